"""Connections: one clock that no byte moves, one request at a time, and a bound on how many wait."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from common.errors import UserError
from common.http.errors import ApiError
from common.http.limits import Limits
from phases.appendix.access.options import hosts, names_of
from phases.appendix.access.policy import AccessPolicy
from phases.appendix.connections.connection import KEEP_ALIVE_SECONDS, NEVER, Connection
from serving.http.request import HttpRequest

LIMITS = Limits(body_seconds=10.0, max_connections=3, max_header_bytes=1000)
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n"
)


class Clock:
    """An event loop that is a clock, and runs no task."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[list[Any]]()

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> Any:
        entry = [self.now + seconds, call, args]
        self.calls.append(entry)
        return SimpleNamespace(cancel=lambda: entry in self.calls and self.calls.remove(entry))

    def create_task(self, task: Any, context: Any = None) -> Any:
        task.close()
        return Mock()

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while due := min(
            (entry for entry in self.calls if entry[0] <= end),
            key=lambda e: e[0],
            default=None,
        ):
            self.calls.remove(due)
            self.now = due[0]
            due[1](*due[2])
        self.now = end


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.aborted = False
        self.reading = True

    def write(self, data: bytes) -> None:
        assert not self.closed, f"{data!r} is written to a connection that is closed"
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Place:
    """A server without sockets: connections to it."""

    def __init__(self) -> None:
        self.clock, self.state = Clock(), ServerState()
        app = SimpleNamespace(limits=LIMITS)
        self.config = uvicorn.Config(app, ws="none", log_config=None, timeout_keep_alive=NEVER)  # type: ignore[arg-type]
        self.config.load()

    def connect(self) -> tuple[Connection, Wire]:
        made, wire = Connection(self.config, self.state, {}, _loop=self.clock), Wire()  # type: ignore[arg-type]
        made.connection_made(wire)  # type: ignore[arg-type]
        return made, wire


def answer(connection: Connection) -> None:
    """The application answers the request that is owed an answer."""
    cycle = connection.owed[0]
    cycle.response_complete = True
    cycle.on_response()


def trickle(place: Place, connection: Connection, data: bytes, seconds: float) -> None:
    """A byte of `data` at each second, as long as the connection is open."""
    for second in range(int(seconds)):
        if connection.transport.is_closing():
            return
        connection.data_received(data[second % len(data) : second % len(data) + 1])
        place.clock.wait(1.0)


@pytest.mark.parametrize(
    ("first", "data", "seconds"),
    [
        ("nothing", b"\r\n", LIMITS.body_seconds),
        ("nothing", b"GET /health HTTP/1.1\r\nx: " + 100 * b"a", LIMITS.body_seconds),
        ("an answer", b"\r\n", KEEP_ALIVE_SECONDS),
        ("an answer", b"GET /health HTTP/1.1\r\nx: " + 100 * b"a", LIMITS.body_seconds),
    ],
)
def test_no_byte_moves_the_clock(first: str, data: bytes, seconds: float) -> None:
    place = Place()
    connection, wire = place.connect()
    if first == "an answer":
        connection.data_received(GET)
        answer(connection)
    trickle(place, connection, data, seconds + 2)
    assert wire.closed, f"after {first} a trickle of {data[:9]!r} keeps the connection"
    assert place.clock.now == pytest.approx(seconds, abs=1.1)
    late = seconds == LIMITS.body_seconds
    assert wire.written.startswith(b"HTTP/1.1 408") == late, (
        "408 is for one that began, or the first"
    )


@pytest.mark.parametrize("first", [b"", GET, POST, POST + b"{", b"no HTTP\r\n\r\n"])
def test_a_connection_that_closes_is_not_held_by_a_client_that_does_not_read(
    first: bytes,
) -> None:
    place = Place()
    connection, wire = place.connect()
    if first:
        connection.data_received(first)
    if connection.owed:
        answer(connection)
    place.clock.wait(
        KEEP_ALIVE_SECONDS if first == GET else 0.0 if first else LIMITS.body_seconds
    )
    assert wire.closed and not wire.aborted, "what is written may be read"
    place.clock.wait(LIMITS.slow_seconds)
    assert wire.aborted, "the system keeps what was not read, and the connection, for ever"
    if first.startswith(b"no HTTP"):
        assert wire.written.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
def test_who_does_not_read_an_answer_is_dropped(pipelined: bool, reads: bool) -> None:
    place = Place()
    connection, wire = place.connect()
    connection.data_received(GET)
    connection.pause_writing()
    if pipelined:
        answer(connection)
        connection.data_received(GET)
    place.clock.wait(LIMITS.slow_seconds / 2)
    if reads:
        connection.resume_writing()
    place.clock.wait(LIMITS.slow_seconds)
    assert wire.aborted != reads


def test_reading_late_does_not_stop_the_clock_of_an_idle_connection() -> None:
    place = Place()
    connection, wire = place.connect()
    connection.data_received(GET)
    connection.pause_writing()
    answer(connection)
    connection.resume_writing()
    place.clock.wait(KEEP_ALIVE_SECONDS)
    assert wire.closed


