"""What the server makes of an output: a model that says a given text, at all protocols."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.json_text import MAX_DEPTH
from phases.appendix.api.reasoning import ThinkReader
from phases.appendix.protocols.ollama import capabilities, card
from phases.appendix.tools.written import decode_written
from serving.app import App
from tests.scripted_server import ALTERNATING, TEMPLATE, THINKING, TOOLS, scripted
from tests.servers import Client

SAID = [{"role": "user", "content": "How is it in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
OLLAMA = "/api/chat"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    RESPONSES: {"input": SAID},
    MESSAGES: {"messages": SAID, "max_tokens": 1000},
    OLLAMA: {"messages": SAID, "stream": False},
}
STOPS = {CHAT: "stop", MESSAGES: "stop_sequences"}


async def ask(app: App, path: str, **fields: Any) -> dict[str, Any]:
    """The whole answer."""
    status, found = await Client(app).post(path, BODIES[path] | fields)
    assert status == 200, found
    return found


def parts(path: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and text of an answer."""
    match path:
        case "/v1/chat/completions":
            message = answer["choices"][0]["message"]
            return message.get("reasoning_content", ""), message["content"] or ""
        case "/v1/responses":
            texts = {
                item["type"]: item["content"][0]["text"]
                for item in answer["output"]
                if "content" in item
            }
            return texts.get("reasoning", ""), texts.get("message", "")
        case "/v1/messages":
            blocks = answer["content"]
            thought = "".join(block.get("thinking", "") for block in blocks)
            return thought, "".join(block.get("text", "") for block in blocks)
    return answer["message"].get("thinking", ""), answer["message"]["content"]


CHANNELS = "<|channel|>analysis<|message|>Simple sum.<|end|><|start|>assistant"
CHANNELS += "<|channel|>final<|message|>four<|return|>"
MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>")
GPT_OSS = "{# <|channel|> <|message|> #}Reasoning: {{ reasoning_effort }}\n" + TEMPLATE


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("special", [False, True])
async def test_channels_are_reasoning_and_the_answer(
    tmp_path: Path, path: str, special: bool
) -> None:
    app = scripted(tmp_path, CHANNELS, GPT_OSS, MARKS, special)
    assert parts(path, await ask(app, path)) == ("Simple sum.", "four")


async def test_channels_come_in_their_order_in_a_stream_and_whole(tmp_path: Path) -> None:
    text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CHANNELS
    app = scripted(tmp_path, text, GPT_OSS)
    blocks = (await ask(app, MESSAGES))["content"]
    assert [each["type"] for each in blocks] == ["text", "thinking", "text"]
    assert parts(CHAT, await ask(app, CHAT)) == ("Simple sum.", "I look.four")
    body = BODIES[MESSAGES] | {"stream": True}
    said = b"".join((await Client(app).request(MESSAGES, body).run()).chunks).decode()
    events = [json.loads(line[6:]) for line in said.split("\n") if line.startswith("data: ")]
    begun = [event["content_block"] for event in events if "content_block" in event]
    assert [each["type"] for each in begun] == ["text", "thinking", "text"]


@pytest.mark.parametrize(
    "text", ["plain", "<|chan", "<|channel|>commentary<|message|>I look.<|end|>", "<"]
)
async def test_what_is_in_no_channel_of_reasoning_is_the_answer(
    tmp_path: Path, text: str
) -> None:
    expected = "I look." if "commentary" in text else text
    assert parts(CHAT, await ask(scripted(tmp_path, text, GPT_OSS), CHAT)) == ("", expected)


ANALYSIS = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
CALLED = " to=functions.weather<|channel|>commentary json"


@pytest.mark.parametrize(
    "head",
    [
        ANALYSIS + "<|channel|>commentary to=functions.weather <|constrain|>json",
        ANALYSIS + CALLED,
        CALLED,
    ],
)
async def test_a_call_in_a_channel_is_a_call(tmp_path: Path, head: str) -> None:
    app = scripted(tmp_path, head + '<|message|>{"city": "Rome"}<|call|>', GPT_OSS, MARKS)
    message = (await ask(app, CHAT, tools=[WEATHER]))["choices"][0]["message"]
    assert message.get("reasoning_content") == ("Look." if ANALYSIS in head else None)
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert app.engine.prompts[0].params.grammar is None, (
        "a grammar of text would forbid channels"
    )
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


THOUGHT = "<think>\nThe text says Question: 2 + 2.\n</think>\nIt is 4. Question: none"


