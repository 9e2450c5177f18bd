"""Phase 15, replicas: chains, policies, gate, a replica's life, the front, blocks that change hands."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import socket
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_graphs
from common.errors import UserError
from common.http.limits import Limits
from forward.loading import load_model
from phases import ROOT
from replicas import gate, heartbeats
from replicas.gate import ENGINE_LOST, KEY, NAME, Gate, RelayedAnswer
from replicas.heartbeats import BROKEN_SECONDS, SILENT_SECONDS, Assignments
from replicas.options import MOST_REPLICAS, ReplicaOptions
from replicas.prefixes import BLOCK, LONGEST, chain, chain_of, keeper_of
from replicas.replica import Replica
from replicas.routing import (
    InFlight,
    LeastLoaded,
    Memory,
    PrefixAware,
    RoundRobin,
    make_policy,
)
from serving.app import App
from serving.endpoints import ServedModel
from serving.liveness import StartupError
from tests.coroutines import Clock, LoopOfItsOwnTime, asynchronously
from tests.servers import JSON, Asked, Loopback, tokenizer_for

LESSON = ROOT / "phases" / "15_replicas" / "README.md"

# Chains.


def body(prompt: Any = None, **more: Any) -> bytes:
    return msgspec.json.encode(
        ({"model": "m", "prompt": prompt} if prompt is not None else {}) | more
    )


def shared(a: list[int], b: list[int]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_chains_agree_as_far_as_texts_do():
    text = "".join(random.Random(1).choices("abcdefgh ", k=20 * BLOCK))
    for place in (0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 3, 19 * BLOCK):
        other = text[:place] + "#" + text[place + 1 :]
        found = shared(chain_of(body(text)), chain_of(body(other)))
        expected = (place + 1) // BLOCK  # a quotation mark comes first
        assert found == expected, (
            f"texts differ at {place}: chains after {found} blocks, not {expected}"
        )


def test_a_number_names_everything_before_its_block():
    one, two = chain([b"a" * 8, b"same"], b""), chain([b"b" * 8, b"same"], b"")
    assert one[1] != two[1], (
        "the last block is the same, and so is its number: what came before is not in it"
    )


def test_a_conversation_goes_on_and_so_does_its_chain():
    said = [
        {"role": "user", "content": "x" * 300},
        {"role": "assistant", "content": "y" * 300},
    ]
    before, after = chain_of(body(messages=said)), chain_of(body(messages=[*said, said[0]]))
    assert len(before) >= 4 and after[: len(before)] == before, (
        "a turn more has changed the chain before it"
    )


@pytest.mark.parametrize("field", ["cache_salt", "tools"])
def test_salt_and_tools_come_before_the_first_token(field):
    message = [{"role": "user", "content": "x" * 600}]
    value: Any = "secret" if field == "cache_salt" else [{"type": "function"}]
    with_it, without = body(messages=message, **{field: value}), body(messages=message)
    assert shared(chain_of(with_it), chain_of(without)) == 0, f"{field} is not in the chain"


def test_other_fields_are_no_matter():
    assert chain_of(body("x" * 999)) == chain_of(
        body("x" * 999, temperature=0.5, stream=True, seed=3)
    )


def test_token_ids_have_a_chain_too():
    ids = list(range(1000, 1200))
    assert shared(chain_of(body([*ids, 1])), chain_of(body([*ids, 2]))) == len(
        chain_of(body(ids))
    )


def test_a_chain_has_an_end():
    assert len(chain_of(body("x" * (BLOCK * LONGEST * 3)))) == LONGEST


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'"x"', b"{}", b'{"messages": 3}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_request_has_no_chain(data):
    assert chain_of(data) == []


# Policies.


def chains(*texts: str) -> list[list[int]]:
    return [chain([letter.encode() for letter in text], b"") for text in texts]


def test_policies_without_memory():
    turns, policy = RoundRobin(), LeastLoaded()
    assert [turns.rank([], {"b": 9, "a": 0, "c": 3})[0] for _ in range(4)] == [
        "a",
        "b",
        "c",
        "a",
    ]
    assert all(policy.rank([], {"a": 2, "b": 1, "c": 3})[0] == "b" for _ in range(5))
    first = [policy.rank([], {"a": 1, "b": 1, "c": 3})[0] for _ in range(12)]
    assert set(first) == {"a", "b"}, f"of two equals, lone requests go to {set(first)} alone"


def test_a_known_beginning_is_gone_to():
    policy, (long, other) = PrefixAware(imbalance=4), chains("abcdefgh", "abcdxxxx")
    policy.sent(long, "b")
    for _ in range(6):
        assert policy.rank(long, {"a": 0, "b": 3, "c": 0})[0] == "b"
        assert policy.rank(other, {"a": 0, "b": 3, "c": 0})[0] == "b", (
            "half of the request is known there"
        )


def test_nobody_goes_beyond_the_bound():
    policy, (known,) = PrefixAware(imbalance=4), chains("abcdefgh")
    policy.sent(known, "b")
    assert policy.rank(known, {"a": 1, "b": 5, "c": 2})[0] == "b", (
        "4 more than the least loaded are allowed"
    )
    assert policy.rank(known, {"a": 1, "b": 6, "c": 2})[0] == "a", (
        "5 more than the least loaded are not"
    )


def test_a_trifle_is_not_worth_a_queue():
    policy, (known, other) = PrefixAware(imbalance=4), chains("a" * 40, "a" * 2 + "b" * 38)
    policy.sent(known, "b")
    assert policy.rank(other, {"a": 0, "b": 1})[0] == "a", (
        "2 of 40 blocks are known, and it waits for them"
    )


def test_where_nothing_is_known_replicas_fill_evenly():
    policy, placed = PrefixAware(), []
    for one in chains(*[letter * 8 for letter in "abcdefghijklmnop"]):
        best = policy.rank(one, {"a": 0, "b": 0, "c": 0, "d": 0})[0]
        policy.sent(one, best)
        placed.append(best)
    assert sorted(placed.count(name) for name in "abcd") == [4, 4, 4, 4], (
        f"16 prefixes went to {placed}"
    )


def test_the_longest_beginning_wins():
    policy, (short, long, asked) = PrefixAware(), chains("abcd", "abcdefgh", "abcdefghij")
    policy.sent(short, "a")
    policy.sent(long, "b")
    assert policy.rank(asked, {"a": 0, "b": 0})[0] == "b", (
        "8 blocks are known there, 4 by the other"
    )


def test_a_gap_ends_a_beginning():
    memory, (one,) = Memory(100), chains("abcdef")
    memory.learn(one[3:])
    assert memory.found(one) == 0, "its first block is not there, so nothing of it can be used"


def test_memory_forgets_the_oldest_and_ends_before_beginnings():
    memory, (first, second) = Memory(8), chains("abcdef", "uvwx")
    memory.learn(first)
    memory.learn(second)
    assert len(memory) == 8 and memory.found(second) == 4
    assert memory.found(first) == 4, (
        f"of 6 old blocks 4 fit, and the first {memory.found(first)} can be used"
    )
    memory.learn(first[:4])
    memory.learn(chains("z")[0])
    assert memory.found(first) == 4, "what was used again was forgotten before what was not"


def test_a_replica_that_leaves_takes_its_knowledge_along():
    policy, (known,) = PrefixAware(imbalance=9), chains("abcdefgh")
    policy.sent(known, "b")
    policy.keep({"a"})
    assert policy.rank(known, {"a": 0, "b": 5})[0] == "a", (
        "a replica that came back has an empty cache"
    )


@settings(max_examples=50)
@given(st.data())
def test_the_bound_holds_whatever_comes(data):
    imbalance = data.draw(st.integers(0, 3))
    policy = PrefixAware(imbalance)
    flight = InFlight()
    names = ["a", "b", "c"]
    number = 0
    open_requests: list[str] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if open_requests and data.draw(st.booleans()):
            flight.end(open_requests.pop(data.draw(st.integers(0, len(open_requests) - 1))))
            continue
        (one,) = chains(data.draw(st.sampled_from(["aaaa", "aabb", "cccc", "d"])))
        loads = {name: flight.of(name) for name in names}
        order = policy.rank(one, loads)
        assert sorted(order) == names, f"{order} leaves somebody out"
        most = min(loads.values()) + imbalance
        assert loads[order[0]] <= most, (
            f"{order[0]} has {loads[order[0]]}, but may have {most}: {loads}"
        )
        policy.sent(one, order[0])
        flight.begin(str(number), order[0])
        open_requests.append(str(number))
        number += 1
    for request in open_requests:
        flight.end(request)
    assert [flight.of(name) for name in names] == [0, 0, 0], (
        "requests that have ended still count"
    )


def test_a_request_counts_once_wherever_it_goes():
    flight = InFlight()
    flight.begin("1", "a")
    flight.begin("1", "b")
    assert (flight.of("a"), flight.of("b")) == (0, 1), (
        "request 1 was given on, and counts at the wrong one"
    )
    flight.end("1")
    flight.end("1")
    assert (flight.of("a"), flight.of("b")) == (0, 0), (
        "request 1 has ended twice, and counts for minus one"
    )
    flight.begin("2", "a")
    flight.keep({"b"})
    flight.end("2")
    assert flight.of("a") == 0, "replica a has left with its requests"


def test_sixteen_prefixes_are_computed_once_each_instead_of_everywhere():
    """What the benchmark measures, without engines: the share of blocks that is found."""
    rng = random.Random(0)
    prefixes = chains(*["".join(rng.choices("abcdefgh", k=48)) for _ in range(16)])
    order = [prefixes[n % 16] for n in range(160)]
    rng.shuffle(order)
    found = {route: hits(route, order) for route in ("prefix", "round-robin", "least-loaded")}
    assert found["prefix"] >= 0.89, (
        f"{found['prefix']:.0%} are found, but only the first 16 of 160 miss"
    )
    assert found["round-robin"] <= 0.66, f"round-robin finds {found['round-robin']:.0%}"


def hits(route: str, order: list[list[int]]) -> float:
    """Four replicas, each with room for a quarter of all prefixes and a bit, one request at a time."""
    policy, caches = make_policy(route, 8), {name: Memory(48 * 5) for name in "abcd"}
    found = 0
    for one in order:
        best = policy.rank(one, dict.fromkeys(caches, 0))[0]
        policy.sent(one, best)
        found += caches[best].found(one)
        caches[best].learn(one)
    return found / sum(map(len, order))


def test_the_lessons_example_is_what_happens():
    policy = PrefixAware(imbalance=1)
    flight = InFlight()
    lines = []
    texts = [
        "SHOP: tea?",
        "CODE: sort",
        "SHOP: tax?",
        "SHOP: tip?",
        "SHOP: toy?",
        "SHOP: tap?",
    ]
    for text, one in zip(texts, chains(*texts), strict=True):
        loads = {name: flight.of(name) for name in "ab"}
        known = {name: policy.memory(name).found(one) for name in "ab"}
        best = policy.rank(one, loads)[0]
        said = (f"{name}: {loads[name]} running, knows {known[name]:2}" for name in "ab")
        lines.append(f"{text}   {'   '.join(said)}   -> {best}")
        policy.sent(one, best)
        flight.begin(text, best)
    told = (
        LESSON.read_text(encoding="utf-8").split("<!-- example -->")[1].split("```")[1].strip()
    )
    assert told.splitlines() == lines


# Options.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"replicas": -1}, "replicas is -1, but must be between 0"),
        ({"replicas": MOST_REPLICAS + 1}, "replicas is .*, but must be between 0 and"),
        ({"replicas": 2, "imbalance": -1}, "imbalance is -1"),
        ({"replicas": 2, "max_replicas": 1}, "max_replicas is 1, but must be between 2"),
        ({"replicas": 2, "route": "random"}, "route is 'random', but must be one of prefix"),
        ({"replicas": 2, "queue": 0}, "queue is 0.0"),
        ({"replicas": 2, "patience": float("nan")}, "patience is nan"),
        ({"route": "round-robin"}, "route is for replicas"),
    ],
)
def test_wrong_options(given, says):
    with pytest.raises(UserError, match=says):
        ReplicaOptions(**given)


def test_there_are_at_most_as_many_as_may_be_added():
    assert ReplicaOptions(replicas=2).most == 2
    assert ReplicaOptions(replicas=2, max_replicas=5).most == 5


def test_without_ray_the_flag_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "replicas.cluster", raising=False)
    with pytest.raises(UserError, match="pip install 'inference-ladder\\[replicas\\]'"):
        importlib.import_module("replicas.cluster")


# The gate.

CLOCK = Clock()
"""Of requests through a gate."""


def asked(
    app: Any,
    method: str = "POST",
    data: bytes = b"",
    limits: Limits | None = None,
    **headers: str,
) -> Asked:
    """One request through a gate, to the application that stands for Ray's proxy."""
    return to(Gate(app, limits), method, "/v1/completions", data, **headers)


