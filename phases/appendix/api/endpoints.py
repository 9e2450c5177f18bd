"""Routes for tokens with all fields: grammars, chats, tools, log-probabilities."""

from __future__ import annotations

from typing import Any

from common.text.tokenizer import LONG
from phases.appendix.api.answers import WideAnswer, WideChatAnswer, WideOrder
from phases.appendix.api.grammars import grammar_of
from phases.appendix.api.reasoning import marks, opened
from phases.appendix.api.schema import ChatRequest, CompletionRequest, Wide
from phases.appendix.tools.described import WARNING, described
from phases.appendix.tools.formats import format_of
from phases.appendix.tools.request import Tools, conversation, refusal, tools_of
from serving.completion import Order
from serving.endpoints import USUAL_TOKENS, Endpoint
from serving.http.answers import Answer
from serving.http.errors import ApiError, wrong
from serving.http.exchange import Exchange
from serving.http.schema import Generation
from serving.messages import Ready

MANY = 50
"""Messages above which a conversation is long, whatever stands in them."""
RESERVED = {"messages", "add_generation_prompt", "add_special_tokens", "tools", "self"}
"""Variables of a template that are not a client's."""


class WideCompletions(Endpoint):
    """`/v1/completions`."""

    body: type[Generation] = CompletionRequest
    answers: type[Answer] = WideAnswer

    async def orders(self, exchange: Exchange, request: Any, ready: Ready) -> list[Order]:
        """See `Endpoint`."""
        prompts = await self.encoded(
            request.prompt, ready, request.add_special_tokens is not False
        )
        usual, logprobs = USUAL_TOKENS, request.logprobs
        return [self.order(request, ids, ready, usual, logprobs=logprobs) for ids in prompts]

    def order(
        self,
        request: Wide,
        ids: list[int],
        ready: Ready,
        usual: int | None,
        *,
        tools: Tools | None = None,
        **more: Any,
    ) -> WideOrder:
        """Make an order; `more` are settings that are not fields of their name. Raises `ApiError`."""
        grammar, asked, loosened = grammar_of(request, self.limits)
        calls = None
        if tools is not None:
            if asked not in ("", "response_format"):  # that one is in the tools' grammar
                raise wrong(asked, f"{asked} and tools both constrain the output")
            grammar = tools.grammar
            asked = "tools"
            loosened = tools.loosened
            calls = tools.format
        return WideOrder(
            ids,
            self.params(request, ids, ready, usual, grammar=grammar, **more),
            asked=asked,
            calls=calls,
            loosened=loosened,
        )

    def refusal(self, message: str, request: Any, order: Order | None = None) -> ApiError:
        """See `Endpoint`. What is wrong with a grammar is told of the field that asked for it."""
        if message.startswith("grammar") and isinstance(order, WideOrder):
            if order.calls is not None and order.params.grammar is not None:
                message = refusal(message, order.params.grammar)
            return wrong(order.asked or None, message)
        return super().refusal(message, request)


class WideChat(WideCompletions):
    """`/v1/chat/completions`: a conversation."""

    body, answers = ChatRequest, WideChatAnswer
    prefix, source = "chatcmpl", "messages"

    def refusal(self, message: str, request: Any, order: Order | None = None) -> ApiError:
        """See `Endpoint`. Two settings have names of their own here."""
        for ours, theirs in (
            ("logprobs ", "top_logprobs "),
            ("max_tokens ", "max_completion_tokens "),
        ):
            if message.startswith(ours) and getattr(request, theirs.strip(), None) is not None:
                message = message.replace(ours, theirs, 1)
        return super().refusal(message, request, order)

    async def prompt(
        self, exchange: Exchange, request: ChatRequest, ready: Ready
    ) -> tuple[list[int], Tools | None]:
        """Return the token ids of a conversation, and the tools that it shows. Raises `ApiError`."""
        tokenizer, messages = self.prompts.tokenizer, request.messages
        texts = (message.get("content") for message in messages)
        self.prompts.fits(
            sum(len(text) for text in texts if isinstance(text, str)), ready, "messages"
        )
        tools = tools_of(request, tokenizer, self.limits)
        shown = (request.tools or []) if tools is not None else []
        settings = {**(request.chat_template_kwargs or {})}
        if reserved := RESERVED & settings.keys():
            raise wrong(
                "chat_template_kwargs", f"chat_template_kwargs may not hold {min(reserved)!r}"
            )
        settings["add_generation_prompt"] = request.add_generation_prompt is not False
        settings["add_special_tokens"] = bool(request.add_special_tokens)

        def make() -> list[int]:
            """Tools are shown in words to a model whose template shows none."""
            made, shows = conversation(messages), format_of(tokenizer)[1]
            if not shows:
                return tokenizer.chat(described(made, shown), **settings)
            return tokenizer.chat(made, **settings | ({"tools": shown} if shown else {}))

        long = (
            len(messages) > MANY
            or sum(len(str(part)) for part in (*messages, settings, shown)) > LONG
        )
        ids = await self.prompts.make(long, make, "messages")
        if shown and not format_of(tokenizer)[1]:
            exchange.extra.append((b"x-ladder-warning", WARNING))
        template = tokenizer.tool_template if request.tools else tokenizer.chat_template
        ignore(exchange, [f"messages.{field}" for field in sorted(template.ignored(messages))])
        return ids, tools

    async def orders(self, exchange: Exchange, request: Any, ready: Ready) -> list[Order]:
        """See `Endpoint`."""
        if request.top_logprobs and not request.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs to be true")
        ids, tools = await self.prompt(exchange, request, ready)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        most = request.max_completion_tokens
        order = self.order(
            request, ids, ready, None, tools=tools, logprobs=logprobs, max_tokens=most
        )
        free = order.asked in ("", "tools") and request.tool_choice in (None, "none", "auto")
        free = free and (request.response_format or {}).get("type", "text") == "text"
        if free and request.separate_reasoning is not False:
            order.reasons = opened(self.prompts.tokenizer, ids)
        if order.reasons is not None:
            order.shown |= marks(self.prompts.tokenizer)
        if order.loosened:
            exchange.extra.append((b"x-ladder-loosened", listed(order.loosened)))
        return [order]


def listed(names: list[str]) -> bytes:
    """Return the first names of a list as the value of a header."""
    text = ", ".join(name[:100] for name in names[:16]).encode("ascii", "replace")
    return bytes(byte if 32 <= byte < 127 else 63 for byte in text)


def ignore(exchange: Exchange, names: list[str]) -> None:
    """Name what a request says in vain in a header."""
    if names:
        exchange.extra.append((b"x-ladder-ignored", listed(names)))