@pytest.mark.parametrize("stop", ["Question:", "\n", "2"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_stop_strings_are_of_the_answer_alone(
    tmp_path: Path, path: str, stop: str
) -> None:
    answer = await ask(scripted(tmp_path, THOUGHT, THINKING), path, **{STOPS[path]: [stop]})
    text = "It is 4. Question: none"
    assert parts(path, answer) == ("The text says Question: 2 + 2.", text.partition(stop)[0])
    opened = scripted(tmp_path, THOUGHT.removeprefix("<think>"), THINKING + "<think>")
    assert parts(path, await ask(opened, path, **{STOPS[path]: [stop]})) == parts(path, answer)
    again = await ask(scripted(tmp_path, CHANNELS.replace("four", "a sum. b"), GPT_OSS), path,
                      **{STOPS[path]: ["sum."]})  # fmt: skip
    assert parts(path, again) == ("Simple sum.", "a ")


@pytest.mark.parametrize(
    ("text", "marks", "count"),
    [
        ("<think>Need a tool, I say.</think>x", ("<think>", "</think>"), len("Need a tool, I say.")),
        ("<think>\nab \n</think>\n\nx", ("<think>", "</think>"), 5),
        ("x", (), 0),
        ("<|channel|>analysis<|message|>Simple sum.<|end|><|start|>assistant<|channel|>final<|message|>4",
         MARKS, 11),
    ],
)  # fmt: skip
async def test_tokens_of_reasoning_are_counted(
    tmp_path: Path, text: str, marks: Any, count: int
) -> None:
    template = GPT_OSS if "channel" in text else THINKING
    app = scripted(tmp_path, text, template, marks)
    used = (await ask(app, RESPONSES))["usage"]
    assert used["output_tokens_details"]["reasoning_tokens"] == count
    used = (await ask(app, CHAT))["usage"]
    assert used["completion_tokens_details"]["reasoning_tokens"] == count


def test_tokens_of_reasoning_are_counted_wherever_the_text_is_cut() -> None:
    text = "<think>abc</think>x"
    for size in (1, 2, 3, 5, 30):
        reader = ThinkReader(False)
        for at in range(0, len(text), size):
            reader.answer(text[at : at + size], False)
        whole = [range(at, at + size) for at in range(0, len(text), size)]
        assert reader.reasoning_tokens == sum(bool({7, 8, 9} & set(span)) for span in whole), (
            size
        )


@pytest.mark.parametrize("stop", ["\n", "arguments", "Rome", "{", "}", "call>"])
@pytest.mark.parametrize("before", ["", "I look. ", "<think>\nI look.\n</think>\n"])
async def test_stop_strings_are_not_of_a_call(tmp_path: Path, before: str, stop: str) -> None:
    app = scripted(tmp_path, before + CALL, THINKING + TOOLS)
    (choice,) = (await ask(app, CHAT, tools=[WEATHER], stop=[stop, "never"]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert choice["message"]["content"] == ("I look." if before == "I look. " else None)


@pytest.mark.parametrize("stop", ["look", "."])
async def test_stop_strings_before_a_call_end_the_answer(tmp_path: Path, stop: str) -> None:
    app = scripted(tmp_path, "I look. " + CALL, TOOLS + TEMPLATE)
    for path, more in ((CHAT, {}), (CHAT, {"tools": [WEATHER]})):
        (choice,) = (await ask(app, path, stop=[stop], **more))["choices"]
        assert choice["message"]["content"] == "I look. ".partition(stop)[0].rstrip() + (
            " " if stop == "look" else ""
        )
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    (choice,) = (await ask(app, CHAT, stop=["\n{"]))["choices"]
    assert choice["message"]["content"] == "I look. <tool_call>", "without tools it is text"


LLAMA_3 = """{{ tools }}ipython {{ '{"name": "' }}{{ '", "parameters": ' }}""" + TEMPLATE
FAMILIES = {"hermes": (TOOLS + TEMPLATE, CALL)}
FAMILIES["llama 3"] = LLAMA_3, '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize("least", [0, 4, 14])
@pytest.mark.parametrize("stop", ["{", "<", "tool", "_call>\n", '{"name', "Rome"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_no_stop_string_is_in_a_call_or_in_its_mark(
    tmp_path: Path, family: str, stop: str, least: int
) -> None:
    template, text = FAMILIES[family]
    app = scripted(tmp_path, text, template)
    asked = {"tools": [WEATHER], "stop": [stop, "x"], "min_tokens": least}
    (choice,) = (await ask(app, CHAT, **asked))["choices"]
    calls = choice["message"].get("tool_calls") or [{"function": {"arguments": ""}}]
    assert calls[0]["function"]["arguments"] == '{"city": "Rome"}', (
        f"{family}: the stop string {stop!r} ended a call, of which min_tokens is {least}"
    )
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("family", "text", "stop", "shown"),
    [
        ("hermes", "a <tool b", "tool", "a <"),
        ("hermes", "a <tool b", "<t", "a "),
        ("hermes", "a b" + CALL, "b<", "a b"),
        ("hermes", "a b" + CALL, "b", "a "),
        ("llama 3", 'I look. {"name": "weather"', '"name', "I look. {"),
        ("llama 3", " { look", "{ l", " "),
    ],
)
async def test_what_only_looks_like_a_call_may_be_stopped(
    tmp_path: Path, family: str, text: str, stop: str, shown: str
) -> None:
    app = scripted(tmp_path, text, FAMILIES[family][0])
    asked = {"tools": [WEATHER], "stop": [stop]}
    (choice,) = (await ask(app, CHAT, **asked))["choices"]
    assert choice["message"]["content"] == shown.rstrip() + " " * (
        shown == "a " or shown == " "
    )
    events = (
        await Client(app).request(CHAT, BODIES[CHAT] | asked | {"stream": True}).run()
    ).events()
    streamed = [event["choices"][0] for event in events[:-1]]
    assert (
        "".join(each["delta"].get("content") or "" for each in streamed)
        == choice["message"]["content"]
    )
    assert streamed[-1]["finish_reason"] == choice["finish_reason"]


# Calls.

CUT = f'{CALL.removesuffix("</tool_call>")}</tool_call>\n<tool_call>\n{{"name": "weather", "arguments": {{"ci'


@pytest.mark.parametrize("path", BODIES)
async def test_an_unfinished_call_is_left_out_where_another_is_whole(
    tmp_path: Path, path: str
) -> None:
    app = scripted(tmp_path, CUT, TOOLS + TEMPLATE)
    tool = WEATHER if path in (CHAT, OLLAMA) else WEATHER["function"] | {"type": "function"}
    if path == MESSAGES:
        tool = {"name": "weather", "input_schema": {"type": "object"}}
    for stream in (False, True):
        asked = Client(app).request(path, BODIES[path] | {"tools": [tool], "stream": stream})
        data = b"".join((await asked.run()).chunks).decode()
        assert data.count('"name":"weather"') - data.count('"parameters"') >= 1
        assert 'ci"' not in data.replace("city", "") and '{\\"ci' not in data.replace(
            "city", ""
        ), data


async def test_the_only_call_is_told_however_it_is_cut(tmp_path: Path) -> None:
    app = scripted(tmp_path, CALL[:55], TOOLS + TEMPLATE)
    (choice,) = (await ask(app, CHAT, tools=[WEATHER]))["choices"]
    assert choice["finish_reason"] == "stop" and len(choice["message"]["tool_calls"]) == 1
    again = [*SAID, choice["message"], {"role": "tool", "tool_call_id": "x", "content": None}]
    await ask(app, CHAT, messages=again)
    first = await ask(app, RESPONSES, tools=[WEATHER["function"] | {"type": "function"}])
    answer = {"type": "function_call_output", "call_id": "x", "output": "sunny"}
    await ask(app, RESPONSES, input=[answer], previous_response_id=first["id"])


WRITTEN = {
    '{"a": 1e999, "b": -1e999, "c": ' + "9" * 5000 + "}": ["a", "b", "c"],
    '{"a": "\\ud800", "b": "\\ude00x"}': ["a", "b"],
    '{"a": 1, "a": 2, "b": "tab\there"}': ["a", "b"],
    '{"a": 123456789012345678901234567890}': ["a"],
}


@pytest.mark.parametrize("arguments", WRITTEN, ids=range(len(WRITTEN)))
@pytest.mark.parametrize("path", BODIES)
async def test_what_json_allows_a_model_may_write(
    tmp_path: Path, path: str, arguments: str
) -> None:
    app = scripted(tmp_path, CALL.replace('{"city": "Rome"}', arguments), TOOLS + TEMPLATE)
    tools = {
        CHAT: WEATHER,
        OLLAMA: WEATHER,
        MESSAGES: {"name": "weather", "input_schema": {"type": "object"}},
    }
    tool = tools.get(path, WEATHER["function"] | {"type": "function"})
    for stream in (False, True):
        body = BODIES[path] | {"tools": [tool], "stream": stream, "max_tokens": 8000}
        asked = (
            await Client(app).request(path, body | {"options": {"num_predict": 8000}}).run()
        )
        assert asked.status == 200 and asked.complete, asked.chunks
        assert b"the server has failed" not in b"".join(asked.chunks)
    if path == MESSAGES:
        (block,) = (await ask(app, path, tools=[tool], max_tokens=8000))["content"]
        assert list(block["input"]) == WRITTEN[arguments]
    if path == OLLAMA:
        calls = (await ask(app, path, tools=[tool]))["message"]["tool_calls"]
        assert list(calls[0]["function"]["arguments"]) == WRITTEN[arguments]


def test_arguments_are_bounded_before_they_are_decoded() -> None:
    deep = '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}"
    assert decode_written(deep) is None and decode_written('{"a": ' + "[" * 100_000) is None
    assert decode_written('{"a": [' + "[]," * 20_000 + "[]]}") is None
    assert decode_written("") == {} and decode_written('{"a": NaN}') == {"a": None}


# Conversations.

TURNS: dict[str, tuple[str, dict[str, Any]]] = {
    "two users": (CHAT, {"messages": [*SAID, *SAID]}),
    "a system message in the middle": (MESSAGES, {"messages": [*SAID, {"role": "system",
        "content": "Be brief."}]}),
    "a result and a text": (MESSAGES, {"messages": [*SAID, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "1", "name": "weather", "input": {}}]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference",
        "tool_name": "x"}]},
        {"type": "text", "text": "And now?"}]}]}),
    "a call, its answer, a user": (CHAT, {"messages": [*SAID, {"role": "assistant", "content": "I look.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"}, *SAID]}),
    "a text and its call apart": (CHAT, {"messages": [*SAID, {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function",
        "function": {"name": "weather", "arguments": None}}]}, {"role": "tool", "content": "sunny"}]}),
    "an output, then a user": (RESPONSES, {"input": [*SAID, {"type": "function_call", "call_id": "1",
        "name": "weather", "arguments": "{}"}, {"type": "function_call_output", "call_id": "1",
        "output": "x"}, *SAID]}),
    "instructions and a developer": (RESPONSES, {"instructions": "Be brief.", "input": [
        {"role": "developer", "content": "Be kind."}, *SAID]}),
}  # fmt: skip


