"""From a request to what the engine is asked for: prompts as token ids, and sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from common.errors import UserError
from common.rules import check_prompt
from common.sampling.params import MAX_INT, MAX_N, SamplingParams
from common.text.ids import LONG
from common.text.tokenizer import Tokenizer
from serving.http import grammars
from serving.http.errors import ApiError, of_user_error
from serving.http.limits import Limits
from serving.http.schema import ChatRequest, CompletionRequest, GenerateRequest, Generation, TokenizeRequest
from serving.messages import Ready
from serving.order import Order
from serving.tools.loosen import loosen
from serving.tools.request import conversation, tools_of

MANY = 50
"""Messages above which a conversation is long, whatever stands in them."""
SLICE = 10_000
"""Entries of a list that are made JSON while nothing else runs, which takes less than a millisecond."""
USUAL_TOKENS = 16
"""`max_tokens` of a completion that does not say; OpenAI's default."""
_COPIED = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids"),
)
_RESERVED = {
    *("messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "tools", "self"),
}
T = TypeVar("T")


class Orders:
    """Makes orders for one model."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self._threads = ThreadPoolExecutor(2, "tokenize")
        with suppress(UserError):  # it has none; where it has one it is compiled now, not while others stream
            _ = tokenizer.chat_template

    async def completion(self, request: CompletionRequest | GenerateRequest, ready: Ready) -> list[Order]:
        """One order a prompt. Raises `ApiError`."""
        given = request.prompt
        if isinstance(given, list) and len(given) > max(ready.max_len, self.limits.max_prompts):
            if isinstance(given[0], int):  # it need not be looked through to be refused
                raise _most("prompt", len(given), ready.max_len - 1, "tokens")
            raise _most("prompt", len(given), self.limits.max_prompts, "prompts")
        prompts = _prompts(given)
        if len(prompts) > self.limits.max_prompts:
            raise _most("prompt", len(prompts), self.limits.max_prompts, "prompts")
        more: dict[str, Any] = {}
        echo = False
        if isinstance(request, CompletionRequest):
            echo = bool(request.echo)
            if request.suffix:
                raise ApiError(400, "suffix is not supported, so it must be empty", param="suffix")
            more["logprobs"] = request.logprobs
            if echo and request.logprobs is not None:
                more["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
            else:
                more |= _prompt_logprobs(request)
            more |= _best_of(request)
        elif request.n not in (None, 1):  # its answer has room for one text
            raise ApiError(400, f"n is {request.n}, but must be 1 at /generate", param="n")
        orders = []
        for prompt in prompts:
            special = request.add_special_tokens is not False
            ids = await self.encode(prompt, special, ready) if isinstance(prompt, str) else prompt
            text = ""
            if echo:
                text = prompt if isinstance(prompt, str) else await self.decode(ids, ready, "prompt")
            orders.append(self._order(request, ids, ready, more, USUAL_TOKENS, text))
        return self._checked(orders)

    async def chat(self, request: ChatRequest, ready: Ready) -> list[Order]:
        """One order. Raises `ApiError`."""
        contents = (one.get("content") for one in request.messages)
        self._fits(sum(len(text) for text in contents if isinstance(text, str)), ready, "messages")
        tools = tools_of(request, self.tokenizer, self.limits)
        if request.chat_template is not None:
            raise ApiError(
                400, "chat_template is not taken from clients: the model's is used", param="chat_template"
            )
        variables = request.chat_template_kwargs or {}
        if _RESERVED & variables.keys():
            name = min(_RESERVED & variables.keys())
            raise ApiError(400, f"chat_template_kwargs may not hold {name!r}", param="chat_template_kwargs")
        if tools is not None:
            variables = {**variables, "tools": tools.shown}
        ids = await self.chat_ids(request, variables, ready)
        more = _prompt_logprobs(request)
        most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        more["max_tokens"] = most
        if request.logprobs:
            more["logprobs"] = request.top_logprobs or 0
        elif request.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        if tools is not None:
            more["grammar"] = tools.grammar
        order = self._order(request, ids, ready, more, None, "")
        if tools is not None:
            order.calls, order.asked, order.loosened = tools.format, "tools", tools.loosened
        return self._checked([order])

    def ignored(self, request: ChatRequest | TokenizeRequest) -> list[str]:
        """The fields in which messages say something that the model's template does not look at."""
        with suppress(UserError):  # a model without a template: `chat_ids` says so
            template = self.tokenizer.tool_template if request.tools else self.tokenizer.chat_template
            return [f"messages.{field}" for field in sorted(template.ignored(request.messages or []))]
        return []

    async def chat_ids(
        self, request: ChatRequest | TokenizeRequest, variables: dict[str, Any], ready: Ready
    ) -> list[int]:
        """Return the token ids of a conversation. Raises `ApiError`."""
        messages, goes_on = request.messages or [], bool(request.continue_final_message)
        if goes_on and request.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt are both true, but only one may be",
                param="continue_final_message",
            )
        size = sum(len(str(part)) for part in (*messages, variables))
        long = len(messages) > MANY or size > LONG

        def make() -> list[int]:
            return self.tokenizer.chat(
                conversation(messages),
                request.add_generation_prompt is not False,
                continue_final_message=goes_on,
                add_special_tokens=bool(request.add_special_tokens),
                **variables,
            )

        return await self._make(long, make, "messages")

    def _fits(self, characters: int, ready: Ready, param: str) -> None:
        """Raise `ApiError` for a text that is too long whatever its tokens are, before it is tokenized."""
        most = self.tokenizer.most_characters(ready.max_len)
        if most is not None and characters > most:
            raise ApiError(
                400,
                f"{param} has {characters:,} characters, more than a context of {ready.max_len} tokens holds",
                param=param,
            )

    async def encode(self, text: str, add_special_tokens: bool, ready: Ready | None = None) -> list[int]:
        """Return the token ids of a text; `ready`: it has to fit the context. Raises `ApiError`."""
        if ready is not None:
            self._fits(len(text), ready, "prompt")
        return await self._make(
            len(text) > LONG, lambda: self.tokenizer.encode(text, add_special_tokens), "prompt"
        )

    async def tokenize(self, request: TokenizeRequest, ready: Ready) -> list[int]:
        """Return the token ids of either. Raises `ApiError`."""
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "exactly one of prompt and messages must be given", param="prompt")
        if request.prompt is not None:
            if len(request.prompt) > self.limits.max_text:
                raise _most("prompt", len(request.prompt), self.limits.max_text, "characters")
            return await self.encode(request.prompt, request.add_special_tokens is not False)
        return await self.chat_ids(request, {"tools": request.tools} if request.tools else {}, ready)

    async def pieces(self, ids: list[int]) -> list[str | None]:
        """Return the tokens as the vocabulary spells them."""
        return await self._make(
            len(ids) > LONG, lambda: [self.tokenizer.backend.id_to_token(token) for token in ids], "tokens"
        )

    async def json(self, value: dict[str, Any]) -> bytes:
        """Return an answer as JSON; of a long list a slice at a time, so that streams go on in between."""

        def encoded(field: Any) -> bytes:
            if not isinstance(field, list):
                return msgspec.json.encode(field)
            slices = (field[at : at + SLICE] for at in range(0, len(field), SLICE))
            return b"[" + b",".join(msgspec.json.encode(part)[1:-1] for part in slices) + b"]"

        def make() -> bytes:
            fields = (msgspec.json.encode(name) + b":" + encoded(field) for name, field in value.items())
            return b"{" + b",".join(fields) + b"}"

        long = any(isinstance(field, list) and len(field) > LONG for field in value.values())
        return await self._make(long, make, "tokens")

    async def decode(self, ids: list[int], ready: Ready, param: str = "tokens") -> str:
        """The text of token ids, special ones too, which stand in the field `param`. Raises `ApiError`."""

        def make() -> str:
            for token in ids:
                if not 0 <= token < ready.vocab_size:
                    raise UserError(f"token id {token} must be between 0 and {ready.vocab_size - 1}")
            return self.tokenizer.decode(ids, skip_special_tokens=False)

        return await self._make(len(ids) > LONG, make, param)

    async def _make(self, long: bool, make: Callable[[], T], param: str) -> T:
        """Run it here if it is short, in a thread otherwise: 10 KB take a millisecond, and others wait."""
        try:
            if not long:
                return make()
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        except UserError as error:
            raise ApiError(400, str(error), param=param) from None

    def _order(
        self,
        request: Generation,
        ids: list[int],
        ready: Ready,
        more: dict[str, Any],
        usual: int | None,
        text: str,
    ) -> Order:
        given = {name: getattr(request, name) for name in _COPIED}
        given |= {"max_tokens": request.max_tokens, "temperature": given["temperature"], **more}
        given = {name: value for name, value in given.items() if value is not None}
        given.setdefault("temperature", 1.0)
        if "max_tokens" not in given:
            given["max_tokens"] = self._room(ids, ready) if usual is None else usual
            given["max_tokens"] = max(given["max_tokens"], given.get("min_tokens", 0) or 0)
        given["logit_bias"] = self._bias(request)
        found, loosened = grammars.constraint(request, self.limits), list[str]()
        if found is not None and grammars.is_hint(request, found):
            definition, loosened = loosen(found[1])
            found = found[0], definition, found[2]
        if "grammar" not in more:
            given |= grammars.settings(found)
        elif found is not None and found[2] != "response_format":  # that one is in the tools' grammar
            raise ApiError(400, f"{found[2]} and tools both constrain the output", param=found[2])
        if len(request.stop or "") > self.limits.max_stops and isinstance(request.stop, list):
            raise _most("stop", len(request.stop), self.limits.max_stops, "strings")
        names = frozenset({*_COPIED, "max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "prompt"})
        try:
            params = SamplingParams(**given)
            check_prompt(ids, ready.vocab_size, ready.max_len, params, continuous=True)
        except UserError as error:
            raise as_asked(of_user_error(error, names), request) from None
        return Order(ids, params, text, asked="" if found is None else found[2], loosened=loosened)

    def _room(self, ids: list[int], ready: Ready) -> int:
        """Tokens that a request which does not say may generate: what the context and the cache can hold."""
        cache = ready.blocks * ready.block_size + 1 if ready.blocks else MAX_INT
        return max(1, min(ready.max_len, cache) - len(ids))

    def _bias(self, request: Generation) -> dict[int, float]:
        given = request.logit_bias or {}
        if len(given) > self.limits.max_bias:
            raise _most("logit_bias", len(given), self.limits.max_bias, "entries")
        for key in given:
            if not (key.isascii() and key.isdecimal() and len(key) < 12):
                raise ApiError(
                    400, f"logit_bias has the key {key[:20]!r}, but keys are token ids", param="logit_bias"
                )
        return {int(key): bias for key, bias in given.items()}

    def _checked(self, orders: list[Order]) -> list[Order]:
        """Refuse what is too much together."""
        choices = sum(order.params.n for order in orders)
        if choices > self.limits.max_choices:
            raise _most("n", choices, self.limits.max_choices, "completions in all")
        return orders


def _prompts(given: str | list[str | int | list[int]] | list[int]) -> list[str | list[int]]:
    """The prompts of a request: a text, token ids, or a list of these. Raises `ApiError`."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is empty, but must have at least 1 token", param="prompt")
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if kinds in ({str}, {list}):
        return given  # type: ignore[return-value]
    raise ApiError(
        400, "prompt is a mixed list, but must hold only texts, only token ids, or only lists", param="prompt"
    )


def as_asked(error: ApiError, request: Generation) -> ApiError:
    """Under the name that the field has in this request."""
    words, chat = str(error), isinstance(request, ChatRequest)
    if "the prompt " in words and error.param is None:
        error.param = "messages" if chat else "prompt"
    theirs = dict[str, str]()
    if isinstance(request, ChatRequest):
        pairs = ("max_tokens", "max_completion_tokens"), ("logprobs", "top_logprobs")
        theirs = {ours: name for ours, name in pairs if getattr(request, name) is not None}
    elif isinstance(request, CompletionRequest):
        if request.best_of is not None:
            theirs["n"] = "best_of"
        if request.prompt_logprobs is None:  # it is what `echo` makes of `logprobs`
            theirs["prompt_logprobs"] = "echo with logprobs"
    for ours, name in theirs.items():
        if error.param == ours or words.startswith(f"{ours} "):
            return ApiError(400, name + words.removeprefix(ours), param=name.split()[0])
    return error


def _prompt_logprobs(request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    """vLLM's field, which its server does not stream either."""
    if request.prompt_logprobs is None:
        return {}
    if request.stream:
        raise ApiError(
            400, "prompt_logprobs cannot be streamed; echo with logprobs can", param="prompt_logprobs"
        )
    return {"prompt_logprobs": request.prompt_logprobs}


def _best_of(request: CompletionRequest) -> dict[str, Any]:
    """`best_of` completions are generated, and the `n` most likely ones returned."""
    best, n = request.best_of, request.n or 1
    if best is None or best == n:
        return {}
    if best > MAX_N:
        raise ApiError(400, f"best_of is {best}, but must be at most {MAX_N}", param="best_of")
    if best < n:
        raise ApiError(400, f"best_of is {best}, but must be at least n, {n}", param="best_of")
    if request.stream:
        raise ApiError(400, "best_of cannot be streamed: which are best is known at the end", param="best_of")
    return {"n": best, "logprobs": request.logprobs or 0}


def _most(field: str, count: int, most: int, what: str) -> ApiError:
    return ApiError(400, f"{field} has {count} {what}, but may have at most {most}", param=field)
