"""Phase 19, prefill and decode apart: blocks and a first token go from one engine to another."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.events import Logprob
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from moving_blocks.tiers import TieredConnector
from paged_cache import PagedEngine
from phases.commands.served_engine import make_engine
from phases.commands.served_split import DecodeObserver, SplitEngine
from serving import messages
from serving.client import EngineClient
from serving.liveness import EngineProcess
from serving.messages import Report
from serving.seams import Sink
from serving.worker import Worker
from tests.phases.test_19_moving_blocks import engine_of, prompt_of, right, tiny
from tests.schedules import greedy
from tests.servers import Loopback, in_turns, tokenizer_for

pytestmark = pytest.mark.timeout(120)

SIZE = 4
"""Tokens of a block."""
RATE = 500.0
"""Tokens a second that computing is taken to make: nobody waits for long for blocks that do not come."""


class Received(Sink):
    """The tokens, the end and the notes of a completion. ended: set when it gets no further token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason = ""
        self.notes: dict[str, list[Any]] = {}
        self.ended = asyncio.Event()

    def note(self, kind: str, values: list[Any]) -> None:
        self.notes.setdefault(kind, []).extend(values)

    def token(self, token: int, reason: str | None, logprob: Logprob | None) -> None:
        assert not self.ended.is_set(), "a token after the end"
        self.tokens.append(token)
        if reason is not None:
            self.end(reason, "")

    def end(self, reason: str, message: str) -> None:
        assert not self.ended.is_set(), "two ends"
        self.reason = reason
        self.ended.set()


class Decoding(Loopback):
    """An engine of this process whose reports go to a `SplitEngine`."""

    outer: LocalSplit

    def send(self, report: Report) -> None:
        self.outer.now = time.perf_counter()
        found = messages.report(messages.encode(report))
        assert isinstance(found, messages.StepReport)
        self.outer._route_tokens(found)


class LocalSplit(SplitEngine):
    """A `SplitEngine` whose two engines are in this process."""

    prefill: Loopback

    def __init__(self, prefill: PagedEngine, decode: PagedEngine) -> None:
        super().__init__(object, Loopback(prefill), DecodeObserver)
        self.least = SIZE
        self.decode = Decoding(decode)
        self.decode.outer = self
        self.decode.worker = Worker(decode, self.decode, DecodeObserver(decode))
        self.ready, self.state = self.decode.ready, "ready"
        self.handed: list[messages.AddRequest] = []

    def transmit(self, data: bytes) -> None:
        self.handed += [
            each
            for each in messages.commands(data)
            if isinstance(each, messages.AddRequest) and each.wanted
        ]
        self.decode.transmit(data)

    def check(self) -> None:
        """Nothing is left in either engine."""
        assert not self.in_flight and not self.prefill.in_flight
        for engine in (self.prefill.engine, self.decode.engine):
            engine.check_integrity()
            assert engine.cache.free == engine.cache.allocator.count, "blocks are lost"
            connector = engine.cache.connector
            assert isinstance(connector, TieredConnector)
            assert not connector.waiting


def split(tmp_path: Path, **options: Any) -> LocalSplit:
    options = {"folder": tmp_path / "blocks", **options}
    prefill, decode = (engine_of(**options) for _ in range(2))
    return LocalSplit(prefill, decode)


async def answers(
    engine: SplitEngine, *prompts: list[int], params: SamplingParams, salt: str = ""
) -> list[Received]:
    received = [Received() for _ in prompts]
    for prompt, sink in zip(prompts, received, strict=True):
        engine.submit(prompt, params, [sink], salt=salt)
    await asyncio.gather(*(sink.ended.wait() for sink in received))
    return received


async def idle(engine: LocalSplit) -> None:
    while not (engine.prefill.engine.idle and engine.decode.engine.idle):
        await asyncio.sleep(0)


@pytest.mark.parametrize("length", [5 * SIZE - 1, 5 * SIZE, 5 * SIZE + 1])
async def test_one_engine_computes_the_prompt_and_another_one_goes_on(
    length: int, tmp_path: Path
) -> None:
    """a11: also where the prompt ends on a block's edge."""
    prompt, engine = prompt_of(1, length), split(tmp_path)
    (found,) = await answers(engine, prompt, params=greedy(6))
    await idle(engine)
    assert found.tokens == right(tuple(prompt), 6) and found.reason == "length"
    assert engine.prefill.engine.stats.computed_tokens == length
    computed = (
        length % SIZE + 5
    )  # the prompt's last part, and what goes on from the first token
    assert engine.decode.engine.stats.computed_tokens == computed
    assert not found.notes, "what one engine computed does not count as cached for the other"
    engine.check()


