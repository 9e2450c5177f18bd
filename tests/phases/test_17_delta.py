"""Phase 17: Qwen3.5's model and the gated delta rule, against transformers and against sums."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hybrid_cache
from common.errors import UserError
from common.events import TokenEvent
from common.models.config import DeltaConfig, ModelConfig
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.rows import RequestRows
from continuous.seams import Drafter
from continuous.work import Work
from forward import Generator, load_model
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from hybrid_cache import HybridCache, LayerGroups
from hybrid_cache.states.delta_rule import DeltaTokens, causal_conv, recurrence, scan, unit
from phases import phase_named
from phases.registry import import_phase, load_engine
from speculative.proposer import Proposer
from tests.fakes import FakeRunner, fingerprint, must
from tests.oracles import assert_same_logits, logits_of, written
from tests.paged_batches import DEVICE
from tests.phases.test_17_hybrid_cache import GroupRunner, machine, nothing_leaks
from tests.schedules import play, random_script

AWKWARD = {
    "vocab_size": 97,
    "hidden_size": 72,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,  # not hidden / heads
    "max_position_embeddings": 256,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LINEAR, FULL = "linear_attention", "full_attention"
ORACLES: dict[str, dict[str, Any]] = {
    "every-fourth": {"tie_word_embeddings": True},
    "own-layers": {"layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR], "attention_bias": True},
    "one-head-each": {"linear_num_key_heads": 6, "linear_conv_kernel_dim": 2, "linear_value_head_dim": 7},
    "half-turned": {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default",
        "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "long": {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0,
        "factor": 4.0, "original_max_position_embeddings": 128, "partial_rotary_factor": 0.25}},
}  # fmt: skip


def oracle(name: str, folder: Path) -> Any:
    """A transformers model of random weights, also written to `folder`."""
    return written(transformers.Qwen3_5TextConfig(**{**AWKWARD, **ORACLES[name]}), folder)


@pytest.mark.parametrize("name", ORACLES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = oracle(name, tmp_path)
    assert_same_logits(
        load_model(tmp_path, device="cpu", dtype="float32"), reference, name, length=70
    )


def test_half_precision_stays_close(tmp_path: Path) -> None:
    """No further from float32 than transformers is."""
    reference, ids = oracle("every-fourth", tmp_path), torch.randint(0, 97, (1, 70))
    half = logits_of(load_model(tmp_path, device="cpu", dtype="bfloat16"), ids)
    with torch.inference_mode():
        exact, theirs = reference(ids).logits, reference.bfloat16()(ids).logits.float()
    assert (
        half.dtype == torch.float32 and (half - exact).norm() < 1.1 * (theirs - exact).norm()
    )


def test_a_multimodal_checkpoint_is_its_text_model(tmp_path: Path) -> None:
    """Image weights and the layer of further tokens are left out."""
    reference = oracle("every-fourth", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors |= {
        "model.visual.patch_embed.proj.weight": torch.ones(2, 2),
        "mtp.fc.weight": torch.ones(2, 2),
    }
    outer = {
        "model_type": "qwen3_5",
        "text_config": raw,
        "vision_config": {},
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_logits(
        load_model(tmp_path, device="cpu", dtype="float32"), reference, length=30
    )


RAW = {**AWKWARD, "model_type": "qwen3_5_text"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False, but only True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only silu"),
        ({"linear_num_value_heads": 4}, "not a multiple of linear_num_key_heads 3"),
        (
            {"layer_types": [LINEAR, "full_attention"]},
            "layer_types has 2 entries for 5 layers",
        ),
        (
            {"layer_types": ["sliding_attention"] * 5},
            "'sliding_attention' is not supported, only linear",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "at another",
        ),
        (
            {"partial_rotary_factor": 1.5},
            "partial_rotary_factor is 1.5, but must be between 0.001 and 1",
        ),
        ({"head_dim": 12}, "head_dim is 12, but rotary embeddings turn pairs"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ModelConfig.from_hf({**RAW, **change})


def tokens(
    length: int, *, leading: tuple[int, ...] = (), slow: bool = True, seed: int = 0
) -> DeltaTokens:
    """Random inputs of a layer of 3 heads; `slow`: the state stays for long."""
    rng = torch.Generator().manual_seed(seed)
    q, k = (unit(torch.randn(*leading, length, 3, 8, generator=rng)) for _ in range(2))
    v = torch.randn(*leading, length, 3, 5, generator=rng)
    decay = -torch.rand(*leading, length, 3, generator=rng) * (0.02 if slow else 30.0)
    beta = torch.rand(*leading, length, 3, generator=rng)
    return DeltaTokens(q, k, v, decay, beta)


def test_one_token_writes_what_the_state_gets_wrong() -> None:
    """Two heads of 1: keys and values are numbers, so the rule can be followed by hand."""
    state = torch.tensor([4.0, 4.0]).view(2, 1, 1)
    ones = torch.ones(1, 2, 1)
    beta = torch.tensor([[1.0, 0.5]])
    given = DeltaTokens(3 * ones, ones, 10 * ones, torch.full((1, 2), 0.5).log(), beta)
    out, after = recurrence(state, given)
    assert after.flatten().tolist() == [10.0, 6.0], (
        "half of 4 is 2; 8 is missing, of which beta is written"
    )
    assert out.flatten().tolist() == [30.0, 18.0]


@pytest.mark.parametrize("slow", [True, False], ids=["slow", "fast"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_scan_equals_recurrence(length: int, slow: bool) -> None:
    given = tokens(length, leading=(2,), slow=slow)
    state = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(1))
    expected, after = recurrence(state, given)
    out, end = scan(state, given)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(end, after, atol=1e-5, rtol=0)


def test_a_scan_in_parts_is_one_scan() -> None:
    given, state = tokens(50), torch.zeros(3, 8, 5)
    expected, after = recurrence(state, given)
    parts = []
    for first, last in [(0, 7), (7, 8), (8, 50)]:
        out, state = scan(state, given.span(first, last), chunk=16)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(state, after, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cuts", [[0, 9], [0, 1, 2, 9], [0, 5, 6, 9]])
def test_convolution_in_parts(cuts: list[int]) -> None:
    """Its state is the inputs of the last tokens; at the beginning of a text they are zeros."""
    x, weight = torch.randn(9, 6), torch.randn(6, 4)
    padded = torch.cat((torch.zeros(3, 6), x)).T.unsqueeze(0)
    expected = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), groups=6)[0].T
    expected = torch.nn.functional.silu(expected)
    before, parts = torch.zeros(3, 6), []
    for first, last in pairwise(cuts):
        out, before = causal_conv(x[first:last], weight, before)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(before, x[-3:])


# Engines.


@pytest.fixture(scope="module")
def model() -> Model:
    """Its states decay slowly, so that a wrong one is seen long after."""
    made = random_model(SHAPES["tiny-delta"], device="cpu", dtype=torch.float32)
    for name, parameter in made.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-4.0)
    return made


def outputs(events: Iterable[TokenEvent]) -> dict[tuple[int, int], list[int | None]]:
    found: dict[tuple[int, int], list[int | None]] = {}
    for event in events:
        found.setdefault((event.index, event.sample), []).append(event.token_id)
    return found


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 257) for _ in range(length)] for length in lengths]


GREEDY = SamplingParams(temperature=0.0, max_tokens=25)
AT_ONCE = prompts_of(5, 33, 70, 1, 16, 17, 50, 64)


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[tuple[int, int], list[int | None]]:
    """Phase 01's: the recurrence over the whole sequence, for every token again."""
    return outputs(Generator(model).stream(AT_ONCE, GREEDY))


