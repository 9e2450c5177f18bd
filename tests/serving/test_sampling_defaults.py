"""A server samples as its model asks for, unless a request says otherwise."""

from __future__ import annotations

from serving.endpoints import Endpoint, Prompts
from serving.http.limits import Limits
from serving.http.schema import CompletionBody
from serving.messages import Ready
from tests.serving_kit import tokenizer as tokenizer

READY = Ready(64, 257, 4, 8, 16, "fcfs")


def test_what_a_request_says_comes_first(tokenizer):
    defaults = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
    body, endpoint = (
        CompletionBody(prompt="a"),
        Endpoint(Prompts(tokenizer, defaults), "tiny", Limits()),
    )
    params = endpoint.params(body, [1], READY, 16)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.2, 0.9, 1.1)
    body.temperature = 0.0
    body.top_p = 1.0
    body.repetition_penalty = 1.0
    params = endpoint.params(body, [1], READY, 16)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 1.0, 1.0)
    body.temperature = body.top_p = None
    neutral = Endpoint(Prompts(tokenizer), "tiny", Limits()).params(body, [1], READY, 16)
    assert (neutral.temperature, neutral.top_p) == (1.0, 1.0)
