"""Other people's clients against a live server: tools, structured answers, log-probabilities of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.servers import Running

pytestmark = pytest.mark.slow  # real processes

openai = pytest.importorskip("openai")

NAME = "random:tiny"
SAID = [{"role": "user", "content": "How is it in Rome?"}]


class Closed(BaseModel):
    """No other properties: random weights would write them until `max_tokens` cuts them off, now and then."""

    model_config = ConfigDict(extra="forbid")


class Weather(Closed):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


class Verdict(Closed):
    word: Literal["yes", "no"]
    sure: bool


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": Weather.model_json_schema()},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running("--max-rows", "8", "--access-log", "none") as running:
        yield running
        running.settle()


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_call_its_answer_and_what_follows(client):
    """The loop that every agent runs: ask, call, answer the call, ask again."""
    said: list = list(SAID)
    done = client.chat.completions.create(
        model=NAME,
        messages=said,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
    )
    (choice,) = done.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert Weather.model_validate_json(call.function.arguments)
    said += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    after = client.chat.completions.create(
        model=NAME, messages=said, tools=[TOOL], max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert (
        after.usage.prompt_tokens > done.usage.prompt_tokens and after.choices[0].message.content is not None
    )


def test_several_calls_streamed(client):
    """Deltas put together by the client's own accumulator."""
    found = set()
    for seed in range(4):
        with client.chat.completions.stream(
            model=NAME, messages=SAID, tools=[TOOL], tool_choice="required", max_tokens=700, seed=seed
        ) as stream:
            kinds = {event.type for event in stream}
            done = stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        if done.choices[0].finish_reason == "tool_calls":
            calls = done.choices[0].message.tool_calls
            found.add(len(calls))
            assert all(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo") for call in calls)
            assert len({call.id for call in calls}) == len(calls)
    assert found, "every answer was cut"


def test_parsed_answers_and_parsed_calls(client):
    done = client.chat.completions.parse(model=NAME, messages=SAID, response_format=Verdict, max_tokens=500)
    assert isinstance(done.choices[0].message.parsed, Verdict)
    done = client.chat.completions.parse(
        model=NAME,
        messages=SAID,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
    )
    assert isinstance(done.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    both = client.chat.completions.parse(
        model=NAME,
        messages=SAID,
        tools=[openai.pydantic_function_tool(Weather)],
        response_format=Verdict,
        parallel_tool_calls=False,
        max_tokens=400,
        seed=1,
    )
    message = both.choices[0].message
    assert isinstance(message.parsed, Verdict) or isinstance(
        message.tool_calls[0].function.parsed_arguments, Weather
    )


def test_litellm(server):
    litellm = pytest.importorskip("litellm")
    more = {"model": f"openai/{NAME}", "messages": SAID, "api_base": f"{server.url}/v1", "api_key": "none"}
    done = litellm.completion(**more, max_tokens=6)
    assert done.usage.completion_tokens >= 1
    chunks = list(litellm.completion(**more, max_tokens=6, stream=True))
    assert litellm.stream_chunk_builder(chunks, messages=SAID) is not None
    called = litellm.completion(
        **more, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=400
    )
    (call,) = called.choices[0].message.tool_calls
    assert Weather.model_validate_json(call.function.arguments)
    formed = litellm.completion(**more, response_format=Verdict, max_tokens=500)
    assert Verdict.model_validate_json(formed.choices[0].message.content)
