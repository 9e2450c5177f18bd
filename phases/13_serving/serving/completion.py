"""The completions that one HTTP request waits for, made into text token by token, and the waiting itself."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from common.events import FinishReason, Logprob, TextStream
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from serving.client import EngineClient

Trouble = Literal["refused", "error", "nan", "died", "deadline", "slow", "left"]
"""Why a request ends early: the engine refused it, its step failed, its logits are NaN, the engine died, it
took too long, its reader took too long, its reader left."""


@dataclass
class Order:
    """A prompt as it goes to the engine.

    shown: special tokens that belong to the text of its completions.
    wanted: kinds of notes about its completions that are read; see `serving.messages`.
    notes: those that have come, by their kind.
    """

    prompt: list[int]
    params: SamplingParams
    shown: frozenset[int] = frozenset()
    wanted: tuple[str, ...] = ()
    notes: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


class Piece(NamedTuple):
    """Text that is ready to be sent, of the tokens `start` to `stop` of a completion."""

    text: str
    start: int
    stop: int


class Choice:
    """One completion: a `Sink` that makes text of tokens and looks for stop strings.

    tokens, texts: each token, and what it adds to the text; perhaps a text more at the end.
    times, logprobs: when each came, and of each if they were asked for.
    sent: how many of the texts a reader has taken.
    stream: makes the text.
    begins: whether its first token begins a text.
    reason: None until it has ended.
    """

    def __init__(
        self, group: ChoiceGroup, index: int, order: Order, tokenizer: Tokenizer
    ) -> None:
        self.group = group
        self.index = index
        self.order = order
        self.number = -1
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[Logprob] = []
        self.times: list[float] = []
        self.sent = 0
        self.reason: str | None = None
        self.stream = TextStream(tokenizer, order.params, order.prompt, order.shown)
        self.begins = self.stream.begins

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    def note(self, kind: str, values: list[Any]) -> None:
        """See `Sink`."""
        self.order.notes[kind].extend(values)

    def token(self, token: int, reason: str | None, logprob: Logprob | None) -> None:
        """See `Sink`. A stop string ends it here, so the engine is told to abort it.

        With more than `most_unsent` texts of a stream the group gives up ("slow"), and hears of no token any
        more.
        """
        group = self.group
        ended, text = self.stream.advance(token, cast("FinishReason | None", reason))
        self.tokens.append(token)
        self.times.append(group.engine.now)
        self.texts.append(text)
        if logprob is not None:
            self.logprobs.append(logprob)
        if ended is not None:
            self.reason = ended
            if reason is None:  # a stop string, which the engine does not look for
                group.engine.abort([self.number])
        if group.streamed and len(self.texts) - self.sent > group.most_unsent:
            group.give_up("slow", "the reader is too slow")
        else:
            group.hear(ended is not None)

    def end(self, reason: str, message: str) -> None:
        """See `Sink`."""
        if reason in ("refused", "error", "nan", "died"):
            self.group.give_up(reason, message)  # type: ignore[arg-type]
            return
        self.texts.append(self.stream.advance(None, "length")[1])
        self.reason = "length" if reason == "abort" else reason
        self.group.hear(True)

    def take(self) -> Piece:
        """All that is unsent, as one piece."""
        start, self.sent = self.sent, len(self.texts)
        return Piece("".join(self.texts[start:]), start, self.sent)


class ChoiceGroup:
    """The completions of one HTTP request.

    trouble: why it cannot be answered in full, and a sentence about it.
    first_token: when one of them had a token.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        orders: Sequence[Order],
        streamed: bool,
        unsent: int,
    ) -> None:
        self.engine = engine
        self.orders = orders
        self.streamed = streamed
        self.most_unsent = unsent
        self.arrived = time.perf_counter()
        self.trouble: tuple[Trouble, str] | None = None
        samples = [order for order in orders for _ in range(order.params.n)]
        self.choices = [
            Choice(self, index, order, tokenizer) for index, order in enumerate(samples)
        ]
        self.left = len(self.choices)
        self.first_token: float | None = None
        self._news = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def send(self, *, priority: int, salt: str, seconds: float) -> None:
        """Hand all to the engine but the stop strings, which are looked for here. It has so many seconds."""
        rest = iter(self.choices)
        for order in self.orders:
            mine = [next(rest) for _ in range(order.params.n)]
            params = replace(order.params, stop=()) if order.params.stop else order.params
            numbers = self.engine.submit(
                order.prompt, params, mine, priority=priority, salt=salt, wanted=order.wanted
            )
            for choice, number in zip(mine, numbers, strict=True):
                choice.number = number
        loop = asyncio.get_running_loop()
        late = "the request was not done by its deadline, or within the server's --max-seconds"
        self._deadline = loop.call_later(seconds, self.give_up, "deadline", late)

    def hear(self, ended: bool) -> None:
        """Something has come for one of the completions."""
        if self.first_token is None:
            self.first_token = self.engine.now
        self.left -= ended
        if self.streamed or self.left == 0:
            self._news.set()

    def give_up(self, trouble: Trouble, message: str) -> None:
        """End what has not ended: the engine frees it at its next step."""
        if self.trouble is None and (self.left or trouble == "slow"):
            self.trouble = trouble, message
        self.close()
        self._news.set()

    def close(self) -> None:
        """Leave nothing behind; harmless after the end."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.engine.abort(choice.number for choice in self.choices if choice.reason is None)

    async def news(self) -> None:
        """Wait until there is something to send, or to say. Only one may wait."""
        await self._news.wait()
        self._news.clear()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(order.prompt) for order in self.orders)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(choice.tokens) for choice in self.choices)
