"""Train a model's head: the model writes the text, and the head learns to say what it says.

    python -m phases.appendix.drafter_training --minutes 17 --out phases/11_speculative/weights

A head that is trained on the model's hidden states alone is good at its first draft and lost at its second,
which builds on a state of its own making. So it is unrolled: in step j every place has the head's own output
of step j - 1 in the place of the model's hidden states, and attends to what a draft there would find cached.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cuda_graphs
from common.device import device_name, pick_device
from common.models.hub import model_folder
from common.request import Request
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from forward.attention import LayerSpec
from forward.loading import load_model
from forward.models.llama import Llama
from speculative.head import Head, save
from speculative.taps import layers_of, stream

WRITING = 0.38
"""Of the whole time: loading, and writing the text."""
RATE = 1.5e-3
"""The largest learning rate; it rises for 30 batches and falls to nothing as the time runs out."""
UNROLL = 4
"""Steps that the head is unrolled for."""
_FORMS = """
What is {}?|Why is {} important?|How does {} work?|Explain {} in simple terms.|Who first thought of {}?
Give me three tips about {}.|What should I know about {}?|Write a short poem about {}.
Tell me a joke about {}.|Write a short story about {}.|What is the history of {}?|List five facts about {}.
What is the difference between {} and {}?|Write an email to a friend about {}.|Who was|When did|How many
What are the pros and cons of {}?|Describe {} in one paragraph.|Can you help me with {}?|Could you|Please|My
Translate "{}" into French.|Summarize what is known about {}.|Why do people|How do I make|How do I fix
Write a Python function that|Correct the grammar of this sentence:|Solve this step by step:|If a train
Name three|Give an example of|Should I|Is it true that|Imagine that|I want to|Which|Tell me|Explain why
"""
FORMS = _FORMS.strip().replace("\n", "|").split("|")
"""How questions begin; a topic stands in each pair of braces."""
OWN = 0.15
"""Of all questions, those that the model begins as well."""


@dataclass(frozen=True)
class Talk:
    """A conversation: its tokens, and where the answer begins."""

    tokens: list[int]
    answer: int


def template(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return what stands before a question, and between it and the answer."""
    one, two = (
        tokenizer.chat([{"role": "user", "content": content}], add_generation_prompt=True)
        for content in ("A", "Why")
    )
    before = next(at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    return one[:before], one[before + 1 :]


def beginnings(tokenizer: Tokenizer, before: int, behind: int) -> Callable[[random.Random], list[int]]:
    """Return what draws the first tokens of a question: a form, about words of the model's vocabulary.

    A model that asks itself from nothing asks much the same. before, behind: tokens of the template.
    """
    known = (tokenizer.token_bytes[token] for token in range(tokenizer.vocab_size))
    words = {data[1:].decode() for data in known if data[:1] == b" " and len(data) > 5 and data.isascii()}
    topics = sorted(word for word in words if word.isalpha() and word.islower())

    def begin(rng: random.Random) -> list[int]:
        form = "" if rng.random() < OWN else rng.choice(FORMS)
        text = form.format(*(rng.choice(topics) for _ in range(form.count("{}"))))
        return tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=True)[before:-behind]

    return begin


def write(
    engine: Engine,
    before: list[int],
    between: list[int],
    *,
    seconds: float,
    most: int,
    answer_tokens: int = 320,
    begin: Callable[[random.Random], list[int]] = lambda rng: [],
) -> list[Talk]:
    """Let the model ask and answer until the time is up, or enough is said; half of the answers are greedy.

    Given the bare beginning of its chat template a model asks a question, as a user would (Xu et al.,
    "Magpie", arXiv 2406.08464).

    begin: draws the first tokens of a question.
    """
    deadline, rng, talks = time.monotonic() + seconds, random.Random(0), list[Talk]()
    asking, answering = set[Request](), set[Request]()
    while time.monotonic() < deadline and len(talks) < most:
        while len(asking) + len(answering) < engine.scheduler.rows.count:
            params = SamplingParams(max_tokens=96, temperature=0.9, seed=rng.getrandbits(32))
            asking.update(engine.add([*before, *begin(rng)], params))
        for output in engine.step():
            request = output.request
            if output.finish_reason is None:
                continue
            if request in answering:
                answering.remove(request)
                talks.append(Talk(list(request.tokens), request.prompt_len))
                continue
            asking.discard(request)
            if output.finish_reason == "stop" and len(request.tokens) > len(before) + 3:
                warmth, seed = 0.0 if rng.random() < 0.5 else 0.8, rng.getrandbits(32)
                params = SamplingParams(max_tokens=answer_tokens, temperature=warmth, seed=seed)
                # The end of the question is part of `between`.
                answering.update(engine.add([*request.tokens[:-1], *between], params))
    for request in (*asking, *answering):
        engine.abort(request)
    while not engine.idle:
        engine.step()
    return talks