@pytest.mark.parametrize("what", TURNS)
@pytest.mark.parametrize("template", [ALTERNATING, TEMPLATE])
async def test_turns_come_in_an_order_that_the_template_takes(
    tmp_path: Path, what: str, template: str
) -> None:
    path, body = TURNS[what]
    app = scripted(tmp_path, "ok", template)
    assert parts(path, await ask(app, path, **body))[1] == "ok"
    prompt = app.model.tokenizer.decode(app.engine.prompts[0].prompt)
    for text in (
        "Be brief.",
        "Be kind.",
        "And now?",
        "sunny",
        "I look.",
        "How is it in Rome?",
    ):
        assert (text in prompt) == (text in json.dumps(body)), (text, prompt)


SYSTEMS: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"instructions": "First.", "input": [{"role": "developer", "content": "Then."}, *SAID]}),
    (RESPONSES, {"instructions": "First.", "input": [{"role": "system", "content": "Then."}, *SAID]}),
    (MESSAGES, {"system": "First.", "messages": [{"role": "system", "content": "Then."}, *SAID]}),
    (OLLAMA, {"system": "First.", "messages": [{"role": "system", "content": "Then."}, *SAID]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), SYSTEMS)
async def test_instructions_stand_before_the_conversation_s_own(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    app = scripted(tmp_path, "ok")
    await ask(app, path, **body)
    prompt = app.model.tokenizer.decode(app.engine.prompts[0].prompt)
    assert prompt.startswith("system: First.\n\nThen.\n"), prompt


async def test_many_turns_are_joined_in_time_in_proportion_to_them(tmp_path: Path) -> None:
    app = scripted(tmp_path, "ok", ALTERNATING)
    turns = [{"role": "user", "content": "x"}] * 1000
    assert parts(CHAT, await ask(app, CHAT, messages=turns))[1] == "ok"


THINKS = THINKING + "{% if add_generation_prompt %}<think>{% endif %}"
PREFILLED: dict[str, dict[str, Any]] = {
    MESSAGES: {},
    OLLAMA: {},
    CHAT: {"continue_final_message": True, "add_generation_prompt": False},
}


@pytest.mark.parametrize("path", PREFILLED)
@pytest.mark.parametrize(
    "template", [TEMPLATE, THINKS, ALTERNATING], ids=["plain", "thinks", "turns"]
)
async def test_an_answer_goes_on_from_a_last_turn_of_the_assistant(
    tmp_path: Path, path: str, template: str
) -> None:
    app = scripted(tmp_path, "world", template)
    turns = [*SAID, {"role": "assistant", "content": "Hello <end>"}]
    assert parts(path, await ask(app, path, messages=turns, **PREFILLED[path])) == (
        "",
        "world",
    )
    prompt = app.engine.prompts[0].prompt
    text = app.model.tokenizer.decode(prompt)
    assert text.endswith("Hello <end>") and 0 not in prompt, (
        "a user's text became a special token"
    )
    assert "<think>" not in text


async def test_what_was_thought_before_a_continued_turn_is_written(tmp_path: Path) -> None:
    app = scripted(tmp_path, "x", "{% for m in messages %}{{ m.thinking }}|{{ m.content }}" +
                   "{% endfor %}")  # fmt: skip
    said = {"role": "assistant", "reasoning_content": "why", "content": [
        {"type": "text", "text": "It"}]}  # fmt: skip
    await ask(app, CHAT, messages=[*SAID, said], continue_final_message=True)
    assert app.model.tokenizer.decode(app.engine.prompts[0].prompt).endswith("why|It")


async def test_reasoning_that_a_client_has_begun_goes_on(tmp_path: Path) -> None:
    app = scripted(tmp_path, "sum.\n</think>\nfour", THINKS)
    said = {"role": "assistant", "content": "<think>\nA simple "}
    answer = await ask(app, CHAT, messages=[*SAID, said], continue_final_message=True)
    assert parts(CHAT, answer) == ("sum.", "four")


async def test_reasoning_of_earlier_turns_is_kept_whole(tmp_path: Path) -> None:
    app = scripted(
        tmp_path, "ok", "{% for m in messages %}{{ m.reasoning_content }}|{% endfor %}"
    )
    thought = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
        for text in "ab"
    ]
    await ask(
        app,
        RESPONSES,
        input=[*SAID, thought[0], {"role": "assistant", "content": "x"}, thought[1]],
    )
    assert "a\nb" in app.model.tokenizer.decode(app.engine.prompts[0].prompt)


EFFORTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning_effort": "low"}),
    (RESPONSES, {"reasoning": {"effort": "low"}}),
    (MESSAGES, {"output_config": {"effort": "low"}}),
    (OLLAMA, {"think": "low"}),
    (CHAT, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
]


@pytest.mark.parametrize(("path", "fields"), EFFORTS)
async def test_the_effort_reaches_the_template_or_is_named(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    app = scripted(tmp_path, "x", GPT_OSS)
    await ask(app, path, **fields)
    assert "Reasoning: low" in app.model.tokenizer.decode(app.engine.prompts[0].prompt)
    other = await Client(scripted(tmp_path, "x")).request(path, BODIES[path] | fields).run()
    (name, value), *_ = fields.items()
    nested = f".{next(iter(value))}" if isinstance(value, dict) else ""
    assert other.headers["x-ladder-ignored"] == name + nested


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (OLLAMA, {"think": True}, "think"),
        (CHAT, {"reasoning_effort": "none"}, "reasoning_effort"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (
            CHAT,
            {"chat_template_kwargs": {"enable_thinkng": False}},
            "chat_template_kwargs.enable_thinkng",
        ),
    ],
)
async def test_a_variable_that_the_template_does_not_read_is_named(
    tmp_path: Path, path: str, fields: dict[str, Any], named: str
) -> None:
    for template in (TEMPLATE, GPT_OSS):
        app = scripted(tmp_path, "x", template)
        asked = await Client(app).request(path, BODIES[path] | fields).run()
        assert (asked.status, asked.headers["x-ladder-ignored"]) == (200, named)


