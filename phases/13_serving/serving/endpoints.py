"""Routes for tokens: from the fields of a request to orders for the engine, and to the answer's shape."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from common.errors import UserError
from common.rules import check_prompt
from common.sampling.params import MAX_INT, SamplingParams
from serving.completion import Order
from serving.http.answers import Answer, ChatAnswer, CompletionAnswer
from serving.http.errors import ApiError, of_user_error
from serving.http.exchange import Exchange
from serving.http.limits import Limits
from serving.http.schema import ChatBody, CompletionBody, Generation
from serving.messages import Ready
from serving.prompts import Prompts

USUAL_TOKENS = 16
"""`max_tokens` of a completion that does not say; OpenAI's default."""
COPIED = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids"),
)
B = TypeVar("B", bound=Generation)


class Endpoint(Generic[B]):
    """A route for tokens.

    body: the fields of its requests.
    answers, prefix: how its answers look, and how their ids begin.
    source: the field that the prompt is made of.
    """

    body: type[B]
    answers: type[Answer]
    prefix = ""
    source = "prompt"

    def __init__(self, prompts: Prompts, model: str, limits: Limits) -> None:
        self.prompts, self.model, self.limits = prompts, model, limits

    async def orders(self, exchange: Exchange, request: B, ready: Ready) -> list[Order]:
        """Make one order a prompt. Raises `ApiError`."""
        raise NotImplementedError

    def answer(self, exchange: Exchange, request: B) -> Answer:
        """Make what shapes the answer. Raises `ApiError`."""
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        made = f"{self.prefix}-{exchange.id.removeprefix('req-')}"
        return self.answers(made, self.model, self.prompts.tokenizer, **self.shape(request))

    def shape(self, request: B) -> dict[str, Any]:
        """Return what the answer has to know of the request."""
        options = request.stream_options
        return {
            "usage": bool(options and options.include_usage),
            "continuous": bool(options and options.continuous_usage_stats),
        }

    def ignored(self, request: B) -> list[str]:
        """Name what the request says in vain, beside unknown fields."""
        return []

    def params(
        self, request: B, ids: list[int], ready: Ready, usual: int | None, **more: Any
    ) -> SamplingParams:
        """Return the settings of a prompt. Raises `ApiError` for what could never be served.

        usual: `max_tokens` where the request does not say; None: as many as there is room for.
        more: settings that are not fields of their name.
        """
        given = {name: getattr(request, name) for name in COPIED} | {"max_tokens": request.max_tokens} | more
        said = {name: value for name, value in given.items() if value is not None}
        given = {"temperature": 1.0} | dict(self.prompts.defaults) | said
        if "max_tokens" not in given:
            cache = ready.blocks * ready.block_size + 1 if ready.blocks else MAX_INT
            room = max(1, min(ready.max_len, cache) - len(ids))
            given["max_tokens"] = max(room if usual is None else usual, given.get("min_tokens", 0))
        given["logit_bias"] = self._bias(request)
        if isinstance(request.stop, list) and len(request.stop) > self.limits.max_stops:
            raise most("stop", len(request.stop), self.limits.max_stops, "strings")
        names = frozenset({*COPIED, "max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "prompt"})
        try:
            params = SamplingParams(**given)
            check_prompt(ids, ready.vocab_size, ready.max_len, params, continuous=True, reads_prompts=True)
        except UserError as error:
            raise self.named(of_user_error(error, names), request) from None
        return params

    def _bias(self, request: B) -> dict[int, float]:
        given = request.logit_bias or {}
        if len(given) > self.limits.max_bias:
            raise most("logit_bias", len(given), self.limits.max_bias, "entries")
        for key in given:
            if not (key.isascii() and key.isdecimal() and len(key) < 12):
                raise ApiError(
                    400, f"logit_bias has the key {key[:20]!r}, but keys are token ids", param="logit_bias"
                )
        return {int(key): bias for key, bias in given.items()}

    def checked(self, orders: list[Order]) -> list[Order]:
        """Refuse what is too much together."""
        choices = sum(order.params.n for order in orders)
        if choices > self.limits.max_choices:
            raise most("n", choices, self.limits.max_choices, "completions in all")
        return orders

    def named(self, error: ApiError, request: B) -> ApiError:
        """Return an error about the prompt or a setting under the name that its field has in this request."""
        if "the prompt " in str(error) and error.param is None:
            error.param = self.source
        return error

    def refusal(self, message: str, order: Order, request: B) -> ApiError:
        """Return the error of a request that the engine refuses."""
        return self.named(of_user_error(UserError(message), type(request).__struct_fields__), request)


class Completions(Endpoint[CompletionBody]):
    """`/v1/completions`: one prompt or several, as text or token ids."""

    body, answers, prefix = CompletionBody, CompletionAnswer, "cmpl"

    async def orders(self, exchange: Exchange, request: CompletionBody, ready: Ready) -> list[Order]:
        """See `Endpoint`."""
        orders = []
        for prompt in prompts_of(request.prompt, ready, self.limits):
            ids = await self.prompts.encode(prompt, ready=ready) if isinstance(prompt, str) else prompt
            orders.append(Order(ids, self.params(request, ids, ready, USUAL_TOKENS)))
        return self.checked(orders)


class Chat(Endpoint[ChatBody]):
    """`/v1/chat/completions`: a conversation."""

    body, answers, prefix = ChatBody, ChatAnswer, "chatcmpl"
    source = "messages"

    async def orders(self, exchange: Exchange, request: ChatBody, ready: Ready) -> list[Order]:
        """See `Endpoint`."""
        self.prompts.fits_messages(request.messages, ready)
        ids = await self.prompts.chat(request.messages)
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        return self.checked([Order(ids, self.params(request, ids, ready, None, max_tokens=limit))])

    def named(self, error: ApiError, request: ChatBody) -> ApiError:
        """See `Endpoint`."""
        error = super().named(error, request)
        return renamed(error, "max_tokens", "max_completion_tokens", request.max_completion_tokens)


def renamed(error: ApiError, setting: str, field: str, given: object) -> ApiError:
    """Return an error about a setting as one about the field that it was given in."""
    words = str(error)
    if given is None or (error.param != setting and not words.startswith(f"{setting} ")):
        return error
    return ApiError(400, field + words.removeprefix(setting), param=field.split()[0])


def prompts_of(
    given: str | list[str | int | list[int]] | list[int], ready: Ready, limits: Limits
) -> list[str | list[int]]:
    """Return the prompts of a request: a text, token ids, or a list of these. Raises `ApiError`."""
    if isinstance(given, list) and len(given) > max(ready.max_len, limits.max_prompts):
        if isinstance(given[0], int):  # it need not be looked through to be refused
            raise most("prompt", len(given), ready.max_len - 1, "tokens")
        raise most("prompt", len(given), limits.max_prompts, "prompts")
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is empty, but must have at least 1 token", param="prompt")
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if kinds not in ({str}, {list}):
        raise ApiError(
            400,
            "prompt is a mixed list, but must hold only texts, only token ids, or only lists",
            param="prompt",
        )
    if len(given) > limits.max_prompts:
        raise most("prompt", len(given), limits.max_prompts, "prompts")
    return given  # type: ignore[return-value]


def most(field: str, count: int, limit: int, what: str) -> ApiError:
    """Return the error of a field that has too many of something."""
    return ApiError(400, f"{field} has {count} {what}, but may have at most {limit}", param=field)
