"""All stages of the training, each within its share of the time."""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cuda_graphs
from common.device import pick_device, pick_dtype
from common.events import generate
from common.models.hub import model_folder
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from forward.loading import load_model
from forward.model import Model
from forward.models.llama import Llama
from phases.appendix.drafter_training.questions import PEOPLE, beginning, words_of
from phases.appendix.drafter_training.text import Talk, batches, frequent, template, write
from phases.appendix.drafter_training.unroll import accepted, loss, padded
from speculative.head import KIND, Head, save

WRITING = 0.38
"""Of the whole time: loading, and writing the text."""
SAVING = 6.0
"""Seconds at the end for the last evaluation and for what could take longer than expected."""
RATE = 1.5e-3
"""The largest learning rate; it rises for 30 batches and falls to nothing as the time runs out."""
HELD = 64
"""Greedy conversations that are kept for the evaluation."""


@dataclass
class Trained:
    """The result of training the head.

    tokens: that it was trained on, each as often as it came.
    people: shares of chains whose first, first two, ... drafts are right, in answers to people's questions.
    history: (seconds, batches, loss, such shares of held-out conversations)
    """

    kind: str
    parameters: int = 0
    bytes: int = 0
    tokens: int = 0
    people: list[float] = field(default_factory=list)
    history: list[tuple[float, int, float, list[float]]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None, *, started: float | None = None) -> dict[str, Any]:
    """Run all stages, each within its share of the time; prints and returns what came of it.

    started: what `time.monotonic` said when the time began.
    """
    started = time.monotonic() if started is None else started
    parser = argparse.ArgumentParser(prog="drafter_training", description="Train a model's head.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=4.0, help="for everything together")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, evidence and card")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that may be drafted")
    parser.add_argument("--unroll", type=int, default=4, help="steps that the head is unrolled for")
    parser.add_argument("--most", type=int, default=100_000, help="conversations at most")
    parser.add_argument("--toy", action="store_true", help="a random model of two layers, on the CPU")
    given = parser.parse_args(argv)
    if given.toy:
        given.model, given.device, given.vocab = "random:tiny", "cpu", 128
    deadline = started + 60 * given.minutes
    device = pick_device(given.device)
    dtype = pick_dtype("auto", device)
    model = load_model(given.model, device=str(device), dtype=str(dtype).removeprefix("torch."))
    assert isinstance(model, Llama), "drafters are made for models of the Llama family"
    report: dict[str, Any] = {"model": given.model, "device": _name(device), "dtype": str(dtype)}
    report["minutes"] = given.minutes
    given.out.mkdir(parents=True, exist_ok=True)
    talks, strangers = write_text(model, given, started + WRITING * 60 * given.minutes, report)
    held, rest = split(talks)
    ids = torch.tensor(frequent(rest, given.vocab, model.config.vocab_size), device=device)
    report["vocab_share"] = share_of(held, set(ids.tolist()))
    skip = 2 if given.toy else len(template(Tokenizer(model_folder(given.model)))[0])
    hidden = model.config.hidden_size
    wide = 48 if given.toy else 8 * hidden // 3 // 64 * 64
    head = warm(Head(model, 1, wide, ids), model).to(device)
    path = given.out / f"{given.model.replace('random:', '')}-head.safetensors"
    keep = partial(save, head, path, {"model": given.model, "conversations": len(rest)})
    seconds = max(1.0, deadline - SAVING - time.monotonic())
    done = train(model, head, rest, held, skip, seconds, given.unroll, keep)
    done.people = measured(model, head, strangers)
    done.bytes = path.stat().st_size
    report[KIND] = asdict(done)
    report["seconds"] = round(time.monotonic() - started, 1)
    (given.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (given.out / "README.md").write_text(card(report), encoding="utf-8")
    summary = {key: report[key] for key in ("model", "device", "seconds", "vocab_share", "text")}
    shares = done.history[-1][3]
    summary[KIND] = {
        "accepted": shares,
        "tokens_per_step": round(1 + sum(shares), 3),
        "for_people": round(1 + sum(done.people), 3),
        "batches": done.history[-1][1],
        "tokens_seen": done.tokens,
        "megabytes": round(done.bytes / 1e6, 2),
    }
    print(json.dumps(summary), flush=True)
    return report


def write_text(
    model: Model, given: argparse.Namespace, until: float, report: dict[str, Any]
) -> tuple[list[Talk], list[Talk]]:
    """Conversations with the model's own engine, and answers to people's questions.

    For the toy, continuations of random beginnings.

    until: what `time.monotonic` says when the writing ends.
    """
    start = time.monotonic()
    if given.toy:
        engine: Engine = cuda_graphs.load(model, max_rows=16, max_len=64, cache_bytes=4 << 20)
        rng = random.Random(0)
        prompts = [[rng.randrange(1, 257) for _ in range(4)] for _ in range(80)]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        talks = [Talk(one.prompt_ids + one.token_ids, 4, True) for one in generate(engine, prompts, params)]
        strangers, took = talks[:4], time.monotonic() - start
    else:
        tokenizer = Tokenizer(model_folder(given.model))
        before, between = template(tokenizer)
        known = (tokenizer.token_bytes[token] for token in range(tokenizer.vocab_size))
        words = words_of(data.decode(errors="replace") for data in known)

        def said(question: str) -> list[int]:
            return tokenizer.chat([{"role": "user", "content": question}], add_generation_prompt=True)

        rows, length = 256 if model.device.type == "cuda" else 16, 512
        room = rows * length * model.config.kv_bytes_per_token(model.dtype)
        options: dict[str, Any] = {"max_rows": rows, "max_len": length, "cache_bytes": room}
        engine = cuda_graphs.load(model, **options)
        ready = time.monotonic()
        print(f"text: the engine is ready after {ready - start:.0f} s", flush=True)
        seconds = max(LEAST_SECONDS, until - ready)
        told = partial(progress, ready, Announced())
        talks = write(
            engine,
            before,
            between,
            seconds=seconds,
            most=given.most,
            begun=lambda rng: said(beginning(rng, words))[len(before) : -len(between)],
            told=told,
        )
        took = time.monotonic() - ready
        people = generate(engine, [said(question) for question in PEOPLE], SamplingParams(max_tokens=160))
        strangers = [Talk(one.prompt_ids + one.token_ids, len(one.prompt_ids), True) for one in people]
    del engine
    _tidy(model.device)
    random.Random(1).shuffle(talks)
    tokens = sum(len(talk.tokens) for talk in talks)
    took = max(1e-9, took)
    report["text"] = {
        "conversations": len(talks),
        "tokens": tokens,
        "seconds": round(took, 1),
        "tokens_per_s": round(tokens / took),
    }
    print(f"text: {len(talks):,} conversations, {tokens:,} tokens, {tokens / took:,.0f} tokens/s", flush=True)
    assert len(talks) >= 8, "too few conversations to train on: give it more --minutes"
    return talks, strangers


LEAST_SECONDS = 10.0
"""However long the set-up took, so long the model writes."""


@dataclass
class Announced:
    """When progress was told last."""

    at: float = 0.0


def progress(since: float, last: Announced, count: int) -> None:
    """A line every ten seconds."""
    now = time.monotonic()
    if now - max(last.at, since) >= 10:
        last.at = now
        print(f"  {count:,} conversations after {now - since:.0f} s", flush=True)


def split(talks: list[Talk]) -> tuple[list[Talk], list[Talk]]:
    """Return what is kept for the evaluation, greedy answers only, and what is trained on."""
    most = min(HELD, max(2, len(talks) // 20))
    held = [talk for talk in talks if talk.greedy][:most]
    kept = {id(talk) for talk in held}
    return held, [talk for talk in talks if id(talk) not in kept]


def share_of(talks: list[Talk], known: set[int]) -> float:
    """Of the tokens in answers, the share that may be drafted."""
    answers = [token for talk in talks for token in talk.tokens[talk.answer :]]
    return sum(token in known for token in answers) / max(1, len(answers))


@torch.no_grad()
def warm(drafter: Head, model: Llama) -> Head:
    """Begin with the model's last layer, which adds nothing yet: what the head is given stands for itself."""
    theirs = dict(model.layers[-1].named_parameters())
    for name, weight in drafter.layers[0].named_parameters():
        other = theirs[name]
        weight.copy_(other[tuple(slice(size) for size in weight.shape)].float())
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
) -> Trained:
    """AdamW with a learning rate that falls to nothing as the time runs out.

    keep: writes the weights; called ten times on the way, so that an end from outside leaves something.
    """
    cuda = model.device.type == "cuda"
    own = drafter.own()
    for weight in own.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(own.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    found = Trained(KIND, sum(weight.numel() for weight in own.values()))
    start, rng, count, smooth, told = time.monotonic(), random.Random(2), 0, torch.zeros(()), -1.0
    past = 0.0
    while past < 1 or count == 0:
        for group in batches(talks, 16_384 if cuda else 2_048, rng):
            past = (time.monotonic() - start) / seconds
            if past - told >= 0.1:
                told = past
                note(found, model, drafter, held, time.monotonic() - start, count, float(smooth))
                keep()
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
            found.tokens += sum(len(talk.tokens) for talk in group)
            if cuda and count % 8 == 0:
                torch.cuda.synchronize()  # or the host runs ahead, and the time is up long before the work is
    for weight in own.values():
        weight.requires_grad_(False)
    note(found, model, drafter, held, time.monotonic() - start, count, float(smooth))
    keep()
    return found


def note(
    found: Trained, model: Model, drafter: Head, held: list[Talk], at: float, count: int, smooth: float
) -> None:
    """One line of the history."""
    shares = measured(model, drafter, held)
    found.history.append((round(at, 2), count, round(smooth, 4), shares))
    right = " ".join(f"{share:.3f}" for share in shares)
    print(
        f"  {found.kind} {at:5.1f} s, {count} batches, loss {smooth:.3f}, accepted {right}, "
        f"{1 + sum(shares):.2f} tokens a step",
        flush=True,
    )


def measured(model: Model, drafter: Head, talks: list[Talk]) -> list[float]:
    """Shares of chains whose first, first two, ... drafts are right."""
    with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
        return [round(share, 4) for share in accepted(model, drafter, talks)]


def card(report: dict[str, Any]) -> str:
    """Return the model card."""
    text = report["text"]
    lines = [
        f"# A drafter for {report['model']}",
        "",
        f"Made by `python -m phases.appendix.drafter_training --model {report['model']} --minutes "
        f"{report['minutes']:g} --out phases/11_speculative/weights` on {report['device']}. It guesses what "
        f"{report['model']} will say and is of no use alone: embedding and output head are those of the "
        "model. License: Apache 2.0, as the model's.",
        "",
        f"Trained on {text['conversations']:,} conversations, {text['tokens']:,} tokens, "
        "that the model wrote itself; questions begin as it likes or with a form of words. No other data. "
        f"{report['vocab_share']:.1%} of the tokens in held-out answers can be drafted.",
        "",
        "| file | parameters | MB | tokens trained on | first, first two, ... drafts right | tokens a step | "
        "for people |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    done = report[KIND]
    shares = done["history"][-1][3]
    right = ", ".join(f"{share:.0%}" for share in shares)
    lines += [
        f"| `{KIND}` | {done['parameters']:,} | {done['bytes'] / 1e6:.1f} | {done['tokens']:,} | "
        f"{right} | {1 + sum(shares):.2f} | {1 + sum(done['people']):.2f} |",
        "",
        f"Held out: {HELD} conversations with greedy answers at most, each draft behind right ones. "
        f"For people: tokens a step in answers to {len(PEOPLE)} questions that none of these made "
        "(`PEOPLE` in `questions.py` of the training).",
    ]
    return "\n".join(lines) + "\n"


def _tidy(device: torch.device) -> None:
    """An engine's graphs and caches go when nothing refers to it any longer."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
