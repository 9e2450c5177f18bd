"""Sampling that a model asks for in its `generation_config.json`."""

from __future__ import annotations

import json

import pytest

from common.errors import UserError
from common.sampling.defaults import FIELDS, sampling_defaults
from common.sampling.params import SamplingParams


def put(folder, **content) -> None:
    (folder / "generation_config.json").write_text(json.dumps(content))


def test_what_the_file_says_of_sampling_and_nothing_else(tmp_path):
    assert sampling_defaults(tmp_path) == {}, "a folder without the file says nothing"
    put(
        tmp_path,
        eos_token_id=2,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        do_sample=False,
        max_new_tokens=7,
    )
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling_defaults(tmp_path, "neutral") == {}
    put(tmp_path, temperature=None, repetition_penalty=1.1, min_p=0.05)
    assert sampling_defaults(tmp_path) == {"repetition_penalty": 1.1, "min_p": 0.05}
    put(tmp_path, **dict.fromkeys(FIELDS, 1))
    assert SamplingParams(**sampling_defaults(tmp_path)).temperature == 1.0


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "0.9"}, {"top_k": 2.5}])
def test_values_that_nobody_can_sample_with(tmp_path, wrong):
    put(tmp_path, **wrong)
    with pytest.raises(
        UserError, match=r"generation_config\.json: .*--generation-config neutral"
    ):
        sampling_defaults(tmp_path)
    assert sampling_defaults(tmp_path, "neutral") == {}
    with pytest.raises(UserError, match="generation_config is 'vllm'"):
        sampling_defaults(tmp_path, "vllm")
