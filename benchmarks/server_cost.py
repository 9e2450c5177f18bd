"""What the API process spends on a streamed token: `python -m benchmarks.server_cost`.

The engine is a stub in a process of its own that has a token for everybody at every tick, and the clients are
here and only drain their sockets. What is counted is processor time of the API process alone, user and
system, so a busy machine disturbs it little; `--wait` is the stub's time for a step, about a GPU's.

With one user the clock is read: from sending a request to its first event, with a stub that answers at once.
That is what the server adds to an engine's first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import psutil
import uvloop

from benchmarks.made_up import made_up_tokenizer
from common.request import Request
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.messages import Output
from forward.shapes import SHAPES
from phases.appendix.server import whole_app, whole_server
from serving.alive import EngineProcess
from serving.http.server import listen

SHAPE = "qwen3-0.6b"


class Ticking:
    """An engine that computes nothing: at every tick each of its requests gets a token."""

    def __init__(self, wait: float) -> None:
        self.wait, self.config = wait, SHAPES[SHAPE]
        self.max_len = 1 << 20
        self._live: dict[Request, int] = {}
        self._ended: list[Output] = []
        self._ids, self._next = count(), time.perf_counter()

    @property
    def idle(self) -> bool:
        """Nobody is served."""
        return not self._live and not self._ended

    def add(
        self, prompt: Sequence[int], params: SamplingParams, *, index: int, priority: int, salt: str
    ) -> list[Request]:
        """See `ServedEngine`."""
        size = len(prompt)
        found = [
            Request(
                next(self._ids), list(prompt), size, size + params.max_tokens, params, index=index, sample=n
            )
            for n in range(params.n)
        ]
        self._live.update(dict.fromkeys(found, 0))
        return found

    def abort(self, request: Request) -> None:
        """See `ServedEngine`."""
        if self._live.pop(request, None) is not None:
            self._ended.append(Output(request, None, "abort", time.perf_counter()))

    def step(self) -> list[Output]:
        """Sleep until the tick; then a token for everybody."""
        pause = self._next - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        now = time.perf_counter()
        self._next = now + self.wait
        outputs, self._ended = self._ended, []
        for request, done in list(self._live.items()):
            last = done + 1 == request.params.max_tokens
            token = 1000 + (7919 * (request.id + done)) % 100_000
            outputs.append(Output(request, token, "length" if last else None, now))
            self._live[request] = done + 1
            if last:
                del self._live[request]
        return outputs


def serve(wait: float, told: Any) -> None:
    """A server around the stub; says where it listens."""
    folder = made_up_tokenizer(f"random:{SHAPE}")
    tokenizer = Tokenizer(folder)
    shutil.rmtree(folder)
    app = whole_app(EngineProcess(partial(Ticking, wait)), tokenizer, "stub")
    listening = listen("127.0.0.1", 0)
    ready: Callable[[], None] = lambda: told.send(listening.getsockname()[1])  # noqa: E731
    uvloop.run(whole_server(app, on_ready=ready).serve([listening]))


def request(tokens: int, chat: bool) -> bytes:
    """A streamed request."""
    ask: dict[str, Any] = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    ask |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": [1, 2, 3]}
    path, data = "/v1/chat/completions" if chat else "/v1/completions", json.dumps(ask).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


class Drain(asyncio.Protocol):
    """A client that reads and looks for nothing but the end."""

    def __init__(self, ask: bytes, done: asyncio.Future[None], first: asyncio.Future[float]) -> None:
        self.ask, self.done, self.first, self.tail = ask, done, first, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self.transport = transport
        transport.write(self.ask)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Count nothing."""
        if not self.first.done():
            self.first.set_result(time.perf_counter())
        self.tail = self.tail[-16:] + data
        if b"[DONE]" in self.tail:
            self.transport.close()
            if not self.done.done():
                self.done.set_result(None)


async def streams(port: int, process: psutil.Process, users: int, tokens: int, chat: bool) -> float:
    """Microseconds of the API process a token, with so many streams at a time."""
    loop = asyncio.get_running_loop()
    ask, before = request(tokens, chat), _cpu(process)
    ends = []
    for _ in range(users):
        done, first = loop.create_future(), loop.create_future()
        await loop.create_connection(partial(Drain, ask, done, first), "127.0.0.1", port)
        ends.append(done)
    await asyncio.gather(*ends)
    return (_cpu(process) - before) / (users * tokens) * 1e6


async def alone(port: int, requests: int) -> float:
    """Milliseconds to the first event, median, of one user."""
    loop, found = asyncio.get_running_loop(), []
    for _ in range(requests):
        done, first = loop.create_future(), loop.create_future()
        started = time.perf_counter()
        await loop.create_connection(partial(Drain, request(2, True), done, first), "127.0.0.1", port)
        found.append(await first - started)
        await done
    return median(found) * 1e3


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measured(wait: float, work: Callable[[int, psutil.Process], Any]) -> Any:
    """Run `work` against a server of its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=serve, args=(wait, theirs))
    child.start()
    try:
        if not mine.poll(120):
            raise RuntimeError("the server has not started")
        return uvloop.run(work(mine.recv(), psutil.Process(child.pid)))
    finally:
        child.terminate()
        child.join()


def sample(users: int, tokens: int, wait: float, repeats: int) -> dict[str, float]:
    """What evidence keeps: the API process's microseconds a token by route, and one user's first token."""
    found: dict[str, float] = {}

    async def both(port: int, process: psutil.Process) -> None:
        await streams(port, process, users, 20, False)
        for name in ("completions", "chat"):
            costs = [await streams(port, process, users, tokens, name == "chat") for _ in range(repeats)]
            found[f"api_cpu_us_per_token_{name}"] = median(costs)

    async def one(port: int, process: psutil.Process) -> None:
        await alone(port, 20)
        found["added_ttft_ms"] = await alone(port, 200)

    measured(wait, both)
    measured(0.0, one)
    return found


def main() -> None:
    """Print microseconds a token for both routes, and milliseconds of one user."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--wait", type=float, default=0.01, help="seconds of a step")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    for name, value in sample(given.users, given.tokens, given.wait, given.repeats).items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
