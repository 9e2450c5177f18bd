"""The command of `train.py`: all stages, each within its share of the time."""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import cuda_graphs
import speculative
from common.device import pick_device, pick_dtype
from common.events import Completion, generate
from common.models.hub import model_folder
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from forward.loading import load_model
from forward.model import Model
from forward.models.llama import Llama
from speculative.head import Drafting, Head, Layers, save
from speculative.training.text import Talk, batches, frequent, template, write
from speculative.training.unroll import accepted, loss, padded

SHARES = {"text": 0.32, "head": 0.3, "layers": 0.18}
"""Of the time; the rest is for loading, capturing graphs and the evaluation."""


@dataclass
class Trained:
    """What training one drafter gave.

    history: (seconds, batches, loss, shares of held-out chains whose first, first two, ... drafts are right)
    """

    kind: str
    parameters: int = 0
    bytes: int = 0
    history: list[tuple[float, int, float, list[float]]] = field(default_factory=list)


def main(questions: Sequence[str]) -> None:
    """Run all stages, each within its share of the time; `questions` are for the evaluation."""
    parser = argparse.ArgumentParser(prog="train.py", description="Train the drafters of a model.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=4.0, help="for everything together")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, evidence and card")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that may be drafted")
    parser.add_argument("--unroll", type=int, default=3, help="steps that the head is unrolled for")
    parser.add_argument("--most", type=int, default=20_000, help="conversations at most")
    parser.add_argument("--toy", action="store_true", help="a random model of two layers, on the CPU")
    given = parser.parse_args()
    started = time.monotonic()
    if given.toy:
        given.model, given.device, given.vocab = "random:tiny", "cpu", 128
    device = pick_device(given.device)
    dtype = pick_dtype("auto", device)
    model = load_model(given.model, device=str(device), dtype=str(dtype).removeprefix("torch."))
    assert isinstance(model, Llama), "drafters are made for models of the Llama family"
    seconds = 60 * given.minutes
    report: dict[str, Any] = {"model": given.model, "device": _name(device), "dtype": str(dtype)}
    talks = write_text(model, given, seconds * SHARES["text"], report)
    held, rest = talks[: max(2, len(talks) // 20)], talks[max(2, len(talks) // 20) :]
    ids = torch.tensor(frequent(rest, given.vocab, model.config.vocab_size), device=device)
    report["vocab_share"] = share_of(held, set(ids.tolist()))
    skip = 2 if given.toy else len(template(Tokenizer(model_folder(given.model)))[0])
    hidden = model.config.hidden_size
    wide = 48 if given.toy else 8 * hidden // 3 // 64 * 64
    narrow = 48 if given.toy else 2 * hidden
    given.out.mkdir(parents=True, exist_ok=True)
    name = given.model.replace("random:", "")
    paths = {}
    for kind, layers, width in ((Head, 1, wide), (Layers, 2, narrow)):
        drafter = warm(kind(model, layers, width, ids), model).to(device)
        done = train(model, drafter, rest, held, skip, seconds * SHARES[kind.kind], given.unroll)
        paths[kind.kind] = given.out / f"{name}-{kind.kind}.safetensors"
        save(drafter, paths[kind.kind], {"model": given.model, "conversations": len(rest)})
        done.bytes = paths[kind.kind].stat().st_size
        report[kind.kind] = asdict(done)
        print(f"{kind.kind}: {done.bytes / 1e6:.1f} MB, {done.history[-1]}", flush=True)
        _write(given.out, report, started)
    left = seconds - (time.monotonic() - started)
    report["engine"] = evaluate(model, given, paths, questions, max(10.0, left))
    _write(given.out, report, started)
    (given.out / "README.md").write_text(card(report, given.minutes), encoding="utf-8")
    print(json.dumps(report["engine"], indent=1))


def write_text(model: Model, given: argparse.Namespace, seconds: float, report: dict[str, Any]) -> list[Talk]:
    """Conversations with the model's own engine; for the toy, continuations of random beginnings."""
    start = time.monotonic()
    if given.toy:
        engine: Engine = cuda_graphs.load(model, max_rows=16, max_len=64, cache_bytes=4 << 20)
        rng = random.Random(0)
        prompts = [[rng.randrange(1, 257) for _ in range(4)] for _ in range(80)]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        talks = [Talk(one.prompt_ids + one.token_ids, 4, True) for one in generate(engine, prompts, params)]
    else:
        before, between = template(Tokenizer(model_folder(given.model)))
        rows, length = 256 if model.device.type == "cuda" else 8, 640
        room = rows * length * model.config.kv_bytes_per_token(model.dtype)
        engine = cuda_graphs.load(model, max_rows=rows, max_len=length, cache_bytes=room)
        left = max(20.0, seconds - (time.monotonic() - start))
        talks = write(engine, before, between, seconds=left, most=given.most)
    del engine
    _tidy(model.device)
    random.Random(1).shuffle(talks)
    tokens = sum(len(talk.tokens) for talk in talks)
    took = time.monotonic() - start
    report["text"] = {"conversations": len(talks), "tokens": tokens, "seconds": took}
    print(f"text: {len(talks)} conversations, {tokens:,} tokens in {took:.0f} s", flush=True)
    assert len(talks) >= 8, "too few conversations to train on: give it more --minutes"
    return talks


def share_of(talks: list[Talk], known: set[int]) -> float:
    """Of the tokens in answers, the share that may be drafted."""
    answers = [token for talk in talks for token in talk.tokens[talk.answer :]]
    return sum(token in known for token in answers) / max(1, len(answers))


@torch.no_grad()
def warm(drafter: Drafting, model: Llama) -> Drafting:
    """Begin with layers of the model: its last one for a head, the first and the last for two layers."""
    places = [-1] if len(drafter.layers) == 1 else [0, -1]
    for mine, place in zip(drafter.layers, places, strict=True):
        theirs = dict(model.layers[place].named_parameters())
        for name, weight in mine.named_parameters():
            other = theirs[name]
            weight.copy_(other[tuple(slice(size) for size in weight.shape)].float())
    drafter.norm.weight.copy_(0.5 * model.norm.weight.float())  # less sure of itself than the model
    if isinstance(drafter, Head):
        # Its layer begins by adding nothing: what it was given stands for itself.
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            drafter.get_parameter(f"layers.0.{name}.weight").zero_()
        half = 0.5 * torch.eye(drafter.config.hidden_size)
        drafter.fuse.weight.copy_(torch.cat((half, half), dim=1))
    return drafter


def train(
    model: Model,
    drafter: Drafting,
    talks: list[Talk],
    held: list[Talk],
    skip: int,
    seconds: float,
    unroll: int,
) -> Trained:
    """AdamW with a learning rate that falls to nothing as the time runs out."""
    cuda = model.device.type == "cuda"
    own = drafter.own()
    for weight in own.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(own.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    found = Trained(drafter.kind, sum(weight.numel() for weight in own.values()))
    greedy = [talk for talk in held if talk.greedy][:40]
    start, rng, count, smooth, told = time.monotonic(), random.Random(2), 0, 0.0, -1.0
    while (past := (time.monotonic() - start) / seconds) < 1 or count == 0:
        for group in batches(talks, 16_384 if cuda else 2_048, rng):
            past = (time.monotonic() - start) / seconds
            if past - told >= 0.1:
                told = past
                note(found, model, drafter, greedy, time.monotonic() - start, count, smooth)
            if past >= 1 and count:
                break
            for settings in optimizer.param_groups:
                settings["lr"] = 1e-3 * min(1.0, (count + 1) / 20) * max(0.02, math.cos(past * math.pi / 2))
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
            smooth = float(value.detach()) if count == 0 else 0.95 * smooth + 0.05 * float(value.detach())
            count += 1
    for weight in own.values():
        weight.requires_grad_(False)
    note(found, model, drafter, greedy, time.monotonic() - start, count, smooth)
    return found


def note(
    found: Trained, model: Model, drafter: Drafting, held: list[Talk], at: float, count: int, smooth: float
) -> None:
    """One line of the history."""
    with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
        shares = accepted(model, drafter, held)
    found.history.append((round(at, 2), count, round(smooth, 4), [round(share, 4) for share in shares]))
    print(f"  {drafter.kind} {at:5.1f} s, {count} batches, loss {smooth:.3f}, accepted {shares}", flush=True)


def evaluate(
    model: Model, given: argparse.Namespace, paths: dict[str, Path], questions: Sequence[str], seconds: float
) -> dict[str, dict[str, float]]:
    """Speed and tokens a step of the engine on questions that nobody was trained on, one after the other."""
    if given.toy:
        prompts, tokens = [[1, 2, 3, 4], [9, 8, 7]], 16
    else:
        tokenizer = Tokenizer(model_folder(given.model))
        prompts = [tokenizer.chat([{"role": "user", "content": q}]) for q in questions]
        tokens = 128
    params = SamplingParams(max_tokens=tokens)
    found: dict[str, dict[str, float]] = {}
    room = 4096 * model.config.kv_bytes_per_token(model.dtype)
    deadline = time.monotonic() + seconds
    truth: list[Completion] | None = None
    for kind in ("none", *paths):
        options = {} if kind == "none" else {"draft_model": str(paths[kind])}
        engine = speculative.load(
            model,
            drafter=kind,
            draft_adaptive=False,
            max_rows=1,
            max_len=1024,
            cache_bytes=room,
            **options,
        )
        generate(engine, prompts[:1], SamplingParams(max_tokens=8, ignore_eos=True))
        done, start = list[Completion](), time.monotonic()
        for prompt in prompts:
            done += generate(engine, [prompt], params)
            if time.monotonic() > deadline and kind == "none":
                break
        took = time.monotonic() - start
        stats = getattr(engine.scheduler.drafter, "stats", None)
        found[kind] = {
            "tokens_per_s": sum(len(one.token_ids) for one in done) / took,
            "tokens_per_step": 1.0 if stats is None else stats.tokens_per_step,
        }
        if truth is None:
            truth, prompts = done, prompts[: len(done)]
        else:
            same = [a.token_ids == b.token_ids for a, b in zip(truth, done, strict=True)]
            found[kind]["same_texts"] = sum(same) / len(same)
        del engine
        _tidy(model.device)
    return found


def card(report: dict[str, Any], minutes: float) -> str:
    """The model card."""
    lines = [
        f"# Drafters for {report['model']}",
        "",
        f"Made by `python phases/11_speculative/train.py --model {report['model']} --minutes {minutes:g}` on "
        f"{report['device']}. They guess what {report['model']} will say and are of no use alone: embedding "
        "and output head are those of the model. License: Apache 2.0, as the model's.",
        "",
        f"Trained on {report['text']['conversations']:,} conversations, {report['text']['tokens']:,} tokens, "
        "that the model wrote itself, questions included. No other data. "
        f"{report['vocab_share']:.1%} of the tokens in held-out answers can be drafted.",
        "",
        "| file | parameters | MB | first, first two, ... drafts right | tokens a step | tokens/s |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for kind in ("head", "layers"):
        done, speed = report[kind], report["engine"][kind]
        shares = ", ".join(f"{share:.0%}" for share in done["history"][-1][3])
        lines.append(
            f"| `{kind}` | {done['parameters']:,} | {done['bytes'] / 1e6:.1f} | {shares} | "
            f"{speed['tokens_per_step']:.2f} | {speed['tokens_per_s']:,.0f} |"
        )
    without = report["engine"]["none"]["tokens_per_s"]
    lines += ["", f"Without a drafter the same questions take {without:,.0f} tokens/s."]
    return "\n".join(lines) + "\n"


def _tidy(device: torch.device) -> None:
    """An engine's graphs and caches go when nothing refers to it any longer."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _write(out: Path, report: dict[str, Any], started: float) -> None:
    report["seconds"] = round(time.monotonic() - started, 1)
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