def batches(talks: Sequence[Talk], tokens: int, rng: random.Random) -> Iterator[list[Talk]]:
    """All conversations once, those of about one length together, at most so many tokens with padding."""
    groups: list[list[Talk]] = [[]]
    for talk in sorted(talks, key=lambda talk: len(talk.tokens)):
        if groups[-1] and len(talk.tokens) * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(talk)
    rng.shuffle(groups)
    yield from groups


def padded(talks: Sequence[Talk], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens `[B, S]`, and which of them are no padding `[B, S]`."""
    rows = [torch.tensor(talk.tokens) for talk in talks]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(device)
    return ids.clamp(min=0), ids >= 0


class WholeAttention:
    """Causal attention over whole sequences; models of the Llama family have no windows or soft caps."""

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [B, S, H, D]`, `k` and `v [B, S, KH, D]` -> `[B, S, H, D]`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True)
        return out.transpose(1, 2)


class UnrolledAttention:
    """Attention of step j over the keys of step 1 up to where its chain began, and its chain's own since.

    The chain that is at place p in step j began at place p - j + 1, and was at place p - j + i in step i.
    """

    def __init__(self) -> None:
        self._past: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [B, S, H, D]`, `k` and `v [B, S, KH, D]` -> `[B, S, H, D]`."""
        group = layer.num_heads // layer.num_kv_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        self._past.append((k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)))
        (first_k, first_v), *own = self._past  # [B, H, S, D]
        size, ahead = q.shape[2], len(own)
        places = torch.arange(size, device=q.device)
        seen = places[:, None] - places[None, :] >= ahead
        scores = [(q @ first_k.transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))]
        lags = range(ahead - 1, -1, -1)
        scores += [(q * shift(keys, by, 2)).sum(-1, True).float() for by, (keys, _) in zip(lags, own)]  # noqa: B905
        weights = (torch.cat(scores, dim=-1) * layer.scale).softmax(-1).to(v.dtype)
        out = weights[..., :size] @ first_v
        for at, (_, values) in enumerate(own):
            out = out + weights[..., size + at, None] * shift(values, ahead - 1 - at, 2)
        return out.transpose(1, 2)


def shift(x: Tensor, by: int, dim: int) -> Tensor:
    """`x` moved `by` places to the right along `dim`, zeros moving in."""
    size = x.shape[dim]
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, by)), x.narrow(dim, 0, size - by)), dim)


@torch.no_grad()
def hidden_states(model: Llama, ids: Tensor, taps: Sequence[int] = ()) -> Tensor:
    """Return what the model makes of `ids [B, S]`: outputs of the layers `taps`, and its last hidden states,
    end to end: `[B, S, (len(taps) + 1) * hidden]`.
    """
    seen: list[Tensor] = []
    hooks = [
        layers_of(model)[place].register_forward_hook(lambda layer, given, out: seen.append(stream(out)))
        for place in taps
    ]
    last = model(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids), WholeAttention())
    for hook in hooks:
        hook.remove()
    return torch.cat((*seen, last), dim=-1)


