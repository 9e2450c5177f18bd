"""Text to train on, which the model writes itself.

A drafter has to say what this model says, not what people say. So nothing is downloaded: the bare beginning
of the chat template makes the model ask a question, and then it answers it (Xu et al., "Magpie", arXiv
2406.08464). Some questions are begun by `questions.py`, for variety.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.request import Request
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine

QUESTION = SamplingParams(max_tokens=96, temperature=0.9)
"""By temperature alone: what truncates is sampled outside of the graphs, and generates a third as fast."""
LEAST_QUESTION = 3
"""Tokens, its end included, that a question has more than."""
LEAST_ANSWER = 24
"""Answers that are not finished when the time is up count from so many tokens on."""


@dataclass(frozen=True)
class Talk:
    """One conversation: all its tokens, where the answer begins, and whether it was greedy."""

    tokens: list[int]
    answer: int
    greedy: bool


def template(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return what stands before a question, and between it and the answer."""
    one, two = (
        tokenizer.chat([{"role": "user", "content": content}], add_generation_prompt=True)
        for content in ("A", "Why")
    )
    before = next(at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    return one[:before], one[before + 1 :]


def write(
    engine: Engine,
    before: list[int],
    between: list[int],
    *,
    seconds: float,
    most: int,
    answer_tokens: int = 320,
    seed: int = 0,
    begun: Callable[[random.Random], list[int]] = lambda rng: [],
    told: Callable[[int], None] = lambda count: None,
) -> list[Talk]:
    """Conversations until the time is up or there are enough; half of the answers are greedy.

    Answers that the end of the time cuts off are the model's words as well, and stay.

    engine: idle, and as many requests are kept in it as it has rows.
    begun: draws the first tokens of a question; none: the model begins as well.
    """
    deadline, rng = time.monotonic() + seconds, random.Random(seed)
    width, talks = engine.scheduler.rows.count, list[Talk]()
    asking, answering = set[Request](), dict[Request, bool]()

    def ask() -> None:
        asking.update(engine.add([*before, *begun(rng)], _seeded(QUESTION, rng)))

    def answer(question: Request) -> None:
        greedy = rng.random() < 0.5
        settings = SamplingParams(max_tokens=answer_tokens, temperature=0.0 if greedy else 0.8)
        prompt = [*question.tokens[:-1], *between]  # the end of the question is part of `between`
        (request,) = engine.add(prompt, settings if greedy else _seeded(settings, rng))
        answering[request] = greedy

    while time.monotonic() < deadline and len(talks) < most:
        while len(asking) + len(answering) < width:
            ask()
        for output in engine.step():
            request = output.request
            if output.finish_reason is None:
                continue
            if request in asking:
                asking.remove(request)
                if output.finish_reason == "stop" and len(request.tokens) > len(before) + LEAST_QUESTION:
                    answer(request)
            elif request in answering:
                talks.append(Talk(list(request.tokens), request.prompt_len, answering.pop(request)))
                told(len(talks))
    for request, was_greedy in answering.items():
        if len(request.output_ids) >= LEAST_ANSWER and len(talks) < most:
            talks.append(Talk(list(request.tokens), request.prompt_len, was_greedy))
    for request in (*asking, *answering):
        engine.abort(request)
    while not engine.idle:
        engine.step()
    return talks


def _seeded(params: SamplingParams, rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=rng.getrandbits(32),
    )


def batches(talks: list[Talk], tokens: int, rng: random.Random) -> Iterator[list[Talk]]:
    """All conversations once, those of about one length together, at most so many tokens with padding."""
    ordered = sorted(talks, key=lambda talk: len(talk.tokens))
    groups, group = list[list[Talk]](), list[Talk]()
    for talk in ordered:
        if group and len(talk.tokens) * (len(group) + 1) > tokens:
            groups.append(group)
            group = []
        group.append(talk)
    groups.append(group)
    rng.shuffle(groups)
    yield from groups


def frequent(talks: list[Talk], count: int, vocab: int) -> list[int]:
    """The `count` most frequent tokens; if fewer occur, others by their number."""
    seen = [0] * vocab
    for talk in talks:
        for token in talk.tokens:
            seen[token] += 1
    ranked = sorted(range(vocab), key=lambda token: (-seen[token], token))
    return sorted(ranked[:count])
