"""Attacks on a server, and what another client's stream and the server's memory show of each.

    ladder bench attacks --device cpu

A bystander streams completions in a process of its own and notes the gaps between their tokens. Each attack
is something that one careless or hostile client can send. Two servers are attacked: a
tiny model, whose steps are so short that every stall of the API process shows, and real weights, because a
grammar is only dear with a real vocabulary. The answers to an attack stand in the options of its run.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import psutil

from benchmarks.bench import Bench
from benchmarks.evidence import BenchOptions, Evidence, collect
from benchmarks.loadtest.user import Target, ask
from benchmarks.measure import Sample, Samples
from benchmarks.plotting import Panel, figure
from benchmarks.server import Server
from benchmarks.workloads import uniform
from common.errors import UserError

NAME = "attacks"
REAL = "smollm2"
TINY = "random:tiny"
OPTIONS: dict[str, Any] = dict(max_connections=100, body_seconds=5, generation_config="model")
QUIET = 5.0
"""Seconds that an attack is watched at least, and that the bystander is heard after it."""
TOKENS = 100
"""Of a stream of the bystander, whose gaps are noted at its end."""
HOLD = 80.0
"""Seconds for which a connection is held, if the server lets it."""
AMBIGUOUS = 'start: e\ne: e e e | e e | "a" | "bb"'
"""Cheap to compile; the items of its parse grow with the cube of the text."""


@dataclass(frozen=True)
class Attack:
    """Something to send. `send` returns what became of it, in words."""

    name: str
    send: Callable[[Target], Awaitable[str]]
    model: str = TINY


def request(
    target: Target, path: str, body: bytes, method: str = "POST", host: str = ""
) -> bytes:
    """Return the bytes of a request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host or target.host}:{target.port}\r\n"
    return (
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


async def answer(target: Target, data: bytes, seconds: float = 60.0) -> str:
    """Send a request, and return the status of its answer, or `closed`, or `hangs`."""
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        writer.write(data)
        line = await asyncio.wait_for(reader.readline(), seconds)
        writer.transport.abort()
        return line.split(b" ")[1].decode() if line else "closed"
    except TimeoutError:
        return "hangs"
    except OSError:
        return "closed"


def tally(found: Iterable[str]) -> str:
    """Return how often each answer came: `400: 3, 200: 1`."""
    return ", ".join(f"{status}: {count}" for status, count in Counter(found).most_common())


async def answers(target: Target, requests: Iterable[bytes]) -> str:
    """Send requests at once, and return how often each answer came."""
    return tally(await asyncio.gather(*(answer(target, one, 120.0) for one in requests)))


def large(name: str, path: str, field: str, value: str, count: int) -> Attack:
    """Send a request with one large field, given as JSON, `count` times at once."""
    needed = '"messages": [{"role": "user", "content": "hi"}], '
    if field in ("messages", "prompt"):
        needed = ""
    text = f'{{{needed}"max_tokens": 4, "{field}": {value}}}'

    def send(target: Target) -> Awaitable[str]:
        return answers(target, [request(target, path, text.encode())] * count)

    return Attack(f"{name}, {count} at once" if count > 1 else name, send)


def numbered(count: int, value: str) -> str:
    """Return an object of so many keys, as JSON."""
    return "{" + ",".join(f'"{number}":{value}' for number in range(count)) + "}"


def trickle(first: bytes, drip: bytes) -> Callable[[Target], Awaitable[str]]:
    """Hold 100 answered connections by a few bytes each second, and count the others that get in."""

    async def hold(target: Target) -> float:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        begun = time.monotonic()
        writer.write(first)
        with suppress(OSError):
            while time.monotonic() - begun < HOLD and not reader.at_eof():
                writer.write(drip)
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(65536), 1.0)
        held = time.monotonic() - begun
        writer.transport.abort()
        return held

    async def send(target: Target) -> str:
        holders = [asyncio.create_task(hold(target)) for _ in range(100)]
        await asyncio.sleep(2.0)
        others = []
        for _ in range(24):
            others.append(await answer(target, request(target, "/health", b"", "GET"), 5.0))
            await asyncio.sleep(0.2)
        found = await asyncio.gather(*holders, return_exceptions=True)
        held = [one for one in found if isinstance(one, float)]
        return f"held for {max(held, default=0):.0f} s at most; others {tally(others)}"

    return send


async def leaver(target: Target) -> str:
    """Ask for 16,000 tokens with another request behind it in the same packet, and leave."""
    body = json.dumps(
        {"prompt": [5, 6, 7], "n": 16, "max_tokens": 1000, "ignore_eos": True}
    ).encode()
    before = await asyncio.to_thread(metric, target, "generation_tokens_total")
    _, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(
        request(target, "/v1/completions", body) + request(target, "/health", b"", "GET")
    )
    await asyncio.sleep(0.3)
    writer.transport.abort()
    await asyncio.sleep(0.5)  # a step and a report of the engine
    left = (
        await asyncio.to_thread(metric, target, "num_requests_running") - 1
    )  # the bystander's
    tokens = await asyncio.to_thread(metric, target, "generation_tokens_total") - before
    return f"{left:.0f} of 16 still run after 0.5 s; {tokens:.0f} tokens"


def foreign(target: Target) -> Awaitable[str]:
    """Ask under a name that is not this machine's, as a page does after DNS rebinding."""
    paths = ("/", "/v1/models", "/events", "/metrics")
    return answers(
        target, (request(target, path, b"", "GET", "evil.example") for path in paths)
    )


