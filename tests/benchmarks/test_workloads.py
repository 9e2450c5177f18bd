"""Workloads are the same everywhere and always: their hashes are written down here."""

from __future__ import annotations

import random

import pytest

from benchmarks.workloads import LEAST_VOCAB, names, workload
from common.errors import UserError

HASHES = {
    "offline-256": "85afb66d5ea73919",
    "single-512": "0583be50a40482fe",
    "prefill-64x1024": "f4bf6fa0a37b6672",
    "agent-session": "3ac511e50eae7e74",
    "chat-serving-short": "eb11a21823e10e81",
    "baseline": "2eaa2b690570ef3e",
    "continuous_batching": "fc7f2c9ce9053f33",
    "paged_attention": "ce07666d16b5fd80",
    "chunked_prefill": "6536dd7f3292fd2b",
    "prefix_caching": "1b31f4670f1c71f8",
    "offline-256-small": "57dfeab81c456d8a",
    "single-512-small": "a14345eef2d0f04e",
    "skewed-outputs-small": "ea38aea1d08db498",
    "agent-session-small": "7a320f4404f0acc4",
    "chat-serving-short-small": "a889addc1408227e",
    "chat-serving-long-small": "47c81abe02e37269",
    "continuous_batching-small": "f35bdf9843941b23",
    "paged_attention-small": "bd5e4c0662f014b1",
    "chunked_prefill-small": "7724dcdf63b8398d",
    "prefix_caching-small": "94399025873fd52d",
}


@pytest.mark.parametrize("name", names())
def test_hash_has_not_changed(name):
    """A change here makes every recorded measurement of the workload incomparable."""
    assert workload(name).sha256[:16] == HASHES[name]


def test_offline_256_is_the_published_benchmark():
    """The token counts that nano-vLLM's benchmark has, drawn in its order."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)
    ]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    work = workload("offline-256")
    assert work.prompts == prompts
    assert work.output_lens == outputs
    assert (work.prompt_tokens, work.output_tokens) == (142_827, 133_966)
    assert work.temperature == 0.6
    assert set(work.arrivals) == {0.0}


def test_cold_repeats_are_distinct_and_keep_what_is_shared():
    work = workload("prefix_caching-small")
    again = work.cold(1)
    assert again.prompt_lens == work.prompt_lens
    assert not {tuple(prompt) for prompt in work.prompts} & {
        tuple(prompt) for prompt in again.prompts
    }
    assert len({tuple(prompt[:256]) for prompt in again.prompts}) == 1
    assert again.sha256 != work.sha256
    assert work.cold(0).sha256 == work.sha256


@pytest.mark.parametrize("name", names())
def test_tokens_stay_below_the_vocabulary(name):
    work = workload(name, vocab=200)
    limit = work.vocab  # `offline-256` draws its largest token too
    assert limit <= 201
    assert all(0 <= token < limit for prompt in work.cold(7).prompts for token in prompt)


def test_the_least_vocabulary_is_what_the_workloads_need():
    assert max(workload(name).vocab for name in names()) == LEAST_VOCAB
    assert max(max(prompt) for prompt in workload("offline-256").prompts) == LEAST_VOCAB - 1


def test_unknown_name():
    with pytest.raises(UserError, match="workload is 'nope'"):
        workload("nope")