def to(app: Any, method: str, path: str, data: bytes | None, **headers: str) -> Asked:
    """One request to any application; without data, nothing of its body comes any more."""
    wire = Asked(app, path, data or b"", method, JSON | headers)
    wire._body = data
    asynchronously(wire.run, 30, partial(LoopOfItsOwnTime, CLOCK))
    return wire


def start(
    status: int = 200,
    name: bytes | None = b"a",
    kind: bytes = b"text/event-stream",
    gone: bool = False,
) -> Any:
    headers = (
        [(b"content-type", kind)]
        + ([(NAME, name)] if name else [])
        + ([(ENGINE_LOST, b"1")] if gone else [])
    )
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(data: bytes, more: bool = True) -> Any:
    return {"type": "http.response.body", "body": data, "more_body": more}


def answering(*turns: list[Any], seen: list[Any] | None = None) -> Any:
    """An application that says these messages, a list for each time it is asked; an exception is raised."""
    left = list(turns)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if seen is not None:
            seen.append(json.loads(json.dumps(scope[KEY], default=bytes.decode)))
        for message in left.pop(0):
            if isinstance(message, Exception):
                raise message
            await send(message)

    return app


def test_the_gate_reads_the_body_and_makes_its_chain():
    seen: list[Any] = []
    data = body("x" * 1000)
    wire = asked(
        answering([start(), part(b"data: [DONE]\n\n", more=False)], seen=seen), data=data
    )
    assert (wire.status, wire.chunks) == (200, [b"data: [DONE]\n\n"])
    assert seen[0]["chain"] == chain_of(data) and seen[0]["body"] == data.decode()