def poisoned(model: Model, **options: Any) -> Any:
    """An engine whose free slots are full of NaN when a step is launched."""
    engine: Any = hybrid_cache.load(model, **options)
    pool = engine.runner.attention.pool
    books = engine.cache.state_manager.pool.allocator
    take = engine.cache.take_moves

    def take_moves(works: Sequence[Work]) -> Any:
        free = [slot for slot in range(books.count) if books.refs[slot] == 0]
        for part in (pool.states.recurrent, pool.states.conv):
            assert not part[:, pool.states.null].any(), (
                "something was written to the null slot"
            )
            part[:, [*free, pool.states.null + 1]] = float("nan")
        return take(works)

    engine.cache.take_moves = take_moves
    return engine


ENGINES: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunks": {"step_tokens": 7, "block_size": 4, "max_rows": 3},
    "chunks-longer-than-pages": {"step_tokens": 37, "block_size": 3},
    "few-blocks": {"block_size": 4, "cache_bytes": 45 * 4 * 512},
    "no-prefix-cache": {"prefix_cache": False, "block_size": 8},
    "no-overlap": {"overlap": False, "block_size": 8},
}


@pytest.mark.parametrize("name", ENGINES)
def test_engine_gives_the_tokens_of_phase_01(
    name: str, model: Model, expected: dict[tuple[int, int], list[int | None]]
) -> None:
    """Twice: the second time prompts begin behind snapshots, and in slots that others have used."""
    engine = poisoned(model, **ENGINES[name])
    for time in ("first", "second"):
        found = outputs(engine.stream(AT_ONCE, GREEDY))
        wrong = [index for index, _ in expected if found[index, 0] != expected[index, 0]]
        assert not wrong, (
            f"{name}, {time} time: prompts {wrong} have other tokens than in phase 01"
        )
        engine.scheduler.check_integrity()
    cache = engine.scheduler.cache
    if name == "few-blocks":
        assert engine.scheduler.preemptions
    if name == "usual":
        assert cache.stats.hit_tokens > 100


