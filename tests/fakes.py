"""A runner without a model that knows what every slot of the cache must hold.

It keeps, for each slot, a fingerprint of the whole sequence up to that token. At every step it checks that
the past is where the block table says, and at the end of a work the next token is a function of the
fingerprint. So a schedule that shares, copies, frees or counts wrongly is seen at once, in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.cache import RowCache
from continuous.rows import Rows
from continuous.work import Work
from forward.shapes import SHAPES
from paged_cache.cache import PagedCache

VOCAB = 50
EOS = 0


def fingerprint(before: int, token: int) -> int:
    return hash((before, token))


def next_token(print_: int, seed: int) -> int:
    return hash((print_, seed, "next")) % VOCAB


def expected_tokens(prompt: Sequence[int], params: SamplingParams, sample: int, max_len: int) -> list[int]:
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


class FakePending:
    """Both halves of a step: what `forward` and `sample` return."""

    def __init__(self, works: Sequence[Work], tokens: list[int], error: Exception | None) -> None:
        self.works, self.tokens, self.error, self.started = works, tokens, error, 0.0

    def get(self) -> list[list[tuple[int, None]]]:
        if self.error is not None:
            raise self.error
        return [[(token, None)] for token in self.tokens]


class Broken(BaseException):
    """Not an `Exception`: the engine would take it for a step that failed."""


def must(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)


class FakeRunner:
    """`fail_run` and `fail_get` make the next step raise, when it is launched or when it is read."""

    def __init__(self, rows: Rows, cache: RowCache | PagedCache) -> None:
        config = replace(SHAPES["tiny"], vocab_size=VOCAB, eos_token_ids=(EOS,))
        self.model: Any = SimpleNamespace(config=config, device=torch.device("cpu"))
        self.rows, self.cache = rows, cache
        self.slots: dict[tuple[int, int], int] = {}
        self.tokens: dict[int, dict[int, int]] = {}  # row -> position -> token, as the device has them
        self.seeds: dict[int, int] = {}
        self.fail_run = self.fail_get = False
        self.computed = 0
        self.most_in_step = 0

    def slot(self, row: int, position: int) -> tuple[int, int]:
        if isinstance(self.cache, PagedCache):
            size = self.cache.block_size
            place = position // size
            must(place < len(self.cache.blocks_of(row)), "a token has no block")
            return int(self.cache.tables[row, place]), position % size
        return row, position

    def sample(self, step: FakePending, allowed: None = None) -> FakePending:
        return step

    def forward(self, works: Sequence[Work], *, masked: bool = False) -> FakePending:
        if self.fail_run:
            self.fail_run = False
            raise RuntimeError("launch failed")
        for request in self.rows.upload():
            must(request.row >= 0, "a request without a row is uploaded")
            self.tokens[request.row] = dict(enumerate(request.tokens))
            self.seeds[request.row] = request.seed
        if isinstance(self.cache, PagedCache):
            old = dict(self.slots)
            for source, target in self.cache.take_copies():
                for offset in range(self.cache.block_size):
                    self.slots[target, offset] = old.get((source, offset), -1)
        must(len({work.row for work in works}) == len(works), "two works in one row")
        written: set[tuple[int, int]] = set()
        sampled: list[int] = []
        for work in sorted(works, key=lambda work: work.row):
            must(work.start + work.count < work.request.limit, "the last token is computed")
            print_ = 0
            for position in range(work.start):
                print_ = fingerprint(print_, self.tokens[work.row][position])
                held = self.slots.get(self.slot(work.row, position))
                must(held == print_, "the past is not where it should be")
            for position in range(work.start, work.start + work.count):
                print_ = fingerprint(print_, self.tokens[work.row][position])
                place = self.slot(work.row, position)
                must(place not in written, "two works write to one slot")
                if isinstance(self.cache, PagedCache):
                    users = self.cache.allocator.refs[
                        place[0]
                    ]  # siblings that fork in this step will share it
                    must(users <= max(1, len(work.takers)), "a shared block is written")
                written.add(place)
                self.slots[place] = print_
            for request in work.takers:
                token = next_token(print_, self.seeds[request.row])
                self.tokens[request.row][work.start + work.count] = token
                sampled.append(token)
        self.computed += sum(work.count for work in works)
        self.most_in_step = max(self.most_in_step, sum(work.count for work in works))
        error = RuntimeError("step failed") if self.fail_get else None
        self.fail_get = False
        ordered = sorted(works, key=lambda work: work.row)
        return FakePending(ordered, sampled, error)


def request_of(requests: list[Request]) -> Request:
    (request,) = requests
    return request