def test_a_response_s_id_leads_to_the_replica_that_has_it():
    seen: list[Any] = []
    data = json.dumps({"input": "x", "previous_response_id": "resp_b7_0123"}).encode()
    asked(
        answering([start(), part(b"", more=False)], seen=seen),
        data=data,
        **{"x-ladder-replica": "a"},
    )
    assert seen[0]["wanted"] == "b7"
    for none in (
        b"{}",
        b"{",
        b'{"previous_response_id": 3}',
        b'{"previous_response_id": "other"}',
    ):
        assert keeper_of(none) == ""


def test_a_reader_that_does_not_read_is_let_go():
    told: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await answering([start(), part(b"data: 1\n\n"), part(b"", more=False)])(
                scope, receive, send
            )
        except ConnectionError as error:
            told.append(str(error))
            raise

    wire = Asked(
        Gate(app, Limits(slow_seconds=0.05)), "/v1/completions", body("x"), "POST", JSON
    )
    wire.reads.clear()
    asynchronously(wire.run, 30)
    assert told == ["the reader is too slow"] and len(wire.chunks) == 1


def test_no_header_is_there_twice():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.extend(name for name, _ in message["headers"])

    said = start()
    said["headers"] += [(b"x-request-id", b"abc"), (b"x-request-id", b"abc")]
    asynchronously(lambda: RelayedAnswer(send).send(said), 30)
    assert sent.count(b"x-request-id") == 1, (
        f"Ray's id of a request comes beside the replica's: {sent}"
    )