def ambiguous(target: Target) -> Awaitable[str]:
    """Follow an ambiguous grammar sixteen times at once; each a little different, so none is shared."""
    body = {"prompt": "a a a", "max_tokens": 300}
    grammars = (f'{AMBIGUOUS} | "{"c" * count}"' for count in range(1, 17))
    bodies = (json.dumps({**body, "guided_grammar": one}).encode() for one in grammars)
    return answers(target, (request(target, "/v1/completions", one) for one in bodies))


def repeated_json(target: Target) -> str:
    """Ask forty chats for JSON whose conversation has such JSON already: drafts reach the end of the text."""
    said = [
        {"role": "user", "content": "Which colour is the sky?"},
        {"role": "assistant", "content": '{"colour": "blue"}'},
        {"role": "user", "content": "Which colour is grass?"},
        {"role": "assistant", "content": '{"colour": "green"}'},
    ]
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "green", "red"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form = {"name": "colour", "schema": schema, "strict": True}
    body: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    body["response_format"] = {"type": "json_schema", "json_schema": form}

    def one(number: int) -> bytes:
        asks = {"role": "user", "content": f"Which colour is thing {number}?"}
        text = json.dumps({**body, "messages": [*said, asks]})
        return request(target, "/v1/chat/completions", text.encode())

    return answers(target, map(one, range(40)))


def attacks() -> list[Attack]:
    """Return every attack, the cheap ones first."""
    text = json.dumps("a" * 3_999_000)
    lists = '{"a":[' + ",".join(["[]"] * 1_300_000) + "]}"
    said = "[" + ",".join(['{"role":"user","content":""}'] * 140_000) + "]"
    chats, completions = "/v1/chat/completions", "/v1/completions"
    fields = [
        ("prompt of 4 MB", completions, "prompt", text),
        ("logit_bias of 250,000 keys", chats, "logit_bias", numbered(250_000, "1")),
        ("60,000 template arguments", chats, "chat_template_kwargs", numbered(60_000, "1")),
        ("metadata of 1.3 M lists", chats, "metadata", lists),
        ("200,000 unknown fields", chats, "unknown", '1, ' + numbered(200_000, "1")[1:-1]),
        ("140,000 messages", chats, "messages", said),
    ]  # fmt: skip
    chunked = (
        b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    long_get = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return [
        Attack("names of other machines", foreign),
        Attack("a leaver with a request behind", leaver),
        *(large(*field, count) for field in fields for count in (1, 4)),
        Attack("100 trickles after an answer", trickle(get, b"\r\n")),
        Attack("100 bodies behind a GET", trickle(long_get, b"x")),
        Attack("100 bodies behind a 404", trickle(chunked, b"1\r\nx\r\n")),
        Attack("JSON that the chat repeats", repeated_json, REAL),
        Attack("16 ambiguous grammars", ambiguous, REAL),
    ]  # fmt: skip


def metric(target: Target, name: str) -> float:
    """Return the sum of a metric of the server."""
    url = f"http://{target.host}:{target.port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as found:
        values = re.findall(rf"(?m)^vllm:{name}(?:{{.*}})? (.*)", found.read().decode())
    return sum(map(float, values))


def stream(target: Target) -> list[float]:
    """Stream a completion; return the gaps between its tokens in milliseconds, 10⁹ if it failed."""
    body = {"prompt": [1, 2, 3], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    outcome = asyncio.run(ask(target, body))
    return [*(1e3 * np.diff(outcome.times))] if outcome.ok else [1e9]


def run(options: BenchOptions) -> Evidence:
    """Send every attack in turn, and note the bystander's gaps meanwhile."""
    if options.device.type != "cpu":
        raise UserError(
            f"device is {options.device}, but attacks are about the API process: --device cpu"
        )
    work = uniform(NAME, 1, 3, TOKENS, 10_000)
    runs = []
    for model in (TINY,) if options.quick else (TINY, REAL):
        bench = Bench(replace(options, model=model))
        process = ProcessPoolExecutor(1, get_context("forkserver"))
        with process as bystander, Server(model, **OPTIONS) as server:
            bystander.submit(stream, server.target).result()  # it imports what it needs
            alone = Attack("nothing", lambda _: asyncio.sleep(0, "the bystander alone"), model)
            for attack in [alone, *(one for one in attacks() if one.model == model)]:
                metrics, said = _watch(attack, server, bystander)
                runs.append(bench.run_of(attack.name, work, Samples([metrics]), answers=said))
    return collect(NAME, runs, options.device)


def _watch(attack: Attack, server: Server, bystander: Executor) -> tuple[Sample, str]:
    """Return what an attack did to the bystander's streams and to the API process, and its answers."""
    process = psutil.Process(server.pid)
    before, most = process.memory_info().rss, 0
    gaps: list[float] = []

    async def listen() -> None:
        while True:
            loop = asyncio.get_running_loop()
            gaps.extend(await loop.run_in_executor(bystander, stream, server.target))

    async def watched() -> str:
        nonlocal most
        streams = asyncio.ensure_future(listen())
        task = asyncio.ensure_future(attack.send(server.target))
        begun = time.monotonic()
        while not task.done() or time.monotonic() - begun < QUIET:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.02)
        await asyncio.sleep(QUIET)  # a stream's gaps are noted at its end
        streams.cancel()
        return task.result()

    said = asyncio.run(watched())
    if not gaps:
        raise UserError(f"no stream of the bystander has ended during {attack.name!r}")
    found = {f"itl_ms_p{part}": float(np.percentile(gaps, part)) for part in (50, 99)}
    found |= {"itl_ms_max": max(gaps), "memory_grown_bytes": float(max(0, most - before))}
    return found, said


draw = figure(
    Panel("{model}: a bystander's gaps", "itl_ms_p99"),
    Panel("{model}: its longest gap", "itl_ms_max"),
    each=("model",),
    rows=2,
    height=4.6,
    phase="13_serving",
)
