"""Servers for tests: a real one in processes of its own, and one in this process without sockets.

The second runs the same application, the same client of the engine and the same loop around the engine; what
would travel between the two processes is encoded and decoded, and handed over at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from common.text.made_up import write_tokenizer
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from phases import ROOT
from phases.appendix.embeddings.prompt_states import PromptObserver
from serving import messages
from serving.app import App
from serving.client import EngineClient
from serving.http.request import HttpRequest
from serving.messages import Command, Report
from serving.sizes import ready
from serving.worker import Worker

JSON = {"content-type": "application/json"}


class Running:
    """`ladder serve` with these arguments, as a context; `url` is where.

    within: seconds that it may take to be ready.
    """

    def __init__(
        self,
        *arguments: str,
        model: str = "random:tiny",
        env: dict[str, str] | None = None,
        within: float = 240.0,
    ) -> None:
        self.within = within
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        path = os.pathsep.join(
            [str(ROOT), *map(str, sorted((ROOT / "phases").glob("[0-9]*")))]
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phases", "serve", model, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            | (env or {}),
            start_new_session=True,
        )
        self.url = ""

    def __enter__(self) -> Running:
        assert self.process.stdout is not None
        timer = threading.Timer(self.within, self.process.kill)
        timer.start()
        for line in self.process.stdout:
            found = re.search(r"Ready: (http://\S+)", line)
            if found:
                self.url = found[1]
                break
        timer.cancel()
        assert self.url, f"the server has not started: {self.stderr()}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()

    def stderr(self) -> str:
        self.log.seek(0)
        return self.log.read()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
        """(status, headers, body) of one request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data, JSON | headers))

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], Any]:
        return self._ask(urllib.request.Request(self.url + path, headers=headers))

    def _ask(self, request: urllib.request.Request) -> tuple[int, dict[str, str], Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status = answer.status
                headers = answer.headers
                data = answer.read()
        except urllib.error.HTTPError as error:
            status = error.code
            headers = error.headers
            data = error.read()
        kind = headers.get("content-type", "")
        return (
            status,
            {k.lower(): v for k, v in headers.items()},
            json.loads(data) if "json" in kind else data,
        )

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self.get("/metrics")[2].decode()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if re.match(rf"{name}(\{{| )", line)
        )

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until nothing is in flight and every block is free; fail if that does not come."""
        wait_until(
            lambda: self.metric("vllm:num_requests_running") == 0,
            "requests still run",
            seconds,
        )
        wait_until(
            lambda: self.metric("vllm:num_requests_waiting") == 0,
            "requests still wait",
            seconds,
        )
        wait_until(
            lambda: self.metric("ladder:free_blocks") == self.metric("ladder:blocks"),
            "blocks leak",
            seconds,
        )


def wait_until(condition: Callable[[], bool], message: str, seconds: float = 60.0) -> None:
    """Wait until it is so: some milliseconds, but on a busy machine a process may get no turn for seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(0.02)


def in_turns(engines: list[psutil.Process], until: Callable[[], bool], message: str) -> None:
    """Let engines go on for some milliseconds at a time until it is so; they are stopped then.

    What they can compute before somebody looks does not depend on how busy the machine is.
    """
    deadline = time.monotonic() + 120
    while not until():
        assert time.monotonic() < deadline, f"{message} after 120 s"
        for engine in engines:
            engine.resume()
        time.sleep(0.01)
        for engine in engines:
            engine.suspend()
        time.sleep(0.05)


