"""One generation as the engine sees it, from `add` to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.events import FinishReason, TextStream
from common.sampling.params import SamplingParams

NO_ROW = -1
"""The row of a request that is not running."""


@dataclass(
    eq=False, slots=True
)  # eq=False: a request is itself, however alike another may look
class Request:
    """One completion of one prompt.

    It waits, runs (it has a row), and finishes (it has a finish reason); preemption makes it wait again.
    Three counts tell how far it is, and the scheduler needs nothing else:

    - `len(tokens)`: tokens whose value the host knows: the prompt and the output so far.
    - `placeholders`: tokens that are being sampled on the device and whose value the host has yet to see.
    - `num_computed_tokens`: tokens whose keys and values are in the cache, or will be once the steps that are
      already scheduled have run. It advances when work is scheduled, so that the next step can be scheduled
      while this one runs. All a request ever needs is for this count to catch up with the other two.

    id: order of arrival.
    limit: it ends with "length" when it has this many tokens, the prompt included.
    seed: of its random numbers, kept here so that a preempted request continues with the same ones.
    index, sample: which prompt of its caller, and which of the prompt's n completions.
    priority: read by the priority policy; lower goes first.
    salt: requests share cached prefixes only with requests of the same salt (read by the prefix cache).
    text: made while it is generated, for a request with stop strings.
    constraint: where it stands in its grammar; the engine's masks put it here, and they alone read it.
    siblings: completions of the same prompt that wait for this one to compute it (`n > 1`).
    rank: where it stands in line, set by the scheduler's policy; smaller goes first.
    in_flight: scheduled steps that the host has not seen the end of.
    cached_tokens: tokens that its last admission found in the prefix cache and did not compute.
    numbers: its prompt as an array, for `ids`.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    limit: int
    params: SamplingParams
    seed: int = 0
    index: int = 0
    sample: int = 0
    priority: int = 0
    salt: str = ""
    text: TextStream | None = None
    constraint: object | None = None
    siblings: list[Request] = field(default_factory=list)
    arrival: float = 0.0
    first_token: float | None = None
    finished: float | None = None
    rank: tuple[float, ...] = ()
    row: int = NO_ROW
    num_computed_tokens: int = 0
    placeholders: int = 0
    in_flight: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    numbers: NDArray[np.int64] | None = field(default=None, repr=False)

    def ids(self, start: int, end: int) -> NDArray[np.int64]:
        """Its known tokens from `start` to `end` as an array, which is not to be changed.

        A list of a thousand takes as long to become one as a step to be scheduled: those of the prompt do it
        once, for all callers.
        """
        prompt_len = self.prompt_len
        if self.numbers is None:
            self.numbers = np.array(self.tokens[:prompt_len], np.int64)
        if end <= prompt_len:
            return self.numbers[start:end]
        output = np.array(self.tokens[max(start, prompt_len) : end], np.int64)
        return np.concatenate((self.numbers[start:], output)) if start < prompt_len else output

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_len :]

    @property
    def prefilling(self) -> bool:
        """True if its known tokens are not all computed; otherwise it is one token behind, and decodes."""
        return self.num_computed_tokens + 1 < len(self.tokens) + self.placeholders
