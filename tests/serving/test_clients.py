"""Other people's clients against a live server: agents, structured answers, embeddings, errors.

Packages that speak another protocol than OpenAI's are the extra `clients`; without one its test is skipped by
its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.servers import Running

pytestmark = pytest.mark.slow  # real processes

openai = pytest.importorskip("openai")

NAME = "random:tiny"
HELLO = [{"role": "user", "content": "Say hello."}]
READ = {
    "type": "object",
    "properties": {"path": {"enum": ["numbers.txt"]}},
    "required": ["path"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "name": "read_file",
        "description": "Read a file",
        "parameters": READ,
    },
    {"type": "function", "name": "add", "description": "Add two numbers", "parameters": ADD},
]
NESTED = [
    {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters")},
    }
    for tool in TOOLS
]
THEIRS = [
    {
        "name": tool["name"],
        "description": tool["description"],
        "input_schema": tool["parameters"],
    }
    for tool in TOOLS
]
TASK = "Read numbers.txt, add its two numbers, and say the sum."
ORDER = ("read_file", "add", None)
"""The tool that each turn of the loop has to call; None: it has to answer."""


class Verdict(BaseModel):
    """No other properties: random weights would write them until `max_tokens` cuts them off, now and then."""

    model_config = ConfigDict(extra="forbid")
    word: Literal["yes", "no"]
    sure: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running("--max-rows", "8", "--access-log", "none") as running:
        yield running
        running.settle()


@pytest.fixture
def client(server: Running) -> Any:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
    )


def call(folder: Path, name: str, arguments: dict[str, Any]) -> str:
    """What a tool answers."""
    if name == "read_file":
        return (folder / arguments["path"]).read_text()
    return str(arguments["a"] + arguments["b"])


def responses_loop(url: str, model: str, folder: Path) -> list[str]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    said: Any = TASK
    before, answers = None, []
    for name in ORDER:
        with client.responses.stream(
            model=model,
            input=said,
            previous_response_id=before,
            tools=TOOLS,
            tool_choice={"type": "function", "name": name} if name else "none",
            parallel_tool_calls=False,
            max_output_tokens=300,
        ) as stream:
            events = list(stream)
            kinds, done = (
                {event.type for event in events},
                events[-1].response,
            )  # it may have been cut
        before, said = done.id, []
        for item in done.output:
            if item.type == "function_call":
                answers.append(call(folder, item.name, json.loads(item.arguments)))
                said.append(
                    {
                        "type": "function_call_output",
                        "call_id": item.call_id,
                        "output": answers[-1],
                    }
                )
        assert ("response.function_call_arguments.delta" in kinds) == bool(name)
    assert done.output_text and done.usage.output_tokens > 0
    return answers


def chat_loop(url: str, model: str, folder: Path) -> list[str]:
    """With deltas put together by the client's own accumulator."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    said: list[Any] = [{"role": "user", "content": TASK}]
    answers = []
    for name in ORDER:
        with client.chat.completions.stream(
            model=model,
            messages=said,
            tools=NESTED,
            tool_choice={"type": "function", "function": {"name": name}} if name else "none",
            parallel_tool_calls=False,
            max_tokens=300,
            extra_body={}
            if name
            else {"guided_regex": "[a-z]{1,9}"},  # what has been cut is not parsed
        ) as stream:
            kinds = {event.type for event in stream}
            (choice,) = stream.get_final_completion().choices
        said.append(choice.message)
        for one in choice.message.tool_calls or []:
            answers.append(call(folder, one.function.name, json.loads(one.function.arguments)))
            said.append({"role": "tool", "tool_call_id": one.id, "content": answers[-1]})
        assert ("tool_calls.function.arguments.delta" in kinds) == bool(name)
        assert (choice.finish_reason == "tool_calls") == bool(name)
        assert not (name and choice.message.content), "a call, and text beside it"
    return answers


def messages_loop(url: str, model: str, folder: Path) -> list[str]:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    said: list[Any] = [{"role": "user", "content": TASK}]
    assert (
        client.messages.count_tokens(model=model, messages=said, tools=THEIRS).input_tokens
        > 20
    )
    answers = []
    for name in ORDER:
        choice = (
            {"type": "tool", "name": name, "disable_parallel_tool_use": True}
            if name
            else {"type": "none"}
        )
        with client.messages.stream(
            model=model, max_tokens=300, messages=said, tools=THEIRS, tool_choice=choice
        ) as stream:
            done = stream.get_final_message()
        said.append({"role": "assistant", "content": done.content})
        results = []
        for block in done.content:
            if block.type == "tool_use":
                answers.append(call(folder, block.name, block.input))
                results.append(
                    {"type": "tool_result", "tool_use_id": block.id, "content": answers[-1]}
                )
        said += [{"role": "user", "content": results}] if results else []
        assert (
            done.stop_reason == "tool_use"
            if name
            else done.stop_reason in ("end_turn", "max_tokens")
        )
    assert done.content[0].type == "text"
    return answers