SAMPLED = SamplingParams(
    max_tokens=12,
    temperature=1.3,
    seed=11,
    min_tokens=3,
    frequency_penalty=0.7,
    repetition_penalty=1.2,
    logit_bias={3: 2.0},
    ignore_eos=True,
)


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        replace(SAMPLED, top_k=5, top_p=0.8),
        replace(SAMPLED, max_tokens=1, min_tokens=0),
    ],
    ids=["penalties", "few tokens", "one token"],
)
async def test_a_random_text_is_that_of_one_engine(
    params: SamplingParams, tmp_path: Path
) -> None:
    prompt, alone = prompt_of(2, 33), engine_of()
    (request,) = alone.add(prompt, params)
    while not alone.idle:
        alone.step()
    engine = split(tmp_path)
    (found,) = await answers(engine, prompt, params=params)
    assert found.tokens == request.output_ids
    assert len(engine.handed) == (params.max_tokens > 1)


async def test_a_first_token_that_is_handed_over_is_not_sampled_again(tmp_path: Path) -> None:
    """Rounding may give the two engines other first tokens: the text goes on from what the client has."""
    other = tiny(9)  # for other rounding
    prompt = next(
        each
        for each in map(prompt_of, range(99))
        if right(tuple(each), 1) != right(tuple(each), 1, other)
    )
    there, here = (
        engine_of(model, folder=tmp_path / "blocks", prefill_rate=RATE)
        for model in (other, tiny())
    )
    (found,) = await answers(LocalSplit(there, here), prompt, params=greedy(5))
    first = right(tuple(prompt), 1, other)
    assert found.tokens == first + right((*prompt, *first), 4)


async def test_many_requests_at_a_time_say_what_phase_01_says(tmp_path: Path) -> None:
    rng = random.Random(3)
    prompts = [prompt_of(rng.randrange(6), rng.randrange(2, 60)) for _ in range(24)]
    engine = split(tmp_path, blocks=30, host=20, prefill_rate=RATE)
    found = await answers(engine, *prompts, params=greedy(7))
    assert [each.tokens for each in found] == [right(tuple(each), 7) for each in prompts]
    await idle(engine)
    engine.check()


async def test_salts_do_not_meet_in_the_folder_between_engines(tmp_path: Path) -> None:
    engine, prompt = split(tmp_path), prompt_of(4)
    for count, salt in enumerate(("a", "b"), start=1):
        await answers(engine, prompt, params=greedy(2), salt=salt)
        assert engine.prefill.engine.stats.computed_tokens == count * len(prompt)


# Whatever happens.


async def test_blocks_that_do_not_come_are_computed(tmp_path: Path) -> None:
    """The folder of the engine that prefills is another one: nothing is ever found."""
    prompt = prompt_of(5)
    there, here = (
        engine_of(folder=tmp_path / name, prefill_rate=RATE) for name in ("there", "here")
    )
    engine = LocalSplit(there, here)
    begun = time.monotonic()
    (found,) = await answers(engine, prompt, params=greedy(6))
    assert found.tokens == right(tuple(prompt), 6)
    assert time.monotonic() - begun > len(prompt) / RATE, "nothing was waited for"
    assert here.stats.computed_tokens == len(prompt) + 5
    await idle(engine)
    engine.check()


async def test_a_prompt_whose_engine_dies_is_computed_by_the_other(tmp_path: Path) -> None:
    prompt, engine = prompt_of(6), split(tmp_path)
    engine.prefill.busy = False
    waiting = asyncio.ensure_future(answers(engine, prompt, params=greedy(6)))
    await asyncio.sleep(0.01)
    assert engine.in_flight == 1 and not engine.handed
    engine.prefill.die()
    (found,) = await waiting
    assert found.tokens == right(tuple(prompt), 6)
    assert engine.decode.engine.stats.computed_tokens == len(prompt) + 5
    await idle(engine)
    engine.check()


async def test_a_prompt_that_one_engine_refuses_is_asked_of_the_other(tmp_path: Path) -> None:
    """a10: a refusal at the first engine begins no text at the second one."""
    engine, prompt = split(tmp_path), prompt_of(7, 90)
    engine.prefill.engine.max_len = 50
    (found,) = await answers(engine, prompt, params=greedy(3))
    assert found.tokens == right(tuple(prompt), 3)
    (refused,) = await answers(engine, [999] * 60, params=greedy(3))
    assert refused.reason == "refused" and not refused.tokens
    await idle(engine)
    engine.check()


async def test_a_completion_ends_if_the_engine_that_decodes_dies(tmp_path: Path) -> None:
    engine = split(tmp_path)
    engine.decode.busy = False
    waiting = asyncio.ensure_future(answers(engine, prompt_of(8), params=greedy(6)))
    while not engine.handed:
        await asyncio.sleep(0)
    engine._lose()
    (found,) = await waiting
    assert len(found.tokens) == 1 and found.reason == "died"
    assert not engine.in_flight


