"""What tests of the server share: an application, what an idle engine should not have, and expected texts."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import pytest

import cuda_graphs
from common.sampling.params import SamplingParams
from common.text.text_stream import TextStream
from common.text.tokenizer import Tokenizer
from forward.model import Model
from paged_cache import PagedEngine
from phases.appendix.observability.metrics import Metrics
from phases.appendix.server import whole_app
from serving.app import App
from serving.http.request import HttpRequest
from tests.equivalence.engines import blocks
from tests.guidance_kit import served as load
from tests.servers import Loopback, tokenizer_for

E = TypeVar("E")
PROMPTS = [
    "hello",
    "a longer prompt, of some twenty tokens",
    "x",
    "one more, and the last of them all " * 4,
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_for(tmp_path_factory.mktemp("tokenizer"), 257)


@pytest.fixture
def engine(model: Model) -> PagedEngine:
    return load(
        model, max_rows=8, cache_bytes=blocks(model, 200), step_tokens=256, speculate=False
    )


@pytest.fixture
def make(engine: PagedEngine, tokenizer: Tokenizer) -> Callable[..., App]:
    return lambda **options: whole_app(Loopback(engine), tokenizer, "tiny", **options)


@pytest.fixture(name="make")
def make_with_grammars(model: Model, tokenizer: Tokenizer) -> Callable[..., App]:
    """Like `make`, around a new engine each time that drafts and follows grammars."""

    def made(**options: Any) -> App:
        size = blocks(model, 200)
        engine = load(
            model, max_rows=8, cache_bytes=size, step_tokens=256, tokenizer=tokenizer
        )
        return whole_app(Loopback(engine), tokenizer, "tiny", **options)

    return made


def extension(app: App, kind: type[E]) -> E:
    """The part of the appendix of this kind, which has hooks in the application."""
    hooks = [*app.before, *app.engine.on_step, *app.on_end]
    bound = [hook for hook in hooks if inspect.ismethod(hook)] + [app.routes["/events"]["GET"]]
    return next(hook.__self__ for hook in bound if isinstance(hook.__self__, kind))


def metrics(app: App) -> Metrics:
    """What the application counts."""
    return extension(app, Metrics)


def leaks(engine: PagedEngine) -> str:
    """What an idle engine should not have, or nothing."""
    engine.check_integrity()
    if not engine.scheduler.idle:
        return "requests are left"
    return "" if engine.cache.free == engine.cache.allocator.count else "blocks are left"


def texts(
    model: Model, tokenizer: Tokenizer, prompts: list[str], params: SamplingParams
) -> list[str]:
    """What phase 09 says, as text."""
    done = cuda_graphs.load(model, tokenizer=tokenizer, max_rows=8, step_tokens=256).generate(
        [tokenizer.encode(p) for p in prompts], params
    )
    found = []
    for completion in done:
        stream, text = TextStream(tokenizer, params), ""
        last = len(completion.token_ids) - 1
        for place, token in enumerate(completion.token_ids):
            text += stream.advance(token, completion.finish_reason if place == last else None)[
                1
            ]
        found.append(text)
    return found


AGAIN = 0.01
"""Seconds to the next place where a loop may be interrupted."""


@contextmanager
def computing_at_most(seconds: float) -> Iterator[None]:
    """Fail what computes longer, in this process's own time: a busy machine makes nothing late.

    A loop that never waits gives no limit of asyncio a turn; a signal comes in between. Other requests that
    compute then fail at once.
    """
    over = False

    def spent(number: int, frame: FrameType | None) -> None:
        nonlocal over
        at = None if frame is None else frame.f_lineno
        while frame is not None and not isinstance(frame.f_locals.get("http"), HttpRequest):
            frame = frame.f_back
        if at is None or (over and frame is None):  # pytest cannot show it, or does so now
            return
        over = True
        http = None if frame is None else frame.f_locals["http"]
        whose = (
            "the test" if http is None else f"request {http.id}, {http.method} {http.path},"
        )
        pytest.fail(f"{whose} has computed for {seconds:g} s: a loop neither waits nor ends")

    before = signal.signal(signal.SIGVTALRM, spent)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


async def settle(app: App) -> None:
    """Let the engine take in what was aborted; then nothing may be left of anybody."""
    for _ in range(4):
        await asyncio.sleep(0)
    while not app.engine.engine.idle:
        await asyncio.sleep(0)
    assert app.engine.in_flight == 0, "completions are in flight though nobody waits for them"
    assert not app.requests, "exchanges are left"
    left = [task for task in asyncio.all_tasks() if "listen_for" in str(task.get_coro())]
    assert not left, f"after its request, a task still waits until the client leaves: {left}"
    assert leaks(app.engine.engine) == ""
