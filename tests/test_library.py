"""The engine from Python: what README and `docs/python.md` show runs, and prints nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from inference_ladder import LLM, SamplingParams
from phases import ROOT

PARIS = "The capital of France is Paris."


def examples(file: str) -> list[str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


@pytest.mark.usefixtures("smollm2_folder")
def test_the_example_of_the_front_page_prints_an_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = (code for code in examples("README.md") if "import" in code)
    exec(example, {})
    assert capsys.readouterr().out == f"{PARIS}\n", "and no memory plan"


@pytest.mark.usefixtures("smollm2_folder")
def test_the_examples_of_the_page_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    printed = []
    for example in examples("docs/python.md"):
        exec(example, names)
        printed.append(capsys.readouterr().out)
    texts, chat, stream, choice = printed
    assert len(texts.splitlines()) >= 2
    assert (chat, stream) == (f"{PARIS} stop\n", f"{PARIS}\n")
    assert choice in ("yes\n", "no\n")


@pytest.mark.usefixtures("smollm2_folder")
def test_a_stream_has_the_text_of_generate_in_pieces() -> None:
    llm = LLM("smollm2", device="cpu", dtype="float32")
    params = SamplingParams(max_tokens=6, temperature=0)
    prompts = ["The sea is", "Two plus two is"]
    pieces = ["", ""]
    for completion, piece in llm.stream(prompts, params):
        pieces[completion.index] += piece
    assert pieces == [completion.text for completion in llm.generate(prompts, params)]
