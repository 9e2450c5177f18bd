"""The extension that installs the whole API."""

from __future__ import annotations

from phases.appendix.api.endpoints import Generate, WideChat, WideCompletions
from phases.appendix.api.openapi import openapi
from phases.appendix.api.tokenization import Tokenization
from serving.app import App, Extension
from serving.http.exchange import Exchange


class Api(Extension):
    """Takes the place of the routes for tokens, and adds `/generate`, `/tokenize` and the document."""

    def install(self, app: App) -> None:
        """See `Extension`."""
        self.version, tokenization = app.version, Tokenization(app)
        app.add("/v1/completions", WideCompletions(app.prompts, app.model, app.limits))
        app.add("/v1/chat/completions", WideChat(app.prompts, app.model, app.limits))
        app.add("/generate", Generate(app.prompts, app.model, app.limits))
        app.routes |= {
            "/tokenize": {"POST": tokenization.tokenize},
            "/detokenize": {"POST": tokenization.detokenize},
            "/openapi.json": {"GET": self.document},
        }

    async def document(self, exchange: Exchange) -> None:
        """Answer with the OpenAPI document."""
        await exchange.json(openapi(self.version))
