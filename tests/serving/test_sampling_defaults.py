"""A server samples as its model asks for, unless a request says otherwise."""

from __future__ import annotations

from serving.app import App
from serving.client import EngineClient
from serving.endpoints import ServedModel
from serving.messages import Ready
from tests.servers import Client
from tests.serving_kit import tokenizer as tokenizer

READY = Ready(64, 257, 4, 8, 16, "fcfs")


def params(tokenizer, defaults, **fields):
    """The settings of a completion by a server with these defaults."""
    app = App(EngineClient(), ServedModel("tiny", tokenizer, defaults=defaults))
    http = Client(app).request("/v1/completions", {}).http()
    return (
        app.endpoints["/v1/completions"].parse(http, {"prompt": "a", **fields}, READY).params
    )


def test_what_a_request_says_comes_first(tokenizer):
    defaults = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
    found = params(tokenizer, defaults)
    assert (found.temperature, found.top_p, found.repetition_penalty) == (0.2, 0.9, 1.1)
    found = params(tokenizer, defaults, temperature=0.0, top_p=1.0, repetition_penalty=1.0)
    assert (found.temperature, found.top_p, found.repetition_penalty) == (0.0, 1.0, 1.0)
    neutral = params(tokenizer, {}, temperature=None, top_p=None)
    assert (neutral.temperature, neutral.top_p) == (1.0, 1.0)
