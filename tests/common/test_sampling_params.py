"""Sampling parameters: what is accepted, what it becomes, and that refusals say field, value and limit."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from common.sampling.list_fields import (
    MAX_BIASED_TOKENS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from common.sampling.params import GREEDY_BELOW, MAX_N, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", -1, "between 0 and 2147483647"),
        ("max_tokens", 1 << 64, "between 0 and 2147483647"),
        ("top_k", 1 << 31, "between -1 and 2147483647"),
        ("n", MAX_N + 1, "between 1 and 128"),
        ("stop_token_ids", (1 << 31,), "between 0 and 2147483647"),
        ("stop_token_ids", (3,) * (MAX_STOP_TOKEN_IDS + 1), "at most 1024"),
        ("stop", ("a",) * (MAX_STOPS + 1), "at most 64"),
        (
            "stop",
            ("a" * (MAX_STOP_CHARACTERS + 1),),
            "1025 characters, but each must have at most 1024",
        ),
        ("logit_bias", {1 << 31: 1.0}, "between 0 and 2147483647"),
        ("logit_bias", dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0), "at most 1024"),
        ("max_tokens", True, "integer"),
        ("min_tokens", -1, "between 0 and 2147483647"),
        ("min_tokens", 129, "at most max_tokens, 128"),
        ("temperature", -0.1, "between 0 and 100"),
        ("temperature", 101, "between 0 and 100"),
        ("temperature", NAN, "between 0 and 100"),
        ("temperature", True, "number"),
        ("top_k", -2, "between -1 and 2147483647"),
        ("top_p", -0.01, "between 0 and 1"),
        ("top_p", 1.01, "between 0 and 1"),
        ("min_p", 1.01, "between 0 and 1"),
        ("repetition_penalty", 1e-46, "between 0.01 and 100"),
        ("presence_penalty", 2.1, "between -2 and 2"),
        ("frequency_penalty", INF, "between -2 and 2"),
        ("seed", 1.5, "integer"),
        ("stop", ("a", ""), "at least 1 character"),
        ("stop", ("a", 3), "only strings"),
        ("stop", 3, "strings"),
        ("stop_token_ids", (-1,), "between 0 and 2147483647"),
        ("stop_token_ids", 5, "token ids"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", 21, "between 0 and 20"),
        ("logit_bias", {-1: 1.0}, "between 0 and 2147483647"),
        ("logit_bias", {"5": 1.0}, "integer"),
        ("logit_bias", {5: NAN}, "between -100 and 100"),
        ("logit_bias", {5: 101.0}, "between -100 and 100"),
        ("logit_bias", [(5, 1.0)], "map"),
        ("n", 0, "between 1 and 128"),
    ],
)
def test_refusals_name_field_value_and_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(UserError) as refusal:
        SamplingParams(**{field: value})
    sentence = str(refusal.value)
    assert field in sentence
    assert limit in sentence
    if not isinstance(value, (tuple, list, dict)):
        assert repr(value) in sentence or str(value) in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(("field", "item"), [("stop", "a"), ("stop_token_ids", 3)])
def test_a_list_without_end_is_refused_before_it_is_walked(field: str, item: Any) -> None:
    taken = 0

    def endless() -> Iterator[Any]:
        nonlocal taken
        while True:
            taken += 1
            yield item

    with pytest.raises(UserError, match=f"{field} is a list of more than"):
        SamplingParams(**{field: endless()})
    assert taken <= max(MAX_STOPS, MAX_STOP_TOKEN_IDS) + 1


def test_defaults_are_greedy_and_switch_everything_off() -> None:
    params = SamplingParams()
    assert params.greedy
    assert not params.penalized
    assert params == SamplingParams(top_k=-1)  # -1 and 0 both mean: keep all
    assert SamplingParams(temperature=GREEDY_BELOW / 2).greedy
    assert not SamplingParams(temperature=GREEDY_BELOW).greedy
    for alone in ({"top_p": 0}, {"top_k": 1}):
        assert SamplingParams(temperature=1.0, **alone).greedy  # type: ignore[arg-type]
    assert not SamplingParams(temperature=1.0, top_p=1e-9).greedy


def test_what_others_write_becomes_plain_numbers_and_tuples() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    params = SamplingParams(
        max_tokens=np.int64(7),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([3], np.int32),  # type: ignore[arg-type]
    )
    assert (type(params.max_tokens), params.max_tokens) == (int, 7)
    assert (type(params.temperature), params.temperature) == (float, 0.5)
    assert params.stop_token_ids == (3,)


def test_is_a_value() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 5.0  # the caller's dictionary is not shared
    assert params.logit_bias == {3: 1.0}
    assert params == SamplingParams(logit_bias={3: 1})
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1}))
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(AttributeError):
        params.seed = 3  # type: ignore[misc]


def test_a_seed_is_its_lowest_64_bits_and_samples_have_different_ones() -> None:
    for seed in (0, 5, -2, -(1 << 63), (1 << 64) - 1, 1 << 64, (1 << 70) + 5, -(1 << 90) - 1):
        assert SamplingParams(seed=seed).seed_of(0) == seed & ((1 << 64) - 1)
    params = SamplingParams(seed=(1 << 64) - 1, n=3)
    assert [params.seed_of(sample) for sample in range(3)] == [(1 << 64) - 1, 0, 1]
    assert SamplingParams(n=3).seed_of(1) is None


def test_a_seed_of_minus_one_is_none_as_in_vllm() -> None:
    params = SamplingParams(seed=-1, n=2)
    assert params.seed is None and params.seed_of(1) is None
    assert SamplingParams(seed=(1 << 64) - 1).seed == (1 << 64) - 1
