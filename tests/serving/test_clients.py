"""Other people's clients against a live server: agents, structured answers, embeddings, errors.

Packages that speak another protocol than OpenAI's are the extra `clients`; without one its test is skipped by
its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
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
SAYS_SOMETHING = {"min_tokens": 8}
"""In the last turn: random weights may end a text with its first token."""


class ReadFile(BaseModel):
    """Read a file."""

    model_config = ConfigDict(extra="forbid")
    path: Literal["numbers.txt"]


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
            extra_body={} if name else SAYS_SOMETHING,
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
            model=model,
            max_tokens=300,
            messages=said,
            tools=THEIRS,
            tool_choice=choice,
            extra_body={} if name else SAYS_SOMETHING,
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


def tool_runner_loop(url: str, model: str, folder: Path) -> list[str]:
    """With the client's own loop, which would let the server keep the conversation."""
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    answers: list[str] = []

    def tool(described: dict[str, Any]) -> Any:
        def run(**arguments: Any) -> str:
            answers.append(call(folder, described["name"], arguments))
            return answers[-1]

        names = {key: described[key] for key in ("name", "description", "input_schema")}
        return anthropic.beta_tool(**names)(run)

    def choice(name: str | None) -> dict[str, Any]:
        chosen = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
        return chosen if name else {"type": "none"}

    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=300,
        messages=[{"role": "user", "content": TASK}],
        tools=[tool(one) for one in THEIRS],
        tool_choice=choice(ORDER[0]),
        extra_body=SAYS_SOMETHING,
    )
    following = iter(ORDER[1:])
    kinds = []
    for message in runner:
        kinds.append([block.type for block in message.content])
        more = choice(next(following, None))
        runner.set_messages_params(lambda params, more=more: {**params, "tool_choice": more})
    assert kinds == [["tool_use"], ["tool_use"], ["text"]]
    return answers


def langchain_loop(url: str, model: str, folder: Path, responses: bool = False) -> list[str]:
    langchain = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    client = langchain.ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        max_tokens=300,
        max_retries=0,
        use_responses_api=responses,
        extra_body=SAYS_SOMETHING,
    )
    said = [messages.HumanMessage(TASK)]
    answers = []
    for name in ORDER:
        bound = client.bind_tools(
            NESTED, tool_choice=name or "none", parallel_tool_calls=False
        )
        parts = list(bound.stream(said))
        answer = parts[0]
        for part in parts[1:]:
            answer += part
        said.append(answer)
        for one in answer.tool_calls:
            answers.append(call(folder, one["name"], one["args"]))
            said.append(messages.ToolMessage(answers[-1], tool_call_id=one["id"]))
        assert [one["name"] for one in answer.tool_calls] == ([name] if name else [])
    assert answer.text
    return answers


LOOPS = {
    "chat": chat_loop,
    "responses": responses_loop,
    "messages": messages_loop,
    "anthropic's own loop": tool_runner_loop,
    "langchain": langchain_loop,
    "langchain, responses": partial(langchain_loop, responses=True),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
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


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(server, responses):
    langchain = pytest.importorskip("langchain_openai")
    at = {"base_url": f"{server.url}/v1", "api_key": "none", "model": NAME, "max_retries": 0}
    client = langchain.ChatOpenAI(**at, max_tokens=500, use_responses_api=responses)
    for method in ("json_schema", "function_calling"):
        formed = client.with_structured_output(Verdict, method=method).invoke("Is it wet?")
        assert isinstance(formed, Verdict)
    embeds = langchain.OpenAIEmbeddings(**at, check_embedding_ctx_length=False)
    assert abs(sum(value * value for value in embeds.embed_query("a")) - 1) < 1e-4


def test_llama_index(server, tmp_path):
    like = pytest.importorskip("llama_index.llms.openai_like")
    tools = pytest.importorskip("llama_index.core.tools")
    (tmp_path / "numbers.txt").write_text("17 25")
    client = like.OpenAILike(
        api_base=f"{server.url}/v1",
        api_key="none",
        model=NAME,
        max_tokens=300,
        max_retries=0,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    greedy = {"temperature": 0, "max_tokens": 9}
    whole = client.complete("Say hello.", **greedy).text
    assert (
        "".join(part.delta for part in client.stream_complete("Say hello.", **greedy)) == whole
    )
    read = tools.FunctionTool.from_defaults(
        lambda path: call(tmp_path, "read_file", {"path": path}),
        name="read_file",
        description="Read a file",
        fn_schema=ReadFile,
    )
    called = client.predict_and_call([read], "Read numbers.txt.", tool_required=True)
    assert "17 25" in called.response


def test_llm(server, tmp_path, monkeypatch):
    llm = pytest.importorskip("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    described = {"model_id": "ladder", "model_name": NAME, "api_base": f"{server.url}/v1"}
    described |= {"supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([described]))
    model = llm.get_model("ladder")
    more = {"key": "none", "system": "Be brief.", "temperature": 0, "max_tokens": 9}
    whole = model.prompt("Say hello.", stream=False, **more).text()
    assert "".join(model.prompt("Say hello.", stream=True, **more)) == whole
    formed = model.prompt("Is it wet?", schema=Verdict, **more | {"max_tokens": 500}).text()
    assert Verdict.model_validate_json(formed)
