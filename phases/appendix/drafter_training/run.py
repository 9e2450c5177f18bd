"""All stages of the training, each within its share of the time."""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cuda_graphs
from common.device import device_name, pick_device
from common.models.hub import model_folder
from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from forward.model import Model
from forward.models.llama import Llama
from phases.appendix.drafter_training.text import (
    Talk,
    batches,
    beginning,
    frequent,
    template,
    words_of,
    write,
)
from phases.appendix.drafter_training.unroll import accepted, loss, padded
from speculative.head import Head, save

WRITING = 0.38
"""Of the whole time: loading, and writing the text."""
SAVING = 6.0
"""Seconds at the end for the last evaluation and for what could take longer than expected."""
LEAST_SECONDS = 10.0
"""However long the set-up took, so long the model writes."""
RATE = 1.5e-3
"""The largest learning rate; it rises for 30 batches and falls to nothing as the time runs out."""
HELD = 64
"""Greedy conversations that are kept for the evaluation."""


def main(argv: Sequence[str] | None = None, *, started: float | None = None) -> None:
    """Run all stages, each within its share of the time.

    started: what `time.monotonic` said when the time began.
    """
    started = time.monotonic() if started is None else started
    parser = argparse.ArgumentParser(prog="drafter_training", description="Train a model's head.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=4.0, help="for everything together")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and card")
    given = parser.parse_args(argv)
    whole = 60 * given.minutes
    model = load_model(given.model, device=str(pick_device(given.device)))
    assert isinstance(model, Llama), "drafters are made for models of the Llama family"
    tokenizer = Tokenizer(model_folder(given.model))
    talks = conversations(model, tokenizer, started + WRITING * whole)
    path = given.out / f"{given.model}-head.safetensors"
    about = {"model": given.model, "device": device_name(model.device), "minutes": given.minutes}
    skip = len(template(tokenizer)[0])
    train_head(model, talks, path, about, skip=skip, seconds=started + whole - SAVING - time.monotonic())


def conversations(model: Model, tokenizer: Tokenizer, until: float) -> list[Talk]:
    """Let the model's own engine write conversations.

    until: what `time.monotonic` says when the writing ends.
    """
    before, between = template(tokenizer)
    known = (tokenizer.token_bytes[token] for token in range(tokenizer.vocab_size))
    topics = words_of(data.decode(errors="replace") for data in known)

    def begun(rng: random.Random) -> list[int]:
        asked = [{"role": "user", "content": beginning(rng, topics)}]
        return tokenizer.chat(asked, add_generation_prompt=True)[len(before) : -len(between)]

    rows, length = 256 if model.device.type == "cuda" else 16, 512
    room = rows * length * model.config.kv_bytes_per_token(model.dtype)
    engine = cuda_graphs.load(model, max_rows=rows, max_len=length, cache_bytes=room)
    seconds = max(LEAST_SECONDS, until - time.monotonic())
    talks = write(engine, before, between, seconds=seconds, most=100_000, begun=begun)
    del engine
    gc.collect()  # its graphs and caches go when nothing refers to it any longer
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    assert len(talks) >= 8, "too few conversations to train on: give it more --minutes"
    random.Random(1).shuffle(talks)
    return talks


