"""What later phases hang on: several tokens a step, two halves, masks, the inbox; Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence

import pytest

from common.interrupts import Uninterrupted
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.cache import RowCache
from continuous.engine import Engine
from continuous.scheduler import Scheduler
from continuous.work import Work
from tests.fakes import FakePending, FakeRunner, expected_tokens
from tests.schedules import MAX_LEN, check, fake_engine

# A victim that is forgotten in the line would hang.
pytestmark = pytest.mark.timeout(20)


# Two halves, and masks between them.


# Plans.


# The inbox.


def fake(rows: int = 4, *, overlap: bool = False) -> tuple[Engine, FakeRunner]:
    return fake_engine(
        lambda table: Scheduler(table, RowCache(MAX_LEN), step_tokens=64), rows, overlap=overlap
    )


def test_nothing_happens_between_two_steps() -> None:
    engine, _ = fake()
    (request,) = engine.add([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert not engine.idle and engine.scheduler.waiting == []
    engine.step()
    assert len(request.output_ids) == 1
    engine.abort(request)
    assert request.finish_reason is None and request.row >= 0, "an abort took effect between two steps"
    (output,) = engine.step()
    assert output.finish_reason == "abort" and request.row < 0 and engine.idle
    engine.abort(request)  # has ended already: nothing to tell
    assert engine.step() == [] and engine.idle


@pytest.mark.parametrize("overlap", [False, True])
def test_any_thread_may_add_and_abort(overlap: bool) -> None:
    engine, _ = fake(6, overlap=overlap)
    made: list[tuple[list[int], Request]] = []
    stop = threading.Event()

    def caller(number: int) -> None:
        for turn in range(40):
            prompt = [number, turn % 7 + 1]
            (request,) = engine.add(prompt, SamplingParams(max_tokens=4, seed=number, ignore_eos=True))
            made.append((prompt, request))
            if turn % 5 == number:
                engine.abort(request)
            time.sleep(0)

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    ends = 0
    deadline = time.monotonic() + 30
    while any(thread.is_alive() for thread in threads) or not engine.idle:
        ends += sum(output.finish_reason is not None for output in engine.step())
        assert time.monotonic() < deadline, "requests of other threads are not served"
    stop.set()
    assert ends == len(made) == 160
    assert len({request.id for _, request in made}) == 160, "two requests have one id"
    for prompt, request in made:
        output = expected_tokens(prompt, request.params, 0, MAX_LEN)
        assert request.output_ids == output[: len(request.output_ids)], f"request {request.id}: wrong tokens"
    check(engine)


# One request's trouble is its own.


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_that_cannot_be_made_ends_its_own_request(overlap: bool, error: BaseException) -> None:
    class Broken:
        def advance(self, token: int, reason: str | None) -> tuple[str | None, str]:
            raise error

    engine, _ = fake(overlap=overlap)
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    first, bad, last = (engine.add([n + 1, 2], params)[0] for n in range(3))
    bad.text = Broken()  # type: ignore[assignment]
    raised = 0
    while not engine.idle:
        try:
            engine.step()
        except KeyboardInterrupt:
            raised += 1
        check(engine)
    assert raised == isinstance(error, KeyboardInterrupt)
    assert bad.finish_reason == "error" and bad.error is error
    for request in (first, last):
        assert request.output_ids == expected_tokens(request.tokens[:2], params, 0, MAX_LEN), request.id


# Ctrl-C.


class PressesCtrlC(FakeRunner):
    """Sends SIGINT to this process in the middle of a step."""

    at = ""

    def forward(self, works: Sequence[Work], *, masked: bool = False) -> FakePending:
        if self.at == "before":
            self.at = ""
            signal.raise_signal(signal.SIGINT)
        step = super().forward(works, masked=masked)
        if self.at == "after":
            self.at = ""
            signal.raise_signal(signal.SIGINT)
        if self.at == "raise":
            self.at = ""
            raise KeyboardInterrupt
        return step


@pytest.mark.parametrize("at", ["before", "after", "raise"])
@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_in_a_step_loses_nobody_elses_tokens(at: str, overlap: bool) -> None:
    engine, _ = fake(2, overlap=overlap)
    runner = PressesCtrlC(engine.scheduler.rows, engine.scheduler.cache)  # type: ignore[arg-type]
    engine.runner = runner  # type: ignore[assignment]
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    requests = [engine.add([n + 1, 2], params)[0] for n in range(4)]
    told: dict[Request, list[int]] = {request: [] for request in requests}

    def step() -> None:
        for request, token, *_ in engine.step():
            if token is not None:
                told[request].append(token)
        check(engine)

    step()
    runner.at = at
    with pytest.raises(KeyboardInterrupt):
        step()
    check(engine)
    while not engine.idle:
        step()
    for request in requests:
        output = expected_tokens(request.tokens[:2], params, 0, MAX_LEN)
        if at != "raise":
            assert request.finish_reason == "length", f"request {request.id} was lost"
        if request.finish_reason == "length":
            assert told[request] == request.output_ids == output, f"request {request.id}: wrong tokens"
        else:  # the step itself raised: its own requests end, the others go on
            assert request.finish_reason == "error" and request in requests[:2]


def test_ctrl_c_is_the_main_threads_affair() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with Uninterrupted():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert failed == []
