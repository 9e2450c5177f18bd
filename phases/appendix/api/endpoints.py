"""Routes for tokens with all fields: grammars, tools, log-probabilities, `best_of`, `echo`, `/generate`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

from common.errors import UserError
from common.sampling.params import MAX_N
from common.text.ids import LONG
from phases.appendix.api import grammars
from phases.appendix.api.answers import GenerateAnswer, WideChatAnswer, WideCompletionAnswer, WideOrder
from phases.appendix.api.schema import ChatRequest, CompletionRequest, GenerateRequest, TokenizeRequest, Wide
from phases.appendix.tools.loosen import loosen
from phases.appendix.tools.request import conversation, refusal, tools_of
from serving.completion import Order
from serving.endpoints import USUAL_TOKENS, Endpoint, prompts_of, renamed
from serving.http.errors import ApiError
from serving.http.exchange import Exchange, listed
from serving.messages import Ready
from serving.prompts import Prompts

_RESERVED = {
    *("messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "tools", "self"),
}
W = TypeVar("W", bound=Wide)


class WideEndpoint(Endpoint[W]):
    """A route whose output may be constrained, and whose answer may hold ids and marks."""

    def order(
        self,
        request: W,
        ids: list[int],
        ready: Ready,
        usual: int | None,
        more: dict[str, Any],
        text: str = "",
    ) -> WideOrder:
        """Make an order; `more` are settings that are not fields of their name. Raises `ApiError`."""
        found, loosened = grammars.constraint(request, self.limits), list[str]()
        if found is not None and grammars.is_hint(request, found):
            definition, loosened = loosen(found[1])
            found = found[0], definition, found[2]
        if "grammar" not in more:
            more = more | grammars.settings(found)
        elif found is not None and found[2] != "response_format":  # that one is in the tools' grammar
            raise ApiError(400, f"{found[2]} and tools both constrain the output", param=found[2])
        params = self.params(request, ids, ready, usual, **more)
        return WideOrder(
            ids,
            params,
            marks=bool(request.stream and request.return_token_marks),
            text=text,
            asked="" if found is None else found[2],
            loosened=loosened,
        )

    def shape(self, request: W) -> dict[str, Any]:
        """See `Endpoint`."""
        marks = bool(request.stream and request.return_token_marks)
        return super().shape(request) | {"ids": bool(request.return_token_ids), "marks": marks}

    def refusal(self, message: str, order: Order, request: W) -> ApiError:
        """See `Endpoint`. What is wrong with a grammar is told of the field that asked for it."""
        if not message.startswith("grammar") or not isinstance(order, WideOrder):
            return super().refusal(message, order, request)
        if order.calls is not None and order.params.grammar is not None:
            message = refusal(message, order.params.grammar)
        return ApiError(400, message, param=order.asked or None)


class WideCompletions(WideEndpoint[CompletionRequest]):
    """`/v1/completions`."""

    body, answers, prefix = CompletionRequest, WideCompletionAnswer, "cmpl"

    async def orders(self, exchange: Exchange, request: CompletionRequest, ready: Ready) -> list[Order]:
        """See `Endpoint`."""
        prompts = prompts_of(request.prompt, ready, self.limits)
        echo = bool(request.echo)
        if request.suffix:
            raise ApiError(400, "suffix is not supported, so it must be empty", param="suffix")
        more: dict[str, Any] = {"logprobs": request.logprobs}
        if echo and request.logprobs is not None:
            more["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
        else:
            more |= prompt_logprobs(request)
        more |= best_of(request)
        orders: list[Order] = []
        for prompt in prompts:
            ids = await ids_of(self.prompts, prompt, request.add_special_tokens, ready)
            text = ""
            if echo:
                text = prompt if isinstance(prompt, str) else await decode(self.prompts, ids, ready, "prompt")
            orders.append(self.order(request, ids, ready, USUAL_TOKENS, more, text))
        return self.checked(orders)

    def shape(self, request: CompletionRequest) -> dict[str, Any]:
        """See `Endpoint`. `best_of` needs log-probabilities for itself."""
        prompts = request.prompt_logprobs is not None
        return super().shape(request) | {"logprobs": request.logprobs, "prompts": prompts}

    def named(self, error: ApiError, request: CompletionRequest) -> ApiError:
        """See `Endpoint`."""
        error = super().named(error, request)
        echoed = True if request.prompt_logprobs is None else None  # it is what `echo` makes of `logprobs`
        error = renamed(error, "n", "best_of", request.best_of)
        return renamed(error, "prompt_logprobs", "echo with logprobs", echoed)


class Generate(WideEndpoint[GenerateRequest]):
    """`/generate`: one prompt, one text."""

    body, answers, prefix = GenerateRequest, GenerateAnswer, "gen"

    async def orders(self, exchange: Exchange, request: GenerateRequest, ready: Ready) -> list[Order]:
        """See `Endpoint`."""
        (prompt,) = prompts_of(request.prompt, ready, self.limits)
        if request.n not in (None, 1):  # its answer has room for one text
            raise ApiError(400, f"n is {request.n}, but must be 1 at /generate", param="n")
        ids = await ids_of(self.prompts, prompt, request.add_special_tokens, ready)
        return [self.order(request, ids, ready, USUAL_TOKENS, {})]


class WideChat(WideEndpoint[ChatRequest]):
    """`/v1/chat/completions`."""

    body, answers, prefix = ChatRequest, WideChatAnswer, "chatcmpl"
    source = "messages"

    async def orders(self, exchange: Exchange, request: ChatRequest, ready: Ready) -> list[Order]:
        """See `Endpoint`."""
        self.prompts.fits_messages(request.messages, ready)
        tools = tools_of(request, self.prompts.tokenizer, self.limits)
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
        ids = await chat_ids(self.prompts, request, variables)
        more = prompt_logprobs(request)
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        more["max_tokens"] = limit
        if request.logprobs:
            more["logprobs"] = request.top_logprobs or 0
        elif request.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        if tools is not None:
            more["grammar"] = tools.grammar
        order = self.order(request, ids, ready, None, more)
        if tools is not None:
            order.calls, order.asked, order.loosened = tools.format, "tools", tools.loosened
            order.shown = frozenset() if tools.format.token is None else frozenset({tools.format.token})
        if order.loosened:
            exchange.extra.append((b"x-ladder-loosened", listed(order.loosened)))
        return self.checked([order])

    def ignored(self, request: ChatRequest) -> list[str]:
        """See `Endpoint`."""
        return ignored(self.prompts, request)

    def shape(self, request: ChatRequest) -> dict[str, Any]:
        """See `Endpoint`."""
        return super().shape(request) | {"prompts": request.prompt_logprobs is not None}

    def named(self, error: ApiError, request: ChatRequest) -> ApiError:
        """See `Endpoint`."""
        error = renamed(
            super().named(error, request),
            "max_tokens",
            "max_completion_tokens",
            request.max_completion_tokens,
        )
        return renamed(error, "logprobs", "top_logprobs", request.top_logprobs)


def ignored(prompts: Prompts, request: ChatRequest | TokenizeRequest) -> list[str]:
    """Return the fields in which messages say something that the model's template does not look at."""
    with suppress(UserError):  # a model without a template: `chat_ids` says so
        tokenizer = prompts.tokenizer
        template = tokenizer.tool_template if request.tools else tokenizer.chat_template
        return [f"messages.{field}" for field in sorted(template.ignored(request.messages or []))]
    return []