@pytest.mark.parametrize("given", [b"mine", b"\xff", b"a b", b"x" * 200])
def test_ray_gets_the_id_of_the_answer_and_can_read_it(given):
    """Ray decodes it as UTF-8, and a request at which it fails was told that its replica has ended."""
    got: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.extend(
            value.decode() for name, value in scope["headers"] if name == b"x-request-id"
        )
        await answering([start(), part(b"ok", more=False)])(scope, receive, send)

    wire = Asked(Gate(app), "/v1/completions", body("x"), "POST", JSON)
    wire.scope["headers"] += [(b"x-request-id", b"other"), (b"x-request-id", given)]
    asynchronously(wire.run, 30)
    assert wire.status == 200 and len(got) == 1 and (got == ["mine"]) == (given == b"mine")


def test_what_is_asked_of_no_path_is_not_there():
    """Ray would say that it has no application, as while none is ready."""
    assert to(Gate(answering()), "OPTIONS", "*", b"").status == 404


def test_who_asks_for_a_replica_may_look_at_it_but_not_load_it():
    for method, expected in (("GET", "b"), ("POST", "")):
        seen: list[Any] = []
        app = answering([start(), part(b"", more=False)], seen=seen)
        asked(app, method, body("x"), **{"x-ladder-replica": "b"})
        assert seen[0]["wanted"] == expected, f"a {method} may choose its replica: {seen[0]}"