@pytest.mark.parametrize(
    "pieces", [[GET + GET], [GET, GET], [GET, GET[:9]], [GET + GET[:9], GET[9:]]]
)
def test_a_leaver_is_noticed_whatever_is_pipelined_behind(pieces: list[bytes]) -> None:
    place = Place()
    connection, wire = place.connect()
    for piece in pieces:
        connection.data_received(piece)
    running = connection.owed[0]
    assert wire.reading, "the server does not read, and cannot see a client leave"
    place.clock.wait(10 * LIMITS.body_seconds)
    assert wire.written == b"", f"{wire.written!r} stands in the middle of an answer"
    connection.connection_lost(None)
    assert running.disconnected and running.message_event.is_set(), (
        "the request runs on for nobody"
    )


def test_what_was_kept_aside_is_answered_next() -> None:
    place = Place()
    connection, _ = place.connect()
    connection.data_received(GET)
    connection.data_received(GET.replace(b"/health", b"/version"))
    for path in ("/health", "/version"):
        assert [cycle.scope["path"] for cycle in connection.owed] == [path]
        answer(connection)


UPGRADE = (
    b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\nupgrade: h2c\r\n"
)
BODY = b'{"prompt": "a"}'
ASKS = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + UPGRADE
COUNTED = ASKS + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = (
    ASKS + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 7, len(COUNTED) - len(BODY), 1000])
@pytest.mark.parametrize("request_bytes", [COUNTED, CHUNKED], ids=["counted", "chunked"])
def test_a_request_that_asks_for_another_protocol_keeps_its_body(
    request_bytes: bytes, size: int
) -> None:
    """Java's client asks for HTTP/2 with every request, and takes an answer in HTTP/1.1."""
    place = Place()
    connection, wire = place.connect()
    for _ in range(2):
        for start in range(0, len(request_bytes), size):
            connection.data_received(request_bytes[start : start + size])
        (cycle,) = connection.owed
        assert (bytes(cycle.body), cycle.more_body) == (BODY, False)
        assert cycle.scope["method"] == "POST" and cycle.keep_alive
        answer(connection)
    assert wire.written == b"" and not wire.closed


@pytest.mark.parametrize(
    "last", [(b"Upgrade, HTTP2", b"Upgrade, close, HTTP2"), (b"HTTP/1.1", b"HTTP/1.0")]
)
def test_the_last_request_may_ask_for_another_protocol(last: tuple[bytes, bytes]) -> None:
    place = Place()
    connection, _ = place.connect()
    connection.data_received(COUNTED.replace(*last) + b"\r\n")
    (cycle,) = connection.owed
    assert (bytes(cycle.body), cycle.more_body, cycle.keep_alive) == (BODY, False, False)


def test_requests_behind_one_that_asks_for_another_protocol_are_answered() -> None:
    place = Place()
    connection, _ = place.connect()
    connection.data_received(GET + COUNTED + GET.replace(b"/health", b"/version"))
    for path in ("/health", "/v1/completions", "/version"):
        assert connection.owed[0].scope["path"] == path
        answer(connection)


def test_no_other_method_gets_a_tunnel() -> None:
    place = Place()
    for head in (b"", b"connection: upgrade\r\nupgrade: h2c\r\n"):
        connection, wire = place.connect()
        connection.data_received(b"CONNECT localhost:80 HTTP/1.1\r\n" + head + b"\r\n")
        assert wire.closed or connection.owed


def test_the_longest_waiting_connection_makes_room() -> None:
    place = Place()
    served, served_wire = place.connect()
    served.data_received(GET)
    wires = []
    for start in (b"", POST + b"{"):
        place.clock.wait(1.0)
        connection, wire = place.connect()
        connection.data_received(start)
        wires.append(wire)
    place.clock.wait(1.0)
    newest, newest_wire = place.connect()
    assert [wire.closed for wire in (*wires, newest_wire)] == [True, False, False], (
        "the idlest was to go"
    )
    assert not served_wire.closed, "a request that is being answered was cut for a newcomer"
    newest.data_received(GET)
    answer(newest)


APP: Any = SimpleNamespace(before=[])
LOCAL = names_of("127.0.0.1", (), keys=False)


def asked(host: str) -> HttpRequest:
    headers = [(b"host", host.encode())] if host else []
    return HttpRequest({"method": "GET", "path": "/", "headers": headers}, None, None, LIMITS)  # type: ignore[arg-type]


OWN = (
    "",
    "localhost",
    "LOCALHOST:8000",
    "a.localhost:1",
    "127.0.0.1:8000",
    "[::1]:8000",
    "192.168.0.7",
)


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "x"]
)
async def test_other_names_are_not(host: str) -> None:
    for own in OWN:
        await AccessPolicy(APP, LOCAL).before(asked(own))
    with pytest.raises(ApiError, match="--allowed-hosts") as refused:
        await AccessPolicy(APP, LOCAL).before(asked(host))
    assert refused.value.status == 421
    await AccessPolicy(
        APP, names_of("127.0.0.1", hosts(host.split(":")[0]), keys=False)
    ).before(asked(host))
    await AccessPolicy(APP, names_of("127.0.0.1", (), keys=True)).before(
        asked(host)
    )  # a page has no key
    with pytest.raises(ApiError):
        await AccessPolicy(APP, names_of("0.0.0.0", ("other",), keys=True)).before(asked(host))
    for wrong in ("", " , ", "a b", "http://a", "a:80"):
        with pytest.raises(UserError, match="--allowed-hosts"):
            hosts(wrong)
