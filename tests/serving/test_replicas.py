"""Phase 15's replicas as they run: Ray Serve, two servers, faults, drains and queues."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import cuda_graphs
from common.sampling.params import SamplingParams
from forward.loading import load_model
from tests.servers import Running, in_turns, wait_until
from tests.serving.test_sockets import is_loopback, listening

# The first one starts the server, which may take 200 s.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("ray.serve")

SMALL = (
    "--max-rows",
    "16",
    "--cache-bytes",
    "6000000",
    "--step-tokens",
    "256",
    "--access-log",
    "none",
)
REPLICAS = (
    "--replicas",
    "2",
    "--max-replicas",
    "3",
    "--queue",
    "4",
    "--patience",
    "1",
    "--imbalance",
    "2",
)
LONG = 900
"""Tokens of a stream that somebody is to be killed under."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(
        *SMALL, *REPLICAS, "--grace-seconds", "100", "--body-seconds", "5", within=200.0
    ) as running:
        yield running


def actors(server: Running) -> list[psutil.Process]:
    """The replicas' processes."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in found if named(process).startswith("ray::ServeReplica")]


def named(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Stream(threading.Thread):
    """One streamed completion, read in a thread.

    leaves: behind the first token.
    replica: who answers; set when the first token is here.
    whole: whether the stream has ended as it should; otherwise `error` is the event it ended with, if any.
    """

    def __init__(
        self, server: Running, prompt: list[int], tokens: int, leaves: bool = False
    ) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.first = threading.Event()
        self.leaves = leaves
        self.body = {
            "model": "random:tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
        }
        self.body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
        self.replica = ""
        self.whole = False
        self.cut = False
        self.tokens: list[int] = []
        self.error: Any = None
        self.said: list[bytes] = []
        self.status = 0
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(self.body), headers)
            answer = connection.getresponse()
            self.status, self.replica = (
                answer.status,
                answer.headers.get("x-ladder-replica", ""),
            )
            for line in answer:
                self.said.append(line)
                self._read(line.strip())
                if self.leaves and self.tokens:
                    break
        except (http.client.HTTPException, ConnectionError):
            self.cut = True
        finally:
            self.first.set()
            connection.close()

    def _read(self, line: bytes) -> None:
        if line == b"data: [DONE]":
            self.whole = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            self.error = event.get("error", self.error)
            for choice in event.get("choices", []):
                self.tokens += choice.get("token_ids") or []
            self.first.set()


def joined(streams: list[Stream]) -> list[Stream]:
    for stream in streams:
        stream.join(120)
        assert not stream.is_alive(), f"a stream of {stream.replica} does not end"
    return streams


def replica_named(server: Running, name: str) -> psutil.Process:
    """The process of a replica: its log is called after it."""
    logs = {
        process: [file.path for file in process.open_files()] for process in actors(server)
    }
    return next(
        one
        for one, paths in logs.items()
        if any(path.endswith(f"_{name}.log") for path in paths)
    )


def engine_of(replica: psutil.Process) -> psutil.Process:
    """The process that computes a replica's tokens."""
    return next(child for child in replica.children() if "spawn_main" in named(child))


def under_way(engines: list[psutil.Process], send: Callable[[], list[Stream]]) -> list[Stream]:
    """Streams that have all begun, none of them computed to its end; engines are stopped afterwards.

    On a busy machine an engine may be done with a stream before another has reached its own: what took
    too long ends, and others are sent.
    """
    for _ in range(5):
        for engine in engines:
            engine.suspend()
        streams = send()
        in_turns(engines, partial(all_begun, streams), "a stream has no first token")
        said = -1
        while said != (said := sum(len(stream.tokens) for stream in streams)):
            time.sleep(0.5)  # what was computed is still on its way
        if all(len(stream.tokens) < LONG for stream in streams):
            return streams
        for engine in engines:
            engine.resume()
        joined(streams)
    raise AssertionError(f"streams of {LONG} tokens are never under way together")


@contextlib.contextmanager
def resumed(engines: list[psutil.Process]) -> Iterator[None]:
    """In any case engines go on afterwards, those that are still there."""
    try:
        yield
    finally:
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()


def all_begun(streams: list[Stream]) -> bool:
    return all(stream.first.is_set() for stream in streams)


def both_serve(server: Running) -> bool:
    """Whether two replicas answer: lone requests go to each in turn."""
    found = [server.get("/ready") for _ in range(4)]
    names = {headers.get("x-ladder-replica") for status, headers, _ in found if status == 200}
    return len(names) >= 2 and all(status == 200 for status, _, _ in found)