def test_a_stream_whose_replica_dies_ends_with_an_error():
    wire = asked(answering([start(), part(b"data: {}\n\n")]), data=body("x"))
    token, error = wire.events()
    assert wire.complete and token == {} and error["error"]["code"] == "died", (
        f"the stream ends with {error}"
    )


def test_half_an_answer_is_not_taken_for_a_whole_one():
    app = answering([start(kind=b"application/json"), part(b'{"half":'), RuntimeError("died")])
    with pytest.raises(ConnectionError):
        asked(app, data=body("x"))


def test_another_replica_is_asked_while_nothing_was_said():
    seen: list[Any] = []
    refuses, dies = [start(503, gone=True), part(b"", more=False)], [RuntimeError("died")]
    wire = asked(
        answering(refuses, dies, [start(), part(b"ok", more=False)], seen=seen), data=body("x")
    )
    assert (wire.status, wire.chunks) == (200, [b"ok"])
    assert seen[1]["avoid"] == ["a"], (
        f"the second try does not avoid the replica that has gone: {seen[1]}"
    )


def test_a_token_that_was_said_is_not_said_again():
    turns: list[Any] = [start(), part(b"data: {}\n\n"), RuntimeError("died")]
    wire = asked(answering(turns, [start(), part(b"twice", more=False)]), data=body("x"))
    assert b"twice" not in wire.chunks, "a stream that had begun was begun again"


@pytest.fixture
def assignments(monkeypatch: pytest.MonkeyPatch) -> Assignments:
    """What a router would tell, where silence is measured by the gate's clock."""
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=CLOCK))
    monkeypatch.setattr(gate, "ASSIGNMENTS", fresh := Assignments())
    monkeypatch.setattr(heartbeats, "ASSIGNMENTS", fresh)
    return fresh


