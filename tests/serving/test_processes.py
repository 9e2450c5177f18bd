"""Phase 13 as it runs: two processes, real sockets, faults and hostile neighbours."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import psutil
import pytest

from serving.liveness import EngineProcess
from tests.servers import Running, in_turns, wait_until

pytestmark = pytest.mark.slow  # real processes

SMALL = (
    "--max-rows",
    "8",
    "--cache-bytes",
    "3000000",
    "--step-tokens",
    "256",
    "--access-log",
    "none",
)
LIMITS = (
    "--slow-seconds",
    "1",
    "--body-seconds",
    "4",
    "--max-body-bytes",
    "100000",
    "--max-unsent",
    "200",
)
# Who sends a request may be held up for a second by the tests beside this one.


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(*SMALL, *LIMITS) as running:
        yield running
        running.settle()


def opened(server: Running, receive_buffer: int = 0) -> socket.socket:
    """A connection, with a small buffer for what is not read."""
    made = socket.socket()
    made.settimeout(120)
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.connect(("127.0.0.1", server.port))
    return made


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)


def request(body: object, more: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    return HEAD + more + b"content-length: %d\r\n\r\n" % len(data) + data


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


# Hostile and slow neighbours.


def test_a_body_of_100_mb_is_refused_before_it_is_sent(server):
    with opened(server) as connection:
        connection.sendall(HEAD + b"content-length: 100000000\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 413")
    with opened(server) as connection:  # without a length: in chunks
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        sent = 0
        try:
            for _ in range(1600):
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 65536
        except OSError:
            pass
        assert sent < 20_000_000, "100 MB were taken in chunks"


NONSENSE = {
    "many headers": b"GET / HTTP/1.1\r\n"
    + b"".join(b"x-%d: y\r\n" % n for n in range(20_000))
    + b"\r\n",
    "a long header": b"GET / HTTP/1.1\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n",
    "a long address": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
    "no HTTP": b"\x16\x03\x01 no HTTP at all\r\n\r\n",
    "a version": b"GET / HTTP/9.9\r\n\r\n",
    "a length": HEAD + b"content-length: -5\r\n\r\n",
    "two lengths": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_floods_and_nonsense(server, kind):
    with opened(server) as connection:
        with suppress(OSError):
            connection.sendall(NONSENSE[kind])
        answer = everything(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    assert server.get("/health")[0] == 200


def test_a_hundred_who_trickle_shut_nobody_out():
    """Without a key: each goes on sending behind its 401, or never begins; the oldest make room.

    The log of all that is on a full disk, and what it has lost is counted.
    """
    limits = ("--max-connections", "100", "--body-seconds", "4")
    with Running(
        *SMALL[:-2], *limits, "--api-key", "secret", "--access-log", "/dev/full"
    ) as server:
        held = [opened(server) for _ in range(100)]
        for number, connection in enumerate(held):
            if number % 2:
                connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n")
        for _ in range(24):
            assert server.get("/v1/models", authorization="Bearer secret")[0] == 200
            for connection in held:
                with suppress(OSError):
                    connection.sendall(b"1\r\n{\r\n" if connection in held[1::2] else b"\r\n")
        for connection in held[1::2]:
            assert everything(connection)[:12] in (b"", b"HTTP/1.1 401"), (
                "answered without a key"
            )
        page = server.get("/metrics", authorization="Bearer secret")[2].decode()
        (lost,) = re.findall(r"^ladder:lost_log_lines_total\S* (\S+)", page, re.M)
        assert float(lost) > 0


def test_slow_headers_and_slow_bodies_are_ended(server):
    with opened(server) as silent, opened(server) as slow, opened(server) as body:
        slow.sendall(b"GET /health HTTP/1.1\r\nhost:")
        body.sendall(request({"prompt": "a"})[:-3])
        assert everything(silent).startswith(b"HTTP/1.1 408")
        assert everything(slow).startswith(b"HTTP/1.1 408")
        assert b" 408 " in everything(body)[:20]


def test_a_reader_that_does_not_read_is_dropped(server):
    """Nobody else waits for it, its buffer is bounded, and its blocks come back."""
    before = server.metric("ladder:troubles_total")
    body = {
        "prompt": "a",
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
        "n": 4,
    }
    slow = [opened(server, 2048) for _ in range(3)]
    for connection in slow:
        connection.sendall(request(body))
    assert server.post("/v1/completions", {"prompt": "b", "max_tokens": 5})[0] == 200
    wait_until(
        lambda: server.metric("ladder:troubles_total") >= before + 3,
        "slow readers are not dropped",
        60,
    )
    server.settle()
    for connection in slow:
        connection.close()


def test_who_leaves_frees_the_blocks(server):
    for number in range(40):
        with opened(server) as connection:
            body = {"prompt": "leaving " * 10, "max_tokens": 900, "ignore_eos": True}
            connection.sendall(request(body | {"stream": number % 2 == 0}))
            if number % 4 == 0:
                connection.recv(200)
    server.settle()
    assert server.get("/ready")[0] == 200


# The engine's death, and the server's.


def engine_of(server: Running) -> psutil.Process:
    """The engine process: the child that has loaded the model."""
    children = psutil.Process(server.process.pid).children()
    return max(children, key=lambda child: child.memory_info().rss)


def test_the_engine_is_killed_with_64_in_flight_and_the_server_lives(server):
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}

    def ask(number: int) -> tuple[int, str]:
        with opened(server) as connection:
            connection.sendall(
                request(body | {"stream": number % 2 == 0}, more=b"connection: close\r\n")
            )
            answer = everything(connection).decode()
            return int(answer.split(" ")[1]), answer

    engine = engine_of(server)
    engine.suspend()  # or the first are done before the last have come, on a busy machine
    with ThreadPoolExecutor(64) as pool:
        try:
            asked = [pool.submit(ask, number) for number in range(64)]
            wait_until(
                lambda: server.metric("vllm:num_requests_waiting") == 64,
                "not all have come",
                60,
            )
            in_turns(
                [engine],
                lambda: server.metric("vllm:num_requests_running") == 8,
                "nobody runs",
            )
        finally:
            engine.kill()
        # At once: the next engine takes some seconds to be ready, the answers may take as long to be read.
        wait_until(lambda: server.get("/ready")[0] == 503, "the engine is not missed")
        status, headers, found = server.post("/v1/completions", {"prompt": "a"})
        assert (status, found["error"]["code"]) == (503, "restarting")
        assert headers["retry-after"] and server.get("/health")[0] == 200
        answers = [one.result(timeout=60) for one in asked]
    told = sum('"code":"died"' in answer for _, answer in answers)
    # On a busy machine those who ran may have got all their tokens before it was killed.
    whole = sum('"finish_reason":"length"' in answer for _, answer in answers)
    assert told + whole == 64 and told >= 40, f"{told} were told, {whole} have all tokens"
    assert {status for status, _ in answers} <= {200, 503}
    wait_until(lambda: server.get("/ready")[0] == 200, "the engine is not started again", 60)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    assert server.metric("ladder:engine_restarts_total") == 1


@contextmanager
def streaming(server: Running, tokens: int) -> Iterator[socket.socket]:
    """A stream that has begun, and has not ended: its engine is stopped as long as the context lasts."""
    engine = engine_of(server)
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    try:
        for _ in range(5):
            engine.suspend()
            with opened(server) as connection:
                connection.sendall(request(body))
                begun = partial(select.select, [connection], [], [], 0)
                in_turns([engine], lambda begun=begun: any(begun()), "no stream begins")
                if server.metric("vllm:num_requests_running"):
                    yield connection
                    return
            engine.resume()
        raise AssertionError(f"a stream of {tokens} tokens has always ended already")
    finally:
        with suppress(psutil.NoSuchProcess):
            engine.resume()


def test_sigterm_lets_streams_finish():
    with Running(*SMALL) as server:
        engine = engine_of(server)
        with streaming(server, 900) as stream, opened(server), opened(server) as watcher:
            watcher.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert watcher.recv(1)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/ready")[0] == 503, "it is still ready")
            assert server.post("/v1/completions", {"prompt": "a"})[0] == 503
            engine.resume()
            assert b"[DONE]" in everything(stream), "a stream was cut off"
            assert server.process.wait(60) == 0
            assert everything(watcher).endswith(b"0\r\n\r\n"), (
                "who watches is not told that the server ends"
            )


@pytest.mark.long
def test_a_second_sigterm_does_not_wait():
    with Running(*SMALL) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        with streaming(server, 1000), suppress(psutil.NoSuchProcess):
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/ready")[0] == 503, "it is still ready")
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(20)  # the stream would have 30 s
        wait_until(
            lambda: not any(child.is_running() for child in children),
            "a process is left behind",
        )


def test_the_engine_does_not_outlive_a_server_that_is_killed():
    with Running(*SMALL) as server:
        engine = engine_of(server)
        server.process.kill()
        server.process.wait()
        wait_until(
            lambda: not engine.is_running() or engine.status() == "zombie",
            "the engine lives on",
            10,
        )


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [(["--max-len", "5000"], "x", "max_len is 5000"), ([], " ", "LADDER_API_KEY is empty")],
    ids=["an option of the engine", "a key that opens nothing"],
)
def test_a_server_that_cannot_start_says_why(arguments, key, words):
    with (
        pytest.raises(AssertionError) as said,
        Running(*arguments, env={"LADDER_API_KEY": key}),
    ):
        pass
    assert words in str(said.value) and "Traceback" not in str(said.value)


async def test_an_engine_that_is_still_starting_is_ended_at_once():
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: complaints.append(context)
    )
    engine = EngineProcess(partial(time.sleep, 60))
    life = asyncio.ensure_future(engine.run())
    await asyncio.sleep(0.3)
    begun = time.monotonic()
    await engine.stop()
    await life
    seconds = time.monotonic() - begun
    # One that can hear gets five seconds to end by itself; this one would sleep on.
    assert seconds < 5, f"{seconds:.1f} s were waited for an engine that cannot hear yet"
    gc.collect()
    await asyncio.sleep(0)
    assert not complaints, f"asyncio complains: {complaints}"
