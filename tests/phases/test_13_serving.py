"""Phase 13 in one process: messages, the engine's loop, requests, streams, and every way to leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from common.errors import UserError
from common.http.limits import Limits
from common.request import Request
from common.sampling.params import SamplingParams
from common.text.detokenizer import Detokenizer
from forward.loading import random_model
from forward.shapes import SHAPES
from phases.appendix.server import whole_app
from serving import app as serving_app
from serving.app import App
from serving.completion import Choice, ChoiceGroup
from serving.endpoints import ServedModel
from serving.formatter import ResponseFormatter
from serving.messages import AbortRequests, AddRequest
from serving.worker import Worker
from tests.coroutines import asynchronously
from tests.equivalence.engines import blocks
from tests.guidance_kit import served as load
from tests.servers import Asked, Client, Lists, Loopback
from tests.serving_kit import PROMPTS, computing_at_most, leaks, metrics, settle, texts
from tests.serving_kit import engine as engine
from tests.serving_kit import make as make
from tests.serving_kit import tokenizer as tokenizer

LIMIT = 20.0
"""Seconds; a hundred times what most of these requests take on an idle machine."""


@pytest.fixture(autouse=True)
def nothing_hangs(request, monkeypatch):
    """Whatever waits or computes without end fails in seconds, and says which request it was."""
    monkeypatch.setattr(Asked, "within", LIMIT)
    long = any(map(request.node.get_closest_marker, ("slow", "long")))
    with contextlib.nullcontext() if long else computing_at_most(LIMIT):
        yield


async def test_a_request_that_never_ends_is_named(make):
    app = make()
    app.engine.busy = False
    asked = Client(app).request("/v1/completions", {"prompt": "never answered"})
    asked.within = 0.05
    with pytest.raises(
        AssertionError, match=r"/v1/completions .*never answered.* no whole ans"
    ):
        await asked.run()
    app.engine.busy = True
    await settle(app)


async def test_a_request_that_computes_without_end_is_named(make, monkeypatch):
    app = make()

    async def forever(http, group):
        while group.unsent:
            pass

    monkeypatch.setattr("serving.completion._stream", forever)
    asked = Client(app).request("/v1/completions", {"prompt": "a", "stream": True})
    with (
        computing_at_most(0.3),
        pytest.raises(pytest.fail.Exception, match=r"POST /v1/completions, has computed"),
    ):
        await asked.run()
    await settle(app)


# The loop.


LEAVERS: dict[str, tuple[int, int, Callable[[Request], bool]]] = {
    "queued": (2, 3, lambda request: request.row < 0),
    "prefilling": (0, 1, lambda request: request.prefilling and request.row >= 0),
    "decoding": (
        1,
        12,
        lambda request: request.row >= 0 and len(request.tokens) > request.prompt_len,
    ),
    "preempted": (1, 3, lambda request: request.preemptions > 0),
    "samples in line": (10, 1, lambda request: bool(request.siblings)),
    "samples": (10, 12, lambda request: not request.siblings),
}
"""Of each state: the number of a request, the turns after which it is in it, and how that is seen."""


@pytest.mark.parametrize("state", LEAVERS)
def test_whoever_leaves_has_nothing_after_two_steps(model, state):
    tight, (number, turns, is_so) = state == "preempted", LEAVERS[state]
    size = blocks(model, 24 if tight else 200)
    engine, channel = (
        load(model, max_rows=2, step_tokens=64, chunk_tokens=16, cache_bytes=size),
        Lists(),
    )
    worker = Worker(engine, channel)
    prompt, params = (
        [1 + n % 200 for n in range(100)],
        SamplingParams(max_tokens=200, ignore_eos=True),
    )
    channel.commands = [
        AddRequest(n, each, params) for n, each in enumerate((prompt, prompt[::-1], prompt))
    ]
    if number == 10:
        channel.commands = [AddRequest(10, prompt, replace(params, n=2))]
    for _ in range(turns):
        worker.turn()
    while tight and not worker.live[1].preemptions:
        worker.turn()
    request = worker.live[number]
    assert is_so(request), f"the request is not {state}, so nothing would be tested"
    channel.commands.append(AbortRequests([number]))
    for _ in range(2):
        worker.turn()
    gone = (
        request.row < 0
        and request not in engine.scheduler.running
        and number not in worker.live
    )
    assert gone, f"a request that left while {state} still holds something"
    channel.commands.append(AbortRequests(list(worker.live)))
    for _ in range(3):
        worker.turn()
    assert leaks(engine) == ""


def test_a_request_that_cannot_be_served_is_refused_and_no_other(model):
    engine, channel = load(model, max_rows=2, cache_bytes=blocks(model, 8)), Lists()
    worker = Worker(engine, channel)
    good, bad = (
        SamplingParams(max_tokens=4, ignore_eos=True),
        SamplingParams(max_tokens=900, ignore_eos=True),
    )
    channel.commands = [
        AddRequest(0, [5, 6], good),
        AddRequest(1, [5] * 100, bad),
        AddRequest(2, [7], good),
    ]
    while not channel.steps or worker.live:
        worker.turn()
    ends = {end.number: end for step in channel.steps for end in step.ends}
    assert ends[1].reason == "refused" and "cache" in ends[1].message
    assert [ends[0].reason, ends[2].reason] == ["length", "length"]
    assert leaks(engine) == ""


# Tokens and text.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 11},
        {"temperature": 0, "stop": ["a", "\x10"]},
    ],
)
async def test_the_text_is_that_of_phase_09(make, model, tokenizer, stream, settings):
    app = make()
    body = {"max_tokens": 24, "stream": stream, **settings}
    asked = [
        Client(app).request("/v1/completions", {"prompt": prompt, **body})
        for prompt in PROMPTS
    ]
    await asyncio.gather(*(one.run() for one in asked))
    params = SamplingParams(max_tokens=24, **settings)
    for prompt, one, oracle in zip(
        PROMPTS, asked, texts(model, tokenizer, PROMPTS, params), strict=True
    ):
        assert one.text() == oracle, (
            f"prompt {prompt[:20]!r} was answered differently from phase 09"
        )
    assert leaks(app.engine.engine) == ""


async def test_phase_13_serves_by_itself(engine, model, tokenizer):
    """Without the appendix: completions, whole and streamed, stops, usage, limits, unknown fields."""
    app = App(Loopback(engine), ServedModel("tiny", tokenizer, Limits(max_queue=1)))
    client = Client(app)
    path = "/v1/completions"
    body = {"max_tokens": 12, "temperature": 0}
    (oracle,) = texts(model, tokenizer, PROMPTS[:1], SamplingParams(max_tokens=12))
    stop = await client.post(path, {"prompt": PROMPTS[0], **body, "stop": oracle[3:5]})
    assert stop[1]["choices"][0] == {
        **{"text": oracle[: oracle.index(oracle[3:5])], "logprobs": None},
        **{"finish_reason": "stop", "index": 0},
    }
    told = (await client.post(path, {"prompt": PROMPTS[:2], **body, "n": 2}))[1]
    assert told["choices"][0]["text"] == oracle and told["usage"]["total_tokens"] > 4 * 5
    more = {
        "prompt": PROMPTS[:2],
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *pieces, last, done = (await client.request(path, body | more).run()).events()
    assert done == "[DONE]" and last["usage"] == told["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }
    for choice in told["choices"]:
        mine = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == choice["index"]]
        assert "".join(p["text"] for p in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    for ask, status, param in (
        ({"prompt": "a", "best_of": 2}, 400, "best_of"),
        ({"prompt": "a", "top_p": 2}, 400, "top_p"),
        ({"prompt": "a", "n": 10}, 400, "n"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
    ):
        found, error = await client.post(path, ask)
        assert (found, error["error"]["param"]) == (status, param), error
    assert (await client.post("/tokenize", {"prompt": "a"}))[0] == 404
    for ready in ("/health", "/ready"):
        assert (await client.get(ready)).status == 200, ready
    await settle(app)


async def test_nobody_elses_tokens_change_while_others_come_and_go(make, model, tokenizer):
    """Sixteen requests are watched; sixty others leave at any moment, fail, or end early."""
    app, rng = make(), random.Random(3)
    client = Client(app)
    prompts = [f"{n} " * (1 + n * 3 % 40) for n in range(16)]
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    watched = [
        client.request("/v1/completions", {"prompt": p, "stream": n % 2 == 0, **body})
        for n, p in enumerate(prompts)
    ]
    others = []
    for number in range(60):
        more = {"prompt": "other " * rng.randint(1, 30), "max_tokens": rng.randint(1, 60)}
        more |= {"stream": True, "seed": number}
        other = client.request(
            "/v1/completions", more | ({"stop": ["e"]} if number % 5 == 0 else {})
        )
        other.leave_after = rng.randint(1, 20)
        others.append(other)
    tasks = [asyncio.ensure_future(one.run()) for one in watched + others]
    rng.shuffle(tasks)
    for _ in range(20):
        await asyncio.sleep(0)
    for other in others[:10]:
        other.leave()
    await asyncio.gather(*tasks)
    oracle = texts(model, tokenizer, prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    for one, prompt, text in zip(watched, prompts, oracle, strict=True):
        assert one.text() == text, (
            f"prompt {prompt[:12]!r} was answered differently from phase 09"
        )
    await settle(app)


async def test_samples_usage_and_ids(make):
    app, path = make(), "/v1/completions"
    body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 3, "seed": 4}
    body |= {"ignore_eos": True, "return_token_ids": True}
    status, found = await Client(app).post(path, body)
    assert status == 200
    choices = found["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in choices[:2]}) == 2, (
        "both samples are the same"
    )
    used = found["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (5, 12), (
        f"usage: prompts of 5 tokens in all, counted once, and 4 completions of 3 tokens, not {used}"
    )
    prompts = [app.model.tokenizer.encode(prompt) for prompt in body["prompt"]]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        prompts[0],
        prompts[0],
        prompts[1],
        prompts[1],
    ], "prompt_token_ids: choices 0 and 1 are of prompt 0, choices 2 and 3 of prompt 1"
    _, again = await Client(app).post(path, body | {"prompt": "abc", "n": 1, "seed": 5})
    assert again["choices"][0]["token_ids"] == choices[1]["token_ids"], (
        "sample 1 has not seed 4 plus 1"
    )


async def test_chunks_put_together_are_the_whole(make):
    client, path = Client(make()), "/v1/chat/completions"
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "seed": 3,
        "n": 2,
    }
    body |= {"logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    whole = (await client.post(path, body))[1]

    options = {"include_usage": True, "continuous_usage_stats": True}  # the second is ignored
    given = body | {"stream": True, "stream_options": options}
    events = (await client.request(path, given).run()).events()
    last = [event if event == "[DONE]" else event["choices"] for event in events[-2:]]
    assert last == [[], "[DONE]"], (
        f"a stream ends with usage, then [DONE], not with {events[-2:]}"
    )
    assert (
        events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24
    )
    assert all(event["usage"] is None for event in events[:-2])
    for choice in whole["choices"]:
        mine = [
            e["choices"][0] for e in events[:-2] if e["choices"][0]["index"] == choice["index"]
        ]
        roles = [place for place, one in enumerate(mine) if "role" in one["delta"]]
        assert roles == [0] and mine[0]["delta"]["role"] == "assistant", (
            f"choice {choice['index']}: its first chunk has the role, not chunks {roles}"
        )
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert (
            "".join(c["delta"].get("content", "") for c in mine)
            == choice["message"]["content"]
        )
        logprobs = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        for one, other in zip(logprobs, choice["logprobs"]["content"], strict=True):
            assert one["bytes"] == other["bytes"]
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert len(logprobs[0]["top_logprobs"]) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
async def test_what_stops_one_completion_stops_no_other(
    make, tokenizer, field, stopped, stream
):
    app = make()
    body = {"prompt": ["ab", "xy"], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    free = (await Client(app).post("/v1/completions", body))[1]["choices"]
    texts, ids = ([choice[name] for choice in free] for name in ("text", "token_ids"))
    stop = next(
        char for char in texts[stopped][1:] if char not in texts[1 - stopped] + "\ufffd"
    )
    texts[stopped] = texts[stopped].partition(stop)[0]
    stats, reasons = app.engine.engine.stats, ["length", "length"]
    reasons[stopped], before = "stop", stats.computed_tokens
    body[field] = stop if field == "stop" else tokenizer.encode(stop)
    body |= {"stream": stream, "stream_options": {"include_usage": True}}
    asked = await Client(app).request("/v1/completions", body).run()
    events = asked.events()[:-1] if stream else [json.loads(b"".join(asked.chunks))]
    used = events[-1]["usage"]["completion_tokens"]
    for index in (0, 1):
        mine = [one for event in events for one in event["choices"] if one["index"] == index]
        said = "".join(one["text"] for one in mine), mine[-1]["finish_reason"]
        assert said == (texts[index], reasons[index]), (
            f"choice {index}, while {stop!r} stops choice {stopped}: {said}"
        )
        count = sum(len(one["token_ids"]) for one in mine)
        used -= count
        assert count == 40 if index != stopped else ids[index][:count] and count < 40, (
            f"choice {index} has {count} tokens, while {stop!r} stops choice {stopped}"
        )
    assert used == 0, f"usage counts {used} tokens more than the choices have"
    await settle(app)
    assert stats.computed_tokens - before < 70, f"choice {stopped} went on in the engine"


async def test_of_two_names_of_max_tokens_the_newer_one_counts(make):
    body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    for given, count in (({"max_tokens": 9}, 9), ({"max_completion_tokens": 4}, 4),
                         ({"max_tokens": 9, "max_completion_tokens": 4}, 4)):  # fmt: skip
        found = (await Client(make()).post("/v1/chat/completions", body | given))[1]
        assert found["usage"]["completion_tokens"] == count, f"{given}: {found['usage']}"


async def test_without_max_tokens_there_is_room_for_the_longest_prompt(model, tokenizer):
    engine = load(model, max_rows=2, cache_bytes=blocks(model, 10), step_tokens=64)
    app = whole_app(Loopback(engine), tokenizer, "tiny")
    (end, *_) = engine.config.eos_token_ids
    body = {"prompt": ["a" * 155, "b"], "logit_bias": {str(end): 100}}
    status, found = await Client(app).post("/v1/completions", body)
    assert status == 200, f"prompt 0 has 155 tokens, and 6 more fit: {found}"


async def test_text_that_a_stop_string_holds_back_comes_with_the_end(make, tokenizer):
    """The engine ends the completion without a token, while "aaa" may begin the stop string."""
    app = make()
    (a,) = tokenizer.encode("a")
    body = {"prompt": "b", "max_tokens": 50, "stop": ["aaab"], "logit_bias": {str(a): 100}}
    asked = asyncio.ensure_future(Client(app).post("/v1/completions", body))
    live = app.engine.worker.live
    while not live or len(live[0].output_ids) < 5:
        await asyncio.sleep(0)
    app.engine.engine.abort(live[0])
    status, found = await asked
    (choice,), used = found["choices"], found["usage"]["completion_tokens"]
    assert (status, choice["text"], used) == (200, "a" * used, len(choice["text"])), (
        f"of {used} tokens, each an a, the text is {choice['text']!r}"
    )
    assert choice["finish_reason"] == "length", (
        "the API has no word for what the engine aborts"
    )
    await settle(app)


async def test_usage_counts_the_token_that_ends_a_text(make):
    app = make()
    (end, *_) = app.engine.engine.config.eos_token_ids
    body = {"prompt": "ab", "max_tokens": 9, "min_tokens": 3, "logit_bias": {str(end): 100}}
    body |= {"return_token_ids": True}
    found = (await Client(app).post("/v1/completions", body))[1]
    (choice,), used = found["choices"], found["usage"]["completion_tokens"]
    assert (choice["token_ids"][-1], choice["finish_reason"]) == (end, "stop")
    assert len(choice["token_ids"]) == used == 4, (
        f"usage: 3 tokens and the one that ends the text, not {used}"
    )


async def test_a_stop_string_ends_the_request_in_the_engine_too(make, model, tokenizer):
    app = make()
    free = texts(model, tokenizer, ["hello"], SamplingParams(max_tokens=60, ignore_eos=True))[
        0
    ]
    stop = free[20:23]
    body = {
        "prompt": "hello",
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 60,
        "stop": [stop],
    }
    found = (await Client(app).post("/v1/completions", body))[1]
    assert found["choices"][0]["text"] == free[: free.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] < 60
    await settle(app)
    assert app.engine.engine.stats.computed_tokens < 40, (
        "the engine went on after the stop string"
    )


# Requests that are refused.

REFUSED: dict[str, tuple[Any, int, str | None, str]] = {
    "no JSON": (b"{", 400, None, "JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, None, "JSON"),
    "half a surrogate": (b'{"prompt": "\\ud800"}', 400, None, ""),
    "an array": (b"[]", 400, None, "object"),
    "nested too deeply": (b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400, None, "nests deeper"),
    "no prompt": ({}, 400, "prompt", "prompt"),
    "empty prompt": ({"prompt": ""}, 400, "prompt", "at least 1 token"),
    "long prompt": ({"prompt": "x" * 1024}, 400, "prompt", "1023"),
    "token out of range": ({"prompt": [1, 257]}, 400, "prompt", "between 0 and 256"),
    "second prompt long": ({"prompt": ["a", "x" * 1024]}, 400, "prompt", "prompt[1] has 1024 tokens"),
    "second prompt far too long": ({"prompt": ["a", "x" * 9**6]}, 400, "prompt", "prompt[1] has 531,441 "),
    "second prompt empty": ({"prompt": ["a", ""]}, 400, "prompt", "prompt[1] is empty"),
    "no token ids in the second": ({"prompt": [[1], []]}, 400, "prompt", "prompt[1] is empty"),
    "second out of range": ({"prompt": [[1], [2, 257], [257]]}, 400, "prompt", "prompt[1] holds token id 25"),
    "only one, in a list": ({"prompt": [[257]]}, 400, "prompt", "prompt[0] holds token id 257"),
    "not the prompts' fault": ({"prompt": ["a", "b"], "stop_token_ids": [300]}, 400, "stop_token_ids",
        "stop_token_ids holds token id 300"),
    "far too long prompt": ({"prompt": "x" * 9**6}, 400, "prompt", "the prompt has 531,441 characters"),
    "token of a hundred digits": (b'{"prompt": [' + b"9" * 100 + b"]}", 400, "prompt", ""),
    "temperature": ({"prompt": "a", "temperature": -1}, 400, "temperature", "between 0"),
    "high temperature": ({"prompt": "a", "temperature": 100.5}, 400, "temperature", "between 0 and 100"),
    "infinity": (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature", "out of range"),
    "too many samples": ({"prompt": ["a"] * 100, "n": 3}, 400, "n", "at most 256"),
    "too many prompts": ({"prompt": ["a"] * 257}, 400, "prompt", "at most 256"),
    "too many stops": ({"prompt": "a", "stop": ["x"] * 65}, 400, "stop", "at most 64"),
    "bias of no token": ({"prompt": "a", "logit_bias": {"300": 1}}, 400, "logit_bias", "256"),
    "suffix": ({"prompt": "a", "suffix": "b"}, 400, "suffix", ""),
    "priority": ({"prompt": "a", "priority": 1}, 400, "priority", "fcfs"),
    "deadline": ({"prompt": "a", "deadline_ms": 0}, 400, "deadline_ms", "is 0, but must be an integer >= 1"),
    "far deadline": ({"prompt": "a", "deadline_ms": 10**12}, 400, "deadline_ms", "is 1000000000000, but"),
    "far priority": ({"prompt": "a", "priority": -(10**12)}, 400, "priority", "is -1000000000000, but"),
    "deadline of 400 digits": (b'{"prompt": "a", "deadline_ms": ' + b"9" * 400 + b"}", 400, "deadline_ms",
        ""),
    "grammar": ({"prompt": "a", "guided_regex": "a+"}, 400, "guided_regex", "no tokenizer"),
    "two grammars": ({"prompt": "a", "guided_regex": "a+", "guided_choice": ["a"]}, 400, "guided_regex",
        "only one"),
    "large schema": ({"prompt": "a", "guided_json": {"title": "x" * 70_000}}, 400, "guided_json", "65,536"),
    "a format without a schema": ({"prompt": "a", "response_format": {"type": "json_schema"}}, 400,
        "response_format", "schema"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_wrong_is_named(make, what):
    body, status, param, words = REFUSED[what]
    app = make()
    got, found = await Client(app).post("/v1/completions", body)
    error = found["error"]
    assert (got, error["param"]) == (status, param), error
    assert words in error["message"] and "Traceback" not in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == ("context_length_exceeded" if "long" in what else None), error
    await settle(app)


async def test_of_several_prompts_the_one_that_the_engine_refuses_is_named(make, monkeypatch):
    app = make()
    add = app.engine.engine.add

    def choosy(prompt: list[int], *args: Any, **more: Any) -> Any:
        if len(prompt) == 2:
            raise UserError("the prompt has 2 tokens, which is one too many")
        return add(prompt, *args, **more)

    monkeypatch.setattr(app.engine.engine, "add", choosy)
    for prompt, name in ((["abc", "de", "x"], "prompt[1]"), ("de", "the prompt")):
        body = {"prompt": prompt, "n": 2, "max_tokens": 1}
        status, found = await Client(app).post("/v1/completions", body)
        assert (status, found["error"]["param"]) == (400, "prompt"), found
        assert found["error"]["message"].startswith(f"{name} has 2 tokens"), found
    await settle(app)


CHAT_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "no role": ({"messages": [{"content": "x"}]}, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url",
        "image_url": {"url": "file:///etc/passwd"}}]}]}, "messages"),
    "a template": ({"chat_template": "{{ 7*7 }}"}, "chat_template"),
    "a reserved variable": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    "goes on from nothing": ({"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
        "continue_final_message"),
    "top without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "a long conversation": ({"messages": [{"role": "user", "content": "x" * 1024}]}, "messages"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHAT_REFUSED)
async def test_what_is_wrong_with_a_chat_is_named(make, what):
    body, param = CHAT_REFUSED[what]
    body = {"messages": [{"role": "user", "content": "x"}]} | body
    status, found = await Client(make()).post("/v1/chat/completions", body)
    assert (status, found["error"]["param"]) == (400, param), found


async def test_unknown_fields_are_named(make):
    body = {"prompt": "a", "max_tokens": 1, "temprature": 0, "mirostat": 2, "user": "me"}
    asked = await Client(make()).request("/v1/completions", body).run()
    assert (
        asked.status == 200
        and asked.headers["x-ladder-ignored"] == "mirostat, temprature, user"
    )
    nasty = (
        await Client(make()).request("/v1/completions", body | {"a\r\nx: y\u00e9": 1}).run()
    )
    assert (
        "\r" not in nasty.headers["x-ladder-ignored"]
        and "\n" not in nasty.headers["x-ladder-ignored"]
    )


async def test_routes_and_methods(make):
    app = make()
    assert (await Client(app).get("/nothing")).status == 404
    wrong = await Client(app).get("/v1/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert (await Client(app).get("/v1/models/tiny")).status == 200
    assert (await Client(app).get("/v1/models/other")).status == 404
    wrong = await Client(app).get("/health", "DELETE")
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD")
    for path in ("/health", "/", "/events"):
        head = await Client(app).get(path, "HEAD")
        assert head.status == 200 and head.chunks == [b""] and head.complete
    form = (
        await Client(app)
        .request("/v1/completions", b"{}", headers={"content-type": "text/plain"})
        .run()
    )
    assert form.status == 415, f"a body of text/plain is answered {form.status}"
    packed = (
        await Client(app)
        .request("/v1/completions", b"{}", headers={"content-encoding": "gzip"})
        .run()
    )
    assert packed.status == 415 and "compressed" in packed.json()["error"]["message"]
    plain = {"content-encoding": "Identity"}
    same = await Client(app).request("/v1/completions", b"{}", headers=plain).run()
    assert same.json()["error"]["param"] == "prompt", "names of codings have no case"
    assert len(form.headers["x-request-id"]) == 24
    mine = await Client(app).get("/version", x_request_id="abc")
    assert mine.headers["x-request-id"] == "abc"
    bad = await Client(app).get("/version", x_request_id="a b")
    assert bad.headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/completions", "/v1/completions"),
        ("/models/tiny", "/v1/models/tiny"),
        ("/v1/api/tags", "/api/tags"),
        ("/v1/files", None),
        ("/v1", None),
        ("//", None),
    ],
)
async def test_a_path_that_is_nearly_a_route_is_told_which(make, path, meant):
    asked = await Client(make()).get(path)
    hint = f" (did you mean {meant!r}?)" if meant else ""
    found = asked.json()["error"]["message"]
    assert (asked.status, found) == (404, f"there is no {path!r} here{hint}")


async def test_models_are_told_when_requests_are_taken(make):
    app = make()
    for state, status in (("starting", 503), ("ready", 200), ("restarting", 503)):
        app.engine.state = state
        answers = [
            await Client(app).get(path) for path in ("/v1/models", "/v1/models/tiny", "/ready")
        ]
        assert [one.status for one in answers] == [status] * 3, state
    app.engine.state = "ready"
    assert (await Client(app).get("/v1/models")).json()["data"][0]["max_model_len"] > 0


async def test_an_engine_that_goes_while_a_request_is_read_ends_it(make):
    app = make()
    asked = Client(app).request("/v1/responses", {"input": "x"})  # which a thread reads
    task = asyncio.ensure_future(asked.run())
    await asyncio.sleep(0)
    app.engine.state = "restarting"
    await asyncio.wait_for(task, 5)
    assert asked.status == 503 and asked.json()["error"]["code"] in ("died", "restarting")
    app.engine.state = "ready"
    await settle(app)


async def test_large_and_slow_bodies(make):
    app = make(limits=Limits(max_body_bytes=1000, body_seconds=0.05))
    told = (
        await Client(app)
        .request("/v1/completions", b"", headers={"content-length": "100000000"})
        .run()
    )
    assert told.status == 413 and told._body is not None, (
        "a body too large by its own account was read"
    )
    untold = await Client(app).request("/v1/completions", b"x" * 1001).run()
    assert untold.status == 413
    slow = Client(app).request("/v1/completions", b"{")
    slow._body = None
    await slow.run()
    assert slow.status == 408
    gone = Client(app).request("/v1/completions", b"{")
    gone._body = None
    gone.leave()
    await gone.run()
    assert gone.status == 0
    await settle(app)


async def test_a_full_queue_says_when_to_come_again(make):
    app = make(limits=Limits(max_queue=2))
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    asked = [Client(app).request("/v1/completions", body) for _ in range(12)]
    tasks = [asyncio.ensure_future(one.run()) for one in asked]
    await asyncio.gather(*tasks)
    statuses = [one.status for one in asked]
    assert statuses.count(200) == 10 and statuses.count(429) == 2, statuses
    (full, *_) = [one for one in asked if one.status == 429]
    assert (
        int(full.headers["retry-after"]) >= 1
        and full.json()["error"]["type"] == "rate_limit_error"
    )
    never = {"prompt": ["a"] * 11, "max_tokens": 1}
    refused = await Client(app).request("/v1/completions", never).run()
    assert refused.status == 400 and "retry-after" not in refused.headers, (
        "it can never be taken"
    )
    assert (await Client(app).post("/v1/completions", never | {"prompt": ["a"] * 10}))[
        0
    ] == 200


# Leaving.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("proxy", [False, True])
async def test_who_leaves_is_let_go(make, stream, proxy):
    """Behind Ray's proxy nobody says that the client has left: the request is cancelled."""
    app = make()
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    asked = Client(app).request("/v1/completions", body)
    task = asyncio.ensure_future(asked.run())
    while not app.engine.engine.scheduler.running:
        await asyncio.sleep(0)
    if proxy:
        task.cancel()
        await asyncio.wait([task])
    else:
        asked.leave()
        await task
    await settle(app)
    steps = app.engine.engine.stats.steps
    assert steps < 60, f"a request whose client had left was computed for {steps} steps"
    assert metrics(app).failures["left"] == 1, "the client has left, and it is not counted"