def test_samples_of_one_prompt_part_with_copies_of_its_state(model: Model) -> None:
    """In the middle of a block and at its end: 19 and 20 tokens in blocks of 4."""
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, seed=5)
    prompts = prompts_of(19, 20, seed=1)
    wanted = outputs(Generator(model).stream(prompts, params))
    engine = hybrid_cache.load(model, block_size=4)
    assert outputs(engine.stream(prompts, params)) == wanted
    assert len({tuple(tokens) for tokens in wanted.values()}) == 6
    engine.scheduler.check_integrity()


def test_a_conversation_goes_on_from_a_snapshot(model: Model) -> None:
    """The second prompt begins with the first and its answer; what is found need not be computed."""
    engine = hybrid_cache.load(model, block_size=4)
    (first,) = prompts_of(30, seed=2)
    answer = [
        token for token in outputs(engine.stream([first], GREEDY))[0, 0] if token is not None
    ]
    second = first + answer + prompts_of(9, seed=3)[0]
    cache = engine.scheduler.cache
    assert isinstance(cache, hybrid_cache.HybridCache)
    before = cache.stats.hit_tokens
    found = outputs(engine.stream([second], GREEDY))
    assert found == outputs(Generator(model).stream([second], GREEDY))
    assert cache.stats.hit_tokens - before >= 48, (
        "decodes leave a snapshot at each block's end"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"drafter": "none"}, {"graphs": False}], ids=str)
def test_guesses_and_small_steps_in_graphs(options: dict[str, Any]) -> None:
    """Whatever graph a step has, the device knows the slots of its works."""
    model = random_model(
        SHAPES["tiny-delta"], device=torch.device("cuda"), dtype=torch.float32
    )
    prompts = [[5, 6, 7, 8] * 9, [5, 6, 7, 8] * 9 + [9], [3], list(range(1, 70)), [200] * 9]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = outputs(Generator(model).stream(prompts, params))
    engine = load_engine(
        phase_named("17"), model, max_rows=8, max_len=256, step_tokens=64, **options
    )
    for time in ("first", "second"):
        found = outputs(engine.stream(prompts, params))
        for key, tokens in expected.items():
            assert found[key] == tokens, f"{time} time, request {key[0]} with {options}"


