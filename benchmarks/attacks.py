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
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
NOWHERE = b"POST /nothing HTTP/1.1\r\nHost: localhost"
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


def post(target: Target, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request with a prompt, or else of one of a chat."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    data = json.dumps(body, separators=(",", ":"))
    head = f"POST {path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return (head + data).encode()


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


async def answers(target: Target, bodies: Iterable[Mapping[str, Any]]) -> str:
    """Send requests at once, and return how often each answer came."""
    data = [post(target, body) for body in bodies]
    return tally(await asyncio.gather(*(answer(target, one, 120.0) for one in data)))


def large(name: str, fields: Mapping[str, Any], count: int) -> Attack:
    """Send a request with these fields `count` times at once."""
    body = {"max_tokens": 4, **fields}
    if "prompt" not in body:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
    name = f"{name}, {count} at once" if count > 1 else name
    return Attack(name, lambda target: answers(target, [body] * count))


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
            others.append(await answer(target, GET, 5.0))
            await asyncio.sleep(0.2)
        found = await asyncio.gather(*holders, return_exceptions=True)
        held = [one for one in found if isinstance(one, float)]
        return f"held for {max(held, default=0):.0f} s at most; others {tally(others)}"

    return send


def ambiguous(target: Target) -> Awaitable[str]:
    """Follow an ambiguous grammar sixteen times at once; each a little different, so none is shared."""
    grammars = (f'{AMBIGUOUS} | "{"c" * count}"' for count in range(1, 17))
    asks = {"prompt": "a a a", "max_tokens": 300}
    return answers(target, ({**asks, "guided_grammar": grammar} for grammar in grammars))


def repeated_json(target: Target) -> Awaitable[str]:
    """Ask forty chats for JSON whose conversation has such JSON already: drafts reach the end of the text."""
    said = []
    for thing, colour in (("the sky", "blue"), ("grass", "green")):
        said.append({"role": "user", "content": f"Which colour is {thing}?"})
        said.append({"role": "assistant", "content": json.dumps({"colour": colour})})
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "green", "red"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form = {"name": "colour", "schema": schema, "strict": True}
    body: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    body["response_format"] = {"type": "json_schema", "json_schema": form}
    asked = ({"role": "user", "content": f"Which colour is thing {at}?"} for at in range(40))
    return answers(target, ({**body, "messages": [*said, ask]} for ask in asked))


def attacks() -> list[Attack]:
    """Return every attack, the cheap ones first."""
    fields: dict[str, dict[str, Any]] = {
        "prompt of 4 MB": {"prompt": "a" * 3_999_000},
        "logit_bias of 250,000 keys": {"logit_bias": numbered(250_000)},
        "60,000 template arguments": {"chat_template_kwargs": numbered(60_000)},
        "metadata of 1.3 M lists": {"metadata": {"a": [[]] * 1_300_000}},
        "200,000 unknown fields": numbered(200_000),
        "140,000 messages": {"messages": [{"role": "user", "content": ""}] * 140_000},
    }
    length = b"\r\nContent-Length: 1000000000\r\n\r\n"
    chunked = b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [
        *(large(*field, count) for field in fields.items() for count in (1, 4)),
        Attack("100 trickles after an answer", trickle(GET, b"\r\n")),
        Attack("100 bodies behind a GET", trickle(GET[:-4] + length, b"x")),
        Attack("100 bodies behind a 404", trickle(NOWHERE + chunked, b"1\r\nx\r\n")),
        Attack("JSON that the chat repeats", repeated_json, REAL),
        Attack("16 ambiguous grammars", ambiguous, REAL),
    ]


def numbered(count: int) -> dict[str, int]:
    """Return so many fields."""
    return {str(number): 1 for number in range(count)}


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
