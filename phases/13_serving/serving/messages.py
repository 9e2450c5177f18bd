"""Messages between the two processes: one a step each way, token ids only.

The API process speaks HTTP and text, the engine process token ids. Structs travel as arrays in MessagePack,
without their fields' names: a step of 256 tokens is little more than a kilobyte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from common.errors import NotANumber, UserError
from common.events import PromptLogprob
from common.sampling.params import SamplingParams

NO_TOKEN = -1
DRAFT, FORCED = "draft", "forced"
"""How a token came about, where that is worth a word: a right guess; the only one that a grammar allowed."""


class AddPrompt(Struct, array_like=True, tag="add"):
    """Put the `params.n` completions of a prompt in line, under the numbers `first .. first + n - 1`.

    traced: tell when the first of them gets a row.
    marks: whether to say of each token whether it was a draft, or the only one that a grammar allowed.
    """

    first: int
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    traced: bool = False
    marks: bool = False


class AbortCompletions(Struct, array_like=True, tag="abort"):
    """End these completions; nobody wants them any more. Unknown numbers have ended already."""

    numbers: list[int]


class WatchEngine(Struct, array_like=True, tag="watch"):
    """Send pictures of the engine, at most one in `seconds`; 0: no more."""

    seconds: float


class Stop(Struct, array_like=True, tag="stop"):
    """End the process."""


Command = AddPrompt | AbortCompletions | WatchEngine | Stop


class Ready(Struct, array_like=True, tag="ready"):
    """The engine is made. The rest is what the API process wants to know about it."""

    max_len: int
    vocab_size: int
    max_rows: int
    blocks: int
    block_size: int
    policy: str
    ledger: str = ""
    seconds: float = 0.0


class Failed(Struct, array_like=True, tag="failed"):
    """The engine cannot be made. wrong_input: somebody can correct it, and `reason` says how."""

    reason: str
    wrong_input: bool


class StepStats(Struct, array_like=True):
    """The engine after a step; counts are since it was made."""

    steps: int = 0
    running: int = 0
    free_blocks: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0


class Token(Struct, array_like=True):
    """Log-probabilities of one token: its place in the report's `tokens`, its own, the likeliest others."""

    place: int
    chosen: float
    top: list[tuple[int, float]]


class PromptToken(Struct, array_like=True):
    """Log-probabilities of a token of a prompt; see `common.events.PromptLogprob`."""

    chosen: float
    rank: int
    top: list[tuple[int, float]]


class End(Struct, array_like=True):
    """A completion has ended.

    reason: "stop" or "length"; "abort" if it was; "refused", "nan" or "error", and why is the `message`.
    place: of its last token in `StepReport.tokens`, or `NO_TOKEN` where it ended without one.
    """

    number: int
    reason: str
    message: str = ""
    place: int = NO_TOKEN


def read(found: Sequence[PromptLogprob | None]) -> list[PromptToken | None]:
    """Return a prompt's log-probabilities as they travel."""
    return [None if one is None else PromptToken(one.chosen, one.rank, list(one.top)) for one in found]


FAILED = "the step that computed this request failed; the server's log says why"


def ending(number: int, reason: str, error: BaseException | None, place: int) -> End:
    """Return how a completion ended. What is wrong with a request itself is told to its sender."""
    if reason != "error":
        return End(number, reason, "", place)
    if isinstance(error, UserError):
        return End(number, "refused", str(error), place)
    if isinstance(error, NotANumber):
        return End(number, "nan", str(error), place)
    return End(number, reason, FAILED, place)


class StepReport(Struct, array_like=True, tag="step"):
    """The outcome of a step: token `tokens[i]` for completion `numbers[i]`, and who has ended.

    cached: completions that have entered, and how many tokens of their prompts were found in the cache.
    entered: traced completions that have got a row in this step.
    prompts: completions that have entered, and what their prompts' tokens were like, where that was asked.
    marks: of tokens by their place, where somebody asked and there is something to say: `DRAFT`, `FORCED`.
    picture: of the engine, for those who watch.
    """

    numbers: list[int]
    tokens: list[int]
    ends: list[End]
    stats: StepStats
    logprobs: list[Token] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    prompts: list[tuple[int, list[PromptToken | None]]] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    picture: dict[str, Any] | None = None


Report = Ready | Failed | StepReport

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_report = msgspec.msgpack.Decoder(Report)


def encode(message: list[Command] | Report) -> bytes:
    """The bytes of a message of either side."""
    return _encoder.encode(message)


def commands(data: bytes) -> list[Command]:
    """Read what the API process has sent."""
    return _commands.decode(data)


def report(data: bytes) -> Report:
    """Read what the engine process has sent."""
    return _report.decode(data)