def hanging(told: Assignments, *first: Any, others: Any) -> tuple[Any, list[list[str]]]:
    """An application whose first replica, h, says no more than this and hangs; what each try avoids."""
    avoided: list[list[str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        avoided.append([*scope[KEY]["avoid"]])
        if len(avoided) > 1:
            await others(scope, receive, send)
            return
        for message in first:
            await send(message)
        told.replicas[scope[KEY]["number"]] = "h"
        await asyncio.sleep(2 * BROKEN_SECONDS)

    return app, avoided


def test_a_replica_that_hangs_is_another_ones_chance(assignments):
    whole = answering([start(), part(b"ok", more=False)])
    app, avoided = hanging(assignments, others=whole)
    wire = asked(app, data=body("x"))
    assert (wire.status, wire.chunks) == (200, [b"ok"]) and avoided == [[], ["h"]]
    assert assignments.suspects() == {"h"} and not assignments.replicas


def test_a_stream_whose_replica_hangs_ends_with_an_error(assignments):
    app, avoided = hanging(assignments, start(), part(b"data: {}\n\n"), others=None)
    token, error = asked(app, data=body("x")).events()
    assert token == {} and error["error"]["code"] == "died" and len(avoided) == 1


def test_a_replica_that_works_long_is_waited_for(assignments):
    """It says that it lives, and no client hears of that."""

    async def works(scope: Any, receive: Any, send: Any) -> None:
        assignments.replicas[scope[KEY]["number"]] = "a"
        await asyncio.sleep(4 * SILENT_SECONDS)
        await answering([start(), part(b"ok", more=False)])(scope, receive, send)

    wire = asked(heartbeats.HeartbeatSender(works), data=body("x"))
    assert (wire.status, wire.chunks) == (200, [b"ok"])


def test_a_request_that_waits_for_a_replica_is_not_one_that_hangs(assignments):
    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(4 * SILENT_SECONDS)
        await answering([start(), part(b"ok", more=False)])(scope, receive, send)

    assert asked(waits, data=body("x")).status == 200


@pytest.mark.parametrize(("status", "becomes"), [(404, 503), (503, 503), (408, 504)])
def test_what_ray_says_is_said_in_our_form(status, becomes):
    said = [
        start(status, name=None, kind=b"text/plain"),
        part(b"Path '/' not found", more=False),
    ]
    wire = asked(answering(said), data=body("x"))
    assert wire.status == becomes and wire.json()["error"]["type"], (
        f"{wire.status} {wire.chunks}"
    )


def test_bodies_have_limits_before_any_replica_hears_of_them():
    app = answering()
    assert asked(app, data=body("x" * 2000), limits=Limits(max_body_bytes=1000)).status == 413
    for kind in ("", "application/x-www-form-urlencoded", "text/plain"):  # the replica decides
        wire = asked(
            answering([start(), part(b"ok", more=False)]), data=b"{}", **{"content-type": kind}
        )
        assert wire.status == 200, kind
    long = asked(
        app, data=body("x"), limits=Limits(max_header_bytes=1000), **{"x-long": "x" * 1000}
    )
    assert long.status == 431 and long.json()["error"]["message"], (
        "Ray has no limit of headers"
    )


def test_rays_own_addresses_are_rays():
    said = answering([start(200, name=None), part(b"success", more=False)])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await said(scope | {KEY: {}}, receive, send)

    assert to(Gate(app), "GET", "/-/healthz", b"").chunks == [b"success"]


# A replica.


def served(tmp_path: Any) -> tuple[Loopback, App]:
    model = load_model("random:tiny")
    engine = Loopback(cuda_graphs.load(model, max_rows=4, cache_bytes=2_000_000))
    return engine, App(
        engine, ServedModel("tiny", tokenizer_for(tmp_path, model.config.vocab_size))
    )


def test_a_replica_answers_under_its_name_with_the_body_that_came_along(tmp_path):
    _, app = served(tmp_path)
    data = body([1, 2, 3], model="tiny", max_tokens=3, ignore_eos=True)

    async def along(scope: Any, receive: Any, send: Any) -> None:
        await Replica(app, "r1")(scope | {KEY: {"body": data}}, receive, send)

    wire = to(along, "POST", "/v1/completions", None)
    assert (wire.status, wire.headers[NAME.decode()]) == (200, "r1")
    assert wire.json()["usage"]["completion_tokens"] == 3


def test_a_replica_whose_engine_has_died_takes_nothing_and_ends(tmp_path):
    engine, app = served(tmp_path)
    ended: list[int] = []
    replica = Replica(app, "r1", ended.append)
    wire = Asked(replica, "/v1/completions", body([1]), "POST", JSON)

    async def test() -> None:
        watching = asyncio.ensure_future(replica._watch())
        await asyncio.sleep(0.1)
        assert not ended, "the engine lives, but the replica ends"
        replica.check_health()
        engine.state = "restarting"
        await wire.run()
        await watching

    asynchronously(test, 20)
    assert ended == [1], "the engine has died, but the replica stays"
    assert wire.headers[ENGINE_LOST.decode()] == "1", "it answers, so nobody else is asked"
    with pytest.raises(RuntimeError, match="restarting"):
        replica.check_health()


def test_a_request_whose_engine_dies_before_its_first_token_goes_to_another(tmp_path):
    engine, app = served(tmp_path)
    dying, data = (
        Replica(app, "r1", lambda _: None),
        body([1, 2, 3], model="tiny", max_tokens=3),
    )
    submit = engine.submit

    def submit_and_die(*given: Any, **more: Any) -> Any:
        numbers = submit(*given, **more)
        engine._lose()
        return numbers

    engine.submit = submit_and_die
    other = Replica(served(tmp_path)[1], "r2")
    replicas = iter([dying, other])

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        await next(replicas)(scope, receive, send)

    wire = asked(proxy, data=data)
    assert wire.status == 200, (
        f"no token had come, but the client got {wire.status}: {wire.chunks}"
    )
    assert wire.headers[NAME.decode()] == "r2"


def test_a_replica_that_is_stopped_does_not_end_as_one_whose_engine_has_died(tmp_path):
    engine, app = served(tmp_path)
    ended: list[int] = []

    async def run() -> None:
        while engine.state == "ready":
            await asyncio.sleep(0.01)

    async def stop() -> None:
        engine.state = "stopped"

    engine.run, engine.stop = run, stop
    replica = Replica(app, "r1", ended.append)

    async def test() -> None:
        await replica.start()
        await replica.stop()
        await asyncio.sleep(0.3)

    asynchronously(test, 20)
    assert not ended, f"an orderly end is told to Ray as status {ended}"


@pytest.mark.parametrize("kind", [UserError, StartupError])
def test_a_replica_that_cannot_be_made_says_why(tmp_path, kind):
    engine, app = served(tmp_path)

    async def fails() -> None:
        raise kind("cache_bytes is 100")

    engine.run, engine.state = fails, "starting"
    with pytest.raises(kind, match="cache_bytes is 100"):
        asynchronously(Replica(app, "r1").start, 10)


# Ray's side of the router, without Ray.


@pytest.fixture
def router(monkeypatch):
    module = pytest.importorskip("replicas.router")
    found = module.Router.__new__(module.Router)
    found._replicas, found._told = {}, {}
    found._replica_queue_len_cache = SimpleNamespace(get=found._told.get)
    found.initialize_state(route="prefix", imbalance=2)
    return found


def pending(number: str, said: dict[str, Any] | None) -> Any:
    import pickle

    from ray.serve._private.common import StreamingHTTPRequest

    given = {"number": 0, "chain": [], "body": b"", "wanted": "", "avoid": []} | (said or {})
    scope = {} if said is None else {KEY: given}
    data = pickle.dumps(StreamingHTTPRequest(asgi_scope=scope, proxy_actor_name="proxy"))
    future = SimpleNamespace(cancelled=lambda: False)
    return SimpleNamespace(
        args=[data], metadata=SimpleNamespace(internal_request_id=number), future=future
    )


class Id:
    """As much of a replica as a router looks at."""

    def __init__(self, name: str) -> None:
        self.unique_id = name


def replicas(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=Id(name)) for name in names]


def chosen(router: Any, request: Any, among: list[Any]) -> str:
    ranks = asyncio.run(router.choose_replicas(among, request))
    return ranks[0][0].replica_id.unique_id


@pytest.mark.slow  # imports Ray
def test_requests_that_come_at_once_see_each_other(router):
    both, (known,) = replicas("a", "b"), chains("abcdefgh")
    got = [chosen(router, pending(str(n), {"chain": known}), both) for n in range(8)]
    assert got[:3] == [got[0]] * 3, f"the same beginning, and nobody busy: {got}"
    assert max(got.count("a"), got.count("b")) <= 5, f"eight at once with a bound of 2: {got}"


@pytest.mark.slow
def test_a_port_that_was_found_is_kept_until_ray_listens_there():
    cluster = pytest.importorskip("replicas.cluster")
    from ray.serve._private.http_util import set_socket_reuse_port

    options = ReplicaOptions(replicas=1)
    made = cluster.Cluster(object, options, 0, Limits(), "127.0.0.1", 0)
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", made.port))
    with socket.socket() as rays, socket.socket() as client:
        set_socket_reuse_port(rays)
        rays.bind(("127.0.0.1", made.port))
        rays.listen()
        client.connect(("127.0.0.1", made.port))
        assert rays.accept()


@pytest.mark.slow
def test_what_has_ended_or_left_counts_no_more(router):
    both = replicas("a", "b")
    requests = [pending(str(n), {}) for n in range(4)]
    where = [chosen(router, request, both) for request in requests]
    assert sorted(where) == ["a", "a", "b", "b"]
    router.on_request_routed(requests[0], both[0].replica_id, None)
    router.on_request_completed(both[0].replica_id, "0")
    requests[1].future.cancelled = lambda: True  # it left before it was sent
    chosen(router, pending("9", {}), both)
    assert router.in_flight.of("a") + router.in_flight.of("b") == 3, (
        "request 0 has ended and 1 has left"
    )


@pytest.mark.slow
def test_what_replicas_tell_of_themselves_counts(router):
    both = replicas("a", "b")
    router._told[both[0].replica_id] = 7  # another proxy's requests
    assert [chosen(router, pending(str(n), {}), both) for n in range(3)] == ["b", "b", "b"]


@pytest.mark.slow
def test_wishes_and_what_is_to_be_avoided(router):
    both = replicas("a", "b")
    assert all(chosen(router, pending("1", {"wanted": "b"}), both) == "b" for _ in range(3))
    goes_on = {"wanted": "b", "body": b"{}"}  # in a conversation, with no chain of its own
    before = router.in_flight.of("b")
    assert chosen(router, pending("5", goes_on), both) == "b"
    assert router.in_flight.of("b") == before + 1, "a request that goes on is no load"
    assert all(chosen(router, pending("2", {"avoid": ["b"]}), both) == "a" for _ in range(3))
    assert chosen(router, pending("3", {"avoid": ["a", "b"]}), both) in "ab", (
        "who avoids all gets nobody"
    )
    assert chosen(router, pending("4", None), both) in "ab"