def test_replicas_listen_on_the_loopback_but_for_one_port_each_that_asks_for_a_token(server):
    found = listening(psutil.Process(server.process.pid))
    assert any(port == server.port and ip == "127.0.0.1" for _, ip, port in found)
    reachable = [(name, port) for name, ip, port in found if not is_loopback(ip)]
    assert len(reachable) <= 2, reachable
    for name, port in reachable:
        assert name.startswith("ray::ServeReplica"), reachable
        assert "authentication token" in said_to_a_stranger(port)


def said_to_a_stranger(port: int) -> str:
    """What a replica answers to a call without a token."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=60)
    return str(caught.value)


def test_the_same_tokens_as_one_server(server):
    prompts = [[n + 5 * i for i in range(40)] for n in range(1, 7)]
    engine = cuda_graphs.load(load_model("random:tiny"))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = [[] for _ in prompts]
    for event in engine.stream(prompts, params):
        expected[event.index] += [] if event.token_id is None else [event.token_id]
    found = joined([Stream(server, prompt, 12) for prompt in prompts])
    for number, (stream, tokens) in enumerate(zip(found, expected, strict=True)):
        assert stream.tokens == tokens, (
            f"request {number} on {stream.replica}: not one server's tokens"
        )
    assert len({stream.replica for stream in found}) == 2, (
        "six at once, and one replica has them all"
    )


def test_equal_prefixes_meet_and_the_bound_holds(server):
    prefixes = [[7 * n + i % 50 for i in range(120)] for n in range(4)]
    home: dict[int, set[str]] = {n: set() for n in range(4)}
    for turn in range(3):
        for n, prefix in enumerate(prefixes):
            home[n].add(joined([Stream(server, [*prefix, 200 + turn], 2)])[0].replica)
    assert all(len(names) == 1 for names in home.values()), (
        f"a prefix went to two idle replicas: {home}"
    )
    assert len(set.union(*home.values())) == 2, "four prefixes, and one replica has them all"
    # Now everybody at once: the bound is 2, so of six at least two must go elsewhere.
    # Who ended early would make room for another one.
    engines = [engine_of(replica) for replica in actors(server)]
    prompts = [[*prefixes[0], 230 + n] for n in range(6)]
    with resumed(engines):
        crowd = under_way(engines, lambda: [Stream(server, one, LONG) for one in prompts])
    joined(crowd)
    assert all(stream.whole for stream in crowd), (
        f"refused: {[stream.said[-2:] for stream in crowd]}"
    )
    there = sum(stream.replica in home[0] for stream in crowd)
    assert 3 <= there <= 4, (
        f"{there} of 6 requests went where their prefix is, but the bound allows 4"
    )


def test_who_leaves_is_let_go(server):
    engines = [engine_of(replica) for replica in actors(server)]

    def metric(line: str) -> float:
        _, headers, text = server.get("/metrics", **{"x-ladder-replica": stream.replica})
        assert headers["x-ladder-replica"] == stream.replica, (
            "a GET has not reached the replica that it asked for"
        )
        return sum(
            float(one.split()[-1])
            for one in text.decode().splitlines()
            if one.startswith(line)
        )

    def known() -> bool:
        return metric("ladder:troubles_total") > 0

    with resumed(engines):
        for _ in range(5):
            (stream,) = joined(
                under_way(engines, lambda: [Stream(server, [5, 6], LONG, leaves=True)])
            )
            wait_until(
                lambda: known() or metric("vllm:num_requests_running") == 0,
                f"the client has left, and {stream.replica} does not know",
            )
            if known():
                break  # otherwise all was computed before the client had read its first token
        assert known(), f"clients have left five times, and {stream.replica} does not know"
        before = metric("ladder:steps_total")
    wait_until(
        lambda: metric("ladder:free_blocks") == metric("ladder:blocks"), "its blocks are kept"
    )
    steps = metric("ladder:steps_total") - before
    assert steps < 100, (  # all of it takes 400, since many tokens are guessed
        f"{steps} steps were computed for a client who has left"
    )


@pytest.mark.parametrize("victim", ["replica", pytest.param("engine", marks=pytest.mark.long)])
def test_who_is_killed_loses_its_own_streams_only_and_comes_back(server, victim):
    wait_until(lambda: both_serve(server), "there are no two replicas", 60)
    before = {process.pid for process in actors(server)}
    engines = [engine_of(replica) for replica in actors(server)]
    with resumed(engines):
        streams = under_way(
            engines, lambda: [Stream(server, [n, 2, 3], LONG) for n in range(1, 5)]
        )
        process = replica_named(server, streams[0].replica)
        (engine_of(process) if victim == "engine" else process).kill()
    assert all(stream.status == 200 for stream in streams), (
        f"refused: {[stream.said for stream in streams]}"
    )
    joined(streams)
    lost = [stream for stream in streams if not stream.whole]
    assert lost, f"the {victim} was killed, and nobody has lost anything"
    assert len(lost) < len(streams), "everybody has lost their streams"
    names = {stream.replica for stream in lost}
    assert len(names) == 1, f"replicas that were not killed have lost streams: {names}"
    for stream in streams:
        if stream in lost:
            ends = f"a lost stream ends with {stream.said[-2:]}, cut: {stream.cut}"
            assert stream.error and stream.error["code"] == "died", ends
        else:
            assert len(stream.tokens) == LONG, f"a stream of {stream.replica} has lost tokens"
    after = joined([Stream(server, [9, n], 4) for n in range(4)])
    assert all(stream.whole for stream in after), (
        f"requests fail meanwhile: {[s.said for s in after]}"
    )
    wait_until(lambda: both_serve(server), "the replica has not come back", 90)
    assert {process.pid for process in actors(server)} != before


def times_given_up(server: Running) -> int:
    """How often the proxy's log says that it has waited in vain for a replica."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (proxy,) = (one.pid for one in processes if named(one).startswith("ray::ProxyActor"))
    log = Path(f"/proc/{proxy}/fd/2").read_text(encoding="utf-8")
    return log.count("says nothing, so it is asked no more")


