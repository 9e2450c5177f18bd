"""Evidence files: their exact shape, reading back what was written, and what they say about the machine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.evidence import (
    Evidence,
    Metric,
    Roofline,
    Run,
    collect,
    results,
)
from common.device_names import device_folder
from common.errors import UserError

CPU = torch.device("cpu")


def a_run(variant: str = "02_kv_cache", **options: object) -> Run:
    metrics = {"output_tokens_per_s": Metric((10.0, 14.0, 11.0))}
    return Run(
        variant, "single-512", "abc", "smollm2", "real", "float32", metrics, options, Roofline(2.0, 0.5)
    )


def test_reading_gives_back_what_was_written(tmp_path):
    evidence = collect("02_kv_cache", [a_run(), a_run("01_forward", batch=2)], CPU)
    path = evidence.write(tmp_path / "cpu" / "02_kv_cache.json")
    assert Evidence.load(path) == evidence
    assert results(tmp_path) == {"cpu": {"02_kv_cache": evidence}}


@pytest.mark.parametrize("content", ["", "[]", '{"phase": "x"}', '{"runs": [3]}'])
def test_another_file_is_named_in_the_error(tmp_path, content):
    path = tmp_path / "wrong.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"wrong\.json is no evidence file"):
        Evidence.load(path)
    with pytest.raises(UserError, match="does not exist"):
        Evidence.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("device", "name", "folder"),
    [
        ("cpu", "AMD EPYC 9R14", "cpu"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("cuda", "NVIDIA", "cuda"),
    ],
)
def test_device_folder(device, name, folder):
    assert device_folder(device, name) == folder
