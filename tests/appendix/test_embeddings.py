"""Embeddings: means of hidden states as the model has them, read off the engine's own steps."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import torch
from torch.nn.functional import normalize

from forward.attention import RecomputeAttention
from phases.appendix.embeddings.endpoint import WARNING
from phases.appendix.server import whole_app
from tests.equivalence.engines import blocks
from tests.guidance_kit import served as load
from tests.servers import Client, Loopback
from tests.serving_kit import engine as engine
from tests.serving_kit import make as make
from tests.serving_kit import metrics, settle
from tests.serving_kit import tokenizer as tokenizer

TEXTS = ["hello", "a longer prompt, of some twenty tokens", "x " * 300, "hello"]


def vectors(answer: dict) -> np.ndarray:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


def means(model, tokenizer, texts) -> np.ndarray:
    """By the model of phase 01, one text at a time."""
    found = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor(tokenizer.encode(text))
            hidden = model(ids, torch.arange(len(ids)), RecomputeAttention())
            found.append(normalize(hidden.float().mean(0), dim=0))
    return torch.stack(found).numpy()


async def test_they_are_the_means_of_the_hidden_states(make, model, tokenizer):
    """One text is longer than a step, so its sum grows over several; two are equal, and neither is cached."""
    app = make()
    asked = await Client(app).request("/v1/embeddings", {"input": TEXTS}).run()
    assert asked.status == 200 and asked.headers["x-ladder-warning"] == WARNING.decode()
    found = vectors(asked.json())
    assert np.abs(found - means(model, tokenizer, TEXTS)).max() < 1e-4
    assert asked.json()["usage"]["prompt_tokens"] == sum(
        len(tokenizer.encode(text)) for text in TEXTS
    )
    again = (
        await Client(app).post("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})
    )[1]
    coded = [
        np.frombuffer(base64.b64decode(one["embedding"]), np.float32) for one in again["data"]
    ]
    assert np.abs(found - coded).max() < 1e-5, "a prefix that was cached has changed a mean"
    ids = (await Client(app).post("/v1/embeddings", {"input": tokenizer.encode("hello")}))[1]
    assert np.abs(vectors(ids) - found[:1]).max() < 1e-5
    await settle(app)


async def test_ollamas_routes_and_the_models_own_dimensions(make, model, tokenizer):
    app = make()
    expected = means(model, tokenizer, TEXTS[:2])
    size = expected.shape[1]
    status, found = await Client(app).post(
        "/api/embed", {"model": "tiny:latest", "input": TEXTS[:2]}
    )
    assert status == 200 and found["prompt_eval_count"] > 0
    assert np.abs(np.array(found["embeddings"]) - expected).max() < 1e-4
    for path, field in (("/v1/embeddings", "input"), ("/api/embed", "input")):
        assert (await Client(app).post(path, {field: "x", "dimensions": size}))[0] == 200
        status, found = await Client(app).post(path, {field: "x", "dimensions": size - 1})
        assert status == 400 and "dimensions is" in json.dumps(found), found
    for input in ("x", [], ""):
        body = {"model": "other", "input": input}
        status, found = await Client(app).post("/api/embed", body)
        assert status == 404 and isinstance(found["error"], str), (body, found)
    for body in ({}, {"input": []}, {"input": ""}, {"input": None, "model": "tiny"}):
        status, found = await Client(app).post("/api/embed", body)
        assert (status, found.get("embeddings")) == (200, []), (
            f"/api/embed, {body}: Ollama answers an empty list, which loads the model, not {found}"
        )
    status, found = await Client(app).post("/api/embed", {"input": ["x", "x" * 1024]})
    assert status == 400 and "input[1] has 1024 tokens" in found["error"], found
    for input in (["x", 3], {"x": 3}, 3):
        status, found = await Client(app).post("/api/embed", {"input": input})
        assert status == 400 and isinstance(found["error"], str), (input, found)
    await settle(app)


async def test_a_mean_survives_preemption(model, tokenizer):
    engine = load(
        model, max_rows=4, cache_bytes=blocks(model, 42), step_tokens=64, speculate=False
    )
    app = whole_app(Loopback(engine), tokenizer, "tiny")
    texts = ["y " * 100, "z " * 100, "w " * 100]
    said = {"prompt": "abc", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "n": 2}
    _, (status, found) = await asyncio.gather(
        Client(app).post("/v1/completions", said),
        Client(app).post("/v1/embeddings", {"input": texts}),
    )
    assert (
        status == 200 and np.abs(vectors(found) - means(model, tokenizer, texts)).max() < 1e-4
    )
    await settle(app)


WRONG = [{"input": value} for value in ([], [1, "a"], "a" * 100_000, ["a"] * 300)] + [{}]
WRONG += [{"input": "a", "dimensions": 8}, {"input": "a", "stream": True}]
WRONG += [{"input": "a", "encoding_format": "hex"}]


async def test_what_is_wrong_is_named(make):
    app = make()
    for body in WRONG:
        field = next((name for name in body if name != "input"), "input")
        status, found = await Client(app).post("/v1/embeddings", body)
        assert (status, found["error"]["param"]) == (400, field), found
    # The field's name, not that of completions. Without texts, Ollama's route answers an empty list.
    for body, words in (
        ({}, "input is missing"),
        ({"input": []}, "input is empty"),
        ({"input": ["a", ""]}, "input[1] is empty"),
        ({"input": [[1], [257]]}, "input[1] holds token id 257"),
    ):
        found = (await Client(app).post("/v1/embeddings", body))[1]["error"]
        assert words in str(found), f"{body}: {found}"
    await settle(app)


async def test_who_leaves_is_let_go_and_keys_are_asked(make):
    app = make(keys=("secret",))
    assert (await Client(app).post("/v1/embeddings", {"input": "a"}))[0] == 401
    key = {"authorization": "Bearer secret"}
    app.engine.busy = False
    asked = Client(app).request("/v1/embeddings", {"input": TEXTS}, headers=key)
    task = asyncio.ensure_future(asked.run())
    while not app.engine.in_flight:
        await asyncio.sleep(0)
    asked.leave()
    await task
    app.engine.busy = True
    await settle(app)
    assert (
        metrics(app).failures["left"] == 1
        and ("/v1/embeddings", 401) in metrics(app).responses
    )
