"""A pytest plugin for tests of a server with OpenAI's routes without `/v1` too, and for any model name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import openai
import requests
from openai.resources import Completions
from openai.resources.chat import Completions as Chat

BOTH = ("/chat/completions", "/completions", "/models")
MODEL = os.environ["LADDER_MODEL"]
_request, _made = requests.Session.request, openai.OpenAI.__init__


def request(self: requests.Session, method: Any, url: Any, *arguments: Any, **options: Any) -> Any:
    """Ask under `/v1`, where ours are, for the model there is."""
    path = urlsplit(url).path
    if path in BOTH:
        url = url.replace(path, f"/v1{path}")
        if isinstance(options.get("json"), dict):
            options["json"] = options["json"] | {"model": MODEL}
    return _request(self, method, url, *arguments, **options)


def made(self: openai.OpenAI, *, base_url: str, **options: Any) -> None:
    """A client of what is under `/v1`."""
    _made(self, base_url=base_url.removesuffix("/v1") + "/v1", **options)


def named(create: Callable[..., Any]) -> Callable[..., Any]:
    """The method, asking for the model there is."""
    return lambda self, *arguments, **options: create(self, *arguments, **(options | {"model": MODEL}))


patched: Any = requests.Session
patched.request = request
patched = openai.OpenAI
patched.__init__ = made
for patched in (Completions, Chat):
    patched.create = named(patched.create)