@pytest.mark.parametrize("loop", [chat_loop, responses_loop, messages_loop])
def test_an_agent_comes_to_its_end(server, tmp_path, loop):
    """Random weights: grammars alone make the calls."""
    (tmp_path / "numbers.txt").write_text("17 25")
    read, total = loop(server.url, NAME, tmp_path)
    assert read == "17 25" and total.isdigit()


def test_parsed_answers_parsed_calls_and_embeddings_of_the_official_client(client):
    assert [model.id for model in client.models.list()] == [NAME]
    more = {"model": NAME, "messages": HELLO, "max_tokens": 500}
    done = client.chat.completions.parse(**more, response_format=Verdict)
    assert isinstance(done.choices[0].message.parsed, Verdict)
    tools = {"tools": [openai.pydantic_function_tool(Verdict)], "tool_choice": "required"}
    called = client.chat.completions.parse(**more, **tools, parallel_tool_calls=False)
    assert isinstance(
        called.choices[0].message.tool_calls[0].function.parsed_arguments, Verdict
    )
    found = client.embeddings.create(model=NAME, input=["a", "b"])  # it asks for base64
    assert [one.index for one in found.data] == [0, 1]
    assert abs(sum(value * value for value in found.data[0].embedding) - 1) < 1e-4


def test_errors_of_the_official_client(client):
    with pytest.raises(openai.BadRequestError, match="temperature is 200"):
        client.completions.create(model=NAME, prompt="a", temperature=200)
    with pytest.raises(openai.NotFoundError, match="another"):
        client.completions.create(model="another", prompt="a")
    late = {"stream": True, "extra_body": {"ignore_eos": True, "deadline_ms": 150}}
    with pytest.raises(openai.APIError):  # in the middle of a stream
        list(client.completions.create(model=NAME, prompt="a", max_tokens=1000, **late))


def test_the_errors_of_others(server):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(model=NAME, max_tokens=5, messages=[])
    with pytest.raises(anthropic.NotFoundError, match="model is"):
        client.messages.create(model="claude", max_tokens=5, messages=HELLO)


def test_ollama(server):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    (model,) = (one.model for one in client.list().models)
    assert model == f"{NAME}:latest" and "tools" in client.show(model).capabilities
    few = {"num_predict": 6, "temperature": 0}
    whole = client.chat(model=model, messages=HELLO, options=few)
    pieces = list(client.chat(model=model, messages=HELLO, options=few, stream=True))
    assert "".join(one.message.content for one in pieces) == whole.message.content
    assert pieces[-1].done and pieces[-1].eval_count == whole.eval_count > 0
    formed = client.chat(model=model, messages=HELLO, format=ADD, options={"num_predict": 300})
    assert set(json.loads(formed.message.content)) == {"a", "b"}
    assert client.generate(model=model, prompt="abc", options=few).response
    assert [one.model for one in client.ps().models] == [model]
    assert len(client.embed(model=model, input=["a", "b"]).embeddings) == 2
    assert client.generate(model=model, keep_alive=0).done_reason == "unload"
    with pytest.raises(ollama.ResponseError) as missing:
        client.pull("other")
    assert "there is no" in missing.value.error, "the error is no text"
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p") as error:
        client.chat(model=model, messages=HELLO, options={"top_p": 7})
    assert error.value.status_code == 400


def test_litellm(server):
    litellm = pytest.importorskip("litellm")
    more = {
        "model": f"openai/{NAME}",
        "messages": HELLO,
        "api_base": f"{server.url}/v1",
        "api_key": "none",
    }
    chunks = list(litellm.completion(**more, max_tokens=6, stream=True))
    assert litellm.stream_chunk_builder(chunks, messages=HELLO).usage.completion_tokens >= 1
    tools = {"tools": NESTED, "tool_choice": "required", "parallel_tool_calls": False}
    (one,) = litellm.completion(**more, **tools, max_tokens=400).choices[0].message.tool_calls
    assert one.function.name in ORDER and json.loads(one.function.arguments)
    formed = litellm.completion(**more, response_format=Verdict, max_tokens=500)
    assert Verdict.model_validate_json(formed.choices[0].message.content)