async def test_no_effort_switches_thinking_off(tmp_path: Path) -> None:
    app = scripted(tmp_path, "x", "{{ enable_thinking }}" + TEMPLATE)
    for path, fields in (
        (CHAT, {"reasoning_effort": "none"}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
    ):
        await ask(app, path, **fields)
        assert app.model.tokenizer.decode(app.engine.prompts[-1].prompt).startswith("False")


@pytest.mark.parametrize(
    ("path", "fields", "thinks"),
    [
        (CHAT, {"reasoning_effort": "none"}, "False"),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "False"),
        (OLLAMA, {"think": False}, "False"),
        (OLLAMA, {}, ""),
        (RESPONSES, {}, ""),
        (MESSAGES, {}, ""),
    ],
)
async def test_a_client_s_variables_stay_beside_those_of_the_protocol(
    tmp_path: Path, path: str, fields: dict[str, Any], thinks: str
) -> None:
    app = scripted(tmp_path, "x", "{{ date }} {{ enable_thinking }}|" + TEMPLATE)
    said = fields | {"chat_template_kwargs": {"date": "Monday"}}
    asked = await Client(app).request(path, BODIES[path] | said).run()
    prompt = app.model.tokenizer.decode(app.engine.prompts[-1].prompt)
    assert prompt.startswith(f"Monday {thinks}|"), prompt
    assert "x-ladder-ignored" not in asked.headers, "the template has read them all"


# Tools of other kinds.

CODEX = [
    WEATHER["function"] | {"type": "function"},
    {"type": "custom", "name": "patch"},
    {"type": "web_search"},
]


@pytest.mark.parametrize(
    ("path", "tools", "left"),
    [
        (RESPONSES, CODEX, "tools[1], tools[2]"),
        (CHAT, [{"type": "custom", "custom": {"name": "x"}}, WEATHER], "tools[0]"),
        (MESSAGES, [{"type": "web_search_20250305", "name": "web_search"},
                    {"name": "weather", "input_schema": {"type": "object"}}], "tools[0]"),
    ],
)  # fmt: skip
async def test_tools_of_other_types_are_left_out_and_named(
    tmp_path: Path, path: str, tools: Any, left: str
) -> None:
    app = scripted(tmp_path, CALL, TOOLS + TEMPLATE)
    asked = await Client(app).request(path, BODIES[path] | {"tools": tools}).run()
    assert asked.status == 200, asked.chunks
    assert left in asked.headers["x-ladder-ignored"] and b"weather" in b"".join(asked.chunks)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_name_of_a_tool_may_have_128_characters(tmp_path: Path, path: str) -> None:
    """As of Anthropic and of Responses: `mcp__SERVER__TOOL` is often above 64."""
    name = "mcp__" + "a" * 123
    app = scripted(tmp_path, CALL.replace("weather", name), TOOLS + TEMPLATE)
    tool = {"type": "function", "name": name, "parameters": {"type": "object"}}
    if path == MESSAGES:
        tool = {"name": name, "input_schema": {"type": "object"}}
    answer = await ask(app, path, tools=[{"function": tool} if path == CHAT else tool])
    assert f'"name": "{name}"' in json.dumps(answer)