def train_head(
    model: Llama,
    talks: list[Talk],
    path: Path,
    about: dict[str, Any],
    *,
    skip: int,
    seconds: float,
    vocab: int = 8192,
    unroll: int = 4,
) -> dict[str, Any]:
    """Train a head on conversations and save it, with a model card; prints and returns what came of it.

    Args:
        about: facts to be told with it.
        skip: tokens at the beginning of each conversation that do not count.
        vocab: tokens that may be drafted. unroll: steps that the head is unrolled for.
    """
    held, rest = split(talks)
    ids = torch.tensor(frequent(rest, vocab, model.config.vocab_size), device=model.device)
    wide = min(8 * model.config.hidden_size // 3 // 64 * 64, model.config.intermediate_size)
    head = warm(Head(model, 1, wide, ids), model).to(model.device)
    facts = {**about, "conversations": len(rest), "tokens": sum(len(talk.tokens) for talk in rest)}
    path.parent.mkdir(parents=True, exist_ok=True)
    keep = partial(save, head, path, facts)
    shares = train(model, head, rest, held, skip, max(1.0, seconds), unroll, keep)
    answers = [token for talk in held for token in talk.tokens[talk.answer :]]
    known = sum(token in set(ids.tolist()) for token in answers) / max(1, len(answers))
    facts |= {"vocab_share": known, "accepted": shares, "tokens_per_step": 1 + sum(shares)}
    path.with_name("README.md").write_text(card(path, head, facts), encoding="utf-8")
    print(json.dumps(facts), flush=True)
    return facts


def split(talks: list[Talk]) -> tuple[list[Talk], list[Talk]]:
    """Return what is kept for the evaluation, greedy answers only, and what is trained on."""
    most = min(HELD, max(2, len(talks) // 20))
    held = [talk for talk in talks if talk.greedy][:most]
    kept = {id(talk) for talk in held}
    return held, [talk for talk in talks if id(talk) not in kept]


@torch.no_grad()
def warm(drafter: Head, model: Llama) -> Head:
    """Begin with the model's last layer, which adds nothing yet: what the head is given stands for itself."""
    theirs = dict(model.layers[-1].named_parameters())
    for name, weight in drafter.layers[0].named_parameters():
        weight.copy_(theirs[name][tuple(slice(size) for size in weight.shape)].float())
    drafter.norm.weight.copy_(0.1 * model.norm.weight.float())  # it knows nothing yet, and is not sure of it
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        drafter.get_parameter(f"layers.0.{name}.weight").zero_()
    eye = torch.eye(drafter.config.hidden_size)
    drafter.fuse.weight.copy_(torch.cat((0.5 * eye, 0.5 * eye), dim=1))
    states = [torch.zeros_like(eye)] * len(drafter.taps)  # the last hidden states alone, to begin with
    drafter.mix_states.weight.copy_(torch.cat((*states, eye), dim=1))
    return drafter


def train(
    model: Model,
    drafter: Head,
    talks: list[Talk],
    held: list[Talk],
    skip: int,
    seconds: float,
    unroll: int,
    keep: Callable[[], None],
) -> list[float]:
    """Run AdamW with a learning rate that falls to nothing as the time runs out.

    keep: writes the weights; called ten times on the way, so that an end from outside leaves something.

    Returns the shares of held-out chains whose first, first two, ... drafts are right.
    """
    cuda = model.device.type == "cuda"
    own = drafter.own()
    for weight in own.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(own.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    start, rng, count, smooth, told = time.monotonic(), random.Random(2), 0, torch.zeros(()), -1.0
    past = 0.0

    def note() -> list[float]:
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            shares = [round(share, 4) for share in accepted(model, drafter, held)]
        keep()
        print(
            f"  {time.monotonic() - start:5.1f} s, {count} batches, loss {float(smooth):.3f}, "
            f"accepted {shares}, {1 + sum(shares):.2f} tokens a step",
            flush=True,
        )
        return shares

    while past < 1 or count == 0:
        for group in batches(talks, 16_384 if cuda else 2_048, rng):
            past = (time.monotonic() - start) / seconds
            if past - told >= 0.1:
                told = past
                note()
            if past >= 1 and count:
                break
            for settings in optimizer.param_groups:
                fall = 0.5 + 0.5 * math.cos(min(1.0, past) * math.pi)
                settings["lr"] = RATE * min(1.0, (count + 1) / 30) * max(0.01, fall)
            ids, real = padded(group, model.device)
            # Some begin in the middle, as a request does whose prefix was found.
            begin = rng.randrange(ids.shape[1] // 2) if rng.random() < 0.2 else 0
            ids, real = ids[:, begin:], real[:, begin:]
            with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
                value = loss(model, drafter, ids, real, max(0, skip - begin), unroll)
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
            optimizer.step()
            latest = value.detach()  # stays on the device: reading it would wait for the step
            smooth = latest if count == 0 else 0.95 * smooth + 0.05 * latest
            count += 1
            if cuda and count % 8 == 0:
                torch.cuda.synchronize()  # or the host runs ahead, and the time is up long before the work is
    for weight in own.values():
        weight.requires_grad_(False)
    return note()


def card(path: Path, head: Head, facts: dict[str, Any]) -> str:
    """Return the model card."""
    right = ", ".join(f"{share:.0%}" for share in facts["accepted"])
    return f"""# A drafter for {facts["model"]}

Made by `python -m phases.appendix.drafter_training --model {facts["model"]} --minutes {facts["minutes"]:g}
--out {path.parent}` on {facts["device"]}. It guesses what {facts["model"]} will say and is of no use alone:
embedding and output head are those of the model. License: Apache 2.0, as the model's.

Trained on {facts["conversations"]:,} conversations, {facts["tokens"]:,} tokens, that the model wrote itself;
questions begin as it likes or with a form of words. No other data. {facts["vocab_share"]:.1%} of the tokens
in held-out answers can be drafted.

`{path.name}`: {sum(weight.numel() for weight in head.own().values()):,} parameters. Held out were {HELD}
conversations with greedy answers at most: of their first, first two, ... drafts {right} are right, which
makes {facts["tokens_per_step"]:.2f} tokens a step. Strangers get fewer: `ladder bench 11` says
how many.
"""
