"""Named workloads: the same requests, token for token, wherever and whenever they are measured.

A workload is prompts (token ids), how many tokens each request generates, and when it arrives. Its SHA-256
covers all of that, so two results with the same hash measured the same work. Tokens are random integers below
a limit: speed does not depend on what they mean, and the end-of-sequence token is ignored.

`offline-256` is the benchmark that nano-vLLM and mini-SGLang publish, `single-512` and `prefill-64x1024` are
its two extremes. The serving workloads follow arrival patterns (steady, burst, long prompts among short ones,
a shared prefix). Every name with `-small` behind it is the same pattern at a size that two CPU cores finish
in about a minute with a model of 135 million parameters.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from common.errors import UserError
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer

Make = Callable[[str, int], "Workload"]
"""From a name and a vocabulary."""
SMALL = "-small"
VOCAB = 10_000
"""Token ids are below this, unless the caller says otherwise."""
LEAST_VOCAB = VOCAB + 1
"""The least vocabulary of a model that takes every workload: `offline-256` draws `VOCAB` itself too."""


@dataclass(frozen=True)
class Item:
    """One request: prompt token ids, tokens to generate, and its arrival in seconds after the start."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A named list of requests. `sequential` means that each is sent when the one before has finished.

    ends: requests end where the model ends them, and `max_tokens` is the most they generate.
    """

    name: str
    items: tuple[Item, ...]
    temperature: float = 0.0
    sequential: bool = False
    vocab: int = 0
    shift: int = 0
    ends: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts, as every phase's `stream` takes them."""
        if not self.shift:
            return [list(item.prompt) for item in self.items]
        return [
            [(token + self.shift) % self.vocab for token in item.prompt] for item in self.items
        ]

    @property
    def params(self) -> list[SamplingParams]:
        """One a prompt; unless it `ends`, exactly `max_tokens` tokens are generated."""
        return [
            SamplingParams(
                max_tokens=item.max_tokens,
                temperature=self.temperature,
                ignore_eos=not self.ends,
                seed=number,
            )
            for number, item in enumerate(self.items)
        ]

    @property
    def arrivals(self) -> list[float]:
        """Seconds after the start at which each request arrives."""
        return [item.arrival for item in self.items]

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(item.prompt) for item in self.items]

    @property
    def output_lens(self) -> list[int]:
        """Tokens each request generates."""
        return [item.max_tokens for item in self.items]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompt_lens)

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(self.output_lens)

    @cached_property
    def sha256(self) -> str:
        """Of tokens, lengths, arrival times, temperature and order; the same on every machine."""
        digest = hashlib.sha256(
            f"{self.temperature!r} {self.sequential!r} {self.shift}".encode()
        )
        if self.ends:
            digest.update(b" ends")
        for item, prompt in zip(self.items, self.prompts, strict=True):
            digest.update(f"\n{len(prompt)} {item.max_tokens} {item.arrival!r}\n".encode())
            digest.update(b" ".join(str(token).encode() for token in prompt))
        return digest.hexdigest()

    def cold(self, repeat: int) -> Workload:
        """The same work with `repeat` added to every token: a prefix cache kept from before finds nothing.

        Requests of one repeat still share what they shared. Repeat 0 is the workload itself.
        """
        return replace(self, shift=repeat)

    def first(self, count: int, tokens: int | None = None) -> Workload:
        """The first `count` requests alone, under a name that says so: for warm-ups and quick looks.

        tokens: the most that each of them generates.
        """
        name = f"{self.name}[:{count}]"
        items = self.items[:count]
        if tokens is not None:
            items = tuple(
                replace(item, max_tokens=min(item.max_tokens, tokens)) for item in items
            )
        return replace(self, name=name, items=items)

    def hurried(self) -> Workload:
        """The first few requests, short and soon after each other: to see that a benchmark runs."""
        items = [
            Item(item.prompt[:64], min(item.max_tokens, 8), item.arrival / 10)
            for item in self.items[:4]
        ]
        return replace(self, name=f"{self.name}[:4]", items=tuple(items))


def workload(name: str, vocab: int = VOCAB) -> Workload:
    """The workload called `name`, with token ids below `vocab`.

    Raises:
        UserError: there is no such workload.
    """
    make = _WORKLOADS.get(name)
    if make is None:
        raise UserError(f"workload is {name!r}, but it must be one of {', '.join(_WORKLOADS)}")
    return make(name, vocab)


def names() -> list[str]:
    """Names of all workloads."""
    return list(_WORKLOADS)


def uniform(
    name: str,
    prompts: int,
    prompt_len: int,
    output_len: int,
    vocab: int = VOCAB,
    seed: int = 0,
) -> Workload:
    """`prompts` requests of equal lengths, all at once: for sweeps over batch size or length."""
    rng = random.Random(seed)
    items = [Item(_tokens(rng, prompt_len, vocab), output_len) for _ in range(prompts)]
    return Workload(name, tuple(items), vocab=vocab)


