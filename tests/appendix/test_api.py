"""The rest of the API: fields, grammars, log-probabilities, tokens and text."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from typing import Any

import pytest
import torch

from forward.attention import RecomputeAttention
from phases.appendix.api.logprobs import CompletionLogprobs
from phases.appendix.server import whole_app
from tests.equivalence.engines import blocks
from tests.guidance_kit import served as load
from tests.servers import Client, Loopback
from tests.serving_kit import engine as engine
from tests.serving_kit import make as make
from tests.serving_kit import settle
from tests.serving_kit import tokenizer as tokenizer

TAKEN: dict[str, dict[str, Any]] = {
    "more samples than rows": {"n": 9},
    "top_p of nothing": {"top_p": 0, "temperature": 1},
    "seed of more bits": {"seed": 2**70},
    "negative seed": {"seed": -(2**70)},
    "nulls": dict.fromkeys(
        (
            "max_tokens",
            "temperature",
            "top_p",
            "n",
            "stop",
            "seed",
            "logit_bias",
            "response_format",
            "stream",
        )
    ),
    "more nulls": dict.fromkeys(
        (
            "stream_options",
            "logprobs",
            "add_special_tokens",
            "echo",
            "guided_json",
            "structured_outputs",
        )
    ),
    "nulls in objects": {
        "structured_outputs": {"json": None, "whitespace_pattern": None, "tree": None}
    },
}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (
            {"logprobs": True, "top_logprobs": 50},
            "top_logprobs",
            "top_logprobs is 50, but must",
        ),
        (
            {"max_completion_tokens": -1},
            "max_completion_tokens",
            "max_completion_tokens is -1, but must",
        ),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1, but must"),
        ({"logit_bias": {"5": 200}}, "logit_bias", "logit_bias of token 5 is 200.0, but"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias (a token id) is -1, but"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "each key of logit_bias must be an int"),
        ({"min_tokens": 10**12}, "min_tokens", "min_tokens is 1000000000000, but must"),
        (
            {"temperature": 101},
            "temperature",
            "temperature is 101.0, but must be between 0 and 100",
        ),
        (
            {"messages": [{"role": "boss", "content": "a"}]},
            "messages",
            "messages[0].role is 'boss', but must be one of system, developer, user, assistant, tool, func",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "functions is not supported"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "structured_outputs (regex) and structured_outputs (choice) both",
        ),
    ],
)
async def test_a_chat_s_error_names_the_field_that_was_sent(make, body, param, says):
    said = [{"role": "user", "content": "a"}]
    status, answer = await Client(make()).post(
        "/v1/chat/completions", {"messages": said} | body
    )
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["message"].startswith(says), answer


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("guided_choice", ["abc", "de"], "abc|de"),
        ("guided_regex", "[ab]{2,5}", "[ab]{2,5}"),
        ("structured_outputs", {"regex": "x+y"}, "x+y"),
        ("response_format", schema_of({"enum": ["left", 7, None]}), '"left"|7|null'),
        ("response_format", {"type": "json_schema", "schema": {"const": "flat"}}, '"flat"'),
        ("response_format", {"type": "json_object", "schema": {"enum": [1, 22]}}, "1|22"),
        ("response_format", {"type": "json_object"}, r"\{(?s:.*)\}"),
    ],
)
async def test_constrained_output(model, tokenizer, field, value, allowed):
    """Every way to ask for it, at a high temperature, beside a request that asks for nothing."""
    engine = load(
        model, max_rows=8, cache_bytes=blocks(model, 200), step_tokens=256, tokenizer=tokenizer
    )
    app = whole_app(Loopback(engine), tokenizer, "tiny")
    body = {
        "prompt": "abc",
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 3,
        "logit_bias": {},
    }
    plain = Client(app).post("/v1/completions", body | {"max_tokens": 5})
    (status, found), (other, _) = await asyncio.gather(
        Client(app).post("/v1/completions", body | {field: value}), plain
    )
    assert status == other == 200, found
    choice = found["choices"][0]
    if choice["finish_reason"] == "stop":  # or it was cut, and says so
        assert re.fullmatch(allowed, choice["text"]), f"{field} allowed {choice['text']!r}"
    else:
        assert choice["finish_reason"] == "length"
    wrong, answer = await Client(app).post("/v1/completions", body | {"guided_regex": "(((("})
    assert wrong == 400 and "regex" in answer["error"]["message"], answer
    assert answer["error"]["param"] == "guided_regex", answer


async def test_fields_of_messages_that_say_nothing_to_this_model_are_named(make):
    message = {
        "role": "user",
        "content": "x",
        "weight": 1,
        "cache_control": {"type": "ephemeral"},
    }
    body = {"messages": [message], "max_tokens": 1}
    asked = await Client(make()).request("/v1/chat/completions", body).run()
    assert asked.status == 200
    assert asked.headers["x-ladder-ignored"] == "messages.cache_control, messages.weight"


async def test_addresses_of_a_client_are_never_opened(model, tokenizer):
    """In messages, schemas and tools: nothing connects to where they point."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        app = whole_app(
            Loopback(load(model, max_rows=2, tokenizer=tokenizer)), tokenizer, "tiny"
        )
        said = [{"role": "user", "content": "x"}]
        image = [{"type": "image_url", "image_url": {"url": url}}]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": url}}}
        for body in (
            {"messages": [{"role": "user", "content": image}]},
            {"messages": said, "guided_json": {"$ref": url}},
            {"messages": said, "guided_json": {"$ref": "file:///etc/passwd"}},
            {"messages": said, "tools": [tool], "tool_choice": "required"},
            {"messages": said, "guided_grammar": f'start: "a"\n%import {url}.x\n'},
        ):
            status, found = await Client(app).post(
                "/v1/chat/completions", body | {"max_tokens": 4}
            )
            assert status == 400, f"{body} is answered with {found}"
        with pytest.raises(TimeoutError):
            trap.accept()


