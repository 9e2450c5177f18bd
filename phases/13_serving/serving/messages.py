"""Messages between the API process and the engine process: one a step each way, token ids only.

The API process speaks HTTP and text, the engine process token ids. Structs travel as arrays in MessagePack,
without their fields' names: a step of 256 tokens is little more than a kilobyte.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from common.events import Logprob
from common.sampling.params import SamplingParams

NO_TOKEN = -1
CACHED = "cached"
"""A kind of notes about a completion: how many tokens of its prompt the prefix cache had."""


class AddRequest(Struct, array_like=True, tag="add"):
    """Command: add the `params.n` completions of a prompt, under the numbers `first .. first + n - 1`.

    prompt: token ids. priority: lower is served first, if the scheduling policy is "priority".
    salt: only requests of equal salt share cached prefixes.
    wanted: kinds of extra data (notes) that the engine's observer shall add to reports.
    """

    first: int
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    wanted: list[str] = []


class AbortRequests(Struct, array_like=True, tag="abort"):
    """Command: abort the completions with these numbers; numbers that have ended already are ignored."""

    numbers: list[int]


class DrawEngine(Struct, array_like=True, tag="draw"):
    """Command: send a picture of the engine, JSON data about its state, with the next report."""


class Stop(Struct, array_like=True, tag="stop"):
    """Command: end the engine process."""


Command = AddRequest | AbortRequests | DrawEngine | Stop


class Ready(Struct, array_like=True, tag="ready"):
    """Report: the engine is made. The fields are the sizes that the API process needs to know.

    max_len: most tokens of a prompt with its output. max_rows: most completions that run at a time.
    blocks, block_size: blocks of the KV cache, and tokens in each; 0 without a paged cache.
    policy: name of the scheduling policy. memory_plan: text about the use of the device's memory.
    device: type of the model's device, such as "cuda".
    """

    max_len: int
    vocab_size: int
    max_rows: int = 1
    blocks: int = 0
    block_size: int = 0
    policy: str = "fcfs"
    memory_plan: str = ""
    device: str = ""


class Failed(Struct, array_like=True, tag="failed"):
    """Report: the engine cannot be made. reason: why, a sentence. wrong_input: the user can correct that."""

    reason: str
    wrong_input: bool


class StepStats(Struct, array_like=True):
    """Statistics of an engine after a step.

    steps, preemptions, computed_tokens, lookup_tokens, hit_tokens: totals since the engine was made. Lookup
        tokens were looked up in the prefix cache, and hit tokens found there.
    running: requests that are being computed now. free_blocks: of the KV cache, now.
    step_tokens, step_seconds: tokens computed in the latest step, and how long it took.
    """

    steps: int = 0
    running: int = 0
    free_blocks: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0


class End(Struct, array_like=True):
    """The end of the completion `number`, in a step's report.

    reason: "stop" or "length"; "abort" if it was aborted; "refused", "nan" or "error", with a sentence in
        `message`.
    place: index of its last token in `StepReport.tokens`, or `NO_TOKEN` where it ended without one.
    """

    number: int
    reason: str
    message: str = ""
    place: int = NO_TOKEN


class StepReport(Struct, array_like=True, tag="step"):
    """Report: the outcome of a step: token `tokens[i]` for completion `numbers[i]`, and which have ended.

    logprobs: (index in `tokens`, log-probabilities) where they were asked for.
    notes: the observer's extra data: (number of a completion, kind such as "cached", a list).
    picture: JSON data about the engine's state, where that was asked for; else None.
    """

    numbers: list[int]
    tokens: list[int]
    ends: list[End]
    stats: StepStats
    logprobs: list[tuple[int, Logprob]] = []
    notes: list[tuple[int, str, list[Any]]] = []
    picture: dict[str, Any] | None = None


Report = Ready | Failed | StepReport

encode = msgspec.msgpack.Encoder().encode
commands = msgspec.msgpack.Decoder(list[Command]).decode
"""Read what the API process has sent."""
report = msgspec.msgpack.Decoder(Report).decode
"""Read what the engine process has sent."""
