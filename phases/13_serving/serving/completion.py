"""The completions that one HTTP request waits for, made into text token by token, and the waiting itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from common.events import FinishReason, TextStream
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from serving.client import EngineClient
from serving.messages import PromptToken, Token
from serving.metrics import Metrics

Trouble = Literal["refused", "error", "nan", "died", "deadline", "slow", "left"]
"""Why a request ends early: the engine refused it, its step failed, its logits are NaN, the engine died, it
took too long, its reader took too long, its reader left."""


@dataclass
class Order:
    """A prompt as it goes to the engine.

    shown: special tokens that belong to the text of its completions.
    marks: whether to say of each token how it came about.
    read: the log-probabilities of the prompt's tokens, from the first completion's first token on.
    """

    prompt: list[int]
    params: SamplingParams
    shown: frozenset[int] = frozenset()
    marks: bool = False
    read: list[PromptToken | None] = field(default_factory=list)


@dataclass
class Piece:
    """Text and tokens that are ready to be sent, of one token or several.

    marks: if asked for, the text of each token and how it came about.
    """

    text: str
    tokens: list[int]
    logprobs: list[Token] = field(default_factory=list)
    marks: list[tuple[str, str]] = field(default_factory=list)


class Choice:
    """One completion: a `Sink` that makes text of tokens and looks for stop strings.

    fresh: pieces that have not been sent.
    begins: whether its first token begins a text.
    reason: None until it has ended.
    """

    def __init__(self, group: ChoiceGroup, index: int, order: Order, tokenizer: Tokenizer) -> None:
        self.group, self.index, self.order = group, index, order
        self.number = -1
        self.fresh: list[Piece] = []
        self.tokens: list[int] = []
        self.logprobs: list[Token] = []
        self.reason: str | None = None
        self.cached = 0
        self.started = False  # whether its first chunk is sent
        self.last = group.arrived
        self.mark = ""
        self._text = TextStream(tokenizer, order.params, order.prompt, order.shown)
        self.begins = self._text.begins

    @property
    def text(self) -> str:
        """All of it so far."""
        return self._text.text

    def token(self, token: int, reason: str | None, logprob: Token | None) -> None:
        """See `Sink`. A stop string ends it here, so the engine is told to abort it.

        The place of its log-probabilities becomes the token's id. The metrics hear how long after the last
        token this one came, or after the request. Where it is streamed, the token is one fresh piece more;
        with more than `most_unsent` of them the group gives up ("slow"), and hears of no token any more.
        """
        group = self.group
        ended: FinishReason | None = reason  # type: ignore[assignment]
        ended, text = self._text.advance(token, ended)
        self.tokens.append(token)
        if logprob is not None:
            logprob.place = token
            self.logprobs.append(logprob)
        group.metrics.token(group.engine.now - self.last, first=len(self.tokens) == 1)
        self.last = group.engine.now
        if ended is not None:
            self.reason = ended
            if reason is None:  # a stop string, which the engine does not look for
                group.engine.abort([self.number])
        if group.streamed:
            marks = [(text, self.mark)] if self.order.marks else []
            self.mark = ""
            self.fresh.append(Piece(text, [token], [] if logprob is None else [logprob], marks))
            if len(self.fresh) > group.most_unsent:
                group.give_up("slow", "the reader is too slow")
                return
        group.hear(ended is not None)

    def end(self, reason: str, message: str) -> None:
        """See `Sink`."""
        if reason in ("refused", "error", "nan", "died"):
            self.group.give_up(reason, message)  # type: ignore[arg-type]
            return
        _, text = self._text.advance(None, "length")
        if self.group.streamed and text:
            self.fresh.append(Piece(text, [], marks=[(text, "")] if self.order.marks else []))
        self.reason = "length" if reason == "abort" else reason
        self.group.hear(True)

    def found(self, tokens: int) -> None:
        """See `Sink`."""
        self.cached = tokens

    def entered(self) -> None:
        """See `Sink`."""
        self.group.entered = self.group.entered or self.group.engine.now

    def read(self, prompt: list[PromptToken | None]) -> None:
        """See `Sink`."""
        self.order.read = prompt

    def marked(self, mark: str) -> None:
        """See `Sink`."""
        self.mark = mark

    def take(self) -> Piece:
        """All that is fresh, as one piece."""
        fresh, self.fresh = self.fresh, []
        if len(fresh) == 1:
            return fresh[0]
        whole = Piece("".join(piece.text for piece in fresh), [])
        for piece in fresh:
            whole.tokens += piece.tokens
            whole.logprobs += piece.logprobs
            whole.marks += piece.marks
        return whole


class ChoiceGroup:
    """The completions of one HTTP request.

    trouble: why it cannot be answered in full, and a sentence about it.
    entered, first_token: when the first of them got a row (if it is traced), and had a token.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        tokenizer: Tokenizer,
        orders: Sequence[Order],
        *,
        streamed: bool,
        most_unsent: int,
    ) -> None:
        self.engine, self.metrics = engine, metrics
        self.orders, self.streamed, self.most_unsent = orders, streamed, most_unsent
        self.arrived = time.perf_counter()
        self.trouble: tuple[Trouble, str] | None = None
        samples = [order for order in orders for _ in range(order.params.n)]
        self.choices = [Choice(self, index, order, tokenizer) for index, order in enumerate(samples)]
        self.left = len(self.choices)
        self.entered: float | None = None
        self.first_token: float | None = None
        self._told, self._waiter = False, cast("asyncio.Future[None] | None", None)
        self._deadline: asyncio.TimerHandle | None = None

    def send(self, *, priority: int, salt: str, seconds: float, traced: bool = False) -> None:
        """Hand all to the engine but the stop strings, which are looked for here. It has so many seconds."""
        at = 0
        for order in self.orders:
            mine = self.choices[at : at + order.params.n]
            params = replace(order.params, stop=()) if order.params.stop else order.params
            numbers = self.engine.submit(
                order.prompt, params, mine, priority=priority, salt=salt, traced=traced, marks=order.marks
            )
            for choice, number in zip(mine, numbers, strict=True):
                choice.number = number
            at += order.params.n
        loop = asyncio.get_running_loop()
        late = "the request was not done by its deadline, or within the server's --max-seconds"
        self._deadline = loop.call_later(seconds, self.give_up, "deadline", late)

    def hear(self, ended: bool) -> None:
        """Something has come for one of the completions."""
        if self.first_token is None:
            self.first_token = self.engine.now
        self.left -= ended
        if self.streamed or self.left == 0:
            self._tell()

    def give_up(self, trouble: Trouble, message: str) -> None:
        """End what has not ended: the engine frees it at its next step."""
        if self.trouble is None and (self.left or trouble == "slow"):
            self.trouble = trouble, message
        self.close()
        self._tell()

    def close(self) -> None:
        """Leave nothing behind; harmless after the end."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.engine.abort(choice.number for choice in self.choices if choice.reason is None)

    async def news(self) -> None:
        """Wait until there is something to send, or to say. Only one may wait."""
        if not self._told:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._told = False

    def _tell(self) -> None:
        """Half as dear as an `asyncio.Event`, and there is one for every token."""
        self._told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def computed(self) -> bool:
        """False where the engine has refused the request."""
        return self.trouble is None or self.trouble[0] != "refused"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(order.prompt) for order in self.orders)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(choice.tokens) for choice in self.choices)
