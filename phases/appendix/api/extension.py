"""The extension that installs the whole API."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from common.errors import UserError
from phases.appendix.api.endpoints import WideChat, WideCompletions, ignore
from phases.appendix.api.openapi import Documented, openapi
from phases.appendix.api.schema import DetokenizeRequest, TokenizeRequest
from phases.appendix.api.tokenization import Tokenization
from phases.appendix.observability.live import HTML
from serving.app import App
from serving.http.exchange import Exchange

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


DOCS = Path(__file__).parent / "docs.html"
SVG = (b"content-type", b"image/svg+xml")
ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" stroke="#3b7dd8" stroke-width="2">'
    b'<path d="M4 1v14M12 1v14M4 4h8M4 8h8M4 12h8"/></svg>'
)


def chat_of(app: App, strict: bool, describe: bool) -> WideChat:
    """Make the endpoint for chats of an application; protocols have one of their own."""
    chat = WideChat(app.prompts, app.model, app.limits)
    chat.strict, chat.describe = strict, describe
    return chat


class Api(Documented):
    """Takes the place of the route for tokens, and adds chats, `/tokenize`, models, and the document.

    version: of the server.
    strict: refuse unknown fields, instead of naming them in the header `x-ladder-ignored`.
    describe: tools in words, to models whose template shows them none.
    """

    def __init__(self, version: str = "0", strict: bool = False, describe: bool = True) -> None:
        super().__init__()
        self.version, self.strict, self.describe = version, strict, describe
        self.created = int(time.time())

    def install(self, app: App) -> None:
        """See `Extension`."""
        self.app, tokenization = app, Tokenization(app, self.strict, self.describe)
        with suppress(UserError):  # where there is a template it is compiled now, not while others stream
            _ = app.prompts.tokenizer.chat_template
        completions = WideCompletions(app.prompts, app.model, app.limits)
        completions.strict = self.strict
        self.add(app, "/v1/completions", completions)
        self.add(app, "/v1/chat/completions", chat_of(app, self.strict, self.describe))
        app.routes |= {
            "/tokenize": {"POST": tokenization.tokenize},
            "/detokenize": {"POST": tokenization.detokenize},
            "/v1/models": {"GET": self.models},
            f"/v1/models/{app.model}": {"GET": self.models},
            "/version": {"GET": lambda exchange: exchange.json({"version": self.version})},
            "/openapi.json": {"GET": lambda exchange: exchange.json(openapi(app, self.version))},
            "/docs": {"GET": lambda exchange: exchange.answer(200, DOCS.read_bytes(), HTML)},
            "/favicon.ico": {"GET": lambda exchange: exchange.answer(200, ICON, [SVG])},
            "/ping": app.routes["/health"],
        }
        self.bodies |= {"/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}

    async def read(self, exchange: Exchange, kind: type, body: bytes) -> None:
        """Find the fields of a body that its kind has not; what is no object is refused later."""
        with suppress(ValueError, RecursionError):
            known = {field.name for field in msgspec.structs.fields(kind)}
            unknown = sorted(_fields.decode(body).keys() - known)
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
