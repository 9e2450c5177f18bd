"""What no engine can serve is refused with one sentence, and nothing else in flight is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import batching
import chunked_prefill
import continuous
import cuda_graphs
import forward
import paged_cache
import prefix_cache
import quant
from common.errors import UserError
from common.events import generate
from forward.model import Model
from tests.schedules import finish, greedy

PHASES = (continuous, paged_cache, chunked_prefill, prefix_cache, cuda_graphs, quant)
each_phase = pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)


@each_phase
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"priority": "high"}, "priority is 'high', but must be an integer"),
        ({"priority": 0.5}, "priority is 0.5, but must be an integer"),
        ({"salt": None}, "salt is None, but must be a string"),
        ({"salt": "\ud800"}, "salt is '.ud800', but must have a UTF-8 form"),
    ],
    ids=str,
)
def test_a_request_that_is_refused_disturbs_nobody(
    model: Model, phase: ModuleType, given: dict[str, Any], sentence: str
) -> None:
    expected = generate(phase.load(model), [[3] * 20], greedy(6))[0].token_ids
    engine = phase.load(model, policy="priority")
    (request,) = engine.add([3] * 20, greedy(6))
    engine.step()
    with pytest.raises(UserError, match=sentence):
        engine.add([1] * 40, greedy(2), **given)
    finish(engine)
    assert request.output_ids == expected


@each_phase
def test_a_stream_leaves_others_their_events(model: Model, phase: ModuleType) -> None:
    """A request was added by hand, and `generate` runs the steps: `step` tells of it all the same."""
    engine = phase.load(model)
    (request,) = engine.add([1, 2, 3], greedy(3))
    generate(engine, [[5, 6]], greedy(10))
    assert request.finish_reason == "length" and not engine.idle
    told = []
    while not engine.idle:
        told += engine.step()
    assert [output.token_id for output in told] == request.output_ids
    assert (
        all(output.request is request for output in told)
        and told[-1].finish_reason == "length"
    )


def test_texts_and_conversations_are_told_apart(smollm2_folder: Path) -> None:
    llm = continuous.LLM(smollm2_folder, device="cpu", max_rows=2, max_len=128)
    question = [{"role": "user", "content": "Hi"}]
    (alone,) = llm.generate(question, greedy(2))
    (listed,) = llm.generate([question], greedy(2))
    assert alone.prompt_ids == listed.prompt_ids == llm.encode(question)
    for wrong in ([[1, 2, 3]], [["user", "Hi"]]):
        with pytest.raises(
            UserError, match=r"a prompt is .*, but must be a text or a list of messages"
        ):
            llm.generate(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "phase", (forward, batching, continuous, cuda_graphs), ids=lambda phase: phase.__name__
)
@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ([5], "the prompt is 5, but must be a list of token ids"),
        ([None], "the prompt is None, but must be"),
        ([np.array(5)], r"the prompt is array\(5\), but must be"),
        ([[[5]]], r"a token id of the prompt is \[5\], but must be an integer"),
        (["ab"], "a token id of the prompt is 'a', but must be an integer"),
        (
            [[10**5000]],
            "the prompt holds token id an integer of 16610 bits, but ids must be between 0",
        ),
        ([np.array([7.0])], "a token id of the prompt is .*7.0.*, but must be an integer"),
        (5, "prompts is 5, but must be a list of prompts"),
    ],
    ids=("int", "None", "array", "nested", "text", "5000 digits", "floats", "no prompts"),
)
def test_what_is_no_list_of_token_ids(
    model: Model, phase: ModuleType, prompts: Any, sentence: str
) -> None:
    engine = phase.load(model)
    for call in (engine.stream, partial(generate, engine)):
        with pytest.raises(UserError, match=sentence):
            call(prompts, greedy(2))
