"""The extension that installs what other clients speak."""

from __future__ import annotations

from functools import partial

from phases.appendix.api.endpoints import WideChat
from phases.appendix.protocols.anthropic import Messages, MessagesRequest, count
from phases.appendix.protocols.ollama import VERSION, Ollama, OllamaRequest, show, tags
from phases.appendix.protocols.responses import Responses
from serving.app import App, Extension


class Protocols(Extension):
    """Adds OpenAI's newer route, Anthropic's and Ollama's."""

    def install(self, app: App) -> None:
        """See `Extension`."""
        chat = WideChat(app.prompts, app.model, app.limits)
        messages = Messages(chat)
        app.add("/v1/responses", Responses(chat))
        app.add("/v1/messages", messages)
        app.add("/api/chat", Ollama(chat, talks=True))
        app.add("/api/generate", Ollama(chat, talks=False))
        app.bodies |= {
            "/v1/messages/count_tokens": MessagesRequest,
            "/api/show": OllamaRequest,
        }
        app.routes |= {
            "/v1/messages/count_tokens": {"POST": partial(count, app, messages)},
            "/api/show": {"POST": partial(show, app)},
            "/api/tags": {"GET": partial(tags, app)},
            "/api/version": {"GET": lambda exchange: exchange.json({"version": VERSION})},
        }
