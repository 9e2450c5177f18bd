"""lm-evaluation-harness against a live server: its log-likelihoods are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.servers import Running

pytestmark = [pytest.mark.long, pytest.mark.weights, pytest.mark.timeout(900)]

lm_eval = pytest.importorskip("lm_eval")

QUESTIONS: list[tuple[str, list[str], int]] = [
    ("The capital of France is", ["Paris", "Rome", "Berlin"], 0),
    ("Two and two are", ["seven", "four", "eleven"], 1),
    ("Water freezes at", ["zero degrees Celsius", "the end of the week"], 0),
    ("The opposite of hot is", ["a table", "cold", "seldom", "blue"], 1),
]


def task(folder: Path) -> dict[str, Any]:
    """A multiple-choice task of the questions above, in a file of this folder."""
    rows = [{"q": q, "choices": choices, "answer": a} for q, choices, a in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }


def log_likelihoods(folder: Path) -> list[float]:
    """What transformers says of every choice."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for question, choices, _ in QUESTIONS:
        start = len(tokenizer(question).input_ids)
        for choice in choices:
            ids = torch.tensor(tokenizer(f"{question} {choice}").input_ids)
            with torch.inference_mode():
                scores = model(ids[None]).logits[0].log_softmax(-1)
            found.append(scores[start - 1 : -1].gather(1, ids[start:, None]).sum().item())
    return found


def evaluated(arguments: dict[str, Any], folder: Path) -> tuple[float, list[float]]:
    """The accuracy of a served model, and the log-likelihood of every choice."""
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[task(folder)],
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["questions"], key=lambda sample: sample["doc_id"])
    values = [float(choice[0][0]) for sample in samples for choice in sample["resps"]]
    return found["results"]["questions"]["acc,none"], values


@pytest.mark.parametrize("tokenized", [True, False], ids=["token ids", "texts"])
def test_a_task_has_the_result_of_transformers(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenized: bool
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    values = log_likelihoods(smollm2_folder)
    options = ("--quantization", "none", "--dtype", "float32", "--access-log", "none")
    with Running(*options, model="smollm2") as server:
        served = {
            "model": "smollm2",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(smollm2_folder),
            "tokenized_requests": tokenized,
        }
        accuracy, found = evaluated(served, tmp_path)
    assert found == pytest.approx(values, abs=1e-3)
    rest, right = iter(values), 0
    for _, choices, answer in QUESTIONS:
        scores = [next(rest) for _ in choices]
        right += scores.index(max(scores)) == answer
    assert accuracy == right / len(QUESTIONS)
