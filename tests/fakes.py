"""A runner without a model that knows what every slot of the cache must hold.

It keeps, for each slot, a fingerprint of the whole sequence up to that token. At every step it checks that
the past is where the block table says, and at the end of a work the next token is a function of the
fingerprint. So a schedule that shares, copies, frees or counts wrongly is seen at once, in microseconds.
What a step that failed has written is worth nothing: whoever reads it afterwards is found out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.cache import CacheManager
from continuous.engine import Engine
from continuous.rows import RequestRows
from continuous.seams import Drafter, GrammarManager
from continuous.work import Work
from forward.shapes import SHAPES

VOCAB = 50
EOS = 0
NOTHING = (-1, 0)
"""What is in a slot that nobody has written."""


def fingerprint(before: int, token: int) -> int:
    """Of a sequence, from that of all but its last token; of integers, so every process says the same."""
    mixed = (before ^ (token + 1) * 0x9E3779B97F4A7C15) * 0xD6E8FEB86659FD93 % 2**64
    return mixed ^ mixed >> 32


def next_token(print_: int, seed: int) -> int:
    """What the fake model says after a sequence."""
    return fingerprint(print_, -2 - seed) % VOCAB


def expected_tokens(
    prompt: Sequence[int], params: SamplingParams, sample: int, max_len: int
) -> list[int]:
    """What the fake model says, without any engine."""
    print_, output = 0, []
    for token in prompt:
        print_ = fingerprint(print_, token)
    while len(output) < min(params.max_tokens, max_len - len(prompt)):
        token = next_token(print_, params.seed_of(sample) or 0)
        output.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            break
        print_ = fingerprint(print_, token)
    return output


@runtime_checkable
class HasBlocks(Protocol):
    """A cache of blocks, as phase 05 and later have."""

    block_size: int
    allocator: Any

    @property
    def free(self) -> int: ...

    def blocks_of(self, row: int) -> Sequence[int]: ...


class OneAhead:
    """A `Loop` that launches a step before it reads the last one, as a later phase has."""

    in_flight_step: Any = None

    @property
    def idle(self) -> bool:
        return self.in_flight_step is None

    def advance(self, engine: Engine) -> None:
        landing, self.in_flight_step = (
            self.in_flight_step,
            engine.sample(engine.forward(engine.schedule())),
        )
        if landing is not None:
            engine.collect(landing)

    def finish_steps(self, engine: Engine) -> None:
        landing, self.in_flight_step = self.in_flight_step, None
        if landing is not None:
            engine.collect(landing)


class FakePending:
    """Both halves of a step: what `forward` and `sample` return.

    tokens: for each taker, all that was sampled for it.
    fails: called when the step is read, if it is one that fails.
    """

    def __init__(
        self,
        works: Sequence[Work],
        tokens: list[list[int]],
        fails: Callable[[], NoReturn] | None,
    ) -> None:
        self.works = works
        self.tokens = tokens
        self.fails = fails

    def get(self) -> list[list[tuple[int, None]]]:
        if self.fails is not None:
            self.fails()
        return [[(token, None) for token in tokens] for tokens in self.tokens]


class Broken(BaseException):
    """Not an `Exception`: the engine would take it for a step that failed."""


def must(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)


class FakeRunner:
    """`fail_run` and `fail_get` make the next step raise, when it is launched or when it is read."""

    def __init__(self, rows: RequestRows, cache: CacheManager | HasBlocks) -> None:
        config = replace(SHAPES["tiny"], vocab_size=VOCAB, eos_token_ids=(EOS,))
        self.model: Any = SimpleNamespace(config=config, device=torch.device("cpu"))
        self.rows, self.cache = rows, cache
        self.slots: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # fingerprint, and the step that wrote it
        self.tokens: dict[
            int, dict[int, int]
        ] = {}  # row -> position -> token, as the device has them
        self.seeds: dict[int, int] = {}
        self.fail_run = self.fail_get = False
        self.steps = self.computed = self.most_in_step = 0
        self.drafted = self.accepted = 0

    def slot(self, work: Work, position: int) -> tuple[int, int]:
        """Where a token of a work's request lies."""
        if not isinstance(self.cache, HasBlocks):
            return work.row, position
        place, offset = divmod(position, self.cache.block_size)
        held = self.cache.blocks_of(work.row)
        must(
            place < len(held), f"{_name(work)}: token {position} has no block, of {len(held)}"
        )
        return held[place], offset

    def sample(self, step: FakePending, allowed: None = None) -> FakePending:
        return step

    def forward(self, works: Sequence[Work], *, masked: bool = False) -> FakePending:
        if self.fail_run:
            self.fail_run = False
            raise RuntimeError("launch failed")
        self.steps += 1
        self._refresh()
        must(
            len({work.row for work in works}) == len(works),
            "two works of one step are in one row",
        )
        must(all(work.count > 0 for work in works), "a work computes nothing")
        works = sorted(works, key=lambda work: work.row)
        written: dict[tuple[int, int], Work] = {}
        sampled: list[list[int]] = []
        for work in works:
            sampled += self._compute(work, written)
        tokens = sum(work.count for work in works)
        self.computed += tokens
        self.most_in_step = max(self.most_in_step, tokens)
        fails, self.fail_get = (self._failing(self.steps) if self.fail_get else None), False
        return FakePending(works, sampled, fails)

    def _refresh(self) -> None:
        """Take the tokens of new requests, and copy blocks."""
        for request in self.rows.upload():
            must(request.row >= 0, f"request {request.id} is uploaded without a row")
            self.tokens[request.row] = dict(enumerate(request.tokens))
            self.seeds[request.row] = request.seed
        if isinstance(self.cache, HasBlocks):
            old, copies = dict(self.slots), self.cache.take_copies()
            targets = [target for _, target in copies]
            must(len(set(targets)) == len(targets), f"two copies into one block: {copies}")
            for source, target in copies:
                for offset in range(self.cache.block_size):
                    self.slots[target, offset] = old.get((source, offset), NOTHING)

    def _compute(self, work: Work, written: dict[tuple[int, int], Work]) -> list[list[int]]:
        """Write a work's slots; for each of its takers, the tokens it gets."""
        name, tokens = _name(work), self.tokens[work.row]
        end = work.start + work.count
        must(
            end < work.request.limit,
            f"{name}: token {end - 1} is computed, though the last one never is",
        )
        must(
            not work.drafts or len(work.sampled_requests) == 1,
            f"{name}: drafts for {len(work.sampled_requests)} takers",
        )
        tokens.update(enumerate(work.drafts, start=end - len(work.drafts)))
        print_ = 0
        for position in range(work.start):
            must(position in tokens, f"{name}: token {position} was never given to the device")
            print_ = fingerprint(print_, tokens[position])
            held, _ = self.slots.get(self.slot(work, position), NOTHING)
            must(
                held == print_,
                f"{name}: the keys of token {position} are not where they should be",
            )
        ends: list[int] = []  # the fingerprints that are sampled from
        for position in range(work.start, end):
            must(position in tokens, f"{name}: token {position} was never given to the device")
            print_ = fingerprint(print_, tokens[position])
            place = self.slot(work, position)
            if place in written:
                raise Broken(
                    f"{name} writes token {position} where {_name(written[place])} has written"
                )
            if isinstance(
                self.cache, HasBlocks
            ):  # siblings that fork in this step will share it
                users, most = (
                    self.cache.allocator.refs[place[0]],
                    max(1, len(work.sampled_requests)),
                )
                must(
                    users <= most,
                    f"{name}: token {position} is written into a block of {users} users",
                )
            written[place] = work
            self.slots[place] = print_, self.steps
            if position >= end - len(work.drafts) - 1:
                ends.append(print_)
        return self._choose(work, ends)

    def _choose(self, work: Work, ends: Sequence[int]) -> list[list[int]]:
        """Sample from these fingerprints; for each taker of a work, the tokens it gets."""
        end = work.start + work.count
        results = []
        for request in work.sampled_requests:
            chosen = [next_token(print_, self.seeds[request.row]) for print_ in ends]
            first = end - len(work.drafts)
            self.tokens[request.row].update(enumerate(chosen, start=first))
            right = next(
                (n for n, draft in enumerate(work.drafts) if draft != chosen[n]),
                len(work.drafts),
            )
            self.drafted += len(work.drafts)
            self.accepted += right
            results.append(chosen[: right + 1])
        return results

    def _failing(self, step: int) -> Callable[[], NoReturn]:
        def fails() -> NoReturn:
            for place, (_, writer) in self.slots.items():
                if writer == step:
                    self.slots[place] = NOTHING
            raise RuntimeError("step failed")

        return fails