async def test_a_whole_call_is_complete_though_the_next_one_is_cut(tmp_path: Path) -> None:
    app = scripted(tmp_path, CUT, TOOLS + TEMPLATE)
    for most, status in ((len(CUT) - 1, "completed"), (60, "incomplete")):
        body = {"tools": [WEATHER["function"] | {"type": "function"}]}
        found = await ask(app, RESPONSES, **body, max_output_tokens=most)
        (call,) = found["output"]
        assert (found["status"], call["status"]) == ("incomplete", status), call


async def test_a_tool_s_name_reaches_the_template_from_ollama_s_clients(
    tmp_path: Path,
) -> None:
    template = "{% for m in messages %}{{ m.name }}{{ m.content }};{% endfor %}"
    app = scripted(tmp_path, "x", TOOLS + template)
    call = {"function": {"name": "weather", "arguments": {}}}
    said = [*SAID, {"role": "assistant", "content": "", "tool_calls": [call]}]
    said += [{"role": "tool", "tool_name": "weather", "content": "sunny"}]
    asked = await Client(app).request(OLLAMA, {"messages": said, "stream": False}).run()
    prompt = app.model.tokenizer.decode(app.engine.prompts[0].prompt)
    assert "weathersunny;" in prompt and "x-ladder-ignored" not in asked.headers, prompt


async def test_a_tool_without_a_type_is_a_function(tmp_path: Path) -> None:
    """As with vLLM, and with Anthropic; without a function it is refused."""
    app = scripted(tmp_path, CALL, TOOLS + TEMPLATE)
    found = await ask(app, CHAT, tools=[{"function": WEATHER["function"]}])
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert "weather" in app.model.tokenizer.decode(app.engine.prompts[0].prompt)
    status, found = await Client(app).post(CHAT, BODIES[CHAT] | {"tools": [{"name": "f"}]})
    assert (status, found["error"]["param"]) == (400, "tools"), found


FORM = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": FORM}},
            "response_format",
        ),
        (RESPONSES, {"text": {"format": FORM}}, "text.format"),
    ],
)
async def test_a_format_beside_a_call_that_must_be_made_is_named(
    tmp_path: Path, path: str, fields: dict[str, Any], named: str
) -> None:
    """Instructor's mode for responses sends the same schema as a function and as the format."""
    app = scripted(tmp_path, CALL, TOOLS + TEMPLATE)
    tool = WEATHER if path == CHAT else WEATHER["function"] | {"type": "function"}
    body = BODIES[path] | fields | {"tools": [tool], "tool_choice": "required"}
    asked = await Client(app).request(path, body).run()
    assert (asked.status, asked.headers["x-ladder-ignored"]) == (200, named)
    assert "weather" in app.engine.prompts[0].params.grammar.source


async def test_either_of_two_formats_that_begin_alike_is_refused(tmp_path: Path) -> None:
    """A call of Llama 3 is JSON without a mark, so it cannot be told from JSON that is no call."""
    llama = '{# "parameters": ipython #}{{ tools }}' + TEMPLATE
    body = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    status, found = await Client(scripted(tmp_path, "x", llama)).post(
        CHAT, BODIES[CHAT] | body
    )
    assert (status, found["error"]["param"]) == (400, "response_format"), found
    assert "only one" in found["error"]["message"]


@pytest.mark.parametrize(
    "choice",
    [
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "weather"}],
        },
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
    ],
)
async def test_some_of_the_tools_may_be_allowed(tmp_path: Path, choice: Any) -> None:
    app = scripted(tmp_path, CALL, TOOLS + TEMPLATE)
    other = {"type": "function", "function": {"name": "other"}}
    await ask(app, CHAT, tools=[other, WEATHER], tool_choice=choice)
    grammar = app.engine.prompts[0].params.grammar.source
    assert "weather" in grammar and "other" not in grammar
    wrong = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "gone"}],
    }
    status, found = await Client(app).post(
        CHAT, BODIES[CHAT] | {"tools": [WEATHER], "tool_choice": wrong}
    )
    assert status == 400 and "'gone'" in found["error"]["message"]


@pytest.mark.parametrize("several", [None, True])
async def test_a_named_function_is_called_once(tmp_path: Path, several: bool | None) -> None:
    app = scripted(tmp_path, CALL, TOOLS + TEMPLATE)
    named = {"type": "function", "function": {"name": "weather"}}
    await ask(app, CHAT, tools=[WEATHER], tool_choice=named, parallel_tool_calls=several)
    theirs = {"name": "weather", "input_schema": {"type": "object"}}
    await ask(app, MESSAGES, tools=[theirs], tool_choice={"type": "tool", "name": "weather"})
    await ask(app, CHAT, tools=[WEATHER], tool_choice="required")
    once, again, many = (request.params.grammar.source for request in app.engine.prompts)
    assert ")*" not in once and ")*" not in again and ")*" in many