@pytest.mark.parametrize(
    ("stream", "late"),
    [(False, 0.0), (True, 0.0), (False, 0.2)],
    ids=["whole", "stream", "slow to send"],
)
async def test_deadlines(make, stream, late):
    """A deadline counts from the beginning of the request: a client slow to send its body uses it up."""
    app = make()
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    asked = Client(app).request("/v1/completions", body | {"deadline_ms": 150 if late else 60})
    receive = asked.receive

    async def slowly() -> dict[str, Any]:
        await asyncio.sleep(late)
        return await receive()

    asked.receive = slowly
    await asked.run()
    if stream and asked.status == 200:
        assert asked.events()[-1]["error"]["code"] == "deadline", (
            "a stream past its deadline has no error"
        )
    else:
        assert (asked.status, asked.json()["error"]["code"]) == (504, "deadline")
    await settle(app)
    assert not late or app.engine.engine.stats.steps < 30, (
        "a request too late on arrival was computed"
    )


async def test_a_deadline_that_passes_while_an_answer_is_written_is_told(make, monkeypatch):
    monkeypatch.setattr("serving.completion.LONG_ANSWER", 0)  # it is written by a thread
    write = ResponseFormatter.body

    def slowly(formatter: ResponseFormatter, group: ChoiceGroup) -> bytes:
        time.sleep(0.4)
        return write(formatter, group)

    monkeypatch.setattr(ResponseFormatter, "body", slowly)
    app = make()
    body = {"prompt": "a", "max_tokens": 1, "ignore_eos": True, "deadline_ms": 300}
    status, found = await Client(app).post("/v1/completions", body)
    assert (status, found["error"]["code"]) == (504, "deadline"), "nothing was answered"
    await settle(app)