def test_a_replica_that_hangs_keeps_nobody_waiting(server):
    """One process is stopped: its requests are answered by the other, within seconds."""
    wait_until(lambda: both_serve(server), "there are no two replicas", 60)
    victim, *_ = actors(server)
    victim.suspend()
    try:
        began = time.monotonic()
        streams = joined([Stream(server, [n, 7], 4) for n in range(1, 9)])
        took = time.monotonic() - began
        assert all(stream.whole for stream in streams), [s.said[-2:] for s in streams]
        answered = {replica_named(server, stream.replica) for stream in streams}
        assert victim not in answered
        assert took < 30, f"a stopped replica kept requests for {took:.0f} s"
        before = times_given_up(server)
        assert before, "nobody has asked it"
        for n in (9, 10):
            assert joined([Stream(server, [n, 7], 4)])[0].whole
        assert times_given_up(server) == before, "it is asked again although it was silent"
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()
    # That it is asked again, half a minute later, is what the last tests wait for.


def test_a_connection_that_sends_no_request_is_closed(server):
    """Three at once: each waits for the seconds that a head may take."""
    with contextlib.ExitStack() as stack:
        began, clients = time.monotonic(), []
        for sent in (b"", b"POST /v1/comp", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: "):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            clients.append(stack.enter_context(client))
            client.sendall(sent)
        for client in clients:
            while client.recv(1000):
                pass
        assert time.monotonic() - began < 15


@pytest.mark.long
def test_more_replicas_while_requests_queue_and_fewer_afterwards(server):
    wait_until(lambda: both_serve(server), "there are no two replicas", 60)
    assert len(actors(server)) == 2
    load = [Stream(server, [n % 250, 4], LONG) for n in range(1, 121)]
    wait_until(
        lambda: len(actors(server)) == 3, "120 requests on two replicas, and none is added", 60
    )
    for stream in load:  # the rest is not waited for
        assert not stream.error, stream.error
    joined(load)
    assert all(stream.whole for stream in load), (
        "a stream was lost while the number of replicas changed"
    )
    wait_until(
        lambda: len(actors(server)) == 2, "nobody asks, and no replica is taken away", 60
    )


def test_sigterm_lets_streams_finish_and_takes_nothing_new(server):
    wait_until(lambda: both_serve(server), "there are no two replicas", 90)
    engines = [engine_of(replica) for replica in actors(server)]

    def status() -> int:
        """Of a new request, which no engine has to answer; 0: nobody is there."""
        try:
            return server.post("/v1/completions", {"prompt": "a", "temperature": -1})[0]
        except OSError:
            return 0

    with resumed(engines):
        streams = under_way(
            engines, lambda: [Stream(server, [n, 2, 3], LONG) for n in range(1, 17)]
        )
        assert status() == 400
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status() in (0, 503), "requests are taken while the server drains")
    for stream in joined(streams):
        assert stream.whole and len(stream.tokens) == LONG, (
            f"{stream.replica} has cut: {stream.said[-2:]}"
        )
    server.process.wait(120)
    assert server.process.returncode == 0, server.stderr()
