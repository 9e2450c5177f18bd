"""The extension that installs what other clients speak."""

from __future__ import annotations

from functools import partial

from phases.appendix.api.endpoints import WideChat
from phases.appendix.protocols import ollama
from phases.appendix.protocols.anthropic import AnthropicErrors, Messages
from phases.appendix.protocols.responses import Responses
from phases.appendix.protocols.translation import ErrorForm, Translation
from serving.app import App, Extension

FORMS = {"/v1/responses": ErrorForm(), "/v1/messages": AnthropicErrors(), "/api/": ollama.OllamaErrors()}
"""Forms of errors, by the beginnings of paths."""


class Protocols(Extension):
    """Adds OpenAI's newer route, Anthropic's and Ollama's."""

    def install(self, app: App) -> None:
        """See `Extension`."""
        chat = WideChat(app.prompts, app.model, app.limits)
        messages = Messages(chat)
        routes: dict[str, Translation] = {
            "/v1/responses": Responses(chat),
            "/v1/messages": messages,
            "/api/chat": ollama.Ollama(chat, talks=True),
            "/api/generate": ollama.Ollama(chat, talks=False),
        }
        posts = {path: partial(route.serve, app) for path, route in routes.items()}
        posts["/v1/messages/count_tokens"] = partial(messages.count, app)
        posts["/api/show"] = partial(ollama.show, app)
        for path, handle in posts.items():
            form = next(form for start, form in FORMS.items() if path.startswith(start))
            app.routes[path] = {"POST": partial(form.told, handle)}
        app.routes["/api/tags"] = {"GET": partial(ollama.tags, app)}
        app.routes["/api/version"] = {"GET": lambda exchange: exchange.json({"version": ollama.VERSION})}
