"""Routes for tokens: from the fields of a request to orders for the engine, and to the answer's shape."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

from common.errors import UserError
from common.rules import check_prompt
from common.sampling.params import MAX_INT, SamplingParams
from common.text.tokenizer import LONG, Tokenizer
from serving.completion import Order
from serving.http.answers import Answer
from serving.http.errors import ApiError, ErrorForm, too_many, wrong
from serving.http.exchange import Exchange
from serving.http.limits import Limits
from serving.http.schema import CompletionBody, Generation
from serving.messages import Ready

USUAL_TOKENS = 16
"""`max_tokens` of a completion that does not say; OpenAI's default."""
COPIED = (
    *(
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "ignore_eos",
        "min_tokens",
    ),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "logit_bias",
    ),
)
T = TypeVar("T")


class Prompts:
    """Encodes for one model: what is short at once, what is long in a thread.

    defaults: settings of the model for requests that do not say; see `sampling_defaults`.
    """

    def __init__(
        self, tokenizer: Tokenizer, defaults: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.tokenizer, self.defaults = tokenizer, defaults
        self._threads = ThreadPoolExecutor(2, "tokenize")

    async def encode(self, text: str, special: bool, ready: Ready) -> list[int]:
        """Return the token ids of a text, which has to fit the context. Raises `ApiError`."""
        self.fits(len(text), ready, "prompt")
        return await self.make(
            len(text) > LONG, lambda: self.tokenizer.encode(text, special), "prompt"
        )

    def fits(self, characters: int, ready: Ready, param: str) -> None:
        """Raise `ApiError` for a text that is too long whatever its tokens are, before it is tokenized."""
        most = self.tokenizer.most_characters(ready.max_len)
        if most is not None and characters > most:
            context = f"more than a context of {ready.max_len} tokens holds"
            raise wrong(param, f"{param} has {characters:,} characters, {context}")

    async def make(self, long: bool, make: Callable[[], T], param: str) -> T:
        """Run `make` in a thread if it is long: 10 KB take a millisecond, and others would wait."""
        try:
            if not long:
                return make()
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        except UserError as error:
            raise wrong(param, str(error)) from None


class Endpoint:
    """A route for tokens: `/v1/completions`, one prompt or several, as text or token ids.

    body: the fields of its requests.
    answers, prefix: how its answers look, and how their ids begin.
    source: the field that the prompt is made of.
    form: of errors.
    most_temperature: of the API that it speaks; an engine takes more.
    """

    body: type[Generation] = CompletionBody
    answers = Answer
    prefix, source = "cmpl", "prompt"
    form = ErrorForm()
    most_temperature = 2.0

    def __init__(self, prompts: Prompts, model: str, limits: Limits) -> None:
        self.prompts = prompts
        self.model = model
        self.limits = limits

    def of(self, request: Any) -> Endpoint:
        """Return the endpoint of one request: this one, or one that is made for it. Raises `ApiError`."""
        heat = request.temperature
        if heat is not None and heat > self.most_temperature:
            limit = f"between 0 and {self.most_temperature:g}"
            raise wrong("temperature", f"temperature is {heat}, but must be {limit}")
        return self

    async def orders(self, exchange: Exchange, request: Any, ready: Ready) -> list[Order]:
        """Make one order a prompt. Raises `ApiError`."""
        prompts = await self.encoded(request.prompt, ready)
        return [Order(ids, self.params(request, ids, ready, USUAL_TOKENS)) for ids in prompts]

    async def encoded(self, given: Any, ready: Ready, special: bool = True) -> list[list[int]]:
        """Return the token ids of each prompt of a text, token ids, or a list of these. Raises `ApiError`."""
        given = [given] if isinstance(given, str) else given
        if not given:
            raise wrong("prompt", "prompt is empty, but must have at least 1 token")
        kind, most = type(given[0]), self.limits.max_prompts
        most = max(ready.max_len, most) if kind is int else most
        if len(given) > most:  # it need not be looked through to be refused
            raise too_many("prompt", len(given), most, "tokens" if kind is int else "prompts")
        if {type(item) for item in given} != {kind}:
            mixed = "prompt is a mixed list, but must hold only texts, only token ids, or only lists"
            raise wrong("prompt", mixed)
        if kind is str:
            return [await self.prompts.encode(text, special, ready) for text in given]
        return [given] if kind is int else given

    def answer(self, exchange: Exchange, request: Generation) -> Answer:
        """Make what shapes the answer. Raises `ApiError`."""
        if request.stream_options is not None and not request.stream:
            raise wrong("stream_options", "stream_options needs stream to be true")
        made = f"{self.prefix}-{exchange.id.removeprefix('req-')}"
        return self.answers(made, self.model, self.prompts.tokenizer, request)

    def params(
        self, request: Generation, ids: list[int], ready: Ready, usual: int | None, **more: Any
    ) -> SamplingParams:
        """Return the settings of a prompt. Raises `ApiError` for what could never be served.

        usual: `max_tokens` where the request does not say; None: as many as there is room for.
        more: settings that are not fields of their name.
        """
        bounds = {
            "stop": (self.limits.max_stops, "strings"),
            "logit_bias": (self.limits.max_bias, "entries"),
        }
        for field, (most, what) in bounds.items():
            value = getattr(request, field)
            if isinstance(value, list | dict) and len(value) > most:
                raise too_many(field, len(value), most, what)
        fields = [(name, getattr(request, name)) for name in COPIED]
        said = {name: value for name, value in (*fields, *more.items()) if value is not None}
        given: dict[str, Any] = {"temperature": 1.0, **self.prompts.defaults, **said}
        if "max_tokens" not in given:
            cache = ready.blocks * ready.block_size + 1 if ready.blocks else MAX_INT
            room = max(1, min(ready.max_len, cache) - len(ids))
            given["max_tokens"] = max(
                room if usual is None else usual, given.get("min_tokens", 0)
            )
        try:
            params = SamplingParams(**given)
            check_prompt(ids, ready.vocab_size, ready.max_len, params, continuous=True)
        except UserError as error:
            raise self.refusal(str(error), request) from None
        return params

    def refusal(
        self, message: str, request: Generation, order: Order | None = None
    ) -> ApiError:
        """Return the error about a setting, whose name its message begins with, or about the prompt."""
        field, error = re.split(r"\W", message, maxsplit=1)[0], wrong(None, message)
        if field in type(request).__struct_fields__:
            error.param = field
        elif "the prompt " in message:
            error.param = self.source
            error.code = "context_length_exceeded" if "must have at most" in message else None
        return error
