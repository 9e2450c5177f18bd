"""Every socket that listens while `ladder serve` runs: who may reach it, and what it is for."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

import psutil
import pytest

from common.errors import UserError
from common.sockets import listen
from parallel.launch import together
from parallel.ranks import Ranks
from tests.servers import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = ("--max-rows", "4", "--access-log", "none")


def processes(top: psutil.Process) -> list[psutil.Process]:
    return [top, *top.children(recursive=True)]


def listening(top: psutil.Process) -> list[tuple[str, str, int]]:
    """(name of the process, address, port) of every TCP or UDP socket that takes something from anywhere."""
    found = []
    for process in processes(top):
        for connection in process.net_connections("inet"):
            is_open = (
                connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
            )
            if is_open and not connection.raddr:
                ip, port = connection.laddr
                found.append((" ".join(process.cmdline()), ip, port))
    return found


def is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def files_of(top: psutil.Process) -> list[Path]:
    """Paths of the sockets that are files."""
    found = set()
    for process in processes(top):
        for connection in process.net_connections("unix"):
            if connection.laddr.startswith("/"):
                found.add(Path(connection.laddr))
    return sorted(found)


@pytest.mark.parametrize("host", ["127..0.1", ".x", "a" * 70])
def test_a_host_that_is_no_name_is_told(host: str):
    with pytest.raises(UserError, match="cannot be listened on"):
        listen(host, 0)


def test_one_server_has_one_port_and_a_file_in_a_folder_of_its_own():
    with Running(*SMALL) as server:
        top = psutil.Process(server.process.pid)
        assert [(ip, port) for _, ip, port in listening(top)] == [("127.0.0.1", server.port)]
        (engine,) = files_of(top)
        found = engine.parent.stat()
        assert stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.geteuid()
    assert not engine.parent.exists()


def test_ranks_listen_on_the_loopback_alone():
    with Running(
        *SMALL, "--phase", "14", "--tensor-parallel", "2", model="random:tiny-window"
    ) as server:
        found = listening(psutil.Process(server.process.pid))
        assert all(is_loopback(ip) for _, ip, _ in found), found
        ports = {port for _, _, port in found}
        assert server.port in ports and len(ports) <= 3, (
            "the server's, and gloo's of each rank"
        )


def strangers_at_the_meeting(ranks: Ranks) -> tuple[list[str], list[float]]:
    """Connect to all that listens here, say this and that, and add up with the other ranks."""
    import torch

    ranks.all_reduce(torch.ones(1))
    addresses, made = [], []
    for connection in psutil.Process().net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            addresses.append(connection.laddr.ip)
            for said in (
                b"",
                bytes(8),
                b"\x01" + bytes(7),
                b"GET / HTTP/1.1\r\n\r\n",
                bytes(1 << 16),
            ):
                stranger = socket.create_connection(("127.0.0.1", connection.laddr.port))
                stranger.sendall(said)
                stranger.settimeout(0.05)
                made.append(stranger)
                with pytest.raises(TimeoutError):  # neither an answer nor an end
                    stranger.recv(1)
    return addresses, ranks.all_reduce(torch.arange(3.0)).tolist()


def test_a_stranger_at_the_port_of_a_rank_learns_and_changes_nothing():
    for addresses, total in together(2, strangers_at_the_meeting):
        assert addresses and set(addresses) == {"127.0.0.1"}
        assert total == [0.0, 2.0, 4.0]