@pytest.mark.slow
def test_kernels_and_torch_agree(
    model: Model, expected: dict[tuple[int, int], list[int | None]]
) -> None:
    """In the interpreter, or on a GPU inside graphs."""
    options: dict[str, Any] = {} if DEVICE == "cuda" else {"kernels": True}
    on_device = copy.deepcopy(model).to(DEVICE)
    engine = hybrid_cache.load(on_device, block_size=16, step_tokens=60, **options)
    few = AT_ONCE[1:3]
    found = outputs(engine.stream(few, SamplingParams(temperature=0.0, max_tokens=4)))
    for at, index in enumerate((1, 2)):
        assert found[at, 0] == expected[index, 0][:4], (
            f"prompt {index} has other tokens by kernels"
        )


def test_decodes_of_a_long_answer_leave_the_snapshots_of_prompts(model: Model) -> None:
    """Each row keeps the newest of its own: two rows have six slots, and 60 tokens are fifteen pages."""
    engine = hybrid_cache.load(model, block_size=4, max_rows=2)
    first, other = prompts_of(30, 9)
    for prompt, count in ((first, 1), (other, 60), ([*first, 1, 2, 3], 1)):
        list(
            engine.stream(
                [prompt], SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            )
        )
    assert engine.scheduler.cache.stats.hit_tokens == 28  # type: ignore[attr-defined]


def test_a_step_that_begins_within_a_page_leaves_a_snapshot_at_its_end(model: Model) -> None:
    """Steps of 6 tokens and 5, pages of 8: the second one's cut is in the page that it reads from."""
    engine = hybrid_cache.load(model, block_size=8, step_tokens=6)
    (prompt,) = prompts_of(11)
    for _ in range(2):
        list(engine.stream([prompt], SamplingParams(temperature=0.0, max_tokens=1)))
    assert engine.scheduler.cache.stats.hit_tokens == 8  # type: ignore[attr-defined]


class Knowing(Proposer):
    """Guesses the tokens that will come, and a wrong one every now and then."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts, self.rng = texts, random.Random(0)

    def guess(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        found = []
        for request, length in zip(requests, lengths, strict=True):
            known = len(request.tokens)
            text = next(text for text in self.texts if text[:known] == request.tokens)
            found.append(
                [token + (self.rng.random() < 0.2) for token in text[known : known + length]]
            )
        return found


@pytest.mark.parametrize("options", [{}, {"block_size": 4, "step_tokens": 9, "max_rows": 2}])
def test_guesses_go_back_to_the_state_before_them(
    model: Model, options: dict[str, Any]
) -> None:
    """Right ones are computed again, and wrong ones leave no trace: the tokens are those without guesses."""
    prompts = prompts_of(36, 21, 9)
    wanted = outputs(Generator(model).stream(prompts, GREEDY))
    engine = poisoned(model, draft_adaptive=False, draft_length=3, **options)
    texts = [[*prompt, *cast("list[int]", wanted[at, 0])] for at, prompt in enumerate(prompts)]
    engine.scheduler.drafter.source = Knowing(texts)
    for _ in range(2):
        assert outputs(engine.stream(prompts, GREEDY)) == wanted
        engine.scheduler.check_integrity()
    stats = engine.scheduler.drafter.stats
    assert sum(stats.drafted) > sum(stats.accepted) > 60


class Prompt(Drafter):
    """Guesses from `texts` as soon as a prompt's last chunk is scheduled; it waits for no step in flight."""

    def __init__(self, texts: list[list[int]], wrong: int) -> None:
        self.texts, self.wrong = texts, wrong
        self.beside = 0

    def begin(self, running: Sequence[Request]) -> bool:
        return True

    def propose(self, request: Request, most: int) -> list[int]:
        if request.placeholders:
            return []
        self.beside += request.in_flight > 0
        known = len(request.tokens)
        text = next((text for text in self.texts if text[:known] == request.tokens), [])
        return [(token + self.wrong) % 257 for token in text[known : known + min(most, 2)]]


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_guesses_beside_a_chunk_in_flight_go_back(
    model: Model, chunk: int, wrong: int
) -> None:
    """The chunk before them is collected when they are launched already, and takes no state back."""
    prompts = prompts_of(9, 2, 22)
    wanted = outputs(Generator(model).stream(prompts, GREEDY))
    engine = poisoned(model, chunk_tokens=chunk, block_size=5, max_rows=1, overlap=True)
    texts = [[*prompt, *cast("list[int]", wanted[at, 0])] for at, prompt in enumerate(prompts)]
    drafter = engine.scheduler.drafter = Prompt(texts, wrong)
    found = outputs(engine.stream(prompts, GREEDY))
    for (request, _), right in wanted.items():
        for place, (token, must_be) in enumerate(zip(found[request, 0], right, strict=True)):
            assert token == must_be, (
                f"request {request}: token {place} is {token}, not {must_be}: its state has not gone back "
                "to that before its drafts"
            )
    assert drafter.beside > 0, "no guess was made while a chunk was in flight"
    engine.scheduler.check_integrity()


