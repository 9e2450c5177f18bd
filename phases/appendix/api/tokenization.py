"""`/tokenize` and `/detokenize`: texts and conversations to token ids, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from common.text.ids import LONG
from phases.appendix.api.endpoints import chat_ids, decode, ignore, ignored
from phases.appendix.api.schema import DetokenizeRequest, TokenizeRequest
from serving.app import App
from serving.http.errors import too_many, wrong
from serving.http.exchange import Exchange

SLICE = 10_000
"""Entries of a list that are made JSON while nothing else runs, which takes less than a millisecond."""


class Tokenization:
    """Both routes of one application. strict: refuse what would be ignored. describe: see `chat_ids`."""

    def __init__(self, app: App, strict: bool, describe: bool) -> None:
        self.app, self.prompts, self.strict, self.describe = app, app.prompts, strict, describe

    async def tokenize(self, exchange: Exchange) -> None:
        """Answer with token ids."""
        request, ready = await self.app.begin(exchange, TokenizeRequest)
        ignore(exchange, ignored(self.prompts, request), self.strict)
        ids = await self.ids(request)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": ready.max_len, "tokens": ids}
        if request.return_token_strs:
            spelled = self.prompts.tokenizer.backend.id_to_token
            found["token_strs"] = await self.prompts.make(
                len(ids) > LONG, lambda: [spelled(token) for token in ids], "tokens"
            )
        await exchange.answer(200, await self.prompts.make(len(ids) > LONG, lambda: sliced(found), "tokens"))

    async def detokenize(self, exchange: Exchange) -> None:
        """Answer with a text."""
        request, ready = await self.app.begin(exchange, DetokenizeRequest)
        await exchange.json({"prompt": await decode(self.prompts, request.tokens, ready)})

    async def ids(self, request: TokenizeRequest) -> list[int]:
        """Return the token ids of a text or a conversation. Raises `ApiError`."""
        if (request.prompt is None) == (request.messages is None):
            raise wrong("prompt", "exactly one of prompt and messages must be given")
        if request.prompt is None:
            return await chat_ids(self.prompts, request, {}, request.tools or [], describe=self.describe)
        if len(request.prompt) > self.app.limits.max_text:
            raise too_many("prompt", len(request.prompt), self.app.limits.max_text, "characters")
        return await self.prompts.encode(request.prompt, request.add_special_tokens is not False)


def sliced(value: dict[str, Any]) -> bytes:
    """Return an object as JSON; of a long list a slice at a time, so that streams go on in between."""

    def encoded(field: Any) -> bytes:
        if not isinstance(field, list):
            return msgspec.json.encode(field)
        slices = (field[at : at + SLICE] for at in range(0, len(field), SLICE))
        return b"[" + b",".join(msgspec.json.encode(part)[1:-1] for part in slices) + b"]"

    fields = (msgspec.json.encode(name) + b":" + encoded(field) for name, field in value.items())
    return b"{" + b",".join(fields) + b"}"