# --- the published benchmarks ---------------------------------------------------------------------------


def _offline(name: str, vocab: int, count: int, shortest: int, longest: int) -> Workload:
    """Random lengths, all at once; the order of the draws is nano-vLLM's `bench.py`."""
    rng = random.Random(0)
    prompts = [
        _tokens(rng, rng.randint(shortest, longest), vocab, inclusive=True)
        for _ in range(count)
    ]
    outputs = [rng.randint(shortest, longest) for _ in range(count)]
    items = [Item(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    return Workload(name, tuple(items), temperature=0.6, vocab=vocab + 1)


def _alike(name: str, vocab: int, count: int, prompt: int, output: int) -> Workload:
    return uniform(name, count, prompt, output, vocab)


# --- texts that mean something ---------------------------------------------------------------------------

PASSAGES = (
    "The harbour of Velm was built by fishermen who were tired of losing boats. Every autumn the wind "
    "turned to the north, and every autumn two or three boats were broken on the rocks below the chapel. "
    "So the fishermen sank old hulls in a line across the bay, filled them with stones, and waited. In "
    "the first winter the line was washed away. In the second winter it held for a month. In the third "
    "winter it held until spring, and the boats behind it were still afloat when the snow melted. Today "
    "the line of hulls is a wall of concrete, and few people in Velm remember that there are ships inside "
    "it.",
    "The committee met on Tuesday to discuss the new bridge. The engineer reported that the foundations "
    "on the east bank are finished and that the foundations on the west bank will be finished in March. "
    "The treasurer reported that two thirds of the money has been spent. The committee decided to order "
    "the steel in January, to close the old bridge in April, and to open the new bridge in September. The "
    "committee also decided to meet again on the first Tuesday of February. The engineer will bring "
    "drawings of the railings, and the treasurer will bring three offers for the lamps.",
    "A bee that has found flowers flies home and dances. The dance has the shape of an eight, and the bee "
    "runs the middle line of the eight while she shakes her body from side to side. The direction of the "
    "middle line tells the other bees the direction of the flowers, measured from the sun. The length of "
    "the middle line tells the other bees the distance of the flowers. A long dance means that the "
    "flowers are far away, and a short dance means that the flowers are near. The other bees follow the "
    "dancer in the dark of the hive, feel her movements, and then fly out to find the flowers.",
    "To make the bread, mix 500 grams of flour with 350 grams of water, 10 grams of salt and 3 grams of "
    "yeast. Cover the bowl and let the dough rest for one hour. Fold the dough four times, cover the "
    "bowl, and let the dough rest for another hour. Fold the dough four times again, put it into a "
    "basket, and let it rest in the refrigerator for one night. In the morning heat the oven to 240 "
    "degrees with an iron pot inside. Put the dough into the hot pot, close the lid, and bake it for 30 "
    "minutes. Open the lid and bake the bread for another 15 minutes. Let the bread cool before you cut "
    "it.",
)
"""Written for this benchmark. Each says things more than once, as texts do."""

CHAT_QUESTIONS = (
    "How does a refrigerator keep food cold?",
    "Write a short poem about a lighthouse.",
    "What should I take with me on a hike of three days?",
    "Explain to a child why the sky is blue.",
    "What is the difference between a virus and a bacterium?",
    "Give me three ideas for a birthday party.",
    "How do I ask my manager for a raise?",
    "Why do cats purr?",
)

TASKS = {
    "rewriting": "Repeat the following text word for word, but correct any mistakes you find.\n\n{}",
    "summarizing": "Summarize the following text. Use the same words as the text.\n\n{}",
    "chat": "{}",
}
"""What is asked of a chat model; the first two about each passage, the last with each question."""


def task(name: str, tokenizer: Tokenizer, max_tokens: int) -> Workload:
    """Prompts of real text in the model's chat form, sent one after the other.

    Raises:
        UserError: there is no such task.
    """
    if name not in TASKS:
        raise UserError(f"task is {name!r}, but it must be one of {', '.join(TASKS)}")
    texts = [
        TASKS[name].format(text) for text in (CHAT_QUESTIONS if name == "chat" else PASSAGES)
    ]
    prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    items = tuple(Item(tuple(prompt), max_tokens) for prompt in prompts)
    return Workload(
        f"{name}-{max_tokens}", items, sequential=True, vocab=tokenizer.vocab_size, ends=True
    )


# --- outputs of unequal length ---------------------------------------------------------------------------


def _skewed(name: str, vocab: int, count: int, short: int, long: int) -> Workload:
    """Most requests generate a few tokens, every eighth a lot: what static batching is worst at."""
    rng = random.Random(0)
    items = []
    for number in range(count):
        prompt = _tokens(rng, rng.randint(16, 48), vocab)
        output = long if number % 8 == 3 else rng.randint(short // 2, short)
        items.append(Item(prompt, output))
    return Workload(name, tuple(items), vocab=vocab)


# --- serving ---------------------------------------------------------------------------------------------


def _baseline(name: str, vocab: int, count: int, prompt_len: int, output_len: int) -> Workload:
    """Requests one after the other: the latency of a server that is never busy."""
    plain = uniform(name, count, prompt_len, output_len, vocab)
    return Workload(name, plain.items, sequential=True, vocab=vocab)


def _steady(
    name: str,
    vocab: int,
    count: int,
    rate: float,
    lengths: tuple[int, int],
    outputs: tuple[int, int],
    long_length: int = 0,
    long_share: float = 0.0,
    prefix_len: int = 0,
) -> Workload:
    """Poisson arrivals at `rate` requests a second (0: all at once), as open clients send them.

    long_length, long_share: this share of the prompts has `long_length` tokens.
    prefix_len: all prompts begin with the same tokens, this many.
    """
    rng = random.Random(0)
    prefix = _tokens(rng, prefix_len, vocab)
    is_long = [number < round(count * long_share) for number in range(count)]
    rng.shuffle(is_long)
    items, clock = [], 0.0
    for long in is_long:
        length = long_length if long else rng.randint(*lengths)
        items.append(
            Item(prefix + _tokens(rng, length, vocab), rng.randint(*outputs), round(clock, 6))
        )
        clock += rng.expovariate(rate) if rate else 0.0
    return Workload(name, tuple(items), vocab=vocab)


def agent(
    name: str, vocab: int, sessions: int, turns: int, system: int, step: int, output: int
) -> Workload:
    """Sessions of an agent that calls tools: each turn's prompt is the whole of the last one and a bit more.

    All sessions begin with one system prompt of `system` tokens. A turn adds `step` tokens: what the model is
    taken to have said and what the tool answered. Sessions start half a second apart, turns each second.
    """
    rng = random.Random(0)
    shared = _tokens(rng, system, vocab)
    items = []
    for session in range(sessions):
        history = shared
        for turn in range(turns):
            history = history + _tokens(rng, step, vocab)
            items.append(Item(history, output, 0.5 * session + turn))
    items.sort(key=lambda item: item.arrival)
    return Workload(name, tuple(items), vocab=vocab)


def _tokens(
    rng: random.Random, length: int, vocab: int, inclusive: bool = False
) -> tuple[int, ...]:
    last = vocab if inclusive else vocab - 1
    return tuple(rng.randint(0, last) for _ in range(length))


def _made(make: Callable[..., Workload], *given: Any, **more: Any) -> Make:
    return lambda name, vocab: make(name, vocab, *given, **more)


def _serving(small: bool) -> dict[str, Make]:
    """The workloads with arrivals. Small ones are shorter and slower, so that two cores keep up."""
    if small:
        return {
            "agent-session": _made(agent, sessions=2, turns=4, system=192, step=48, output=8),
            "chat-serving-short": _made(_steady, 12, 2.0, (16, 48), (8, 24)),
            "chat-serving-long": _made(_steady, 6, 0.5, (256, 512), (16, 48)),
            "continuous_batching": _made(_steady, 12, 2.0, (24, 96), (8, 48)),
            "paged_attention": _made(_steady, 16, 0.0, (24, 96), (8, 32)),
            "chunked_prefill": _made(
                _steady, 12, 1.0, (16, 64), (16, 48), long_length=512, long_share=0.75
            ),
            "prefix_caching": _made(_steady, 12, 1.5, (16, 48), (8, 16), prefix_len=256),
        }
    return {
        "agent-session": _made(agent, sessions=8, turns=8, system=2048, step=256, output=64),
        "chat-serving-short": _made(_steady, 128, 32.0, (32, 128), (32, 128)),
        "baseline": _made(_baseline, 10, 256, 128),
        "continuous_batching": _made(_steady, 32, 4.0, (64, 512), (32, 256)),
        "paged_attention": _made(_steady, 48, 0.0, (64, 1024), (32, 256)),
        "chunked_prefill": _made(
            _steady, 48, 6.0, (32, 128), (64, 192), long_length=3072, long_share=0.75
        ),
        "prefix_caching": _made(_steady, 48, 8.0, (32, 128), (32, 128), prefix_len=1024),
    }


_WORKLOADS: dict[str, Make] = {
    "offline-256": _made(_offline, 256, 100, 1024),
    "single-512": _made(_alike, 1, 100, 512),
    "prefill-64x1024": _made(_alike, 64, 1024, 1),
    **_serving(small=False),
    "offline-256-small": _made(_offline, 16, 16, 96),
    "single-512-small": _made(_alike, 1, 100, 128),
    "skewed-outputs-small": _made(_skewed, 32, 12, 160),
    **{name + SMALL: make for name, make in _serving(small=True).items()},
}