async def test_what_is_not_supported_is_refused_by_name(make):
    client = Client(make())
    for field, value in (("prompt_logprobs", 1), ("suffix", "b"), ("best_of", 2)):
        status, found = await client.post(
            "/v1/completions", {"prompt": "a", "max_tokens": 1, field: value}
        )
        assert (status, found["error"]["param"]) == (400, field), found
        assert found["error"]["message"].startswith(f"{field} is not supported"), found
    assert (
        await client.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "suffix": ""})
    )[0] == 200


def likelihoods(model, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, by the model of phase 01."""
    with torch.inference_mode():
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), RecomputeAttention())
        scores = model.logits(hidden).float().log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("most", [0, 1, 3])
async def test_a_prompt_is_scored(make, model, tokenizer, most):
    """As evaluation harnesses ask: token ids, `echo`, log-probabilities, hardly any output."""
    app = make()
    prompts = [
        tokenizer.encode(text)
        for text in ("hello there", "x", "a long prompt of many blocks " * 20)
    ]
    body = {
        "prompt": prompts,
        "echo": True,
        "logprobs": 2,
        "max_tokens": most,
        "temperature": 0,
    }
    for _ in range(2):  # the second time the prefix cache knows them
        status, found = await Client(app).post("/v1/completions", body)
        assert status == 200, found
        for ids, choice in zip(prompts, found["choices"], strict=True):
            told = choice["logprobs"]
            assert choice["text"].startswith("".join(told["tokens"][: len(ids)]))
            assert choice["finish_reason"] == "length"
            assert choice["text"].startswith(tokenizer.decode(ids))
            assert {len(values) for values in told.values()} == {len(ids) + most}
            assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
            expected = likelihoods(model, ids).tolist()
            assert told["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
            for token, value, top in zip(
                *(values[1:] for values in list(told.values())[:3]), strict=True
            ):
                assert top[token] == value and len(top) in (2, 3)
            assert told["text_offset"][: len(ids)] == list(range(len(ids)))
    assert found["usage"]["completion_tokens"] == 3 * most
    await settle(app)


@pytest.mark.parametrize("stream", [False, True])
async def test_of_the_token_that_scores_a_prompt_nothing_is_shown(make, stream):
    """Not even that it would have ended the text."""
    body = {"prompt": "ab", "echo": True, "max_tokens": 0, "logit_bias": {"0": 100}}
    body |= {"return_token_ids": True, "stream": stream}
    asked = await Client(make()).request("/v1/completions", body).run()
    (choice,) = (asked.events()[0] if stream else asked.json())["choices"]
    assert (choice["text"], choice["token_ids"]) == ("ab", []), choice
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("id", [-1, 257, 1 << 31, 1 << 32, 1 << 63, 10**30])
async def test_an_echo_of_no_token_is_refused(make, id):
    body = {"prompt": [[1], [id]], "echo": True, "max_tokens": 1}
    status, found = await Client(make()).post("/v1/completions", body)
    assert (status, found["error"]["param"]) == (400, "prompt"), found


@pytest.mark.parametrize("prompt", [[1, "a"], [1, [2]], [[1], "a"], ["a", 1]])
async def test_an_echo_of_a_mixed_list_is_refused(make, prompt):
    body = {"prompt": prompt, "echo": True, "max_tokens": 1}
    status, found = await Client(make()).post("/v1/completions", body)
    assert (status, found["error"]["param"]) == (400, "prompt"), found
    assert "mixed list" in found["error"]["message"]


async def test_an_echo_is_the_same_in_a_stream(make):
    body = {
        "prompt": ["ab", "cde"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 4,
        "seed": 3,
    }
    client = Client(make())
    whole = (await client.post("/v1/completions", body))[1]["choices"]
    events = (await client.request("/v1/completions", body | {"stream": True}).run()).events()[
        :-1
    ]
    for choice in whole:
        mine = [
            event["choices"][0]
            for event in events
            if event["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(one["text"] for one in mine) == choice["text"]
        for name in ("tokens", "text_offset"):
            told = [
                value for one in mine if one["logprobs"] for value in one["logprobs"][name]
            ]
            assert told == choice["logprobs"][name]


async def test_offsets_are_those_of_tokens_whose_text_is_held_back(make, tokenizer):
    """It may be the beginning of a stop string, and comes with a later token."""
    (token,) = tokenizer.encode("x")
    body = {"prompt": "ab", "max_tokens": 4, "logprobs": 0, "logit_bias": {token: 100}}
    body |= {"temperature": 0, "stop": "xxxy"}
    for echo in (False, True):
        asked = Client(make()).request(
            "/v1/completions", body | {"echo": echo, "stream": True}
        )
        events = (await asked.run()).events()[:-1]
        found = [event["choices"][0]["logprobs"] for event in events]
        offsets = [offset for one in found if one for offset in one["text_offset"]]
        assert offsets == ([0, 1, 2, 3, 4, 5] if echo else [0, 1, 2, 3])


@pytest.mark.parametrize("what", TAKEN)
async def test_what_other_servers_take_is_taken(make, what):
    app = make()
    status, found = await Client(app).post(
        "/v1/completions", {"prompt": "a", "max_tokens": 2} | TAKEN[what]
    )
    assert status == 200, found
    assert len(found["choices"]) == (TAKEN[what].get("n") or 1)
    await settle(app)


async def test_pages_of_the_api_ask_nobody_else(make):
    app = make(keys=("secret",))
    key = {"authorization": "Bearer secret"}
    page = await Client(app).request("/docs", b"", "GET", key).run()
    text = b"".join(page.chunks).decode()
    assert (
        page.status == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    )
    assert "/openapi.json" in text and "http:" not in text and "https:" not in text
    document = (await Client(app).request("/openapi.json", b"", "GET", key).run()).json()
    assert set(app.routes) == set(document["paths"]), "a route is not in the document"
    fields = document["components"]["schemas"]
    assert all(re.fullmatch(r"[\w.-]+", name) for name in fields), "OpenAPI's names of parts"
    asked = {"messages", "logit_bias", "response_format", "tools", "deadline_ms", "min_p"}
    assert asked <= set(fields["v1.chat.completions"]["properties"])
    for name in ("v1.responses", "v1.messages", "v1.embeddings", "api.chat"):
        assert {"seed", "deadline_ms"} <= set(fields[name]["properties"]), name
    assert (await Client(app).request("/ping", b"", "GET").run()).status == 200, (
        "a watcher needs a key"
    )


@pytest.mark.parametrize("slow", [False, True])
async def test_a_thread_writes_many_log_probabilities_of_a_stream(make, monkeypatch, slow):
    """The first chunk of an echo has those of a whole prompt, one behind a pause of the client those of
    all that was not sent; other streams would wait for them.
    """
    threads, lists = list[bool](), CompletionLogprobs.lists
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 40, "stream": True}
    app = make()
    asked = Client(app).request("/v1/completions", body | {"ignore_eos": True})

    def noted(*given):
        threads.append(threading.current_thread() is threading.main_thread())
        if slow and len(threads) == 1:
            asked.reads.clear()  # does not read on
        return lists(*given)

    monkeypatch.setattr(CompletionLogprobs, "lists", noted)
    running = asyncio.ensure_future(asked.run())
    while slow and not running.done():
        await asyncio.sleep(0.01)
        if all(http.group is not None and not http.group.left for http in app.requests):
            asked.reads.set()  # reads on when all is computed
    await running
    assert asked.status == 200 and threads[0] is False
    assert not slow or (len(threads) == 2 and threads[1] is False), threads
