"""The sizes of an engine: the options that every engine from this phase on has."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import UserError
from common.options import check_options, option
from continuous.policies import POLICIES
from forward.model import Model

MOST_ROWS = 1 << 16
MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Sizes:
    """Options of an engine that limit requests, tokens and cache memory; None: the phase's own default.

    Raises:
        UserError: a value is out of its limits.
    """

    max_rows: int | None = option(None, "requests that run at a time", low=1, high=MOST_ROWS)
    max_len: int | None = option(
        None, "most tokens of a request, prompt and output", low=2, high=MOST_TOKENS
    )
    step_tokens: int | None = option(
        None, "most tokens computed in a step", low=1, high=MOST_TOKENS
    )
    policy: str = option(
        "fcfs",
        "which request is first: fcfs, shortest_first or priority",
        choices=POLICIES,
    )
    cache_bytes: int | None = option(None, "bytes of the KV cache", low=0)

    def __post_init__(self) -> None:
        """Raise `UserError` for a value out of its limits."""
        check_options(self)

    def context(self, model: Model, default: int | None = None) -> int:
        """Return the most tokens that a request may have, prompt and output.

        This is `max_len`, or without it the model's context, but at most `default` (None: no such limit).

        Raises:
            UserError: `max_len` is larger than the model's context.
        """
        if self.max_len is None:
            return model.max_len if default is None else min(model.max_len, default)
        if self.max_len > model.max_len:
            raise UserError(
                f"max_len is {self.max_len}, but must be between 2 and the model's context of {model.max_len}"
            )
        return self.max_len
