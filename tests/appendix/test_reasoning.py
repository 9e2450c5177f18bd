"""Reasoning is split off as it comes, and tools are described to models whose template shows them none."""

from __future__ import annotations

import json
from itertools import product

import pytest

from phases.appendix.api.reasoning import ThinkReader, opened
from phases.appendix.server import whole_app
from phases.appendix.tools.described import described, with_system
from phases.appendix.tools.formats import HERMES
from phases.appendix.tools.reader import CallReader
from phases.appendix.tools.request import conversation
from serving.seams import Delta
from tests.appendix.test_tools import NOW, templated
from tests.guidance_kit import served as load
from tests.servers import Client, Loopback

CASES = [  # opened by the template; the output; reasoning; what follows
    (
        False,
        "<think>\nIt is\n\nlate. \n</think>\n\nGood night.",
        "It is\n\nlate.",
        "Good night.",
    ),
    (
        True,
        "\nLate.\n</think>\n\nGood <think>night</think>.",
        "Late.",
        "Good <think>night</think>.",
    ),
    (False, "No <think>thought</think>.", "", "No <think>thought</think>."),
    (False, " \n<think></think>x", "", "x"),
    (False, "<think>cut </thi", "cut </thi", ""),
    (True, "", "", ""),
    (False, "<thin", "", "<thin"),
    (False, "<think>Call it.<tool_call>\n{", "Call it.", "<tool_call>\n{"),
    (False, "<think>a</think>  \n", "a", ""),
]


@pytest.mark.parametrize(("case", "size"), list(product(CASES, (1, 2, 3, 7, 100))))
def test_reasoning_is_found_however_the_text_is_cut(case, size):
    begun, text, thought, rest = case
    reader = ThinkReader(begun, CallReader(HERMES))
    pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
    answers, deltas = list[str](), list[Delta]()
    for place, piece in enumerate(pieces, 1):
        answers.append(reader.answer(piece, place == len(pieces)))
        deltas += reader.deltas("", False)
    assert "".join(delta["reasoning_content"] for delta in deltas) == thought
    assert "".join(answers) == rest


@pytest.mark.parametrize(
    ("template", "begins"),
    [
        ("{{ messages[0].content }}", None),
        ("{# <think> #}{{ messages[0].content }}", False),
        ("{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}", True),
        ("{{ messages[0].content }}<think>\n\n</think>\n\n", False),
    ],
)
def test_the_template_says_where_reasoning_begins(tmp_path, template, begins):
    made = templated(tmp_path, template)
    assert opened(made, made.chat([{"role": "user", "content": "x"}])) is begins


async def test_a_chat_has_its_reasoning_apart_at_once_and_in_chunks(model, tmp_path):
    """Random weights write no marks, so a template opens the reasoning: all of the output is of it."""
    thinking = templated(tmp_path, "{{ messages[0].content }}{# <think> #}{{ '<think>' }}")
    app = whole_app(Loopback(load(model, max_rows=2, tokenizer=thinking)), thinking, "tiny")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "temperature": 0}
    message = (await Client(app).post("/v1/chat/completions", body))[1]["choices"][0][
        "message"
    ]
    streamed = await Client(app).request("/v1/chat/completions", body | {"stream": True}).run()
    deltas = [event["choices"][0]["delta"] for event in streamed.events()[:-1]]
    assert message["content"] == "" and message["reasoning_content"]
    assert (
        "".join(delta.get("reasoning_content", "") for delta in deltas)
        == message["reasoning_content"]
    )
    whole = body | {"separate_reasoning": False}
    plain = (await Client(app).post("/v1/chat/completions", whole))[1]["choices"][0]["message"]
    assert plain["content"].strip() == message["reasoning_content"].strip() and len(plain) == 3
    formed = body | {"guided_choice": ["yes"]}
    answer = (await Client(app).post("/v1/chat/completions", formed))[1]["choices"][0][
        "message"
    ]
    assert answer["content"] == "yes", "a grammar's output was taken for reasoning"
    theirs = (await Client(app).post("/v1/messages", body))[1]["content"]
    assert (
        theirs[0]["type"] == "thinking"
        and theirs[0]["thinking"] == message["reasoning_content"]
    )
    asked = {"input": "x", "max_output_tokens": 6, "temperature": 0}
    ours = (await Client(app).post("/v1/responses", asked))[1]
    assert ours["output"][0]["content"][0]["text"] == message["reasoning_content"]


CALLS = [
    {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rom"}'},
    },
    {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]
SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "user", "content": "And now?"},
]


def test_tools_calls_and_answers_as_text():
    made = described(conversation(SAID), [NOW])
    assert [message["role"] for message in made] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
    ]
    assert (
        made[0]["content"].startswith("Be brief.\n\n# Tools")
        and json.dumps(NOW) in made[0]["content"]
    )
    calls = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
    calls += '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert made[2] == {"role": "assistant", "content": "Let me look.\n" + calls}
    answers = (
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    assert made[3] == {"role": "user", "content": answers} and made[4] == SAID[5]
    assert described(SAID[:2], []) == SAID[:2], "a conversation without tools is another one"
    assert with_system([{"role": "user", "content": "x"}], "y")[0] == {
        "role": "system",
        "content": "y",
    }


async def test_a_model_without_tools_calls_them(model, tmp_path):
    plain = templated(
        tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    app = whole_app(Loopback(load(model, max_rows=2, tokenizer=plain)), plain, "tiny")
    body = {
        "messages": SAID,
        "tools": [NOW],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    asked = await Client(app).request("/v1/chat/completions", body | {"max_tokens": 400}).run()
    assert (
        asked.status == 200
        and "described in the system message" in asked.headers["x-ladder-warning"]
    )
    (call,) = asked.json()["choices"][0]["message"]["tool_calls"]
    assert (
        call["function"]["name"] == "now" and json.loads(call["function"]["arguments"]) == {}
    )
    image = [*SAID[:3], {"role": "tool", "content": [{"type": "image_url"}]}]
    status, found = await Client(app).post("/v1/chat/completions", body | {"messages": image})
    assert (status, found["error"]["param"]) == (400, "messages"), found
    quiet = (
        await Client(app)
        .request("/v1/chat/completions", {"messages": SAID, "max_tokens": 1})
        .run()
    )
    assert quiet.status == 200 and "x-ladder-warning" not in quiet.headers
