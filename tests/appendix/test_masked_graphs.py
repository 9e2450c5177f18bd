"""Masks on a GPU: kernels that read them, and the second half of a step as a graph."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import cuda_graphs
import forward
from common.request import Request
from common.sampling import ops
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.sampling.sampler import TORCH, TokenBitmask
from continuous.work import Work
from cuda_graphs import OverlappedLoop
from forward.model import Model
from paged_cache import PagedEngine
from tests.guidance_kit import GRAMMARS, SCHEMAS, engine_of, must_obey
from tests.kernel_layers import only_attention
from tests.schedules import check
from tests.structured_kit import PROMPT, SMALL, text_of
from tests.structured_kit import equal_priority as equal_priority

pytestmark = pytest.mark.timeout(120)
pytest.importorskip("llguidance")


@pytest.fixture(autouse=True)
def few_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than four masks are left to other threads, as on a GPU's host, even if there is one alone."""
    monkeypatch.setattr("phases.appendix.guidance.backend.SINGLE_THREAD_BATCH", 4)


def kernels_run_on() -> str:
    """A device; skips a test where there is none."""
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter or a GPU")
    return "cuda" if torch.cuda.is_available() else "cpu"


def test_the_kernel_masks_what_torch_masks() -> None:
    pytest.importorskip("triton")
    from phases.appendix.masked_graphs.kernel import with_kernel

    sampler: Any = None  # not used
    backend = with_kernel(TORCH)
    device = kernels_run_on()
    made = torch.Generator().manual_seed(3)
    for vocab in (257, 32, 4096, 9001):
        words = torch.randint(
            -(2**31), 2**31 - 1, (3, -(-vocab // 32)), generator=made, dtype=torch.int32
        )
        allowed = TokenBitmask(words.to(device), torch.tensor([0, 2, 4], device=device))
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.randn(6, vocab, generator=made).to(device, dtype)
            expected = ops.forbid(logits.clone(), allowed.words, allowed.positions)
            backend.forbid(sampler, logits, allowed)
            assert torch.equal(logits, expected), f"{vocab} tokens in {dtype}"
            wide = logits.new_zeros(vocab, 6).T
            backend.forbid(sampler, wide, allowed)
            assert torch.equal(wide == 0, expected > -math.inf), (
                f"{vocab} tokens in columns, {dtype}"
            )
            padded = TokenBitmask(allowed.words, torch.tensor([0, -1, -1], device=device))
            room = logits.new_zeros(8, vocab)
            backend.forbid(sampler, room[2:], padded)
            touched = room.any(1).nonzero().flatten().tolist()
            assert touched in ([], [2]), (
                f"padding masks places {[place - 2 for place in touched]}"
            )
    assert with_kernel(TORCH).forbid is not TORCH.forbid


@pytest.mark.parametrize("size", [4, 16])
def test_a_first_half_leaves_the_logits_where_the_second_reads_them(
    model: Model, size: int
) -> None:
    pytest.importorskip("triton")
    from cuda_graphs.capture import Capturer
    from phases.appendix.masked_graphs.graphs import LogitsGraph, MaskInputs

    masks, hidden = MaskInputs(16, model), torch.randn(size, model.config.hidden_size)
    half = SimpleNamespace(
        size=size, hidden=hidden, inputs=torch.ones(3, size, dtype=torch.int64)
    )
    half.machine, half.pad = SimpleNamespace(model=model), lambda: None
    made = LogitsGraph(cast(Any, half), masks, Capturer(model.device))
    torch.testing.assert_close(made.logits, model.logits(hidden))
    assert (
        masks.logits[:size].data_ptr() == made.logits.data_ptr()
        and not masks.logits[size:].any()
    )


def obey_beside_free_rows(model: Model, **options: Any) -> None:
    engine = engine_of(model, **options)
    names = list(SCHEMAS)
    bound = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=n, grammar=GRAMMARS[m])
        for n, m in enumerate(names)
    ]
    free = [SamplingParams(max_tokens=20, ignore_eos=True)] * 2
    done = engine.generate([PROMPT] * (len(bound) + 2), [*free, *bound])
    alone = engine.generate([PROMPT] * 2, free)
    assert [c.token_ids for c in done[:2]] == [c.token_ids for c in alone], (
        "a neighbour changes tokens"
    )
    for completion, name in zip(done[2:], names, strict=True):
        must_obey(completion, name)
    check(engine)


PLAIN: dict[str, Any] = {"kernels": True, "graphs": True, "graph_tokens": 0}


def plan_of(engine: PagedEngine) -> Any:
    from cuda_graphs.runner import GraphRunner
    from phases.appendix.masked_graphs.graphs import MaskedGraphExecutor

    assert isinstance(engine.runner, GraphRunner)
    return engine.runner.executor(MaskedGraphExecutor)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a graph is called, not replayed; only what masked steps need is called when it is captured."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    from cuda_graphs.capture import Capturer
    from cuda_graphs.decode_graph import DecodeGraph
    from phases.appendix.masked_graphs.graphs import LogitsGraph, MaskedGraph

    def capture(self: Capturer, function: Any) -> Any:
        of = function.__self__
        if isinstance(of, LogitsGraph | MaskedGraph) or (
            isinstance(of, DecodeGraph) and of.plan is None
        ):
            function()
        return function

    monkeypatch.setattr(Capturer, "capture", capture)


