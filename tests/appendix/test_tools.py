"""Tools: how calls are written, kept to their schema, found in text, and answered."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from common.errors import UserError
from common.http.errors import ApiError
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer
from forward.loading import random_model
from forward.shapes import SHAPES
from phases.appendix.guidance.backend import GuidanceBackend
from phases.appendix.guidance.exact import DATE, exact
from phases.appendix.guidance.spelling import Spelling
from phases.appendix.server import whole_app
from phases.appendix.tools.formats import HERMES, LLAMA, CallFormat, format_of
from phases.appendix.tools.reader import CallReader
from phases.appendix.tools.request import conversation, refusal
from tests.guidance_kit import served as load
from tests.servers import Client, Loopback, tokenizer_for
from tests.serving_kit import make_with_grammars as make_with_grammars
from tests.serving_kit import tokenizer as tokenizer
from tests.structured_kit import mask

DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": DAYS}}
CITY |= {"required": ["city", "days"], "additionalProperties": False}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": CITY},
}
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
NOW = {"type": "function", "function": {"name": "now"}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FORMATS = {"hermes": HERMES, "llama": LLAMA}


def templated(folder: Path, template: Any) -> Tokenizer:
    """A tokenizer with this chat template."""
    tokenizer_for(folder, 257)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template})
    )
    return Tokenizer(folder)


TEMPLATES = {
    "{% if tools %}x{% endif %}<tool_call>\n{{ messages }}": (HERMES, True),
    """{{ tools }}ipython {{ '{"name": "' }}{{ '", "parameters": ' }}""": (LLAMA, True),
    "{{ messages }}": (HERMES, False),
    "{% for tool in tools %}{{ tool }}{% endfor %}": (HERMES, False),
    "{{ tools }}<tool_call>\n<function=": (HERMES, False),
    "{{ tools }}[TOOL_CALLS]f[ARGS]": (HERMES, False),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_format_is_read_off_the_template_or_described(tmp_path, template):
    assert format_of(templated(tmp_path, template)) == TEMPLATES[template]


def written(format: CallFormat, calls: list[tuple[str, str]], text: str = "") -> str:
    """What a model writes, by hand: independent of the grammar."""
    each = [
        f'{{"name": "{name}", "{format.arguments}": {arguments}}}' for name, arguments in calls
    ]
    before = format.trigger + format.before
    return (
        text + before + f"{format.after}\n{before}".join(each) + format.after if each else text
    )


GOOD = [
    [("weather", '{"city": "Rome", "days": 3}')],
    [("now", "{}")],
    [("now", "{ }"), ("weather", '{"city":"Oslo","days":1}'), ("now", "{}")],
]
BAD = [
    [("weather", '{"city": "Paris", "days": 3}')],
    [("weather", '{"city": "Rome"}')],
    [("elsewhere", "{}")],
    [("now", '{"a": 1}')],
    [("now", "[]")],
]


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> GuidanceBackend:
    return GuidanceBackend(Spelling.of(tokenizer, 257, (0,)))


@pytest.mark.parametrize("name", FORMATS)
def test_grammars_take_calls_that_follow_their_schema_and_no_others(backend, tokenizer, name):
    format = FORMATS[name]
    tools = [("weather", CITY), ("now", NOTHING)]
    one = format.trigger == ""

    def check(text: str, expected: bool, **how: Any) -> None:
        grammar = format.grammar(tools, **{"must": False, "several": True, **how})
        matcher, ids = backend.compile(grammar).matcher(), tokenizer.encode(text)
        found = matcher.advance(ids) == len(ids) and 0 in mask(matcher, 257)
        assert found is expected, (
            f"{name}, {how}: the output {text!r} is {'taken' if found else 'refused'}"
        )

    for calls in GOOD:
        single = len(calls) == 1
        check(written(format, calls), single or not one, must=True)
        check(written(format, calls), single, must=True, several=False)
        check(written(format, calls, "" if one else "Let me see.\n"), single or not one)
    for calls in BAD:
        check(written(format, calls), False, must=True)
        check(written(format, calls, "" if one else "Well: "), False)
    check("Hello.", True)
    check("Hello.", False, must=True)
    check("", True)
    if not one:
        check("7", True, content={"type": "integer"})
        check(written(format, GOOD[0]), True, content={"type": "integer"})
        check("Hello.", False, content={"type": "integer"})
        check(written(format, GOOD[0]) + " and more", False)


def test_wide_schemas_in_a_grammar_are_refused_like_others():
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(3000)}}
    with pytest.raises(UserError, match="3,000 keys"):
        HERMES.grammar([("f", wide)], must=True, several=False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(name, size):
    format = FORMATS[name]
    tricky = '{"city": "a\\"}}]</tool_call><tool_call>", "days": {"x": ["]", {}]}}'
    calls = [("weather", tricky)] if name == "llama" else [("weather", tricky), ("now", "{}")]
    text = written(format, calls, "" if name == "llama" else "One < two <tool.\n\n")
    reader = CallReader(format)
    content = ""
    pieces = dict[int, str]()
    for at in range(0, len(text), size):
        for delta in reader.deltas(text[at : at + size], at + size >= len(text)):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                place = call["index"]
                assert ("id" in call) == (place not in pieces), (
                    "a call is told of twice, or not at its beginning"
                )
                pieces[place] = pieces.get(place, "") + call["function"]["arguments"]
    where = f"{format.trigger!r} and text in pieces of {size}"
    before = "" if name == "llama" else "One < two <tool."
    assert content == before, f"{where}: what stands before the calls was read as {content!r}"
    found = [tuple(call["function"].values()) for call in reader.calls]
    assert found == calls, f"{where}: the calls were read as {found}"
    for place, (_, arguments) in enumerate(calls):
        assert pieces[place] == arguments, (
            f"{where}: arguments {place} were told as {pieces[place]!r}"
        )
    assert reader.complete, f"{where}: the last call is not taken for whole"
    assert len({call["id"] for call in reader.calls}) == len(calls)


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_is_left_as_it_is(name):
    for text in ["", "  spaces  ", "a <tool_cal", "[TOOL_CALLS", " {x", "a {x", "a\n\n"]:
        for size in (1, 3, 100):
            reader = CallReader(FORMATS[name])
            pieces = [text[at : at + size] for at in range(0, max(1, len(text)), size)]
            pieces = [one for piece in pieces for one in (piece, "")]  # half of a character
            deltas = [
                delta
                for n, p in enumerate(pieces)
                for delta in reader.deltas(p, n == len(pieces) - 1)
            ]
            found = "".join(delta["content"] for delta in deltas)
            assert found == text and not reader.calls, (
                f"{text!r} in pieces of {size} became {found!r}"
            )


def test_a_call_that_was_cut_off_is_not_complete():
    whole = written(HERMES, [("now", '{"a": {}}')])
    for cut in range(len(whole)):
        reader = CallReader(HERMES)
        reader.deltas(whole[:cut], True)
        assert reader.complete == (cut >= whole.index("{}}") + 3), f"cut after {whole[:cut]!r}"


@pytest.mark.parametrize("must", [True, False])
def test_the_cut_off_mark_of_a_call_that_must_come_is_no_content(must: bool):
    """An output with `auto` may be a text that ends so; one of `required` is not."""
    for cut in range(1, len(HERMES.trigger)):
        begun = HERMES.trigger[:cut]
        reader = CallReader(HERMES, must)
        deltas = reader.deltas(begun[:1], False) + reader.deltas(begun[1:], True)
        content = "".join(delta["content"] for delta in deltas)
        assert content == ("" if must else begun), f"cut after {begun!r}: content {content!r}"


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no function": ({"tools": [{"type": "function"}]}, "tools", "tools[0]"),
    "a strange name": ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools", "a-z"),
    "a long name": ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools", "1 to 128"),
    "parameters of no object": ({"tools": [{"type": "function",
        "function": {"name": "x", "parameters": {"type": "array"}}}]}, "tools", "schema of an object"),
    "twice": ({"tools": [NOW, NOW]}, "tools", "two functions"),
    "too many": ({"tools": [NOW] * 129}, "tools", "at most 128"),
    "too large": ({"tools": [{"type": "function", "function": {"name": "x", "description": "x" * 70_000}}]},
        "tools", "65,536"),
    "choice without tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "a choice of no tool": ({"tools": [NOW], "tool_choice": {"type": "function",
        "function": {"name": "gone"}}}, "tool_choice", "'gone'"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), WRONG.values(), ids=WRONG)
async def test_what_is_wrong_with_tools_is_named(make, fields, param, words):
    status, found = await Client(make()).post("/v1/chat/completions", SAID | fields)
    assert (status, found["error"]["param"]) == (400, param) and words in found["error"][
        "message"
    ], found


def test_conversations_with_calls(tokenizer):
    """What OpenAI's client sends back of an answer: nulls, and arguments as a text of JSON."""
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "now", "arguments": '{"a": [1]}'},
    }
    said = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {"role": "assistant", "content": "noon", "tool_calls": None, "audio": None},
    ]
    made = conversation(said)
    shown = tokenizer.templates.plain.conversation(made)
    assert made[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    for place, field in ((1, "refusal"), (1, "annotations"), (3, "tool_calls"), (3, "audio")):
        assert field not in shown[place], (
            f"messages[{place}].{field} was null, and the template gets it"
        )
    text = tokenizer.decode(tokenizer.chat(made, tools=[NOW]))
    assert '<tool_call>\n{"name": "now", "arguments": {"a": [1]}}\n</tool_call>' in text
    assert "tool: 12:00" in text and text.startswith("tools: [")
    for arguments in (
        "{",
        '{"a": ',
        "[]",
        "7",
        "",
        None,
    ):  # what a model has written, or was cut off at
        broken = [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            }
        ]
        assert conversation(broken)[0]["tool_calls"][0]["function"]["arguments"] == {}
    for arguments in (5, ["a"]):  # what no client means
        broken = [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            }
        ]
        with pytest.raises(ApiError, match="arguments must be an object"):
            conversation(broken)
    with pytest.raises(ApiError, match="has a name"):
        conversation([{"role": "assistant", "tool_calls": [{}]}])