# Lines.

ENDS = "a\u2028b\u2029c\x85d\x0be"


@pytest.mark.parametrize("path", [*BODIES, "/v1/completions", "/api/generate"])
async def test_no_line_of_a_stream_ends_within_an_answer(tmp_path: Path, path: str) -> None:
    app = scripted(tmp_path, ENDS)
    body = BODIES.get(path, {"prompt": "x"}) | {"stream": True, "max_tokens": 100}
    data = b"".join((await Client(app).request(path, body).run()).chunks).decode()
    assert len(data.splitlines()) == len(data.split("\n")) - 1
    assert all(f"\\u{ord(end):04x}" in data for end in "\u2028\u2029\x85")


# Ollama.


async def test_ollama_loads_and_unloads_without_a_prompt(tmp_path: Path) -> None:
    app = scripted(tmp_path, "x")
    for path, body in (
        ("/api/chat", {"messages": []}),
        ("/api/chat", {}),
        ("/api/generate", {"images": []}),
    ):
        for more, reason in (
            ({}, "load"),
            ({"keep_alive": 0}, "unload"),
            ({"keep_alive": "0s"}, "unload"),
        ):
            status, found = await Client(app).post(path, body | more)
            assert (
                status == 200 and found["done"] is True and found["done_reason"] == reason
            ), found
            assert (
                found["message"]["content"] if path == "/api/chat" else found["response"]
            ) == ""
    assert not app.engine.prompts, "something was generated"
    assert (await Client(app).post("/api/chat", {"model": "other"}))[0] == 404
    status, _ = await Client(app).post(
        "/api/generate", {"prompt": "x", "images": ["aGk="], "stream": False}
    )
    assert status == 400
    null = await Client(app).request("/api/generate", {"prompt": "x", "stream": None}).run()
    assert null.headers["content-type"] == "application/x-ndjson", "null is not streamed"


async def test_ollama_is_told_what_the_model_can(tmp_path: Path) -> None:
    assert "thinking" in capabilities(scripted(tmp_path, "x", THINKING).model)
    assert "thinking" in capabilities(scripted(tmp_path, "x", GPT_OSS).model)
    app = scripted(tmp_path, "x")
    assert "thinking" not in capabilities(app.model)
    (model,) = (await Client(app).get("/api/ps")).json()["models"]
    assert model["name"] == "tiny:latest" and model["context_length"] == 16384
    missing = (await Client(app).get("/api/nothing")).json()
    assert isinstance(missing["error"], str)
    kind = {"content-type": "application/x-ndjson"}
    assert (
        await Client(app).request("/api/chat", BODIES[OLLAMA], headers=kind).run()
    ).status == 200
    page = kind | {"origin": "https://example.org"}
    assert (
        await Client(app).request("/api/chat", BODIES[OLLAMA], headers=page).run()
    ).status == 415


async def test_whole_numbers_of_ollama_s_options_may_have_a_point(tmp_path: Path) -> None:
    app = scripted(tmp_path, "abcdef")
    given = {"num_predict": 3.0, "seed": 7.0, "top_k": 4.0, "temperature": 1.0, "min_p": 0.5}
    found = await ask(app, OLLAMA, options=given)
    params = app.engine.prompts[0].params
    assert found["message"]["content"] == "abc"
    assert (params.seed, params.top_k, params.min_p) == (7, 4, 0.5)
    for wrong in (3.5, 1e400):
        body = BODIES[OLLAMA] | {"options": {"num_predict": wrong}}
        assert (await Client(app).post(OLLAMA, body))[0] == 400
    await ask(app, OLLAMA, options={"num_predict": -1.0})


async def test_seeds_of_ollama_below_zero_are_none(tmp_path: Path) -> None:
    app = scripted(tmp_path, "x")
    await ask(app, OLLAMA, options={"seed": -1})
    await ask(app, OLLAMA, options={"seed": 3})
    assert [request.params.seed for request in app.engine.prompts] == [None, 3]


# Options beside a constraint.


async def test_options_of_a_constraint_are_no_constraint(tmp_path: Path) -> None:
    app = scripted(tmp_path, "{}")
    for option, value in (("disable_any_whitespace", True), ("whitespace_pattern", " ")):
        body = BODIES[CHAT] | {
            "structured_outputs": {"json": {"type": "object"}, option: value}
        }
        asked = await Client(app).request(CHAT, body).run()
        assert (
            asked.status == 200
            and f"structured_outputs.{option}" in asked.headers["x-ladder-ignored"]
        )


# Bodies of many parts.