def test_the_second_prompt_leaves_a_snapshot_where_it_parts(model: Model) -> None:
    """Its beginning is cached, but no state is: it is computed in full, and the third begins behind it."""
    engine = hybrid_cache.load(model, block_size=4)
    stats = engine.scheduler.cache.stats  # type: ignore[attr-defined]
    beginning, *ends = prompts_of(42, 30, 31, 32)
    found = []
    for end in ends:
        before = stats.hit_tokens
        prompt = beginning + end
        assert outputs(engine.stream([prompt], GREEDY)) == outputs(
            Generator(model).stream([prompt], GREEDY)
        )
        found.append(stats.hit_tokens - before)
    assert found == [0, 0, 40]


# Any schedule.


class StateRunner(GroupRunner):
    """A `GroupRunner` whose states are fingerprints of the tokens that they have seen.

    It finds slots as the device does. A work must find the state behind the tokens before its own, and no
    work of a step may write what another one reads or writes.
    """

    def __init__(self, rows: RequestRows, cache: HybridCache) -> None:
        super().__init__(rows, cache)
        assert cache.state_manager is not None
        self.null, self.snapshots = cache.state_manager.pool.null, 0
        self.states: dict[int, int] = {self.null: 0}
        self.reads: dict[int, Work] = {}
        self.writes: dict[int, Work] = {}

    def forward(self, works: Sequence[Work], *, masked: bool = False) -> Any:
        self.reads, self.writes = {}, {}
        if not self.fail_run and (moves := self.cache.take_moves(works)) is not None:
            self.places[:, moves.pages] = moves.blocks
        return FakeRunner.forward(self, works, masked=masked)

    def _refresh(self) -> None:
        behind = self.cache.state_manager.slot_offset  # type: ignore[union-attr]
        copies = [
            pair
            for _, pairs in self.cache._block_copies
            for pair in pairs
            if pair[0] >= behind
        ]
        super()._refresh()
        self.states |= {
            target - behind: self.states[source - behind] for source, target in copies
        }

    def _compute(self, work: Work, written: dict[tuple[int, int], Work]) -> list[list[int]]:
        chosen = super()._compute(work, written)
        name = f"request {work.request.id}"
        size = self.cache.block_size
        end = work.start + work.count
        states, state = [0], 0
        for position in range(end):
            state = fingerprint(state, self.tokens[work.row][position])
            states.append(state)
        table = self.cache.tables[work.row]
        slots, tails = self.places[-2:]

        def slot_behind(tokens: int) -> int:
            return int(slots[table[(tokens - 1) // size]]) if tokens else self.null

        source, tail = (
            slot_behind(work.start),
            int(tails[table[(end - 1) // size]]) if work.count > 1 else 0,
        )
        right = self.states.get(source) == states[work.start]
        must(right, f"{name}: slot {source} has not the state behind {work.start} tokens")
        must(
            self.writes.get(source, work) is work,
            f"{name} reads slot {source}, which others write",
        )
        self.reads[source] = work
        if tail >= 0:
            must(
                slot_behind(end) != self.null,
                f"{name}: nowhere to write the state behind {end} tokens",
            )
            self._write(name, work, slot_behind(end), states[end])
        uncertain = 0 if work.drafts_forced else len(work.drafts)
        must(
            max(0, -tail) == uncertain,
            f"{name}: {uncertain} tokens are guesses, but {-tail} are cut off",
        )
        cut = end - abs(tail)
        if tail and (boundary := slot_behind(cut)) != self.null:
            must(tail < 0 or cut % size == 0, f"{name}: a snapshot within a page")
            self.snapshots += tail > 0
            self._write(name, work, boundary, states[cut])
        return chosen

    def _write(self, name: str, work: Work, slot: int, state: int) -> None:
        for others in (self.reads, self.writes):
            must(
                others.get(slot, work) is work,
                f"{name} writes slot {slot}, which another work uses",
            )
        self.writes[slot], self.states[slot] = work, state


DELTA = DeltaConfig(1, 1, 1, 1, 2, (False, False, True))
STATEFUL = [
    LayerGroups(1, {None: [[1]]}, DELTA),
    LayerGroups(1, {5: [[0]], None: [[1]]}, DELTA),
]
"""Layers with keys and layers with states."""


@pytest.mark.parametrize(
    "seeds", [40, pytest.param(2500, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("drafts", [False, True])
def test_any_schedule_reads_the_right_states(drafts: bool, seeds: int) -> None:
    snapshots = hits = preemptions = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        engine, runner = machine(rng, STATEFUL, StateRunner, drafts)
        try:
            play(engine, runner, random_script(rng))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        hits += runner.cache.stats.hit_tokens
        nothing_leaks(engine)
        states = runner.cache.state_manager
        assert states is not None
        assert states.pool.allocator.free == states.pool.allocator.count, "slots are lost"
        snapshots += runner.snapshots
        preemptions += engine.scheduler.preemptions
    assert min(snapshots, hits, preemptions) > 5, (snapshots, hits, preemptions)


@pytest.mark.parametrize(
    "number",
    ["04", "05", "06", "07", "08", "09", "10", "11", "12", "13", "14", "15", "16", "17"],
)
def test_load_refuses_states_where_there_is_no_room_for_them(
    model: Model, number: str
) -> None:
    """In Python, without the command line's check: the first step would fail otherwise."""
    off = {"hybrid_cache": False} if number == "17" else {}
    with pytest.raises(UserError, match=r"layer_types has linear_attention.* from 17"):
        import_phase(phase_named(number)).load(model, max_rows=2, cache_bytes=1 << 20, **off)


@pytest.mark.parametrize("number", ["02", "03"])
def test_a_generator_refuses_states_at_its_first_request(model: Model, number: str) -> None:
    made = import_phase(phase_named(number)).load(model)
    with pytest.raises(UserError, match=r"layer_types has linear_attention.* from 17"):
        list(made.stream([[1, 2, 3]], SamplingParams(max_tokens=2)))


@pytest.mark.parametrize("number", ["02", "05", "13"])
def test_phases_without_states_refuse_the_model_before_a_request_comes(number: str) -> None:
    with pytest.raises(
        UserError, match=r"layers of Gated DeltaNet, which keep a state: phases from 17 on"
    ):
        load_engine(phase_named(number), "random:tiny-delta", device="cpu")
