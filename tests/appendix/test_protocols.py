"""What other clients speak: each route takes the chat's path, and says the same as the chat does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.http.errors import ApiError
from common.http.limits import Limits
from phases.appendix.protocols.responses import MOST_BYTES, MOST_KEPT, SHARE, Conversations
from tests.servers import Asked, Client
from tests.serving_kit import make_with_grammars as make_with_grammars
from tests.serving_kit import metrics, settle
from tests.serving_kit import tokenizer as tokenizer

SAID = [{"role": "user", "content": "How is it in Rome?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
CITY |= {"additionalProperties": False}
FLAT = {"type": "function", "name": "weather", "description": "", "parameters": CITY}
THEIRS = {"name": "weather", "description": "", "input_schema": CITY}
SMALL_BATCH = {"num_predict": 8, "temperature": 0}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": SAID, "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {"messages": SAID, "max_tokens": 8, "temperature": 0},
    "/api/chat": {"messages": SAID, "options": SMALL_BATCH, "stream": False},
    "/api/generate": {"prompt": SAID[0]["content"], "options": SMALL_BATCH, "stream": False},
}
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": SAID, "tools": [FLAT], "tool_choice": "required",
        "parallel_tool_calls": False},
    "/v1/messages": {"messages": SAID, "max_tokens": 400, "tools": [THEIRS],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
}  # fmt: skip


LONG = {
    "options": {"num_predict": 900},
    "max_output_tokens": 900,
    "max_tokens": 900,
    "ignore_eos": True,
}


def events_of(asked: Asked) -> list[dict[str, Any]]:
    """Events with names, or lines of JSON."""
    data = b"".join(asked.chunks).decode()
    if asked.headers["content-type"] == "application/x-ndjson":
        return [json.loads(line) for line in data.splitlines()]
    found = []
    for block in data.strip().split("\n\n"):
        name, _, body = block.partition("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(path: str, answer: dict[str, Any]) -> str:
    match path:
        case "/v1/responses":
            (item,) = answer["output"]
            return item["content"][0]["text"]
        case "/v1/messages":
            return "".join(block["text"] for block in answer["content"])
        case "/api/chat":
            return answer["message"]["content"]
    return answer["response"]


def streamed_text(path: str, events: list[dict[str, Any]]) -> str:
    match path:
        case "/v1/responses":
            return "".join(
                e["delta"] for e in events if e["type"] == "response.output_text.delta"
            )
        case "/v1/messages":
            return "".join(
                e["delta"]["text"] for e in events if e["type"] == "content_block_delta"
            )
    return "".join(text_of(path, event) for event in events)


@pytest.mark.parametrize("path", REQUESTS)
async def test_the_text_is_the_chats_at_once_and_in_events(make, path):
    app = make()
    body = {"messages": SAID, "max_tokens": 8, "temperature": 0}
    chat = (await Client(app).post("/v1/chat/completions", body))[1]
    status, whole = await Client(app).post(path, REQUESTS[path])
    assert status == 200, whole
    assert text_of(path, whole) == chat["choices"][0]["message"]["content"]
    streamed = await Client(app).request(path, REQUESTS[path] | {"stream": True}).run()
    events = events_of(streamed)
    assert len(events) > 4, "the stream has come in one piece"
    assert streamed_text(path, events) == text_of(path, whole)
    used, cut = chat["usage"], chat["choices"][0]["finish_reason"] == "length"
    if path == "/v1/responses":
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        final = events[-1]["response"]
        assert events[-1]["type"] == f"response.{final['status']}"
        assert final["status"] == whole["status"] == ("incomplete" if cut else "completed")
        assert text_of(path, final) == text_of(path, whole)
        assert final["usage"]["output_tokens"] == used["completion_tokens"]
    elif path == "/v1/messages":
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        ended = "max_tokens" if cut else "end_turn"
        assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == ended
        took = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
        assert took == used["prompt_tokens"]
    else:
        assert events[-1]["done"] and not any(event["done"] for event in events[:-1])
        assert whole["prompt_eval_count"] == used["prompt_tokens"]
        assert events[-1]["eval_count"] == used["completion_tokens"] == whole["eval_count"]
        assert whole["done_reason"] == ("length" if cut else "stop")


@pytest.mark.parametrize("path", WITH_TOOLS)
async def test_calls_and_their_answers(make, path):
    app = make()
    status, whole = await Client(app).post(path, WITH_TOOLS[path] | {"seed": 1})
    assert status == 200, whole
    streamed = (
        await Client(app).request(path, WITH_TOOLS[path] | {"seed": 1, "stream": True}).run()
    )
    events = events_of(streamed)
    if path == "/v1/responses":
        (call,) = whole["output"]
        arguments = json.loads(call["arguments"])
        pieces = [
            e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"
        ]
        assert json.loads("".join(pieces)) == arguments and call["type"] == "function_call"
        answer = {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": "sunny",
        }
        more = {"input": [*SAID, call, answer], "max_output_tokens": 2}
        kept = {"input": [answer], "previous_response_id": whole["id"], "max_output_tokens": 2}
        assert (await Client(app).post(path, kept))[1]["usage"]["input_tokens"] > 0
    else:
        (call,) = whole["content"]
        arguments = call["input"]
        pieces = [
            e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"
        ]
        assert json.loads("".join(pieces)) == arguments and whole["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"]}
        result |= {"content": [{"type": "text", "text": "sunny"}]}
        turns = [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        more = {"messages": SAID + turns, "max_tokens": 2}
    assert arguments["city"] in ("Rome", "Oslo") and call["name"] == "weather"
    status, after = await Client(app).post(path, more | {"tools": WITH_TOOLS[path]["tools"]})
    assert status == 200, after


async def test_each_block_of_a_message_ends_once(make):
    body = {
        "messages": SAID,
        "max_tokens": 400,
        "tools": [THEIRS],
        "tool_choice": {"type": "any"},
    }
    app, most = make(), 0
    for seed in range(8):
        streamed = (
            await Client(app)
            .request("/v1/messages", body | {"seed": seed, "stream": True})
            .run()
        )
        events = [(event["type"], event.get("index")) for event in events_of(streamed)]
        begun = [index for kind, index in events if kind == "content_block_start"]
        ended = [index for kind, index in events if kind == "content_block_stop"]
        assert begun == ended, f"seed {seed}: blocks {begun} begin and {ended} end"
        most = max(most, len(begun))
    assert most > 1, "no seed has two calls, so that nothing was seen"


async def test_what_is_no_object_is_no_format(make):
    status, said = await Client(make()).post(
        "/v1/responses", {"input": "a", "text": {"format": 5}}
    )
    assert (status, said["error"]["param"]) == (400, "text.format")


async def test_structured_output(make):
    form = {"type": "json_schema", "name": "city", "schema": CITY}
    plain, many = {"type": "json_schema", "schema": CITY}, {"options": {"num_predict": 400}}
    bodies = {
        "/v1/responses": {"text": {"format": form}, "max_output_tokens": 400},
        "/v1/messages": {"output_config": {"format": plain}, "max_tokens": 400},
        "/api/chat": {"format": CITY, **many},
        "/api/generate": {"format": CITY, **many},
    }
    app = make()
    for path, body in bodies.items():
        status, whole = await Client(app).post(path, REQUESTS[path] | body)
        assert status == 200, whole
        assert json.loads(text_of(path, whole))["city"] in ("Rome", "Oslo"), path


async def test_a_conversation_goes_on_from_a_response_within_a_bound(make):
    app = make()
    body = REQUESTS["/v1/responses"] | {"instructions": "Be brief."}
    first = (await Client(app).post("/v1/responses", body))[1]
    more = {
        "input": "And in Oslo?",
        "max_output_tokens": 2,
        "previous_response_id": first["id"],
    }
    kept = (await Client(app).post("/v1/responses", more))[1]["usage"]["input_tokens"]
    said = [*SAID, {"role": "assistant", "content": text_of("/v1/responses", first)}]
    whole = {
        "input": [*said, {"role": "user", "content": "And in Oslo?"}],
        "max_output_tokens": 2,
    }
    assert (await Client(app).post("/v1/responses", whole))[1]["usage"]["input_tokens"] == kept
    unkept = (
        await Client(app).post("/v1/responses", REQUESTS["/v1/responses"] | {"store": False})
    )[1]
    status, error = await Client(app).post(
        "/v1/responses", more | {"previous_response_id": unkept["id"]}
    )
    assert (status, error["error"]["param"]) == (404, "previous_response_id")


def test_the_oldest_conversations_go_first():
    kept, said = Conversations(), [{"role": "user", "content": "x"}]
    for number in range(MOST_KEPT + 1):
        kept.keep(str(number), said, f"client {number % (2 * SHARE)}".encode())
    with pytest.raises(ApiError, match="no more"):
        kept.find("0")
    assert kept.find("1")
    kept.keep("large", [{"role": "user", "content": "x" * (40 << 20)}])
    assert kept.size < MOST_BYTES, "more is kept than the bound"


def test_one_client_cannot_push_out_the_conversations_of_others():
    kept, said = Conversations(), [{"role": "user", "content": "x"}]
    kept.keep("mine", said, b"me")
    for number in range(3 * MOST_KEPT):
        kept.keep(str(number), said, b"another")
    for number in range(40):
        kept.keep(
            f"large {number}", [{"role": "user", "content": "x" * (2 << 20)}], b"another"
        )
    assert kept.find("mine") == said and kept.size <= MOST_BYTES // SHARE + 100


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a number for a text": ("/v1/responses", {"input": [{"content": 3}]}, "input"),
    "an image": ("/v1/responses", {"input": [{"content": [{"type": "input_image"}]}]}, "input"),
    "several": ("/v1/responses", {"n": 2}, "n"),
    "temperature": ("/v1/responses", {"temperature": -1}, "temperature"),
    "a high temperature": ("/v1/responses", {"temperature": 101}, "temperature"),
    "a role": ("/v1/messages", {"messages": [{"role": "boss", "content": "hi"}]}, "messages"),
    "a role of Ollama's": ("/api/chat", {"messages": [{"role": "boss", "content": "hi"}]}, "messages"),
    "a schema that is none": ("/v1/responses", {"text": {"format": {"type": "x"}}}, "text.format"),
    "no messages": ("/v1/messages", {"messages": []}, "messages"),
    "another part": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages"),
    "an unknown tool": ("/v1/messages", {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "too many stops": ("/v1/messages", {"stop_sequences": ["x"] * 99}, "stop_sequences"),
    "an image of Ollama's": ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, "messages"),
    "an effort": ("/v1/responses", {"reasoning": {"effort": 3}}, "reasoning.effort"),
    "a thread": ("/v1/messages", {"thread": {"type": "create"}}, "thread"),
    "a summary": ("/v1/messages", {"compaction": {"type": "summarize"}}, "compaction"),
    "another effort": ("/v1/messages", {"output_config": {"effort": []}}, "output_config.effort"),
    "an option of another type": ("/api/chat", {"options": {"top_p": "x"}}, "options.top_p"),
    "an option": ("/api/chat", {"options": {"top_p": 7}}, "options.top_p"),
    "an image of a prompt": ("/api/generate", {"images": ["x"]}, "images"),
    "a format": ("/api/generate", {"format": "xml"}, "format"),
    "raw text": ("/api/generate", {"raw": True}, "raw"),
    "a penalty": ("/api/generate", {"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), WRONG.values(), ids=WRONG)
async def test_what_is_wrong_is_named_in_the_form_of_the_route(make, path, body, field):
    app = make()
    status, found = await Client(app).post(path, REQUESTS[path] | body)
    assert status == 400, found
    if path.startswith("/api/"):
        assert isinstance(found["error"], str) and found["param"] == field, found
    else:
        assert (
            found["error"]["param"] == field
            and found["error"]["type"] == "invalid_request_error"
        ), found
        assert (found.get("type") == "error") == (path == "/v1/messages")
    await settle(app)


async def test_a_format_of_openai_s_is_refused_in_words_that_hold_for_ollama(make):
    app, body = make(), REQUESTS["/api/chat"] | {"format": "json_object"}
    status, found = await Client(app).post("/api/chat", body)
    assert (status, found["error"]) == (
        400,
        "format is not supported with the value 'json_object'",
    )
    await settle(app)


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "m"}]
)
async def test_anthropics_client_learns_that_a_conversation_is_not_kept(make, thread):
    """By this code it sends all of it again, instead of the new messages alone."""
    body = REQUESTS["/v1/messages"] | {"thread": thread}
    status, found = await Client(make()).post("/v1/messages", body)
    assert (status, found["error"]["code"]) == (400, "thread_unsupported_request")
    assert found["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("seed", [-1, -2])
async def test_of_ollama_s_seeds_minus_one_is_none(make, seed):
    """And its temperatures go beyond OpenAI's 2, at which a tiny model's texts are all different."""
    app, texts = make(), set()
    options = {"num_predict": 30, "temperature": 3, "seed": seed}
    for _ in range(3):
        status, answer = await Client(app).post(
            "/api/chat", REQUESTS["/api/chat"] | {"options": options}
        )
        assert status == 200, answer
        texts.add(answer["message"]["content"])
    assert len(texts) == (3 if seed == -1 else 1)
    await settle(app)


@pytest.mark.parametrize("most", [-1, pytest.param(-2, marks=pytest.mark.slow)])
async def test_ollama_s_num_predict_below_zero_is_as_many_as_there_is_room_for(make, most):
    app = make()
    body = REQUESTS["/api/generate"] | {
        "options": {"num_predict": most, "temperature": 0, "ignore_eos": True}
    }
    status, answer = await Client(app).post("/api/generate", body)
    assert status == 200 and answer["done_reason"] == "length", answer
    assert answer["eval_count"] > 100
    await settle(app)


@pytest.mark.parametrize("path", REQUESTS)
async def test_the_same_limits_keys_and_metrics_as_the_chat(make, path):
    app = make(
        keys=("secret",), limits=Limits(max_queue=1, max_requests=1, max_body_bytes=2000)
    )
    assert (await Client(app).post(path, REQUESTS[path]))[0] == 401
    basic = {
        "authorization": "Basic zzz",
        "x_api_key": "secret",
    }  # a proxy asks for one of its own
    for headers in ({"authorization": "Bearer secret"}, basic, {"x_api_key": "secret"}):
        assert (await Client(app).post(path, REQUESTS[path], **headers))[0] == 200
    assert (await Client(app).post(path, REQUESTS[path] | {"x": "y" * 2000}, **headers))[
        0
    ] == 413
    assert (await Client(app).post(path, REQUESTS[path] | {"model": "other"}, **headers))[
        0
    ] == 404
    key = {"x-api-key": "secret"}
    running = Client(app).request(path, REQUESTS[path] | LONG | {"stream": True}, headers=key)
    task = asyncio.ensure_future(running.run())
    while not app.engine.in_flight:
        await asyncio.sleep(0)
    assert (await Client(app).post(path, REQUESTS[path], **headers))[0] == 429
    running.leave()
    await task
    assert {(path, 200), (path, 401), (path, 413), (path, 404), (path, 429)} <= set(
        metrics(app).responses
    )
    assert metrics(app).generated > 0 and metrics(app).prompted > 0
    await settle(app)


@pytest.mark.parametrize("path", REQUESTS)
async def test_an_error_ends_a_stream_in_its_form(make, path):
    app = make()
    asked = Client(app).request(path, REQUESTS[path] | LONG | {"stream": True})
    task = asyncio.ensure_future(asked.run())
    while len(asked.chunks) < 3:
        await asyncio.sleep(0)
    app.engine.die()
    await task
    last = b"".join(asked.chunks).decode().rstrip("\n").splitlines()[-1]
    assert "the engine has ended" in str(json.loads(last.removeprefix("data: "))["error"]), (
        last
    )


async def test_stop_sequences_are_named(make):
    app = make()
    text = text_of(
        "/v1/messages", (await Client(app).post("/v1/messages", REQUESTS["/v1/messages"]))[1]
    )
    stop = text[3:5]
    body = REQUESTS["/v1/messages"] | {"stop_sequences": ["never", stop]}
    found = (await Client(app).post("/v1/messages", body))[1]
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert text_of("/v1/messages", found) == text[: text.index(stop)]


async def test_a_whole_call_is_why_a_message_ends_whatever_stops_it(make):
    body = WITH_TOOLS["/v1/messages"] | {"seed": 1, "stop_sequences": ["</tool_call>"]}
    found = (await Client(make()).post("/v1/messages", body))[1]
    assert found["content"][0]["input"]["city"] in ("Rome", "Oslo")
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)


CALLED = {"name": "weather", "arguments": '{"city": "Rome"}'}
FUNCTION = {name: value for name, value in FLAT.items() if name != "type"}
TOOL = {"type": "function", "function": FUNCTION}
IN_TURNS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"tools": [FLAT], "input": [
        *SAID, {"type": "function_call", "call_id": "c", **CALLED},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"}]},
    "/v1/messages": {"tools": [THEIRS], "messages": [
        *SAID, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "sunny"}]}]},
    "/api/chat": {"tools": [TOOL], "stream": False, "messages": [
        *SAID, {"role": "assistant", "tool_calls": [
            {"function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"}]},
}  # fmt: skip


@pytest.mark.parametrize("path", IN_TURNS)
async def test_a_conversation_with_tools_is_the_same_prompt_at_every_route(make, path):
    call = {"id": "c", "type": "function", "function": CALLED}
    messages = [*SAID, {"role": "assistant", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": "sunny"}]
    chat = {"messages": messages, "tools": [TOOL], "max_tokens": 1}
    used = (await Client(make()).post("/v1/chat/completions", chat))[1]["usage"]
    most = {"max_tokens": 1, "max_output_tokens": 1, "options": {"num_predict": 1}}
    status, whole = await Client(make()).post(path, most | IN_TURNS[path])
    assert status == 200, whole
    counts = whole.get("usage", whole)
    took = counts.get("prompt_eval_count", counts.get("input_tokens"))
    assert took + counts.get("cache_read_input_tokens", 0) == used["prompt_tokens"]


async def test_tokens_are_counted_as_a_message_takes_them(make):
    app = make()
    body = {
        "messages": SAID,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [THEIRS],
    }
    counted = (await Client(app).post("/v1/messages/count_tokens", body))[1]["input_tokens"]
    used = (await Client(app).post("/v1/messages", body | {"max_tokens": 1}))[1]["usage"]
    assert counted == used["input_tokens"] + used["cache_read_input_tokens"] > 20


async def test_the_model_is_shown_to_ollamas_clients(make):
    app = make()
    (model,) = (await Client(app).request("/api/tags", b"", "GET").run()).json()["models"]
    shown = (await Client(app).post("/api/show", {"model": model["name"]}))[1]
    assert (
        await Client(app).post("/api/chat", REQUESTS["/api/chat"] | {"model": model["name"]})
    )[0] == 200
    assert (
        "completion" in shown["capabilities"]
        and shown["model_info"]["ladder.context_length"] > 0
    )
    assert (await Client(app).request("/api/version", b"", "GET").run()).json()["version"]


@pytest.mark.parametrize(
    ("more", "status"), [({}, 200), ({"origin": "https://example.org"}, 415)]
)
async def test_curl_without_a_content_type_is_taken_and_a_page_is_not(make, more, status):
    headers = {"content-type": "application/x-www-form-urlencoded"} | more
    body = {"prompt": "a", "max_tokens": 1}
    asked = await Client(make()).request("/v1/completions", body, headers=headers).run()
    assert asked.status == status
    plain = headers | {"content-type": "text/plain"}
    assert (
        await Client(make()).request("/v1/completions", body, headers=plain).run()
    ).status == 415


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {"a": "b" * 100_000}),
        ("metadata", {f"k{n}": n for n in range(10_000)}),
        ("text", {"format": {"type": "text"}, "more": "b" * 100_000}),
        ("tool_choice", {"type": "function", "name": "f", "more": "b" * 100_000}),
    ],
)
async def test_what_a_response_says_again_has_a_bound(make, field: str, value: Any) -> None:
    asked = await Client(make()).request("/v1/responses", {"input": "a", field: value}).run()
    assert asked.status == 400 and f"{field} has " in asked.json()["error"]["message"]
    assert sum(map(len, asked.chunks)) < 500
