"""The state of one request in an engine, from `add` to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.events import FinishReason
from common.sampling.params import SamplingParams
from common.text.text_stream import TextStream

NO_ROW = -1
"""The row of a request that is not running."""


# eq=False: two requests are never equal, even with equal fields.
@dataclass(eq=False, slots=True)
class Request:
    """One completion of one prompt.

    It waits, runs (it has a row), and finishes (it has a finish reason); preemption makes it wait again.
    Three counts describe its progress, and the scheduler needs nothing else:

    - `len(tokens)`: tokens whose value the host knows: the prompt and the output so far.
    - `placeholders`: tokens that are being sampled on the device and whose value the host has yet to see.
    - `num_computed_tokens`: tokens whose keys and values are in the cache, or will be once the steps that
      are already scheduled have run. It advances when work is scheduled, so that the next step can be
      scheduled while this one runs. A request only needs this count to catch up with the other two.

    id: order of arrival.
    tokens: token ids of the prompt and the output so far.
    prompt_len: tokens of the prompt.
    limit: it ends with "length" when it has this many tokens, the prompt included.
    params: its sampling settings.
    seed: of its random numbers, stored here so that a preempted request continues with the same ones.
    index, sample: number of the prompt in its caller's list, and of the completion among the prompt's n.
    priority: read by the priority policy; lower goes first.
    salt: requests share cached prefixes only with requests of the same salt (read by the prefix cache).
    text: decoder of the output, for a request with stop strings; None otherwise.
    constraint: the request's position in its grammar; only the engine's grammar code sets and reads it.
    siblings: completions of the same prompt that wait for this one to compute it (`n > 1`).
    rank: its position in the waiting line, set by the scheduler's policy; smaller goes first.
    in_flight: number of scheduled steps whose result the host has not seen.
    cached_tokens: tokens that its last admission found in the prefix cache and did not compute.
    numbers: its prompt as an array, cached for `ids`.
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
        """Return its known tokens from `start` to `end` as an int64 array, which must not be changed.

        Converting a thousand tokens takes as long as scheduling a step: a prompt is converted once, for all.
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
        """Return the tokens generated so far."""
        return self.tokens[self.prompt_len :]

    @property
    def prefilling(self) -> bool:
        """Return True if more than the newest token is to be computed; else the request decodes."""
        return self.num_computed_tokens + 1 < len(self.tokens) + self.placeholders
