"""The routes that other clients speak."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from common.http.errors import ErrorForm
from phases.appendix.protocols.anthropic import Messages, count
from phases.appendix.protocols.ollama import (
    VERSION,
    Ollama,
    error_form,
    generate,
    running,
    show,
    tags,
)
from phases.appendix.protocols.responses import Responses
from serving.app import App
from serving.http.request import HttpRequest


def add_protocols(app: App) -> None:
    """Add to a server the routes of OpenAI's Responses, Anthropic's Messages, and Ollama's API."""
    messages = Messages(app.chat)
    app.add("/v1/responses", Responses(app.chat))
    app.add("/v1/messages", messages)
    for path, talks in (("/api/chat", True), ("/api/generate", False)):
        ollama = Ollama(app.chat, talks=talks)
        app.add(path, ollama)
        app.routes[path] = {"POST": partial(generate, app, ollama)}
    app.routes |= {
        "/v1/messages/count_tokens": {"POST": partial(count, app, messages)},
        "/api/show": {"POST": partial(show, app)},
        "/api/tags": {"GET": partial(tags, app)},
        "/api/ps": {"GET": partial(running, app)},
        "/api/version": {"GET": lambda http: http.json({"version": VERSION})},
    }
    forms = {"/api/": error_form({}), "/v1/messages": messages.form}
    app.before.insert(0, partial(set_form, forms))


async def set_form(forms: Mapping[str, ErrorForm], http: HttpRequest) -> bool:
    """Give all errors of an HTTP request the form of its protocol, also of a path that there is not.

    forms: of errors, by the beginning of the path. Returns False: the request is not answered here.
    """
    for beginning, form in forms.items():
        if http.path.startswith(beginning):
            http.form = form
    return False