async def chat_ids(
    prompts: Prompts, request: ChatRequest | TokenizeRequest, variables: dict[str, Any]
) -> list[int]:
    """Return the token ids of a conversation. Raises `ApiError`."""
    goes_on = bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt are both true, but only one may be",
            param="continue_final_message",
        )
    settings = {
        "add_generation_prompt": request.add_generation_prompt is not False,
        "continue_final_message": goes_on,
        "add_special_tokens": bool(request.add_special_tokens),
    }
    return await prompts.chat(request.messages or [], {**variables, **settings}, conversation)


async def ids_of(prompts: Prompts, prompt: str | list[int], special: bool | None, ready: Ready) -> list[int]:
    """Return the token ids of a prompt. Raises `ApiError`."""
    return await prompts.encode(prompt, special is not False, ready) if isinstance(prompt, str) else prompt


async def decode(prompts: Prompts, ids: list[int], ready: Ready, param: str = "tokens") -> str:
    """Return the text of token ids, special ones too, which stand in the field `param`. Raises `ApiError`."""

    def make() -> str:
        for token in ids:
            if not 0 <= token < ready.vocab_size:
                raise UserError(f"token id {token} must be between 0 and {ready.vocab_size - 1}")
        return prompts.tokenizer.decode(ids, skip_special_tokens=False)

    return await prompts.make(len(ids) > LONG, make, param)


def prompt_logprobs(request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    """Return the setting of vLLM's field, which its server does not stream either."""
    if request.prompt_logprobs is None:
        return {}
    if request.stream:
        raise ApiError(
            400, "prompt_logprobs cannot be streamed; echo with logprobs can", param="prompt_logprobs"
        )
    return {"prompt_logprobs": request.prompt_logprobs}


def best_of(request: CompletionRequest) -> dict[str, Any]:
    """Return the settings of `best_of` completions, of which the `n` most likely ones are the answer."""
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