class FakeDrafter(Drafter):
    """Guesses up to `most` tokens, the first of which are right, as many as chance will have."""

    def __init__(self, seed: int, most: int = 4) -> None:
        self.rng, self.most = random.Random(seed), most

    def begin(self, running: Sequence[Request]) -> bool:
        return True

    def propose(self, request: Request, most: int) -> list[int]:
        must(
            most > 0,
            f"request {request.id}: drafts are asked for where there is room for none",
        )
        if request.placeholders:  # what follows a token on its way would have to be certain
            return []
        print_, drafts = 0, list[int]()
        for token in request.tokens:
            print_ = fingerprint(print_, token)
        wrong = self.rng.randrange(self.most + 1)
        for place in range(min(most, self.rng.randrange(self.most + 1))):
            drafts.append((next_token(print_, request.seed) + (place >= wrong)) % VOCAB)
            print_ = fingerprint(print_, drafts[-1])
        return drafts


class OddOnly(GrammarManager):
    """Lets every request choose odd tokens only, and checks that it knows every token before."""

    active = True

    def __init__(self, vocab: int) -> None:
        words = -(-vocab // 32)
        self.row = torch.full((1, words), 0xAAAAAAAA - (1 << 32), dtype=torch.int32)
        self.filled = 0

    def ready(self, request: Request) -> bool:
        request.constraint = self
        return True

    def fill_bitmask(self, works: Sequence[Work]) -> Tensor:
        sampled_requests = [
            sampled_request for work in works for sampled_request in work.sampled_requests
        ]
        for work in works:
            for sampled_request in work.sampled_requests:
                if sampled_request.finish_reason is not None:
                    continue
                on_their_way = (
                    work.start + work.count - len(work.drafts) - len(sampled_request.tokens)
                )
                assert on_their_way == 0, (
                    f"request {sampled_request.id}: a mask before {on_their_way} tokens"
                )
        self.filled += 1
        return self.row.expand(len(sampled_requests), -1)


def _name(work: Work) -> str:
    return f"request {work.request.id}, row {work.row}"
