"""The extension that installs what other clients speak."""

from __future__ import annotations

from functools import partial

from phases.appendix.api.endpoints import WideChat
from phases.appendix.protocols.anthropic import AnthropicErrors, Messages, MessagesRequest, count
from phases.appendix.protocols.ollama import VERSION, Ollama, OllamaErrors, OllamaRequest, show, tags
from phases.appendix.protocols.responses import Conversations, Responses, ResponsesRequest
from phases.appendix.protocols.translation import ErrorForm, Kind, serve
from serving.app import App, Extension, Handler
from serving.http.schema import Generation

FORMS = {"/v1/responses": ErrorForm(), "/v1/messages": AnthropicErrors(), "/api/": OllamaErrors()}
"""Forms of errors, by the beginnings of paths."""


class Protocols(Extension):
    """Adds OpenAI's newer route, Anthropic's and Ollama's."""

    def install(self, app: App) -> None:
        """See `Extension`."""
        chat = WideChat(app.prompts, app.model, app.limits)
        kinds: dict[str, tuple[type[Generation], Kind]] = {
            "/v1/responses": (ResponsesRequest, partial(Responses, chat, Conversations())),
            "/v1/messages": (MessagesRequest, partial(Messages, chat)),
            "/api/chat": (OllamaRequest, partial(Ollama, chat, talks=True)),
            "/api/generate": (OllamaRequest, partial(Ollama, chat, talks=False)),
        }
        posts: dict[str, Handler] = {path: partial(serve, app, *kind) for path, kind in kinds.items()}
        posts["/v1/messages/count_tokens"] = partial(count, app, chat)
        posts["/api/show"] = partial(show, app)
        for path, handle in posts.items():
            form = next(form for start, form in FORMS.items() if path.startswith(start))
            app.routes[path] = {"POST": partial(form.told, handle)}
        app.routes["/api/tags"] = {"GET": partial(tags, app)}
        app.routes["/api/version"] = {"GET": lambda exchange: exchange.json({"version": VERSION})}
