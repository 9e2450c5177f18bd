"""The HTTP routes of other clients' APIs: OpenAI's Responses, Anthropic's Messages, Ollama's API."""

from __future__ import annotations

from functools import partial

from phases.appendix.protocols.anthropic import Messages, count
from phases.appendix.protocols.ollama import (
    VERSION,
    Ollama,
    add_ollama,
    error_form,
    running,
    show,
    tags,
)
from phases.appendix.protocols.responses import Responses
from serving.app import App


def add_protocols(app: App) -> None:
    """Add to a server the routes of OpenAI's Responses, Anthropic's Messages, and Ollama's API."""
    app.forms["/api/"] = error_form({})
    messages = Messages(app.chat)
    app.add("/v1/responses", Responses(app.chat))
    app.add("/v1/messages", messages)
    for path, talks in (("/api/chat", True), ("/api/generate", False)):
        add_ollama(app, path, Ollama(app.chat, talks=talks))
    app.routes |= {
        "/v1/messages/count_tokens": {"POST": partial(count, app, messages)},
        "/api/show": {"POST": partial(show, app)},
        "/api/tags": {"GET": partial(tags, app)},
        "/api/ps": {"GET": partial(running, app)},
        "/api/version": {"GET": lambda http: http.json({"version": VERSION})},
    }