class Loopback(EngineClient):
    """An `EngineClient` whose engine is in this process.

    busy: a step is run only while it is set, so that a test can look at what is between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.worker = Worker(engine, self, PromptObserver(engine))
        self.busy = True
        self._arrived: list[Command] = []
        self._pumping: asyncio.Task[None] | None = None
        self.ready = ready(engine)
        self.stats = messages.StepStats(free_blocks=self.ready.blocks)
        self.state = "ready"

    def receive(self, seconds: float) -> list[Command]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def send(self, report: Report) -> None:
        self.now = time.perf_counter()
        found = messages.report(messages.encode(report))
        assert isinstance(found, messages.StepReport)
        self._route_tokens(found)

    def transmit(self, data: bytes) -> None:
        self._arrived += messages.commands(data)
        if self._pumping is None or self._pumping.done():
            self._pumping = asyncio.ensure_future(self.pump())

    async def pump(self) -> None:
        while self._arrived or not self.engine.idle:
            if self.busy:
                self.worker.turn()
            await asyncio.sleep(0)

    def die(self) -> None:
        """What happens when the process ends."""
        self._lose()
        assert self.state == "restarting", "the engine has died, and requests are still taken"
        self.worker = Worker(self.engine, self, PromptObserver(self.engine))
        self._arrived = []
        for request in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            self.engine.abort(request)
        while not self.engine.idle:
            self.engine.step()
        self.state = "ready"


class Lists:
    """A channel of two lists: commands to be read, and the steps that were sent."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.steps: list[Any] = []

    def receive(self, seconds: float) -> list[Any]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, report: Any) -> None:
        self.steps.append(report)


class Client:
    """Calls an application directly. A request may leave after so many messages that it was sent."""

    def __init__(self, app: App) -> None:
        self.app = app

    def request(
        self, path: str, body: Any, method: str = "POST", headers: dict[str, str] | None = None
    ) -> Asked:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Asked(self.app, path, data, method, JSON | (headers or {}))

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        asked = self.request(
            path, body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        await asked.run()
        return asked.status, asked.json()

    async def get(self, path: str, method: str = "GET", **headers: str) -> Asked:
        """A request without a body, when it has its answer."""
        return await self.request(
            path, b"", method, {k.replace("_", "-"): v for k, v in headers.items()}
        ).run()


class Asked:
    """One request to an application and what it was answered; it fails if it is not by `within` seconds."""

    within = 200.0

    def __init__(
        self, app: App, path: str, body: bytes, method: str, headers: dict[str, str]
    ) -> None:
        self.app = app
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": ("test", 1),
            "state": {"abort": self.leave},
        }
        self.name = f"{method} {path} {body[:80].decode(errors='replace')}"
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.complete = False
        self.leave_after: int | None = None
        self.reads = asyncio.Event()  # cleared: the client does not read
        self.reads.set()

    def leave(self) -> None:
        """The client disconnects."""
        self._left.set()
        self.reads.set()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "a second answer to one request"
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        assert not self.complete, "a message after the last one"
        self.chunks.append(message["body"])
        self.complete = not message.get("more_body")
        if self.leave_after is not None and len(self.chunks) >= self.leave_after:
            self.leave()
        await self.reads.wait()

    def http(self) -> HttpRequest:
        """The request as routes see it."""
        return HttpRequest(self.scope, self.receive, self.send, self.app.limits)

    async def run(self) -> Asked:
        try:
            async with asyncio.timeout(self.within):
                await self.app(self.scope, self.receive, self.send)
        except TimeoutError:
            raise AssertionError(
                f"{self.name} has got no whole answer in {self.within:g} s: a request ends with the last "
                "token of its completions, an error, or its client's leaving"
            ) from None
        return self

    def json(self) -> Any:
        return json.loads(b"".join(self.chunks))

    def events(self) -> list[Any]:
        return events(b"".join(self.chunks))

    def text(self) -> str:
        """The text of the first choice, streamed or not."""
        whole = self.headers["content-type"].startswith("application/json")
        parts = [self.json()] if whole else self.events()[:-1]
        return "".join(part["choices"][0]["text"] for part in parts if part["choices"])


def events(data: bytes) -> list[Any]:
    """The events of a stream; `[DONE]` as it is."""
    found = []
    for block in data.decode().split("\n\n"):
        if block:
            assert block.startswith("data: "), f"no event: {block!r}"
            text = block.removeprefix("data: ")
            found.append(text if text == "[DONE]" else json.loads(text))
    return found


def tokenizer_for(folder: Path, vocab_size: int, eos: tuple[int, ...] = (0,)) -> Tokenizer:
    """A made-up tokenizer in a folder."""
    write_tokenizer(folder, vocab_size, eos)
    return Tokenizer(folder)
