"""The extension that installs what other clients speak."""

from __future__ import annotations

from functools import partial

from phases.appendix.api.extension import Documented, chat_of
from phases.appendix.protocols import ollama
from phases.appendix.protocols.anthropic import AnthropicErrors, Messages, MessagesRequest
from phases.appendix.protocols.responses import Responses
from phases.appendix.protocols.translation import ErrorForm, Translation
from serving.app import App

FORMS = {"/v1/responses": ErrorForm(), "/v1/messages": AnthropicErrors(), "/api/": ollama.OllamaErrors()}
"""Forms of errors, by the beginnings of paths."""


class Protocols(Documented):
    """Adds OpenAI's newer route, Anthropic's and Ollama's.

    strict: refuse what would be ignored.
    """

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict

    def install(self, app: App) -> None:
        """See `Extension`."""
        chat = chat_of(app, self.strict)
        messages = Messages(chat)
        routes: dict[str, Translation] = {
            "/v1/responses": Responses(chat),
            "/v1/messages": messages,
            "/api/chat": ollama.Ollama(chat, talks=True),
            "/api/generate": ollama.Ollama(chat, talks=False),
        }
        self.bodies |= {path: route.body for path, route in routes.items()}
        self.bodies |= {"/v1/messages/count_tokens": MessagesRequest, "/api/show": ollama.OllamaRequest}
        posts = {path: partial(route.serve, app) for path, route in routes.items()}
        posts["/v1/messages/count_tokens"] = partial(messages.count, app)
        posts["/api/show"] = partial(ollama.show, app)
        for path, handle in posts.items():
            form = next(form for start, form in FORMS.items() if path.startswith(start))
            app.routes[path] = {"POST": partial(form.told, handle)}
        app.routes["/api/tags"] = {"GET": partial(ollama.tags, app)}
        app.routes["/api/version"] = {"GET": lambda exchange: exchange.json({"version": ollama.VERSION})}
