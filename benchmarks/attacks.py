"""Attacks on a server, and what another client's stream and the server's memory show of each.

    ladder bench attacks --device cpu

A bystander streams completions from a process of its own and notes the gaps between its tokens. Each attack
is something that one careless or hostile client can send. Two servers are attacked: a
tiny model, whose steps are so short that every stall of the API process shows, and real weights, because a
grammar is only dear with a real vocabulary. The answers to an attack stand in the options of its run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil

from benchmarks.bench import Bench
from benchmarks.evidence import ROOT, BenchOptions, Evidence, collect
from benchmarks.loadtest.user import Target, ask
from benchmarks.measure import Sample, Samples
from benchmarks.plotting import Panel, figure
from benchmarks.server import Server, import_path
from benchmarks.workloads import uniform
from common.errors import UserError

NAME = "attacks"
REAL = "smollm2"
TINY = "random:tiny"
OPTIONS: dict[str, Any] = {
    "max_connections": 100,
    "body_seconds": 5,
    "generation_config": "model",
}
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


def tally(found: Sequence[str]) -> str:
    """Return how often each answer came: `400: 3, 200: 1`."""
    return ", ".join(f"{status}: {count}" for status, count in Counter(found).most_common())


def large(name: str, path: str, field: str, value: str, count: int) -> Attack:
    """Send a request with one large field, given as JSON, `count` times at once."""
    needed = (
        ""
        if field in ("messages", "prompt")
        else '"messages": [{"role": "user", "content": "hi"}], '
    )
    text = f'{{{needed}"max_tokens": 4, "{field}": {value}}}'

    async def send(target: Target) -> str:
        data = request(target, path, text.encode())
        return tally(await asyncio.gather(*(answer(target, data) for _ in range(count))))

    return Attack(f"{name}, {count} at once" if count > 1 else name, send)


def numbered(count: int, value: str) -> str:
    """Return an object of so many keys, as JSON."""
    return "{" + ",".join(f'"{number}":{value}' for number in range(count)) + "}"


def trickle(
    first: bytes, drip: bytes, connections: int = 100
) -> Callable[[Target], Awaitable[str]]:
    """Hold answered connections by a few bytes each second, and count the others that get in."""

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
        holders = [asyncio.create_task(hold(target)) for _ in range(connections)]
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
    before = await asyncio.to_thread(generated, target)
    _, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(
        request(target, "/v1/completions", body) + request(target, "/health", b"", "GET")
    )
    await asyncio.sleep(0.3)
    writer.transport.abort()
    await asyncio.sleep(0.5)  # a step and a report of the engine
    left = await asyncio.to_thread(running, target)
    tokens = await asyncio.to_thread(generated, target) - before
    return f"{left:.0f} of 16 still run after 0.5 s; {tokens:.0f} tokens"


async def foreign(target: Target) -> str:
    """Ask under a name that is not this machine's, as a page does after DNS rebinding."""
    paths = ("/", "/v1/models", "/events", "/metrics")
    data = [request(target, path, b"", "GET", "evil.example") for path in paths]
    return tally(await asyncio.gather(*(answer(target, one) for one in data)))


async def ambiguous(target: Target) -> str:
    """Follow an ambiguous grammar sixteen times at once; each a little different, so none is shared."""
    data = [
        request(target, "/v1/completions", json.dumps(
            {"prompt": "a a a", "max_tokens": 300, "guided_grammar": f'{AMBIGUOUS} | "{"c" * (number + 1)}"'}
        ).encode())
        for number in range(16)
    ]  # fmt: skip
    return tally(await asyncio.gather(*(answer(target, one, 120.0) for one in data)))


async def repeated_json(target: Target) -> str:
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
    form = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": schema, "strict": True},
    }

    async def one(number: int) -> str:
        messages = [*said, {"role": "user", "content": f"Which colour is thing {number}?"}]
        body = {
            "messages": messages,
            "response_format": form,
            "max_tokens": 60,
            "temperature": 0,
        }
        return await answer(
            target, request(target, "/v1/chat/completions", json.dumps(body).encode()), 120.0
        )

    return tally(await asyncio.gather(*(one(number) for number in range(40))))


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


def _metric(target: Target, name: str) -> float:
    with urllib.request.urlopen(
        f"http://{target.host}:{target.port}/metrics", timeout=30
    ) as found:
        lines = found.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}(\{{| )", line)
    )


def generated(target: Target) -> float:
    """Return the tokens that the server has generated."""
    return _metric(target, "vllm:generation_tokens_total")


def running(target: Target) -> float:
    """Return the completions in flight, the bystander's one left out."""
    return _metric(target, "vllm:num_requests_running") - 1


class Bystander:
    """A process that streams completions, one after another, and notes the gaps between their tokens."""

    def __init__(self, target: Target) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attacks", target.host, str(target.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": import_path()},
        )

    def gaps(self) -> list[float]:
        """Return the gaps since the last call, in milliseconds; a failed stream is one of 10⁹."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


async def _stream(target: Target) -> None:
    """Stream until killed; answer a line of input with the gaps that were noted."""
    loop, gaps = asyncio.get_running_loop(), [0.0] * 0
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def stream() -> None:
        body = {
            "prompt": [1, 2, 3],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        while True:
            outcome = await ask(target, body, 600.0)
            gaps.extend(1e3 * np.diff(outcome.times) if outcome.ok else [1e9])

    task = asyncio.create_task(stream())
    while await reader.readline():
        print(json.dumps(gaps), flush=True)
        gaps.clear()
    task.cancel()


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
        with Server(model, **OPTIONS) as server:
            target, process = server.target, psutil.Process(server.pid)
            bystander = Bystander(target)
            try:
                alone = Attack("nothing", _nothing, model)
                for attack in [alone, *(one for one in attacks() if one.model == model)]:
                    metrics, said = _watch(attack, target, process, bystander)
                    runs.append(
                        bench.run_of(attack.name, work, Samples([metrics]), answers=said)
                    )
            finally:
                bystander.close()
    return collect(NAME, runs, options.device)


async def _nothing(target: Target) -> str:
    await asyncio.sleep(QUIET)
    return "the bystander alone"


def _watch(
    attack: Attack, target: Target, process: psutil.Process, bystander: Bystander
) -> tuple[Sample, str]:
    """Return what an attack did to the bystander and to the API process, and its answers."""
    bystander.gaps()
    before, most = process.memory_info().rss, 0

    async def watched() -> str:
        nonlocal most
        task = asyncio.ensure_future(attack.send(target))
        begun = time.monotonic()
        while not task.done() or time.monotonic() - begun < QUIET:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.02)
        return task.result()

    said = asyncio.run(watched())
    time.sleep(QUIET)  # a stream's gaps are noted at its end
    gaps = bystander.gaps()
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


def main() -> None:
    """Be the bystander of a server: host and port are the arguments."""
    asyncio.run(_stream(Target(sys.argv[1], int(sys.argv[2]))))


if __name__ == "__main__":
    main()