def outputs(drafter: Head, ids: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
    """Return the head's hidden states in each step, `[B, S - 1, hidden]`.

    Entry `[:, p]` is about token p + 2, and belongs to a chain that began `step` places before.

    hidden: what `hidden_states` makes with the head's taps.
    """
    tokens, features = ids[:, 1:], drafter.mix(hidden[:, :-1])
    positions = torch.arange(tokens.shape[1], device=ids.device).expand_as(tokens)
    attention, made = UnrolledAttention(), list[Tensor]()
    for _ in range(steps):
        made.append(drafter.step(tokens, features, positions, attention))
        features = shift(made[-1], 1, 1)
    return made


def loss(model: Llama, drafter: Head, ids: Tensor, real: Tensor, skip: int, steps: int = UNROLL) -> Tensor:
    """Cross-entropy with the model's own probabilities over the reduced vocabulary, mean over all steps.

    skip: places at the beginning that do not count: the template, the same in all conversations.
    """
    reduced = drafter.lm_head
    hidden = hidden_states(model, ids, drafter.taps)
    with torch.no_grad():
        last = hidden[:, 1:, -model.config.hidden_size :]
        wanted = reduced.few(last).float().softmax(-1)  # [B, S - 1, N]
    total = torch.zeros((), device=ids.device)
    for step, out in enumerate(outputs(drafter, ids, hidden, steps)):
        counts = real[:, 1:].clone()
        counts[:, : max(skip, step)] = False
        counts[:, -1] = False  # what comes behind the end is not known
        logits = reduced.few(out.to(reduced.weight.dtype)).float()
        terms = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1), reduction="none")
        total = total + 0.8**step * (terms * counts.flatten()).sum() / counts.sum().clamp(min=1)
    return total


@torch.no_grad()
def begun(model: Llama, ids: Tensor) -> Head:
    """Make a head that begins with the model's last layer, which adds nothing yet."""
    width = min(8 * model.config.hidden_size // 3 // 64 * 64, model.config.intermediate_size)
    drafter = Head(model, 1, width, ids).to(model.device)
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


def train(model: Llama, talks: list[Talk], *, skip: int, seconds: float, vocab: int = 8192) -> Head:
    """Make a head, and run AdamW with a learning rate that falls to nothing as the time runs out.

    vocab: tokens that may be drafted, the most frequent ones.
    """
    cuda, rng, count = model.device.type == "cuda", random.Random(2), 0
    every = torch.tensor([token for talk in talks for token in talk.tokens])
    frequent = torch.bincount(every, minlength=model.config.vocab_size).topk(vocab).indices
    drafter = begun(model, frequent.sort().values.to(model.device))
    own = [weight.requires_grad_(True) for weight in drafter.own().values()]
    optimizer = torch.optim.AdamW(own, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    start, past = time.monotonic(), 0.0
    while past < 1:
        for group in batches(talks, 16_384 if cuda else 2_048, rng):
            past = (time.monotonic() - start) / seconds
            if past >= 1 and count:
                break
            fall = max(0.01, 0.5 + 0.5 * math.cos(min(1.0, past) * math.pi))
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, (count + 1) / 30) * fall
            ids, real = padded(group, model.device)
            # Some begin in the middle, as a request does whose prefix was found.
            begin = rng.randrange(ids.shape[1] // 2) if rng.random() < 0.2 else 0
            with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
                value = loss(model, drafter, ids[:, begin:], real[:, begin:], max(0, skip - begin))
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            optimizer.step()
            if count % 8 == 0:  # the host waits, or it would run ahead of the clock
                print(f"  {time.monotonic() - start:5.1f} s, loss {value.item():.3f}", flush=True)
            count += 1
    return drafter.requires_grad_(False)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the text, train, save the head, and print what came of it."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="drafter_training", description="Train a model's head.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=4.0, help="for everything together")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    given = parser.parse_args(argv)
    model = load_model(given.model, device=str(pick_device(given.device)))
    assert isinstance(model, Llama), "drafters are made for models of the Llama family"
    tokenizer, cuda = Tokenizer(model_folder(given.model)), model.device.type == "cuda"
    before, between = template(tokenizer)
    rows, length, whole = 256 if cuda else 16, 512, 60 * given.minutes
    room = rows * length * model.config.kv_bytes_per_token(model.dtype)
    engine = cuda_graphs.load(model, max_rows=rows, max_len=length, cache_bytes=room)
    left = max(10.0, started + WRITING * whole - time.monotonic())
    begin = beginnings(tokenizer, len(before), len(between))
    talks = write(engine, before, between, seconds=left, most=100_000, begin=begin)
    del engine
    gc.collect()  # its graphs and caches go when nothing refers to it any longer
    torch.cuda.empty_cache()
    assert len(talks) >= 8, "too few conversations to train on: give it more --minutes"
    left = max(1.0, started + whole - time.monotonic())
    drafter = train(model, talks, skip=len(before), seconds=left)
    facts: dict[str, Any] = {"model": given.model, "device": device_name(model.device)}
    facts |= {"minutes": given.minutes, "conversations": len(talks)}
    save(drafter, given.out / f"{given.model}-head.safetensors", facts)
    print(json.dumps(facts), flush=True)