async def test_completions_that_cannot_be_made_leave_nothing_in_the_engine(make, monkeypatch):
    app, start = make(), Choice.__init__

    def fail_at_the_second(choice: Choice, group: Any, index: int, tokenizer: Any) -> None:
        assert index == 0, "planted"
        start(choice, group, index, tokenizer)

    monkeypatch.setattr(Choice, "__init__", fail_at_the_second)
    body = {"prompt": ["one", "two"], "max_tokens": 100, "ignore_eos": True}
    status, _ = await Client(app).post("/v1/completions", body)
    assert status == 500
    assert app.engine.in_flight == 0, "a prompt of a request that failed is computed"


async def test_an_answer_that_cannot_be_written_leaves_nothing_in_the_engine(
    make, monkeypatch
):
    def fail(group: ChoiceGroup) -> bytes:
        raise RuntimeError("planted")

    app = make()
    monkeypatch.setattr(ChoiceGroup, "events", fail)
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    status, _ = await Client(app).post("/v1/completions", body)
    assert status == 500
    assert app.engine.in_flight == 0, "a request whose answer failed is still computed"
    await settle(app)


async def test_a_slow_reader_is_dropped_and_others_are_not(make, model, tokenizer):
    app = make(limits=Limits(max_unsent=20))
    body = {
        "prompt": "hello",
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    slow, fast = (Client(app).request("/v1/completions", body) for _ in range(2))
    slow.reads.clear()
    tasks = [asyncio.ensure_future(one.run()) for one in (slow, fast)]
    await tasks[1]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    assert [fast.text()] == texts(model, tokenizer, ["hello"], params)
    (group,) = [http.group for http in app.requests if http.group is not None]
    assert group.failure is not None and group.failure[0] == "slow"
    unsent = sum(len(choice.texts) - choice.sent for choice in group.choices)
    assert len(slow.chunks) == 1 and unsent <= 21, "its buffer has no bound"
    slow.leave()  # what the server's sweep does
    await tasks[0]
    await settle(app)
    assert metrics(app).failures["slow"] == 1


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.long)],
)
def test_thousands_who_leave(make, rounds):
    """At every moment of a request's life, a hundred at a time; blocks come back, memory does not grow."""

    async def test() -> None:
        app, rng = make(), random.Random(1)
        process = psutil.Process(os.getpid())

        async def some(count: int) -> None:
            asked: list[Asked] = []
            for _ in range(count):
                body = {
                    "prompt": "abc" * rng.randint(1, 9),
                    "max_tokens": 50,
                    "stream": rng.random() < 0.5,
                }
                one = Client(app).request("/v1/completions", body)
                asked.append(one)
            tasks = [asyncio.ensure_future(one.run()) for one in asked]
            for one in asked:
                for _ in range(rng.randint(0, 1)):
                    await asyncio.sleep(0)
                one.leave()
            await asyncio.gather(*tasks)
            await settle(app)

        # What is kept of a request is kept of each, so a leak shows in every part of the run. What Python and
        # the C library take for themselves comes in jumps, and not in every part.
        sizes, objects = [], []
        for _ in range(4):
            for _ in range(rounds // 4):
                await some(100)
            gc.collect()
            sizes.append(process.memory_info().rss)
            objects.append(len(gc.get_objects()))
        grown = min(after / before - 1 for before, after in itertools.pairwise(sizes))
        assert grown < 0.003, (
            f"MB after each {25 * rounds} requests left: {[size >> 20 for size in sizes]}"
        )
        kept = min(after - before for before, after in itertools.pairwise(objects))
        assert kept < 150, (
            f"{kept} Python objects are kept of each {25 * rounds} requests that were left"
        )
        assert metrics(app).failures["left"] > 50 * rounds

    asynchronously(test, 280.0)


class Driven:
    """Drives a coroutine by hand, counts its waits, and cancels it at one of them."""

    def __init__(self, coroutine: Any, at: int) -> None:
        self.step = coroutine.__await__()
        self.at = at
        self.count = 0

    def __await__(self) -> Any:
        value = None
        while True:
            try:
                waited = self.step.send(value)
            except StopIteration:
                return
            if self.count == self.at:
                if asyncio.isfuture(waited):
                    waited.cancel()
                self.step.throw(asyncio.CancelledError)
            self.count += 1
            value = yield waited


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": 1}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_at_every_await(make, monkeypatch, stream, more):
    """A request is cancelled at its first wait, at its second, and so on: nothing is ever left.

    Its prompt is tokenized by a thread, which is a wait, too.
    """
    monkeypatch.setattr(serving_app, "LONG", 0)
    body = {"prompt": "abcdef", "max_tokens": 8, "ignore_eos": True, "stream": stream, **more}
    app = make()

    async def drive(at: int) -> int:
        driven = Driven(Client(app).request("/v1/completions", body).run(), at)
        ends = (asyncio.CancelledError, StopIteration, RuntimeError)
        with contextlib.suppress(*ends):
            await driven
            # How many waits there are depends on how many tokens come at once.
            assert at < 0 or driven.count <= at, f"cancelled at wait {at}, and it went on"
        assert app.engine.in_flight == 0, f"cancelled at wait {at}, and the engine goes on"
        await settle(app)
        return driven.count

    found: list[int] = []

    async def all_of_them() -> None:
        found.append(await drive(-1))
        for at in range(found[0]):
            await drive(at)

    asynchronously(all_of_them, 120.0)
    waits = found[0]
    assert waits >= (8 if stream else 1), (
        f"a request waits only {waits} times, so little would be tested"
    )


async def test_engine_death_is_told_to_everybody(make):
    app = make()
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
    asked = [
        Client(app).request("/v1/completions", body | {"stream": n % 2 == 0})
        for n in range(16)
    ]
    tasks = [asyncio.ensure_future(one.run()) for one in asked]
    while not any(one.chunks for one in asked):
        await asyncio.sleep(0)
    app.engine.die()
    _, waiting = await asyncio.wait(tasks, timeout=5)
    assert not waiting, f"{len(waiting)} requests were not told that their engine has died"
    for one in asked:
        error = (
            one.events()[-1]
            if one.headers["content-type"].startswith("text/event")
            else one.json()
        )
        assert error["error"]["code"] == "died", error
        assert one.status in (200, 503) and one.complete
    assert not metrics(app)._last, "of completions that no engine knows any more"
    assert (await Client(app).post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[
        0
    ] == 200
    await settle(app)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_step_is_a_500_for_its_own_requests(make, monkeypatch, stream):
    """Or, in the middle of a stream, an error as its last event. The next request is answered."""
    app = make()
    engine = app.engine.engine
    body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": stream}
    asked = Client(app).request("/v1/completions", body)
    task = asyncio.ensure_future(asked.run())
    while engine.stats.steps < 8:
        await asyncio.sleep(0)
    forward = engine.runner.forward

    def broken(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(engine.runner, "forward", forward)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "forward", broken)
    await task
    error = (asked.events()[-1] if stream else asked.json())["error"]
    assert (asked.status, error["code"]) == (200 if stream else 500, "error"), error
    assert error["type"] == "server_error" and "device" not in error["message"], (
        "an inner word has got out"
    )
    assert not stream or asked.events()[-2]["choices"], (
        "nothing came before the step that failed"
    )
    assert (await Client(app).post("/v1/completions", body | {"stream": False}))[0] == 200
    await settle(app)


async def test_salts_part_the_prefix_cache_and_usage_tells_what_was_found(make):
    app = make()
    body = {"prompt": "the same beginning of three blocks at the least, " * 2, "max_tokens": 1}

    async def found(**more: Any) -> int:
        answer = (await Client(app).post("/v1/completions", body | more))[1]
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await found(cache_salt="a") == 0, "the first request of salt a found a prefix"
    assert await found(cache_salt="a") >= 48, (
        "the second request of salt a did not find the first one's"
    )
    assert await found(cache_salt="b") == 0, (
        "salt b found what salt a had left: tenants see each other"
    )
    assert await found(cache_salt="c", n=4) == 0, (
        "samples are told to have found each other's prompt"
    )
    one = await found(cache_salt="c")
    assert await found(cache_salt="c", n=4) == one >= 48, (
        "what was found is told once a prompt"
    )
    twice = await found(cache_salt="c", prompt=[body["prompt"]] * 2, n=2)
    assert twice == 2 * one, "what was found is told for one of the two prompts"


@pytest.mark.parametrize("stream", [False, True])
async def test_nan_is_an_error_of_its_own_request_and_is_counted(tokenizer, stream):
    broken = random_model(SHAPES["tiny"], device="cpu", dtype=torch.float32)
    (bad,) = tokenizer.encode("q")
    broken.embed_tokens.weight.data[bad] = float("nan")
    engine = load(broken, max_rows=4, cache_bytes=blocks(broken, 60), step_tokens=64)
    app = whole_app(Loopback(engine), tokenizer, "tiny")
    body = {
        "max_tokens": 6,
        "ignore_eos": True,
        "stream": stream,
        "logit_bias": {str(bad): -100},
    }
    asked = [
        Client(app).request("/v1/completions", body | {"prompt": text})
        for text in ("ab", "aqb", "c")
    ]
    done = await asyncio.gather(*(one.run() for one in asked))
    assert [one.status for one in done] == [200, 500, 200]
    error = json.loads(b"".join(done[1].chunks))["error"]
    assert error["code"] == "nan" and "not a number" in error["message"]
    page = b"".join((await Client(app).get("/metrics")).chunks).decode()
    assert 'ladder:troubles_total{model_name="tiny",reason="nan"} 1' in page
    await settle(app)


async def test_metrics_are_what_happened(make):
    parser = pytest.importorskip("prometheus_client.parser")
    app = make()
    for number in range(3):
        body = {"prompt": "abcd", "max_tokens": 5, "ignore_eos": True, "seed": number}
        await Client(app).post("/v1/completions", body)
    status, _ = await Client(app).post(
        "/v1/completions", {"prompt": "abcd", "guided_regex": "a"}
    )
    assert status == 400, "the engine has refused it, and it is no request of any length"
    asked = await Client(app).get("/metrics")
    text = b"".join(asked.chunks).decode()
    found: dict[str, float] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    assert found["vllm:generation_tokens_total"] == 15
    assert found["vllm:prompt_tokens_total"] == 12
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 12
    assert found["vllm:request_success_total"] == 3
    assert (
        found["vllm:request_prompt_tokens_count"]
        == found["vllm:e2e_request_latency_seconds_count"]
        == 3
    )
    assert found["ladder:troubles_total"] == 1
    assert found["vllm:num_requests_running"] == 0 and found["vllm:kv_cache_usage_perc"] == 0
    assert found["ladder:steps_total"] == app.engine.worker._steps


async def test_the_end_of_a_prompt_is_what_a_text_goes_on_from(make, monkeypatch):
    """However long the prompt is: a completion must not look through one without text."""
    app, seen = make(), Counter[Detokenizer]()
    push = Detokenizer.push

    def noted(self, token):
        seen[self] += 1
        return push(self, token)

    monkeypatch.setattr(Detokenizer, "push", noted)
    special = next(iter(app.model.tokenizer.special_ids))
    body = {"prompt": [[special] * 900, [65, special]], "n": 4, "max_tokens": 1}
    asked = await Client(app).request("/v1/completions", body).run()
    assert asked.status == 200 and len(seen) >= 8 and max(seen.values()) <= 64
    begins = [choice["index"] for choice in asked.json()["choices"]]
    assert begins == [*range(8)]


class Growing(list[str]):
    """A list that gets another text as soon as somebody has asked for its length."""

    def __len__(self) -> int:
        size = super().__len__()
        if size == 1:
            self.append("b")
        return size


def test_a_text_that_comes_while_texts_are_taken_is_taken_once():
    choice = SimpleNamespace(sent=0, texts=Growing(["a"]))
    pieces = [Choice.take(choice), Choice.take(choice)]  # type: ignore[arg-type]
    assert pieces == [("a", 0, 1), ("b", 1, 2)]
