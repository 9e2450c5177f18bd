"""The extension that installs the whole API."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import msgspec

from common.errors import UserError
from phases.appendix.api.endpoints import WideChat, WideCompletions, ignore
from phases.appendix.api.openapi import openapi
from phases.appendix.api.tokenization import Tokenization
from serving.app import App, Extension
from serving.http.exchange import Exchange

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Api(Extension):
    """Takes the place of the route for tokens, and adds chats, `/tokenize`, models, and the document.

    version: of the server.
    strict: refuse unknown fields, instead of naming them in the header `x-ladder-ignored`.
    """

    def __init__(self, version: str = "0", strict: bool = False) -> None:
        self.version, self.strict, self.created = version, strict, int(time.time())

    def install(self, app: App) -> None:
        """See `Extension`."""
        self.app, tokenization = app, Tokenization(app, self.strict)
        with suppress(UserError):  # where there is a template it is compiled now, not while others stream
            _ = app.prompts.tokenizer.chat_template
        for path, kind in (("/v1/completions", WideCompletions), ("/v1/chat/completions", WideChat)):
            endpoint = kind(app.prompts, app.model, app.limits)
            endpoint.strict = self.strict
            app.add(path, endpoint)
        app.routes |= {
            "/tokenize": {"POST": tokenization.tokenize},
            "/detokenize": {"POST": tokenization.detokenize},
            "/v1/models": {"GET": self.models},
            f"/v1/models/{app.model}": {"GET": self.models},
            "/version": {"GET": lambda exchange: exchange.json({"version": self.version})},
            "/openapi.json": {"GET": lambda exchange: exchange.json(openapi(self.version))},
        }

    async def read(self, exchange: Exchange, kind: Any, body: bytes) -> None:
        """Find the fields of a body that its kind has not; what is no object is refused later."""
        with suppress(ValueError, RecursionError):
            unknown = sorted(_fields.decode(body).keys() - set(kind.__struct_fields__))
            ignore(exchange, unknown, self.strict)

    async def models(self, exchange: Exchange) -> None:
        """Answer with the model, alone or in a list of one."""
        card = {
            "id": self.app.model,
            "object": "model",
            "created": self.created,
            "owned_by": "inference-ladder",
        }
        if self.app.prompts.defaults:
            card["default_sampling_params"] = dict(self.app.prompts.defaults)
        if self.app.engine.ready is not None:
            card["max_model_len"] = self.app.engine.ready.max_len
        alone = exchange.path != "/v1/models"
        await exchange.json(card if alone else {"object": "list", "data": [card]})