@pytest.mark.parametrize("stage", ["prefill", "handed over", "files", "decode"])
async def test_an_abort_at_any_stage_of_a_handover_leaves_nothing(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sink = split(tmp_path), Received()
    connector = engine.decode.engine.cache.connector
    assert isinstance(connector, TieredConnector)
    engine.prefill.busy = stage != "prefill"
    engine.decode.busy = stage == "decode"
    if stage == "files":  # they are waited for, and do not come
        assert connector.disk is not None
        monkeypatch.setattr(connector.disk.files, "contains", lambda digest: False)
        engine.decode.busy = True
    numbers = engine.submit(prompt_of(9), greedy(40), [sink])

    def reached() -> bool:
        if stage == "prefill":
            return bool(engine.prefill.engine.inbox) or not engine.prefill.busy
        if stage == "files":
            return bool(connector.waiting)
        return len(sink.tokens) > 2 if stage == "decode" else bool(engine.handed)

    while not reached():
        await asyncio.sleep(0)
    engine.abort(numbers)
    engine.prefill.busy = engine.decode.busy = True
    await asyncio.sleep(0.01)
    await idle(engine)
    connector.poll()
    assert not sink.ended.is_set(), "who has left is not called again"
    engine.check()


# Two processes.

OPTIONS = {"max_rows": 4, "max_len": 1024, "step_tokens": 32, "cache_bytes": 1 << 20}
LONG = [1 + 7 * place % 250 for place in range(600)]


@asynccontextmanager
async def processes(tmp_path: Path) -> AsyncIterator[SplitEngine]:
    """Two engines of `random:tiny` in processes of their own, which compute a prompt in many steps."""
    tokenizer_for(tmp_path, 257)
    options = OPTIONS | {"disk_folder": str(tmp_path / "blocks")}
    make = partial(make_engine, "random:tiny", str(tmp_path), "19", options, "cpu", "float32")
    engine = SplitEngine(make, EngineProcess(make), DecodeObserver)
    life = asyncio.ensure_future(engine.run())
    await until(lambda: engine.state == engine.prefill.state == "ready" or life.done())
    try:
        yield engine
    finally:
        await engine.stop()
        await asyncio.wait_for(life, 20)


async def until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it does not come to this"
        await asyncio.sleep(0.002)


def balanced(engine: EngineClient) -> bool:
    return engine.ready is not None and engine.stats.free_blocks == engine.ready.blocks


@pytest.mark.slow
@pytest.mark.timeout(290)  # it starts four engines
async def test_either_process_may_be_killed_between_the_two_halves(tmp_path: Path) -> None:
    """a8: the other one goes on, and has lost no block."""
    folder = tmp_path / "blocks"
    async with processes(tmp_path) as engine:
        prefill = engine.prefill
        assert isinstance(prefill, EngineProcess)
        right, sink = (await answers(engine, LONG, params=greedy(8)))[0].tokens, Received()
        masked = SamplingParams(max_tokens=40, seed=1, grammar=Grammar("regex", "x[ab]{20}y"))
        (found,) = await answers(engine, LONG, params=masked)
        text = Tokenizer(tmp_path).decode(found.tokens)
        assert re.match("x[ab]{20}y", text), "the grammar goes on after the first token"

        def files() -> int:
            return len(list(folder.glob("*.kv")))

        # While it computes and writes: the other one computes the prompt.
        prompt, before = [250, *LONG], files()
        process = psutil.Process(prefill.process.pid)
        process.suspend()
        engine.submit(prompt, greedy(8), [sink])
        await asyncio.sleep(0.01)  # the request is on its way
        in_turns([process], lambda: files() > before + 2, "no block is written")
        assert engine.prefilling, "it is too fast for this test"
        process.kill()
        await asyncio.wait_for(sink.ended.wait(), 60)
        assert sink.reason == "length" and len(sink.tokens) == 8
        await until(lambda: prefill.restarts == 1 and prefill.state == "ready")
        assert (await answers(engine, prompt, params=greedy(8)))[0].tokens == sink.tokens
        await until(lambda: balanced(engine) and balanced(prefill))

        # While it waits for blocks, or decodes: the first token came from the other one.
        process = psutil.Process(engine.process.pid)
        for number in range(5):  # on a busy machine it may be done before it is stopped
            sink = Received()
            process.suspend()
            engine.submit([249 - number, *LONG], greedy(300), [sink])
            await until(lambda: bool(engine._sinks))
            for _ in range(3):
                process.resume()
                time.sleep(0.005)
                process.suspend()
            await asyncio.sleep(0.1)
            if not sink.ended.is_set():
                break
            process.resume()
        process.kill()
        await asyncio.wait_for(sink.ended.wait(), 60)
        assert sink.reason == "died" and 0 < len(sink.tokens) < 300
        await until(lambda: balanced(prefill))
        await until(lambda: engine.restarts == 1 and engine.state == "ready")
        assert (await answers(engine, LONG, params=greedy(8)))[0].tokens == right
        await until(lambda: balanced(engine) and balanced(prefill))
