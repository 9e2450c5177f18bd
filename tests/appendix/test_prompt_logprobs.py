"""Log-probabilities of prompts: right in every engine, whatever happens, and for nobody else."""

from __future__ import annotations

import gc
import random

import pytest
import torch

import kv_cache
from common.errors import UserError
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.engine import Engine
from forward.attention import RecomputeAttention
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from phases import phase_named
from phases.appendix.api.prompt_logprobs import read_prompts
from phases.registry import load_engine
from tests.equivalence.engines import ENGINES, blocks

NAMES = ["04 overlapped", "05 small blocks", "05 preempting overlapped", "07 tiny budget", "07 preempting"]


def asked(name: str, model: Model) -> Engine:
    engine = ENGINES[name](model)
    read_prompts(engine)
    return engine


def oracle(model: Model, prompt: list[int]) -> torch.Tensor:
    """`[S - 1, V]`, by phase 01: all positions at once."""
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=model.device)
        places = torch.arange(len(prompt), device=model.device)[None]
        hidden = model(ids, places, RecomputeAttention())
        return model.logits(hidden[0, :-1]).log_softmax(-1).cpu()


def run(engine: Engine) -> list:
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    return outputs


def check(model: Model, request, top: int, near: float = 1e-4) -> None:
    prompt = request.tokens[: request.prompt_len]
    right, found = oracle(model, prompt), request.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for place in range(1, len(prompt)):
        row, token, told = right[place - 1], prompt[place], found[place]
        where = f"request {request.id}, token {place} of its prompt, id {token}"
        assert told is not None, f"{where}: nothing is told"
        assert told.chosen == pytest.approx(float(row[token]), abs=near), where
        above, not_below = (int((row > row[token] + by).sum()) for by in (near, -near))
        assert above < told.rank <= not_below, f"{where}: its rank is {told.rank}, not {above + 1}"
        assert len(told.top) == top
        values = row.topk(max(top, 1)).values[:top].tolist()
        assert [value for _, value in told.top] == pytest.approx(values, abs=near), f"{where}: the likeliest"


@pytest.mark.parametrize("name", [*NAMES, "08 radix"])
def test_they_are_phase_01s(model, name):
    """Among others that do not ask, with prompts that are alike, chunked, preempted and computed again."""
    rng, engine = random.Random(4), asked(name, model)
    same = [rng.randrange(257) for _ in range(40)]
    asking, others = [], []
    for number in range(10):
        prompt = same[: rng.randint(1, 40)] + [rng.randrange(257) for _ in range(rng.randint(0, 20))]
        most = rng.choice([0, 1, 12])
        others += engine.add(prompt, SamplingParams(max_tokens=max(most, 1), ignore_eos=True))
        params = SamplingParams(max_tokens=most, ignore_eos=True, prompt_logprobs=number % 3)
        asking += engine.add(prompt, params)
    run(engine)
    for request in asking:
        check(model, request, request.params.prompt_logprobs)
        assert len(request.output_ids) == request.params.max_tokens and request.finish_reason == "length"
    for one, other in zip(asking, others, strict=True):
        assert other.prompt_logprobs is None
        size = min(len(one.output_ids), len(other.output_ids))
        assert one.output_ids[:size] == other.output_ids[:size], f"asking changed request {one.id}'s tokens"


def test_who_leaves_is_watched_no_longer(model):
    engine = asked("07 tiny budget", model)
    (request,) = engine.add([7] * 60, SamplingParams(max_tokens=3, prompt_logprobs=1))
    engine.step()
    engine.abort(request)
    run(engine)
    del request
    (other,) = engine.add([7] * 20, SamplingParams(max_tokens=3, prompt_logprobs=1))
    run(engine)
    check(model, other, 1)
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) is Request and one.prompt_len == 60]
    assert not left, "a request that has left is still watched"


def test_a_prompt_that_is_found_is_computed_all_the_same(model):
    engine = asked("08 radix", model)
    prompt = [3, 4, 5, 6] * 20
    for wants in (None, 1, None):
        params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=wants)
        (request,) = engine.add(prompt, params)
        run(engine)
        assert (request.cached_tokens > 0) == (wants is None and request.id > 0), f"request {request.id}"
    assert engine.cache.free == engine.cache.allocator.count


def test_earlier_phases_and_caches_without_room_refuse(model):
    with pytest.raises(UserError, match="prompt_logprobs is set"):
        list(kv_cache.load(model).stream([[1, 2]], SamplingParams(prompt_logprobs=1)))
    with pytest.raises(UserError, match="prompt_logprobs is 21"):
        SamplingParams(prompt_logprobs=21)
    phase, tight = phase_named("13"), {"max_rows": 2, "cache_bytes": blocks(model, 2)}
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with pytest.raises(UserError, match="prompt_logprobs is set"):
        load_engine(phase, model, prompt_logprobs=False, **tight).add([1] * 3, params)
    engine = load_engine(phase, model, **tight)
    with pytest.raises(UserError, match="cache"):
        engine.add([1] * 33, params)


@pytest.mark.gpu
def test_on_a_gpu_they_arrive_behind_the_step_that_computes_them():
    """Graphs, overlap and copies that nobody waits for: the next replay overwrites what they are made of."""
    replayed(random_model(SHAPES["tiny"], device="cuda", dtype=torch.float32), near=5e-3)


@pytest.mark.slow
def test_steps_replayed_from_graphs_tell_them_too(model, monkeypatch):
    """Kernels in the interpreter: chunk graphs, decode graphs, and a step that runs ahead."""
    monkeypatch.setattr("cuda_graphs.capture.Capturer.capture", lambda self, function: function)
    replayed(model, near=1e-4)


def replayed(model: Model, near: float) -> None:
    plain = dict.fromkeys(("norms", "rope", "activation", "projections", "sampling"), "torch")
    sizes = {"max_rows": 3, "max_len": 120, "graph_tokens": 32, "cache_bytes": 4_000_000}
    graphs = {"kernels": True, "graphs": True, "latency": False, "rehearsal": False, "drafter": "none"}
    engine = load_engine(phase_named("13"), model, step_tokens=24, **graphs, **plain, **sizes)
    requests = []
    for number, most in enumerate((0, 2, 1)):
        params = SamplingParams(max_tokens=most, ignore_eos=True, prompt_logprobs=number)
        requests += engine.add([(7 * n + number) % 257 for n in range(20 + 9 * number)], params)
    run(engine)
    assert engine.runner.replays > 0
    for request in requests:
        check(model, request, request.params.prompt_logprobs, near)
