"""Phase 11: drafts beside what the model samples, step by step."""

from __future__ import annotations

from typing import Any

import torch

import speculative
from benchmarks.pictures.driving import exactly, steps
from benchmarks.pictures.svg import Box, Lines, Picture, Text, cells, picture, row, table
from common.models.checkpoint import assign
from forward.loading import finish, random_tensors, skeleton
from forward.model import Model
from forward.shapes import SHAPES

TEXT = ["the", "cat", "sat", "on", "the", "mat", ".", "the"]
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
CELL = 50


def toy() -> Model:
    """A model with attention and an MLP that add nothing, so that its head reads the newest word alone."""
    model = skeleton(SHAPES["tiny"])
    for name, value in random_tensors(model, torch.device("cpu"), torch.float32, seed=0):
        if not name.endswith(
            ("norm.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")
        ):
            value.zero_()
        if name == "embed_tokens.weight":
            value.fill_diagonal_(1.0)
        if name == "lm_head.weight":
            for word, following in SAYS.items():
                value[WORDS.index(following), WORDS.index(word)] = 1.0
        assign(model, name, value)
    return finish(model, torch.device("cpu"))


def verified(shown: int | None = None) -> Picture:
    """Continue the text: the newest word and the drafts, computed at once; below what the model samples.

    shown: which step, from 1 on; None: all.
    """
    engine: Any = speculative.load(
        toy(),
        drafter="ngram",
        draft_length=DRAFTS,
        draft_adaptive=False,
        overlap=False,
        max_rows=1,
        max_len=64,
    )
    (request,) = engine.add([WORDS.index(word) for word in TEXT], exactly(OUTPUT))
    moments = [(len(request.tokens), works[0].drafts) for works in steps(engine)]
    words = [WORDS[token] for token in request.tokens]
    lines: Lines = []
    for step, (known, tokens) in enumerate(moments):
        if step == 0 or shown not in (None, step):  # the first computes the prompt
            continue
        after = moments[step + 1][0] if step + 1 < len(moments) else len(words)
        kept = after - known
        drafts = [WORDS[token] for token in tokens]
        says = [SAYS[word] for word in (words[known - 1], *drafts)]
        assert says[:kept] == words[known:after], "the engine keeps what the model samples"
        before = cells(words[known - 4 : known - 1], ["kept a"], CELL)
        computed = cells([words[known - 1], *drafts], ["now a"] * kept + ["idle"], CELL)
        answers = cells(says, ["known a"] * kept + ["idle"] * len(says), CELL)
        right = f"{kept - 1} of {len(drafts)} drafts right: " if drafts else ""
        gained = Text(f"{right}{kept} token{'s' * (kept > 1)}", "bold" if kept > 1 else "soft")
        label = f"step {step}"
        if not drafts:
            lines.append([label, before, row(computed, answers), gained])
            continue
        signs = ["="] * (kept - 1) + ["≠"] * (kept <= len(drafts))
        compared = row(Box(CELL), *(Text(sign, "mid", CELL) for sign in signs))
        lines.append([label, before, computed, gained])
        lines.append(["", "", compared])
        lines.append(["", Text("the model samples", "soft end"), row(Box(CELL), answers)])
    return picture(
        "Drafts, and what the model samples in their places",
        table(lines, gap=4, down=4),
        "kept a: in the cache",
        "now a: computed, and right",
        "known a: kept",
        "idle: computed in vain",
    )


PICTURES = {"drafts": verified}
show = verified
