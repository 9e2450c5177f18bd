"""Phase 11: drafts beside what the model says, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import speculative
from benchmarks.pictures.driving import exactly
from benchmarks.pictures.svg import INK, SOFT, STRONG, Picture
from common.models.checkpoint import assign
from continuous.work import Work
from forward.loading import finish, random_tensors, skeleton
from forward.model import Model
from forward.shapes import SHAPES

TEXT = ["the", "cat", "sat", "on", "the", "mat", ".", "the", "cat"]
SAYS = {
    "cat": "sat",
    "sat": "on",
    "on": "a",
    "a": "rug",
    "rug": ".",
    ".": "the",
    "the": "cat",
    "mat": ".",
}
"""The model: what it says behind each word, whatever stands before."""
WORDS = ["<end>", *SAYS]
DRAFTS, OUTPUT = 4, 12


@dataclass(frozen=True)
class Step:
    """One step: the words known before it, what is guessed, what the model says, how much of that is kept."""

    known: Sequence[str]
    drafts: Sequence[str]
    sampled: Sequence[str]
    kept: int


def model_of(says: dict[str, str], words: Sequence[str]) -> Model:
    """A model with attention and an MLP that add nothing, so that its head reads the newest word alone."""
    size = len(words) + len(words) % 2
    config = replace(SHAPES["tiny"], vocab_size=len(words), hidden_size=size)
    model = skeleton(config)
    for name, value in random_tensors(model, torch.device("cpu"), torch.float32, seed=0):
        if name.endswith(
            ("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")
        ):
            value.zero_()
        if name == "embed_tokens.weight":
            value.fill_diagonal_(1.0)
        if name == "lm_head.weight":
            for word, following in says.items():
                value[words.index(following), words.index(word)] = 1.0
        assign(model, name, value)
    return finish(model, torch.device("cpu"))


def record() -> list[Step]:
    """Continue the text with n-grams as the drafter."""
    engine: Any = speculative.load(
        model_of(SAYS, WORDS),
        drafter="ngram",
        draft_length=DRAFTS,
        draft_adaptive=False,
        overlap=False,
        max_rows=1,
        max_len=64,
    )
    sampled, works = list[list[int]](), list[Work]()
    agree, schedule = engine.runner.verifier.agree, engine.schedule

    def watch_agree(tokens: Any, drafts: Any) -> int:
        sampled.append(list(tokens))
        return int(agree(tokens, drafts))

    def watch_schedule() -> list[Work]:
        works[:] = schedule()
        return list(works)

    engine.runner.verifier.agree, engine.schedule = watch_agree, watch_schedule
    params = exactly(OUTPUT)
    (request,) = engine.add([WORDS.index(word) for word in TEXT[:-1]], params)
    engine.step()  # the prompt; behind it the model says the last word of the text
    steps = []
    while not engine.idle:
        known = list(request.tokens)
        sampled.clear()
        engine.step()
        new = request.tokens[len(known) :]
        lines = known, works[0].drafts, sampled[0] if sampled else new
        before, drafts, says = ([WORDS[token] for token in line] for line in lines)
        steps.append(Step(before, drafts, says, len(new)))
    return steps


def verified(steps: Sequence[Step]) -> Picture:
    """Every step: the newest word and the drafts, computed at once; below them what the model says there."""
    cell = 54
    left = 78
    before = 3
    picture = Picture(
        "Drafts, and what the model says in their places",
        "; ".join(
            f"step {at}: drafts {' '.join(step.drafts) or 'none'}, the model says {' '.join(step.sampled)}, "
            f"kept {' '.join(step.sampled[: step.kept])}"
            for at, step in enumerate(steps, 1)
        ),
        height=62 + sum(80 if step.drafts else 40 for step in steps) + 30,
    )
    start = left + cell * before
    picture.text(start - 8, 26, "known", "end", SOFT)
    picture.text(start + 2, 26, "computed in one step", fill=SOFT)
    y = 36.0
    for at, step in enumerate(steps, 1):
        picture.text(left - 14, y + 18, f"step {at}", "end", bold=True)
        for place, word in enumerate(step.known[-1 - before : -1]):
            picture.cell(left + cell * place, y, cell, 27, "kept", "a", word)
        picture.cell(start, y, cell, 27, "now", "a", step.known[-1])
        right = step.kept - 1
        for place, word in enumerate(step.drafts):
            picture.cell(
                start + cell * (place + 1),
                y,
                cell,
                27,
                "now" if place < right else "idle",
                "a",
                word,
            )
        below = y + (44 if step.drafts else 0)
        if step.drafts:
            picture.text(start + cell - 8, below + 18, "the model says", "end", SOFT)
        for place, word in enumerate(step.sampled):
            x = start + cell * (place + 1)
            picture.cell(
                x, below, cell, 27, "known" if place < step.kept else "idle", "a", word
            )
            if place >= step.kept:
                picture.line([(x + 8, below + 14), (x + cell - 8, below + 14)])
            elif place < len(step.drafts):
                same = place < right
                sign, colour = ("=", SOFT) if same else ("≠", STRONG["e"])
                picture.text(x + cell / 2, y + 40, sign, "middle", colour, 14, bold=not same)
        x = start + cell * (DRAFTS + 2) + 16
        words = (
            f"{right} of {len(step.drafts)} drafts right"
            if step.drafts
            else "nothing to guess from"
        )
        picture.text(x, y + 18, words, fill=SOFT)
        words = "1 token" if step.kept == 1 else f"{step.kept} tokens"
        picture.text(x, y + 35, words, fill=INK, bold=step.kept > 1)
        y += 80 if step.drafts else 40
    picture.legend(
        left,
        picture.height - 14,
        [
            ("kept", "a", "in the cache"),
            ("now", "a", "computed, and right"),
            ("known", "a", "kept"),
            ("idle", "a", "computed in vain"),
        ],
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's one."""
    return {"drafts": verified(record())}


def show(step: int) -> Picture:
    """Any step, from 1 on."""
    return verified(record()[step - 1 : step])