def test_a_tool_that_cannot_be_compiled_is_named(backend):
    bad = {"type": "object", "not": {}}
    for name, format in FORMATS.items():
        grammar = format.grammar(
            [("now", NOTHING), ("wea-ther", bad)], must=True, several=True
        )
        with pytest.raises(UserError) as said:
            backend.compile(grammar)
        found = refusal(str(said.value), grammar)
        assert found.startswith("tools: the parameters of 'wea-ther' are refused: "), (
            f"{name}: {found}"
        )
        assert "not" in found and "llguidance" not in found, f"{name}: {found}"
    assert refusal("(x) takes longer", grammar) == "tools cannot be compiled: (x) takes longer"


# Tools that are not strict: every valid value is still valid, and what is left out is named.

LOOSENED: dict[str, tuple[Any, list[str]]] = {
    "names with a rule": ({"type": "object", "propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
    "pydantic's set": ({"properties": {"s": {"uniqueItems": True}}}, ["properties/s/uniqueItems"]),
    "a format nobody knows": ({"properties": {"p": {"format": "cuid"}}}, ["properties/p/format"]),
    "a lookahead": ({"properties": {"p": {"pattern": "^(?!a)b"}}}, ["properties/p/pattern"]),
    "a bound of int64": ({"properties": {"n": {"maximum": 2**63 - 1}}}, ["properties/n/maximum"]),
    "never": ({"properties": {"x": {"not": {}}}}, ["properties/x/not"]),
    "conditions": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["if", "then"]),
    "null fields": ({"required": None, "properties": {"a": {"type": "string", "default": None}}}, []),
    "annotations": ({"title": "T", "$schema": "x", "x-order": 1, "properties": {"a": {"examples": [1]}}}, []),
    "one of several": ({"properties": {"a": {"oneOf": [{"type": "string"}, {"minimum": 2**60 + 1}]}}},
        ["properties/a/oneOf/1/minimum"]),
    "deep": ({"$defs": {"d": {"items": {"uniqueItems": True}}}, "properties": {"a": {"$ref": "#/$defs/d"}}},
        ["$defs/d/items/uniqueItems"]),
    "keys counted": ({"properties": {"a": {}}, "minProperties": 1}, ["minProperties"]),
}  # fmt: skip
GIVEN = [
    {}, {"a": 1}, {"a": "x", "b": 2}, {"s": [1, 1]}, {"s": [1, 2]}, {"p": "b"}, {"p": "ab"}, {"n": 2**63 - 1},
    {"n": 2**63}, {"x": 1}, {"a": [1, 1]}, {"a": [1, 2]}, {"a": 2**60 + 2}, {"b": None},
]  # fmt: skip


@pytest.mark.parametrize("name", LOOSENED)
def test_what_was_valid_stays_valid_and_what_is_left_out_is_named(name: str) -> None:
    schema, names = LOOSENED[name]
    left = list[str]()
    made = exact(schema, left=left)
    assert left == [f"#/{name}" for name in names]
    strict = jsonschema.Draft202012Validator(
        {k: v for k, v in schema.items() if v is not None}
    )
    loose = jsonschema.Draft202012Validator(made)
    for value in GIVEN:
        assert loose.is_valid(value) or not strict.is_valid(value), (
            f"{value} is valid, and no longer taken"
        )


def test_nothing_of_an_ordinary_schema_is_lost_and_nonsense_breaks_nothing() -> None:
    number, day = {"type": "integer", "minimum": 1}, {"type": "string", "format": "date"}
    schema = {"type": "object", "properties": {"n": number, "d": day}, "required": ["n"]}
    left = list[str]()
    assert exact(schema, left=left) == exact(schema) and not left
    assert exact(schema)["properties"]["d"]["pattern"] == f"^{DATE}$"
    broken = {"pattern": 3, "format": [1], "patternProperties": [], "required": "a"}
    assert exact(broken, left=left) == {} and left == [f"#/{keyword}" for keyword in broken]


async def streamed_deltas(app: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = await Client(app).request("/v1/chat/completions", body | {"stream": True}).run()
    return [event["choices"][0]["delta"] for event in asked.events()[:-1]]


@pytest.mark.parametrize("most", [1, 16, 30, 45])
async def test_a_call_that_is_cut_is_told_alike_at_once_and_in_pieces(make, most):
    app = make()
    body = SAID | {
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": most,
        "seed": 1,
    }
    (whole,) = (await Client(app).post("/v1/chat/completions", body))[1]["choices"]
    deltas = await streamed_deltas(app, body)
    content = "".join(delta.get("content", "") for delta in deltas)
    said = whole["message"]["content"] or ""
    assert said == content, (
        f"after {most} tokens the content is {said!r}, and in a stream {content!r}"
    )
    assert not said or most == 1, (
        f"after {most} tokens of a call its beginning is content: {said!r}"
    )
    called = sum("id" in one for delta in deltas for one in delta.get("tool_calls", []))
    assert len(whole["message"].get("tool_calls", [])) == called


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_calls_are_made_where_they_must_be(make, choice):
    """At a high temperature, with random weights: only the grammar can make these calls."""
    app = make()
    body = SAID | {
        "tools": [WEATHER, NOW],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    body |= {"max_tokens": 400, "return_token_ids": True}
    for seed in range(3):
        more = body | {"seed": seed}
        status, whole = await Client(app).post("/v1/chat/completions", more)
        assert status == 200, whole
        (answer,) = whole["choices"]
        made = answer["message"].get("tool_calls", [])
        assert len(made) == 1, (
            f"seed {seed}, tool_choice {choice}: {len(made)} calls were made, not one"
        )
        (call,) = made
        assert answer["finish_reason"] == "tool_calls", (
            f"a call was made, and the end is {answer}"
        )
        assert answer["message"]["content"] is None
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, {"weather": CITY, "now": NOTHING}[name])
        assert choice == "required" or name == "weather", (
            "another function was called than the named one"
        )

        streamed = (
            await Client(app).request("/v1/chat/completions", more | {"stream": True}).run()
        )
        pieces = [event["choices"][0] for event in streamed.events()[:-1]]
        calls = [c for piece in pieces for c in piece["delta"].get("tool_calls", [])]
        assert (
            calls[0]["function"]["name"] == name
            and calls[0]["id"]
            and calls[0]["type"] == "function"
        )
        assert all(set(c) == {"index", "function"} and c["index"] == 0 for c in calls[1:])
        assert (
            "".join(c["function"]["arguments"] for c in calls) == call["function"]["arguments"]
        )
        assert pieces[-1]["finish_reason"] == "tool_calls"
        ids = [token for piece in pieces for token in piece.get("token_ids", [])]
        assert ids == answer["token_ids"], "tokens are missing, or told twice"


LLAMAS = """{{ tools | tojson }}{{ messages[0].content }}{# ipython '{"name": "' '", "parameters": ' #}"""


async def test_other_families_call_as_they_were_taught(tmp_path):
    made = templated(tmp_path, LLAMAS)
    wide = replace(SHAPES["tiny"], vocab_size=300, eos_token_ids=(0,))
    engine = load(
        random_model(wide, device="cpu", dtype=torch.float32), max_rows=2, tokenizer=made
    )
    app = whole_app(Loopback(engine), made, "tiny")
    body = SAID | {"tools": [WEATHER], "max_tokens": 400}
    body |= {"tool_choice": "required", "parallel_tool_calls": False}
    status, whole = await Client(app).post("/v1/chat/completions", body)
    assert status == 200, whole
    (answer,) = whole["choices"]
    (call,) = answer["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    assert answer["message"]["content"] is None and answer["finish_reason"] == "tool_calls"
    deltas = await streamed_deltas(app, body)
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    assert sum("id" in one for delta in deltas for one in delta.get("tool_calls", [])) == 1


async def test_either_a_call_or_the_format(make):
    """`response_format` beside tools: what is no call has the schema. Both happen, and each as it should."""
    app = make()
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
    body = SAID | {"tools": [NOW], "response_format": form}
    kinds = set()
    more = [body | {"seed": seed, "max_tokens": 300, "temperature": 2.0} for seed in range(12)]
    answers = await asyncio.gather(
        *(Client(app).post("/v1/chat/completions", one) for one in more)
    )
    for status, found in answers:
        assert status == 200, found
        (answer,) = found["choices"]
        kinds.add(answer["finish_reason"])
        if answer["finish_reason"] == "stop":
            assert json.loads(answer["message"]["content"]) in (1, 2)
        elif answer["finish_reason"] == "tool_calls":
            assert answer["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert {"stop", "tool_calls"} <= kinds, f"only {kinds} came in {len(answers)} tries"
    other = SAID | {"tools": [NOW], "guided_regex": "a+"}
    status, found = await Client(app).post("/v1/chat/completions", other)
    assert (status, found["error"]["param"]) == (400, "guided_regex"), (
        "a call or another grammar"
    )


@pytest.mark.parametrize("strict", [True, False])
async def test_a_format_beside_tools_is_followed_or_named(make, strict: bool) -> None:
    """What cannot be followed is the format's fault, not that of the tools, and of a hint it is left out."""
    form = {"name": "n", "strict": strict, "schema": {"type": "object", "minProperties": 5}}
    asked = {"response_format": {"type": "json_schema", "json_schema": form}, "max_tokens": 4}
    status, found = await Client(make()).post(
        "/v1/chat/completions", SAID | {"tools": [NOW]} | asked
    )
    if strict:
        assert (status, found["error"]["param"]) == (400, "response_format"), found
    else:
        assert status == 200, found
    must = SAID | {"tools": [NOW], "tool_choice": "required"} | asked
    called = await Client(make()).request("/v1/chat/completions", must).run()
    assert (called.status, called.headers["x-ladder-ignored"]) == (200, "response_format")


@pytest.mark.parametrize("said", [{"content": None}, {}, {"content": ""}, {"content": "so"}])
def test_a_content_beside_calls_reaches_the_template_as_it_was_sent(said) -> None:
    """Templates of DeepSeek's kind write calls in another form where the content is none."""
    source = (
        "{% for m in messages if m.tool_calls %}{% if m['content'] is none %}only{% else %}"
        "{{ m['content'] }} and{% endif %} {{ m.tool_calls[0].function.name }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = conversation([{"role": "assistant", "tool_calls": [call], **said}])
    template = ChatTemplate(source, {})
    found = template.render(template.conversation(messages), add_generation_prompt=True)
    assert found == ("only f" if said.get("content") is None else f"{said['content']} and f")