MANY: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text",
        "text": "x"}] * 30_000}]}),
    "messages": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 30_000}),
    "answers of tools": (CHAT, {"messages": [{"role": "tool", "content": "x" * 300}] * 12_000}),
    "a call's id": (RESPONSES, {"input": [{"type": "function_call", "name": "f",
        "call_id": "x" * 3_900_000}]}),
    "a deep argument": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",
        "arguments": json.loads("[" * 200 + "]" * 200)}}]}]}),
    "a role": (CHAT, {"messages": [{"role": "x" * 3_000_000, "content": "y"}]}),
    "prompts": ("/v1/completions", {"prompt": ["x" * 190_000] * 20}),
    "a model": (CHAT, {"messages": SAID, "model": "x" * 3_000_000}),
    "a number": (CHAT, {"messages": SAID, "temperature": "x" * 3_000_000}),
    "an enumeration": (MESSAGES, {"messages": [{"role": "x" * 3_000_000, "content": "y"}]}),
    "a tool's name": (CHAT, {"messages": SAID, "tools": [WEATHER], "tool_choice": {"type": "function",
        "function": {"name": "x" * 3_000_000}}}),
    "a kind of part": (CHAT, {"messages": [{"role": "user", "content": [{"type": "x" * 1000}]}]}),
    "calls that are none": (CHAT, {"messages": [{"role": "assistant", "tool_calls": "x" * 1000}]}),
    "a path": ("/" + "x" * 3000, {}),
}  # fmt: skip


@pytest.mark.parametrize("what", MANY)
async def test_a_refusal_is_short_whatever_is_refused(tmp_path: Path, what: str) -> None:
    path, body = MANY[what]
    asked = await Client(scripted(tmp_path, "x")).request(path, body | {"max_tokens": 5}).run()
    assert asked.status in (400, 404), asked.status
    data = b"".join(asked.chunks)
    assert len(data) < 800 and b"x" * 101 not in data, data[:500]


@pytest.mark.parametrize(
    "text",
    ['{"a": 1e999, "b": [-1e999, NaN]}', '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800x\\udc00"}',
     '{"\\ud83d\\ude00": "\\ud83d\\ude00"}', '{"a": "x\ty"}', '{"a": -9223372036854775809}'],
)  # fmt: skip
def test_what_a_model_has_written_can_be_written_again(text: str) -> None:
    found = decode_written(text)
    assert found is not None
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


@pytest.mark.parametrize("text", ["[]", "7", '{"a', '{"a": 1} x', "null", "{" * 300])
def test_what_is_no_object_is_none(text: str) -> None:
    assert decode_written(text) is None
    assert decode_written("") == {}


CALLED_F = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CALLING = {"role": "assistant", "tool_calls": CALLED_F}
TOLD = {"role": "tool", "tool_call_id": "1"}
RULES = {"role": "system"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [*SAID, CALLING, TOLD | {"content": {"temp": 20}}]}),
        (OLLAMA, {"system": "S", "messages": [RULES | {"content": {"text": "T"}}, *SAID]}),
    ],
    ids=["a result", "a system message"],
)
async def test_a_content_that_is_no_text_is_refused_and_not_lost(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    status, found = await Client(scripted(tmp_path, "x")).post(path, BODIES[path] | fields)
    assert status == 400, f"what it said is lost: {found}"


async def test_a_refusal_that_was_said_is_a_text(tmp_path: Path) -> None:
    app = scripted(tmp_path, "x")
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]}
    said = [*SAID, refused | {"tool_calls": CALLED_F}, TOLD | {"content": "20"}]
    await ask(app, CHAT, messages=said)
    assert "never" in app.model.tokenizer.decode(app.engine.prompts[0].prompt)


async def test_max_tokens_is_taken_by_its_other_name(tmp_path: Path) -> None:
    app = scripted(tmp_path, "a long answer")
    found = await ask(app, RESPONSES, max_tokens=2)
    assert found["usage"]["output_tokens"] == 2, "max_tokens has no effect"


async def test_a_variable_may_be_called_like_a_parameter(tmp_path: Path) -> None:
    said = [*SAID, {"role": "assistant", "content": "x"}]
    more = {"continue_final_message": True, "chat_template_kwargs": {"template": 1}}
    await ask(scripted(tmp_path, "x"), CHAT, messages=said, **more)


async def test_ollama_s_own_words(tmp_path: Path) -> None:
    """A call at `/api/generate`, a message without a content, and a model called as Ollama calls it."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    body = {"prompt": "hi", "tools": [tool], "stream": False}
    status, found = await Client(scripted(tmp_path, text)).post("/api/generate", body)
    assert status == 200 and found["tool_calls"][0]["function"]["name"] == "f", found
    await ask(scripted(tmp_path, "x"), OLLAMA, messages=[*SAID, {"role": "assistant"}])
    app = scripted(tmp_path, "x")
    app.model.name = "a:latest"
    for name in ("a:latest", None):
        await ask(app, OLLAMA, model=name)
    assert card(app)["name"] == "a:latest"