@pytest.mark.slow
@pytest.mark.usefixtures("calls")
@only_attention()
def test_masked_steps_are_two_graphs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows end before others, so a graph's masks are fewer than in the step before, at other places."""
    from phases.appendix.masked_graphs.graphs import LogitsGraph, MaskedGraph

    letters, digits = Grammar.regex("[xyz]{9}"), Grammar.regex("[0-9]{9}")
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True),
        SamplingParams(max_tokens=3, grammar=letters),
        SamplingParams(max_tokens=5, temperature=1.0, seed=1, grammar=digits),
        SamplingParams(max_tokens=5, temperature=1.0, seed=2, ignore_eos=True),
    ]
    captured: list[list[int]] = []
    first, rest = LogitsGraph.compute, MaskedGraph.compute
    with monkeypatch.context() as patch:
        patch.setattr(
            LogitsGraph,
            "compute",
            lambda self: captured.append(self.half.at.tolist()) or first(self),
        )
        patch.setattr(
            MaskedGraph,
            "compute",
            lambda self: captured.append(self.first.inputs[1].tolist()) or rest(self),
        )
        engine = engine_of(model, **PLAIN, max_rows=4)
    assert captured and all(set(at) == {-1} for at in captured), (
        f"captured with somebody at {captured}"
    )
    graphs = plan_of(engine).graphs
    assert sorted(size for size, _ in graphs) == [1, 1, 2, 2, 4, 4], (
        f"masked graphs: {sorted(graphs)}"
    )
    replayed: Counter[tuple[int, Any]] = Counter()
    for key, graph in graphs.items():
        replay = graph.replay
        graph.replay = lambda key=key, replay=replay: replayed.update([key]) or replay()
    found = engine.generate([PROMPT] * 4, params)
    assert sum(replayed.values()) == 4, (
        f"of four masked decode steps {dict(replayed)} were graphs"
    )
    graphs.clear()
    eager = engine.generate([PROMPT] * 4, params)
    free = cuda_graphs.load(model, **SMALL).generate([PROMPT] * 2, [params[0], params[3]])
    for one, other in (
        *zip(found, eager, strict=True),
        (found[0], free[0]),
        (found[3], free[1]),
    ):
        assert one.token_ids == other.token_ids, (
            f"prompt {one.index}: {one.token_ids} from graphs, {other.token_ids} without or alone"
        )
    for completion, allowed in zip(found[1:3], ("xyz", "0123456789"), strict=True):
        assert set(text_of(completion)) <= set(allowed), (
            f"{allowed} allow {text_of(completion)!r}"
        )
    check(engine)


@pytest.mark.slow
@pytest.mark.usefixtures("calls")
@only_attention()
def test_the_next_step_is_staged_while_masks_are_made(model: Model) -> None:
    """With rows that become free, get new owners with nothing but one token to compute, and fail."""
    options: dict[str, Any] = {
        **PLAIN,
        "max_rows": 7,
        "jump_forward": False,
        "speculate": False,
    }
    grammars = [Grammar.regex("[xyz]{30}"), Grammar.regex("[0-9]{30}")]
    lengths = [7, 3, 6, 7, 5, 7, 7]
    prompts, late = [[10 + n, 20 + n] for n in range(len(lengths))], [[40], [41]]

    def outputs(staging: bool) -> tuple[list[list[int]], list[int]]:
        engine = engine_of(model, **options)
        plan, masks = plan_of(engine), engine.grammar_manager
        staged: list[int] = []
        if not staging:
            plan.graphs.clear()
        else:
            assert isinstance(engine.loop, OverlappedLoop)

            def noted(works: Sequence[Work]) -> None:
                plan.stage(works)
                if plan._staged is not None and plan._staged[0] is works:
                    staged.append(len(works))

            engine.loop.prefetchers = [noted]
        requests = []
        for number, (prompt, most) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(
                max_tokens=most,
                temperature=number % 2,
                seed=number,
                grammar=grammars[number % 2],
            )
            masks.wait_until_compiled(grammars[number % 2])
            requests += engine.add(prompt, params)
        take_failed = masks.pop_failed_requests

        def failed() -> list[tuple[Request, Exception]]:
            if len(requests[4].output_ids) == 2 and requests[4].finish_reason is None:
                return [*take_failed(), (requests[4], RuntimeError("this one"))]
            return take_failed()

        masks.pop_failed_requests = failed  # type: ignore[method-assign]
        waiting = list(late)
        while not engine.idle:
            engine.step()
            if requests[1].finish_reason is not None and waiting:
                params = SamplingParams(
                    max_tokens=3, temperature=1.0, seed=5, grammar=grammars[0]
                )
                requests += [one for prompt in waiting for one in engine.add(prompt, params)]
                waiting.clear()
        check(engine)
        assert [r.finish_reason for r in requests] == ["length"] * 4 + ["error"] + [
            "length"
        ] * 4
        return [request.output_ids for request in requests], staged

    (found, staged), (wanted, _) = outputs(True), outputs(False)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one == other, (
            f"request {number}: {one} where steps are staged early, else {other}"
        )
    assert len(staged) >= 3, f"steps that were staged early, by requests: {staged}"


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_on_a_gpu(overlap: bool) -> None:
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    obey_beside_free_rows(
        model, overlap=overlap, kernels=True, graphs=True, max_rows=16, cache_bytes=1 << 22
    )
