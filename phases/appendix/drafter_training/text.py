"""Text to train on, which the model writes itself.

A drafter has to say what this model says, not what people say. So nothing is downloaded: the bare beginning
of the chat template makes the model ask a question, and then it answers it (Xu et al., "Magpie", arXiv
2406.08464). A model that asks itself from nothing asks much the same, and a drafter that has read only
answers to those guesses badly for people. So most questions are begun here, with a form of words and mostly
a topic, and the model ends them. Topics are words of its own vocabulary: a list that somebody writes is read
to its end in minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from common.request import Request
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine

OWN = 0.15
"""Of all questions, those that the model begins as well."""
SHORTEST = 5
"""Letters of a word that may be a topic: shorter tokens are mostly parts of words."""
_FORMS = """
What is {}?|Why is {} important?|How does {} work?|Explain {} in simple terms.|Who first thought of {}?
Give me three tips about {}.|What should I know about {}?|Write a short poem about {}.
Tell me a joke about {}.|Write a short story about {}.|What is the history of {}?
What are common mistakes with {}?|Plan a week around {}.|List five facts about {}.
What is the difference between {} and {}?|Write an email to a friend about {}.
What are the pros and cons of {}?|Describe {} in one paragraph.|Can you help me with {}?
Translate "{}" into French.|I am worried about {}. What can I do?
Write a dialogue between two people about {}.|Summarize what is known about {}.|Who was|When did|Where is
How many|What is the capital of|Why do people|How do I make|How do I fix|How can I learn
Write a Python function that|Write a SQL query that|Correct the grammar of this sentence:
Summarize this text:|Solve this step by step:|If a train|Name three|Give an example of|Should I
Is it true that|Recommend|Imagine that|What happens when|Could you|Please|My|I want to|I cannot|Which
Tell me|How long|What should I|Explain why
"""
FORMS = _FORMS.strip().replace("\n", "|").split("|")
"""How questions begin; a topic stands in each pair of braces."""
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
    for request, was_greedy in answering.items():
        if len(request.output_ids) >= LEAST_ANSWER and len(talks) < most:
            talks.append(Talk(list(request.tokens), request.prompt_len, was_greedy))
    for request in (*asking, *answering):
        engine.abort(request)
    while not engine.idle:
        engine.step()
    return talks


def _seeded(params: SamplingParams, rng: random.Random) -> SamplingParams:
    return replace(params, seed=rng.getrandbits(32))


def words_of(texts: Iterable[str]) -> list[str]:
    """Return the lower-case words among a vocabulary's tokens, by their texts: those behind a space."""
    found = (text[1:] for text in texts if text.startswith(" ") and len(text) > SHORTEST)
    return sorted({word for word in found if word.isascii() and word.isalpha() and word.islower()})


def beginning(rng: random.Random, topics: Sequence[str]) -> str:
    """Return how a question begins; often that is all of it. Empty: the model begins as well."""
    if rng.random() < OWN:
        return ""
    form = rng.choice(FORMS)
    return form.format(*(rng.choice(topics) for _ in range(form.count("{}"))))


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
