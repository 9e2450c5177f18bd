"""Phase 04: requests join and leave at every step, and nothing that happens to one reaches another."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.profiler import profile

import continuous
import continuous.attention
import forward
from common.errors import UserError
from common.events import generate
from common.interrupts import uninterrupted
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.cache import RowCache
from continuous.engine import Engine
from continuous.groups import group
from continuous.policies import POLICIES
from continuous.rows import RequestRows
from continuous.scheduler import Scheduler
from continuous.stats import STEP
from continuous.work import Work
from forward.model import Model
from tests.fakes import FakePending, FakeRunner, expected_tokens
from tests.schedules import (
    MAX_LEN,
    SCHEDULES,
    check,
    fake_engine,
    finish,
    greedy,
    machine_of_rows,
    operations,
    play,
    play_seeds,
)
from tests.servers import tokenizer_for

# A victim that is forgotten in the line would hang.
pytestmark = pytest.mark.timeout(20)


def fake(
    rows: int = 4, *, step_tokens: int = 64, policy: str = "fcfs", overlap: bool = False
) -> Any:
    def scheduler(table: RequestRows) -> Scheduler:
        return Scheduler(table, RowCache(), step_tokens=step_tokens, policy=POLICIES[policy])

    return fake_engine(scheduler, rows, overlap=overlap)


# Schedules.


@pytest.mark.timeout(120)
@SCHEDULES
@given(script=operations, seed=st.integers(0, 999))
def test_any_schedule(script: list[Any], seed: int) -> None:
    engine, runner = machine_of_rows(random.Random(seed))
    play(engine, runner, script)
    assert runner.most_in_step <= MAX_LEN


@pytest.mark.timeout(120)
def test_many_schedules() -> None:
    for _, runner in play_seeds(range(80), machine_of_rows):
        assert runner.most_in_step <= MAX_LEN, (
            f"{runner.most_in_step} tokens in one step of {MAX_LEN}"
        )


def test_requests_join_and_leave_at_every_step() -> None:
    engine, runner = fake(2)
    for length, count in ((5, 1), (3, 6), (4, 2)):
        engine.add([1] * length, greedy(count))
    seen = []
    while not engine.idle:
        before = runner.computed
        engine.step()
        seen.append(runner.computed - before)
    # 5 + 3 together; the first is done and the third's prompt runs beside a decode; two decodes; one alone.
    assert seen == [8, 1 + 4, 2, 1, 1, 1], (
        "request 2 joins in the step after request 0 has left"
    )
    assert (engine.stats.steps, engine.stats.decode_steps) == (6, 4)


def test_a_profile_names_each_step() -> None:
    engine, _ = fake()
    engine.add([1] * 5, greedy(2))
    engine.step()  # no profiler runs yet
    engine.add([2] * 3, greedy(3))
    with profile() as profiled:
        finish(engine)
    ranges = [event for event in profiled.events() if event.name.startswith(STEP)]
    names = [
        event.name.removeprefix(STEP)
        for event in sorted(ranges, key=lambda one: one.time_range.start)
    ]
    assert names == ["prefill", "decode", "decode"], (
        "step 2 has request 1's prompt, steps 3 and 4 a token each"
    )


def test_waiting_prompts_are_prefilled_together(model: Model) -> None:
    engine = continuous.load(model, max_rows=8)
    for length in (3, 9, 4):
        engine.add([1] * length, greedy(2))
    passes = []
    hook = model.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    engine.step()
    hook.remove()
    assert passes == [16]


def test_every_token_is_computed_once(model: Model) -> None:
    """Work shrank: nothing is padded, and a finished row costs nothing."""
    engine = continuous.load(model, max_rows=3)
    lengths, counts = (3, 30, 17, 1, 8), (1, 9, 30, 4, 2)
    prompts = [[7] * length for length in lengths]
    computed: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    generate(engine, prompts, [greedy(count) for count in counts])
    hook.remove()
    assert (
        sum(computed)
        == engine.stats.computed_tokens
        == sum(lengths) + sum(counts) - len(counts)
    )


def test_only_sampled_rows_get_logits(model: Model) -> None:
    engine = continuous.load(model)
    rows: list[int] = []
    hook = model.lm_head.register_forward_pre_hook(
        lambda _, args: rows.append(args[0].shape[0])
    )
    generate(engine, [[1] * 50, [2] * 60], greedy(2))
    hook.remove()
    assert rows == [2, 2]


def test_first_come_first_served() -> None:
    """A short request does not overtake a long one that is waiting for room in the step."""
    engine, _ = fake(4, step_tokens=40)
    first, second, third = (engine.add([1] * n, greedy(3))[0] for n in (35, 30, 2))
    engine.step()
    rows = [request.row for request in (first, second, third)]
    assert rows == [0, -1, -1], (
        f"35 of 40 tokens are taken: requests of 30 and of 2 wait, not {rows}"
    )
    assert engine.scheduler.waiting == [second, third]
    engine.step()
    assert second.row >= 0 and third.row >= 0


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", "abc"), ("shortest_first", "bca"), ("priority", "cab")]
)
def test_policies(policy: str, order: str) -> None:
    engine, _ = fake(1, policy=policy)
    requests = {
        name: engine.add([1] * length, greedy(2), priority=priority)[0]
        for name, length, priority in (("a", 20, 1), ("b", 2, 2), ("c", 10, 0))
    }
    finish(engine)
    done = sorted(requests, key=lambda name: requests[name].finished or 0.0)
    assert "".join(done) == order


def test_a_request_is_not_readmitted_while_a_token_is_in_flight() -> None:
    engine, _ = fake(2)
    (request,) = engine.add([1, 2, 3], greedy(5, seed=0))
    engine.process_inbox()
    pending = engine.sample(engine.forward(engine.scheduler.schedule()))
    assert pending is not None
    engine.scheduler.leave(request)  # preempted, as a later phase does
    request.num_computed_tokens = 0
    engine.scheduler.add([request])
    assert engine.scheduler.schedule() == [], "request 0 has a token in flight, and must wait"
    engine.collect(pending)
    assert request.output_ids == expected_tokens([1, 2, 3], request.params, 0, MAX_LEN)[:1]
    (work,) = engine.scheduler.schedule()
    assert (work.start, work.count) == (0, 4)  # the prompt and the token that was in flight


# What callers do.


def test_nothing_is_added_if_one_prompt_is_bad(model: Model) -> None:
    engine = continuous.load(model)
    with pytest.raises(UserError, match="token id 257"):
        engine.stream([[1], [257]], greedy(1))
    with pytest.raises(UserError, match="no tokenizer"):
        engine.stream([[1]], greedy(1, stop=("x",)))
    assert engine.idle


def test_the_sampler_knows_every_token_of_the_model(model: Model) -> None:
    params = SamplingParams(
        max_tokens=2, temperature=1.0, seed=0, ignore_eos=True, logit_bias={256: 100.0}
    )
    made = continuous.load(model, max_rows=2).generate([[1, 2]], [params])
    assert made[0].token_ids == [256, 256], "the last token of the vocabulary cannot be forced"


def test_a_prompt_longer_than_a_step_is_rejected() -> None:
    engine, _ = fake(2, step_tokens=10)
    with pytest.raises(UserError, match=r"11 tokens.*at most step_tokens, 10"):
        engine.add([1] * 11, greedy(1))
    engine.add([1] * 10, greedy(1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_rows": 0}, "max_rows is 0"),
        ({"max_len": 1}, "max_len is 1"),
        ({"max_len": 2000}, "model's context of 1024"),
        ({"policy": "lifo"}, "policy is 'lifo'"),
        ({"cache_bytes": 1000}, "cache_bytes is 1000"),
        ({"cache_bytes": 10**18}, r"cache_bytes is 10{18}, but only \d+ bytes are free"),
        (
            {"max_rows": 65536, "max_len": 1024},
            r"max_rows is 65536, .*, but only 1000000 bytes are free",
        ),
        ({"step_tokens": 0}, "step_tokens is 0"),
    ],
)
def test_bad_options(
    model: Model, options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous, "free_memory", lambda device: (10**6, 10**6))
    with pytest.raises(UserError, match=says):
        continuous.load(model, **options)


def test_a_cache_of_so_many_bytes_has_whole_rows(model: Model) -> None:
    row = 32 * model.config.kv_bytes_per_token(model.dtype)
    for size, most, rows in ((row, None, 1), (3 * row - 1, None, 2), (3 * row, 2, 2)):
        made = continuous.load(
            model, max_len=32, max_rows=most, cache_bytes=size
        ).scheduler.rows.count
        assert made == rows, (
            f"{size} bytes have room for rows of {row} bytes, max_rows {most}: made {made}"
        )


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_in_every_state(overlap: bool) -> None:
    engine, _ = fake(1, overlap=overlap)
    (running,) = engine.add([1, 2, 3], greedy(20))
    (waiting,) = engine.add([1, 2, 3, 4], greedy(20))
    (last,) = engine.add([5], greedy(2))
    for _ in range(3):
        engine.step()
    engine.abort(waiting)
    engine.abort(running)
    engine.process_inbox()
    assert running.output_ids and running.finish_reason == waiting.finish_reason == "abort"
    ends = []
    while not engine.idle:
        ends += [
            (output.request.id, output.finish_reason)
            for output in engine.step()
            if output.finish_reason
        ]
    assert ends == [(1, "abort"), (0, "abort"), (2, "length")], (
        "each reader is told how its request ended"
    )
    engine.abort(last)
    engine.step()
    assert last.finish_reason == "length", "request 2 had ended before it was aborted"
    assert engine.idle and engine.scheduler.rows.free == 1


def test_text_that_a_stop_string_holds_back_comes_with_an_abort(
    model: Model, tmp_path: Path
) -> None:
    tokenizer = tokenizer_for(tmp_path, 257)
    (a,) = tokenizer.encode("a")
    engine = continuous.load(model, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=9, stop=("aaaaab",), logit_bias={a: 100.0})
    (request,) = engine.add([1, 2], params)
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.text for output in outputs] == ["", "", ""], "it may begin the stop string"
    engine.abort(request)
    (end,) = engine.step()
    assert (end.finish_reason, end.text) == ("abort", "aaa"), (
        f"request 0 was aborted after 3 tokens, and its text ends with {end.text!r}, not 'aaa'"
    )


def test_the_first_token_has_one_time() -> None:
    engine, _ = fake()
    (request,) = engine.add([1, 2, 3], greedy(4))
    times = [output.time for _ in range(4) for output in engine.step()]
    assert request.first_token == times[0] and request.finished == times[-1], (
        "request 0: first_token is the time of its first token, finished that of its last"
    )


def test_a_consumer_that_leaves_aborts_the_rest(model: Model) -> None:
    engine = continuous.load(model, max_rows=2)
    stream = engine.stream([[1, 2], [3], [4, 5]], greedy(50))
    for _ in range(5):
        next(stream)
    stream.close()
    assert engine.idle and engine.scheduler.rows.free == 2, (
        "the consumer of requests 0 to 2 has left, but they go on or keep their rows"
    )
    assert generate(engine, [[9]], greedy(3)) and engine.idle


# Failures.


def test_streams_of_several_threads_do_not_meet() -> None:
    model = forward.load_model("random:tiny", device="cpu", dtype="float32")
    engine = continuous.load(model, max_rows=3, max_len=40)
    prompts = [[[7, n + 1, 9] * (1 + n % 3)] for n in range(12)]
    alone = [engine.generate(prompt, greedy(12))[0] for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: engine.generate(prompt, greedy(12)), prompts))
    for number, ((one,), right) in enumerate(zip(together, alone, strict=True)):
        assert one.token_ids == right.token_ids, (
            f"prompt {number} has other tokens beside others than alone"
        )
    assert engine.idle and engine.scheduler.rows.free == 3


def test_an_exception_in_the_model_fails_that_step_only(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    engine = continuous.load(model, max_rows=2)
    prompts = [[1, 2], [3], [4, 5], [6]]
    alone = generate(engine, prompts, greedy(5))
    calls = []

    def explode(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("out of luck")

    hook = model.register_forward_pre_hook(explode)
    done = generate(engine, prompts, greedy(5))
    hook.remove()
    assert [one.finish_reason for one in done] == ["error", "error", "length", "length"]
    assert [len(one.token_ids) for one in done] == [2, 2, 5, 5]
    for one, other in zip(alone, done, strict=True):
        assert one.token_ids[: len(other.token_ids)] == other.token_ids
    assert engine.idle and engine.scheduler.rows.free == 2 and "out of luck" in caplog.text


def test_a_failed_step_lands_and_ends_each_of_its_requests_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = fake(3)
    committed: list[Any] = []
    monkeypatch.setattr(engine.cache, "commit", lambda *given: committed.append(given))
    first, second, third = (engine.add([n + 1, 2], greedy(6))[0] for n in range(3))
    engine.process_inbox()
    works = engine.schedule()
    engine.abort(second)
    engine.process_inbox()
    second.error = earlier = RuntimeError("earlier")
    engine.fail(works, error := RuntimeError("no"))
    ends = [
        (output.request.id, output.token_id, output.finish_reason)
        for output in engine.take_outputs()
    ]
    each = "each request of the step ends once, 1 before the others"
    assert ends == [(1, None, "abort"), (0, None, "error"), (2, None, "error")], each
    assert (first.error, second.error, third.error) == (error, earlier, error)
    left = [request.in_flight + request.placeholders for request in (first, second, third)]
    assert left == [0, 0, 0], f"of requests 0, 1 and 2 {left} tokens have not landed"
    assert not committed, "what a failed step computed is committed"
    assert engine.idle and engine.scheduler.rows.free == 3


# Batches and attention.


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=1, max_size=40
    ),
    padding=st.integers(0, 3000),
    by_rows=st.booleans(),
)
@example(sizes=[(1, 4)] * 5, padding=15, by_rows=True)  # one call across the gap of three rows
@example(sizes=[(1, 4)] * 5, padding=14, by_rows=True)  # the gap is one pair too dear
def test_groups_cover_everybody_and_pad_little(
    sizes: list[tuple[int, int]], padding: int, by_rows: bool
) -> None:
    queries = np.array([q for q, _ in sizes])
    contexts = queries + np.array([past for _, past in sizes])
    rows = np.array([3 * (i // 4) + i for i in range(len(sizes))])  # a gap after every fourth
    order = list(range(len(sizes))) if by_rows else np.lexsort((contexts, queries)).tolist()
    groups = group(order, queries, contexts, padding, rows if by_rows else None)
    assert np.concatenate(groups).tolist() == order
    for members in groups:
        # One view over rows covers those between its members too, and they count as padding.
        height = rows[members[-1]] - rows[members[0]] + 1 if by_rows else len(members)
        padded = height * queries[members].max() * contexts[members].max()
        assert padded - (queries[members] * contexts[members]).sum() <= padding


def test_decodes_read_views_of_the_rows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied: what attention reads lies inside the store."""
    engine = continuous.load(model, max_rows=4)
    store = engine.runner.attention.store.data  # type: ignore[attr-defined]
    seen = []
    original = continuous.attention.attend_masked

    def spy(layer: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        seen.extend((k, v))
        return original(layer, q, k, v, mask)

    monkeypatch.setattr(continuous.attention, "attend_masked", spy)
    generate(engine, [[1] * 5, [2] * 9, [3] * 5], greedy(4))
    assert len(seen) >= 2 * 2 * 3
    for tensor in seen:
        assert tensor.untyped_storage().data_ptr() == store.untyped_storage().data_ptr()


def test_what_an_earlier_request_left_in_a_row_is_not_seen(model: Model) -> None:
    engine = continuous.load(model, max_rows=2)
    expected = generate(engine, [[1] * 9, [5] * 3], greedy(6))
    engine.runner.attention.store.data.fill_(1e3)  # type: ignore[attr-defined]
    actual = generate(engine, [[1] * 9, [5] * 3], greedy(6))
    assert [one.token_ids for one in actual] == [one.token_ids for one in expected]


def test_the_nan_of_one_request_reaches_no_later_one_in_its_row(model: Model) -> None:
    """Keys and values of token 50 are NaN; a masked one has weight 0, and 0 times NaN is NaN."""
    broken = forward.load_model("random:tiny", device="cpu", dtype="float32")
    broken.embed_tokens.weight.data[50] = float("nan")
    engine = continuous.load(broken, max_rows=2)
    (bad,) = generate(engine, [[50] * 40], greedy(2))
    assert bad.finish_reason == "error", "request 0 has NaN, but no error"
    prompts = [[1, 2, 3], [9] * 20]
    wanted = generate(continuous.load(model, max_rows=2), prompts, greedy(6))
    for one, right in zip(generate(engine, prompts, greedy(6)), wanted, strict=True):
        assert one.token_ids == right.token_ids, (
            f"request {one.index}: its tokens are wrong, since its row had held NaN"
        )


@pytest.mark.parametrize("shape", ["tiny", "tiny-window"])
def test_tokens_are_those_of_the_naive_loop(shape: str) -> None:
    """One model has layers with windows."""
    model = forward.load_model(f"random:{shape}", device="cpu", dtype="float32")
    prompts = [[1, 2, 3], [5] * 30, list(range(40))]
    naive, engine = forward.load(model), continuous.load(model, max_rows=2)
    made, wanted = (generate(one, prompts, greedy(6)) for one in (engine, naive))
    for one, right in zip(made, wanted, strict=True):
        assert one.token_ids == right.token_ids, (
            f"{shape}: other tokens for prompt {one.index}"
        )


def test_no_plan_is_compiled_for_a_context_length(model: Model) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    continuous.load(model)
    assert not torch.backends.cuda.cudnn_sdp_enabled(), (
        "cuDNN may compile a plan at every step"
    )


@pytest.mark.timeout(300)
def test_llm_speaks_text(smollm2_folder: Any) -> None:
    llm = continuous.LLM(smollm2_folder, device="cpu", max_rows=4, max_len=256)
    question = [{"role": "user", "content": "What is the capital of Italy?"}]
    done = llm.generate(
        ["The capital of France is", question, "1, 2, 3, 4,"],
        [
            SamplingParams(max_tokens=6),
            SamplingParams(max_tokens=20),
            SamplingParams(max_tokens=30, stop=("7, 8",)),
        ],
    )
    assert done[0].text.startswith(" Paris")
    assert (
        done[1].finish_reason == "stop"
        and done[1].token_ids[-1] in llm.engine.config.eos_token_ids
    )
    assert (
        done[1].text == llm.tokenizer.decode(done[1].token_ids[:-1])
        and "<|" not in done[1].text
    )
    assert done[2].text == " 5, 6, " and done[2].finish_reason == "stop"
    assert isinstance(llm.engine, Engine) and llm.engine.idle
    (single,) = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
    assert single.text == done[0].text


def test_an_engine_looks_through_the_books_of_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = fake()
    engine.check_integrity()

    def wrong() -> None:
        raise AssertionError("a row is lost")

    monkeypatch.setattr(engine.cache, "check", wrong)
    with pytest.raises(AssertionError, match="a row is lost"):
        engine.check_integrity()


# The inbox.


def test_nothing_happens_between_two_steps() -> None:
    engine, _ = fake()
    (request,) = engine.add([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert not engine.idle and engine.scheduler.waiting == []
    engine.step()
    assert len(request.output_ids) == 1
    engine.abort(request)
    assert request.finish_reason is None and request.row >= 0, (
        "an abort took effect between two steps"
    )
    (output,) = engine.step()
    assert output.finish_reason == "abort" and request.row < 0 and engine.idle
    engine.abort(request)  # has ended already: nothing to tell
    assert engine.step() == [] and engine.idle


@pytest.mark.parametrize("overlap", [False, True])
def test_any_thread_may_add_and_abort(overlap: bool) -> None:
    engine, _ = fake(6, overlap=overlap)
    made: list[tuple[list[int], Request]] = []

    def caller(number: int) -> None:
        for turn in range(40):
            prompt = [number, turn % 7 + 1]
            (request,) = engine.add(
                prompt, SamplingParams(max_tokens=4, seed=number, ignore_eos=True)
            )
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
    assert ends == len(made) == 160
    assert len({request.id for _, request in made}) == 160, "two requests have one id"
    for prompt, request in made:
        output = expected_tokens(prompt, request.params, 0, MAX_LEN)
        assert request.output_ids == output[: len(request.output_ids)], (
            f"request {request.id}: wrong tokens"
        )
    check(engine)


# One request's trouble is its own.


@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_that_cannot_be_made_ends_its_own_request(overlap: bool) -> None:
    error = RuntimeError("no")

    class Broken:
        def advance(self, token: int, reason: str | None) -> tuple[str | None, str]:
            raise error

    engine, _ = fake(overlap=overlap)
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    first, bad, last = (engine.add([n + 1, 2], params)[0] for n in range(3))
    bad.text = Broken()  # type: ignore[assignment]
    while not engine.idle:
        engine.step()
        check(engine)
    assert bad.finish_reason == "error" and bad.error is error
    for request in (first, last):
        assert request.output_ids == expected_tokens(request.tokens[:2], params, 0, MAX_LEN), (
            request.id
        )


# Ctrl-C.


class PressesCtrlC(FakeRunner):
    """Sends SIGINT to this process in the middle of a step."""

    at = ""

    def forward(self, works: Sequence[Work], *, masked: bool = False) -> FakePending:
        at, self.at = self.at, ""
        if at == "before":
            signal.raise_signal(signal.SIGINT)
        step = super().forward(works, masked=masked)
        if at == "after":
            signal.raise_signal(signal.SIGINT)
        if at == "raise":
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
            assert told[request] == request.output_ids == output, (
                f"request {request.id}: wrong tokens"
            )
        else:  # the step itself raised: its own requests end, the others go on
            assert request.finish_reason == "error" and request in requests[:2]


def test_ctrl_c_is_not_lost_where_the_block_fails() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise OSError("the step fails, too")


def test_ctrl_c_is_the_main_threads_affair() -> None:
    def work() -> None:
        with uninterrupted():
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(10)
