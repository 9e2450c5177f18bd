"""A suffix automaton guesses: the longest repeated end of a text, and what other requests have said."""

from __future__ import annotations

import random
from typing import Any

import pytest

import continuous
from common.errors import UserError
from common.request import Request
from common.sampling.params import SamplingParams
from forward.model import Model
from phases import find_phase
from phases.appendix.suffix_drafter import automaton as suffix
from phases.appendix.suffix_drafter.automaton import BREAK, SuffixAutomaton, Suffixes
from phases.registry import load_engine

SMALL = {"max_rows": 6, "max_len": 96, "block_size": 4, "cache_bytes": 1 << 20, "step_tokens": 64}


def engine_of(model: Model, **options: Any) -> Any:
    phase = find_phase("11")
    assert phase is not None
    return load_engine(phase, model, drafter="suffix", **{**SMALL, **options})


@pytest.mark.parametrize("options", [{}, {"draft_adaptive": False}, {"overlap": False}], ids=str)
def test_suffixes_change_no_token(model: Model, options: dict[str, Any]) -> None:
    """Preemption, sampling and samples of one prompt included; the second time the answers are known."""
    prompts = [[5, 6, 7, 8] * 5, [5, 6, 7, 8] * 5, [200] * 40, [3, 1]]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.8, seed=1, n=2, ignore_eos=True),
        SamplingParams(max_tokens=24, frequency_penalty=0.5, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.6, seed=2, ignore_eos=True),
    ]
    right = continuous.load(model, max_rows=4, max_len=96).generate(prompts, params)
    tight = 30 * 4 * model.config.kv_bytes_per_token(model.dtype)
    engine = engine_of(model, cache_bytes=tight, **options)
    for _ in range(2):
        found = engine.generate(prompts, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in right]
    engine.check_integrity()
    assert engine.cache.free == engine.cache.allocator.count, "blocks leak"
    if options.get("draft_adaptive") is False:
        assert sum(engine.scheduler.drafter.stats.accepted) > 0, "suffixes were never right"


def test_its_option_is_memory(model: Model) -> None:
    source = engine_of(model, suffix_bytes=90_000).scheduler.drafter.source
    assert isinstance(source, Suffixes) and source.most_tokens == 50
    with pytest.raises(UserError, match="suffix_bytes is -1"):
        engine_of(model, suffix_bytes=-1)


def longest(tokens: list[int]) -> int:
    """The longest end of `tokens` that stands in it before."""
    for length in range(len(tokens) - 1, 0, -1):
        if any(tokens[at : at + length] == tokens[-length:] for at in range(len(tokens) - length)):
            return length
    return 0


def test_a_suffix_automaton_finds_the_longest_repeated_end() -> None:
    rng = random.Random(2)
    for size in (2, 3, 5):
        tokens, automaton = [], SuffixAutomaton()
        for _ in range(80):
            tokens.append(rng.randrange(size))
            automaton.add(tokens[-1])
            length, end = automaton.repeated()
            assert length == longest(tokens), tokens
            assert tokens[end - length : end] == tokens[len(tokens) - length :] and end < len(tokens), tokens
            assert automaton.repeated() == (length, end), "asked twice, it answers two things"
        assert len(automaton.next) <= 2 * len(tokens) + 1, "more than two states a token"


def test_a_shared_automaton_matches_texts_but_not_across_them() -> None:
    rng = random.Random(3)
    texts = [[rng.randrange(4) for _ in range(25)] for _ in range(6)]
    automaton = SuffixAutomaton()
    for told in texts:
        for token in (*told, BREAK):
            automaton.add(token)
    for _ in range(200):
        query = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        length, end = automaton.match(query)
        best = max(
            n
            for n in range(len(query) + 1)
            if n == 0 or any(query[-n:] == told[at : at + n] for told in texts for at in range(26 - n))
        )
        assert length == best, query
        assert length == 0 or automaton.tokens[end - length : end] == query[-length:], query


def ended(tokens: list[int], salt: str = "") -> Request:
    request = Request(0, tokens, 1, 999, SamplingParams(), salt=salt)
    request.finish_reason = "stop"
    return request


def test_texts_are_shared_within_a_salt_and_bounded_in_bytes() -> None:
    source = Suffixes(2000 * suffix.BYTES_PER_TOKEN)
    told = ended([1, 2, 3, 4, 5, 6, 7], "a")
    source.guess([told], [3])
    source.leave(told)
    mine, theirs = (Request(1, [9, 2, 3, 4], 4, 99, SamplingParams(), salt=salt) for salt in "ab")
    assert source.guess([mine, theirs], [3, 3]) == [[5, 6, 7], []], "a tenant sees another's text"
    for number in range(40):
        other = ended([number + 10] * 3 + list(range(100, 300)))
        source.guess([other], [1])
        source.leave(other)
        assert source.shared_bytes <= 2000 * suffix.BYTES_PER_TOKEN


def test_a_preempted_request_leaves_nothing_to_others() -> None:
    source = Suffixes(1 << 20)
    request = Request(0, [1, 2, 3, 4, 5], 2, 99, SamplingParams())
    source.guess([request], [1])
    source.leave(request)
    assert source.shared_bytes == 0 and not source.own
