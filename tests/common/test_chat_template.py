"""Chat templates: nothing a template does takes long or much memory, and a bad message is named."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from common.errors import UserError
from common.text.chat_template import ChatTemplate
from common.text.continued import render_continued
from common.text.template_sandbox import (
    MEMORY_BYTES,
    OUTPUT_CHARACTERS,
    SECONDS,
    SOURCE_CHARACTERS,
)

USER = {"role": "user", "content": "hello"}
DOUBLED = "{% set ns = namespace(a='x') %}{% for i in range(60) %}"
TUPLES = "{% set ns = namespace(a=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"

FAILS = {
    "division": ("{{ 1/0 }}", "ZeroDivisionError"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "format": ("{{ '{x}'.format() }}", "KeyError"),
    "undefined": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "call of undefined": ("{{ nothing() }}", "'nothing' is undefined"),
    "refusal": ("{{ raise_exception('roles must\n\nalternate') }}", "roles must alternate"),
    "dunder": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "dunder in format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "cycler": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
    "change": ("{{ messages.append(1) }}", "unsafe"),
    "change of a message": ("{{ messages[0].update(role='system') }}", "unsafe"),
    "include": ("{% include 'other' %}", "no loader"),
    "import": ("{% import '/etc/passwd' as x %}", "no loader"),
}
BOUNDED = {
    "long text": "{{ 'x' * 10**12 }}",
    "power": "{{ (messages | length + 8)**(9**9) }}",
    "macro that branches": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubled by +": DOUBLED + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "nested tuples as a key": TUPLES + "{{ {ns.a: 1} }}",
    "deep": "{% set ns = namespace(a=[]) %}{% for i in range(9999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
    "replace by long": "{% set long = 'x' * 4000000 %}{{ long | replace('x', long) }}",
    "width by format": "{{ '{:1000000000}'.format(1) }}",
    "attributes": "{% for i in range(99999) %}{% set t = range(99999) | map(attribute='a.a.a.a') | list %}{% endfor %}",
    "output": "{% for i in range(100000) %}" + "x" * 5000 + "{% endfor %}",
}
INVALID = {
    "syntax": "{% if %}",
    "not closed": "{{ 'a",
    "huge number": "{{ " + "9" * 10_000 + " }}",
    "parentheses": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "ifs": "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for i in a %}" * 30 + "{% endfor %}" * 30,
    "long sum": "{{ " + "+".join(["a"] * 20_000) + " }}",
    "size": "x" * (SOURCE_CHARACTERS + 1),
    "constant": "{{ 9**(9**9) }}",
    "filter": "{{ 'x' | center_of_attention }}",
    "test": "{{ 'x' is divisible }}",
}


def attempt(source: str) -> str:
    """The one sentence with which a template fails, after little work and without memory of this process."""
    start, before = processor_seconds(), psutil.Process().memory_info().rss
    with pytest.raises(UserError) as caught:
        template = ChatTemplate(source, {})
        template.render(template.conversation([USER]), add_generation_prompt=True)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700, message
    assert processor_seconds() - start < 10 * SECONDS
    assert psutil.Process().memory_info().rss - before < MEMORY_BYTES / 10
    return message


def processor_seconds() -> float:
    """Of this process, and of those that it has started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.mark.parametrize(("source", "reason"), FAILS.values(), ids=FAILS)
def test_a_template_that_fails_says_why(source: str, reason: str) -> None:
    assert reason in attempt(source)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.slow
def test_no_template_runs_long_or_takes_much_memory(name: str) -> None:
    message = attempt(BOUNDED[name])
    assert "chat template" in message
    assert (
        ChatTemplate("{{ messages | length }}", {}).render([USER], add_generation_prompt=True)
        == "1"
    )


@pytest.mark.parametrize("name", INVALID)
def test_a_template_that_cannot_be_compiled_is_not_valid(name: str) -> None:
    assert "chat template is not valid" in attempt(INVALID[name])


def test_a_mistake_in_a_template_is_told_with_its_line() -> None:
    assert "chat template is not valid (line 3: " in attempt("a\n\n{% if %}")


def test_output_has_a_limit() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    long = "x" * OUTPUT_CHARACTERS
    assert template.render([{**USER, "content": long}], add_generation_prompt=True) == long
    with pytest.raises(
        UserError, match=r"writes 4,194,305 characters, but may write 4,194,304"
    ):
        template.render([{**USER, "content": long + "x"}], add_generation_prompt=True)


def test_threads_render_at_the_same_time_and_get_their_own_texts() -> None:
    template = ChatTemplate(
        "{% for i in range(9999) %}{% endfor %}{{ messages[0].content }}", {}
    )

    def rendered(number: int) -> str:
        message = {"role": "user", "content": str(number)}
        return template.render([message], add_generation_prompt=True)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rendered, range(100))) == [str(number) for number in range(100)]


def test_a_process_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}", {})
    for child in psutil.Process().children():
        if any("template_child" in word for word in child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
            psutil.wait_procs([child], timeout=5)
    assert template.render([USER], add_generation_prompt=True) == "1"


def test_a_thousand_messages_fit_into_the_budget() -> None:
    """What published templates do with each message: look at its neighbours, at the number of all, at text."""
    template = ChatTemplate(
        "{% for m in messages[::-1] %}{% set last = loop.index0 == messages | length - 1 %}"
        "{% if m.role == 'user' and m.content is string and not m.content.startswith('<tool>') %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' + '\n' }}{% endif %}"
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}"
        "{% if not loop.first and loop.previtem.role == m.role %}{{ m | tojson }}{% endif %}{% endfor %}",
        {},
    )
    messages = [{"role": "user", "content": "word " * 350}] * 1000
    assert template.render(messages, add_generation_prompt=True).count("<|im_start|>") == 1000


PLAIN = [
    "{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}{{ nothing }}{{ {'a': 1}.items() | list }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ [3, 1, 2] | sort | reverse | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | join('/', attribute='role') }}",
    "{% macro say(m, end='!') %}{{ m.content }}{{ end }}{{ caller() if caller }}{% endmacro %}{{ say(messages[0]) }}"
    "{% call say(messages[1], end='?') %}called{% endcall %}",
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'system' %}{% set ns.n = ns.n + loop.length %}"
    "{{ loop.cycle('a', 'b') }}{{ loop.last }}{% else %}none{% endfor %}{{ ns.n }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% if loop.index0 is even %};{% endif %}{% endfor %}",
    "{{ '%s is %5.2f' % ('a', 2) }}{{ '{:>5}|{x}'.format(1, x=2) }}{{ 'a-b'.split('-')[1:] }}{{ 'aXbX' | replace('X', '-') }}",
    "{% set t %}<{{ messages[0].content }}>{% endset %}{{ t | upper | indent(2, true) }}{{ 7 // 2 ** 2 }}{{ -3 % 5 }}",
    "{% filter upper %}a{{ messages[0].role }}{% endfilter %}{{ (1, 2) }}{{ 'abc'[::-1] }}{{ 1 < 2 <= 3 }}{{ 'a' in 'abc' }}",
    "{{ messages[0].get('content', 'no') }}{{ messages[0]['missing'] is defined }}{{ '<&>' | safe }}{{ 'b' is in ['a'] }}",
    "{% for t in [[1, [2]], [3]] recursive %}{{ loop(t) if t is sequence else t }}{% endfor %}{{ 3.7 | int }}{{ '4' | int + 1 }}",
    "{{ 2.567 | round(1) }}{{ '%s-%s' | format('a', 1) }}{{ [1, 2] | sum }}{{ '<b>' | e }}{{ 'a b c' | wordcount }}",
    "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ 'a long text' | truncate(6, true) }}",
    "{% for role, group in messages | groupby('role') %}{{ role }}:{{ group | length }}{% endfor %}{{ 9 is divisibleby 3 }}",
    "{{ 'a'.center(5) }}{{ 'a' | center(5) }}{{ [7] | random }}{{ 'a,b' | wordwrap(2) }}{{ {'a': 1} | xmlattr }}",
    "{{ 'a\nb' | indent }}{{ [1] | pprint }}{{ 1024 | filesizeformat }}{{ '<a>x</a>' | striptags }}{{ 'a b' | urlencode }}",
    "{% generation %}{{ messages[1] | tojson(indent=2) }}{% endgeneration %}{{ 'é' | tojson }}",
    "{{ {'b': 1, 'a': [true, none]} | dictsort }}{{ joiner(',')() }}{{ [1, 1, 2] | unique | list }}{{ [1, 2] + [3] }}",
]


@pytest.mark.parametrize("source", PLAIN)
def test_what_is_written_is_what_transformers_writes(source: str) -> None:
    messages = [
        {"role": "system", "content": " be brief"},
        {"role": "user", "content": "hi\nyou"},
    ]
    (expected,), _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True
    )
    assert ChatTemplate(source, {}).render(messages, add_generation_prompt=True) == expected


@pytest.mark.parametrize("kind", ["filters", "tests"])
def test_all_of_jinja_is_there(kind: str) -> None:
    """A process that may open no file has read beforehand what its filters and tests import."""
    for name in sorted(getattr(jinja2.Environment(), kind)):
        source = f"{{{{ 'a' | {name} }}}}" if kind == "filters" else f"{{{{ 'a' is {name} }}}}"
        try:
            ChatTemplate(source, {}).render([USER], add_generation_prompt=True)
        except UserError as error:
            assert not re.search("open files|No (filter|test) named", str(error)), name


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages is empty"),
        ("hi", "messages is a str, but must be a list"),
        (["hi"], r"messages\[0\] is 'hi', but must be an object"),
        ([{"content": "hi"}], r"messages\[0\] has no role"),
        ([{**USER, "role": 1}], r"messages\[0\].role is 1, but must be a string"),
        (
            [{**USER, "role": "boss"}],
            r"messages\[0\].role is 'boss', but must be one of system, .*, function$",
        ),
        (
            [{**USER, "role": "User"}],
            r"role is 'User', but must be one of .* \(did you mean 'user'\?\)",
        ),
        (
            [USER, {**USER, "role": "x" * 100_000}],
            r"messages\[1\].role is 'x.{,80}, but must be one of",
        ),
        (
            [{**USER, "content": [{"type": ["x"] * 100_000}]}],
            r"content\[0\].type is .{,80}, but must be 'text'",
        ),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{**USER, "content": None}], r"messages\[0\] has no content"),
        ([{**USER, "content": 3}], r"messages\[0\].content is 3, but must be a string"),
        ([{**USER, "content": "a\ud800"}], r"messages\[0\].content is .*UTF-8"),
        ([{**USER, "content": ["hi"]}], r"messages\[0\].content\[0\] is 'hi'"),
        (
            [{**USER, "content": [{"type": "image_url"}]}],
            r"content\[0\].type is 'image_url', but must be 'text'",
        ),
        (
            [{**USER, "content": [{"type": "text"}]}],
            r"content\[0\].text is None, but must be a string",
        ),
        (
            [USER, {**USER, "audio": {"id": "a"}}],
            r"messages\[1\] has 'audio', but this model takes texts",
        ),
        (
            [USER, {**USER, "images": ["x"]}],
            r"messages\[1\] has 'images', but this model takes texts",
        ),
        (
            [{**USER, "content": [{"type": "input_audio"}]}],
            r"content\[0\].type is 'input_audio'",
        ),
        (
            [{**USER, "tool_calls": "x"}],
            r"messages\[0\].tool_calls is 'x', but must be a list",
        ),
    ],
)
def test_a_bad_message_is_named(messages, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        ChatTemplate("", {}).conversation(messages)


PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}],
}
READS_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def test_parts_of_text_are_written_as_they_are_or_as_lines() -> None:
    """As they are by a template that reads parts, as lines by one that takes texts."""
    for source, text in ((READS_PARTS, "a b"), ("{{ messages[0].content }}", "a \nb")):
        template = ChatTemplate(source, {})
        assert (
            template.render(template.conversation([PARTS]), add_generation_prompt=False)
            == text
        )


ASSISTANT = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    "message",
    [
        {**ASSISTANT, "refusal": None, "reasoning": None, "annotations": [], "audio": None},
        {**ASSISTANT, "function_call": None, "tool_calls": [], "provider_specific_fields": {}},
        {
            **ASSISTANT,
            "id": "msg_1",
            "weight": 0,
            "cache_control": {"type": "ephemeral"},
            "parsed": {"a": 1},
        },
        {**ASSISTANT, "reasoning": "thought", "reasoning_details": [{"text": "thought"}]},
        {"role": "assistant", "content": None, "refusal": "yes"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "yes"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
    ],
    ids=str,
)
def test_what_other_servers_and_clients_write_changes_nothing(message) -> None:
    """Nor need an assistant have said anything."""
    silent = not (message.get("content") or message.get("refusal"))
    expected = ASSISTANT | ({"content": ""} if silent else {})
    assert ChatTemplate("{{ messages }}", {}).conversation([message]) == [expected]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_its_name(field: str) -> None:
    template = ChatTemplate(
        "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", {}
    )
    message = {**ASSISTANT, field: "hm "}
    assert (
        template.render(template.conversation([message]), add_generation_prompt=False)
        == "hm hm "
    )
    part = {
        "type": "text",
        "text": "a",
        "cache_control": {"type": "ephemeral"},
        "annotations": [],
    }
    ignored = set[str]()
    template.conversation([message, {**USER, "content": [part]}], ignored)
    assert ignored == {"cache_control"}


def test_a_message_may_have_what_the_template_names() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.mood }}{{ m['colour'] }}{% endfor %}", {}
    )
    message = {**USER, "mood": "glad", "colour": "red"}
    assert (
        template.render(template.conversation([message]), add_generation_prompt=True)
        == "gladred"
    )
    ignored = set[str]()
    template.conversation([{**message, "weight": 1, "id": None}], ignored)
    assert ignored == {"weight"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert template.conversation([calls]) == [calls]


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": None}}}]
CALLING = {"role": "assistant", "content": None, "tool_calls": CALLS}
ASKS = [
    "{{ m.content }}|{{ m['content'] }}|{{ m.content ~ '.' }}|{{ m.content or 'or' }}",
    "{% if m.content %}yes{% else %}no{% endif %}{{ m.content if m.content else 'none' }}",
    "{{ m.content is defined }}{{ m.content is undefined }}{{ 'content' in m }}{{ m.content is string }}",
    "{{ m.content is mapping }}{{ m.content is iterable }}{{ m.content is sequence }}{{ m.content is number }}",
    "{{ m.content | length }}{{ m.content | trim }}{{ m.content | default('d') }}{{ m.content | default('e', true) }}",
    "{% for part in m.content %}{{ part }}{% endfor %}{{ 'x' in m.content }}{{ m.content | list }}",
    "{{ m | tojson }}{{ m.items() | list }}{{ m | length }}{% for key in m %}{{ key }}{% endfor %}",
    "{{ m.get('content', '') }}{{ m.get('content') or '' }}{{ m.content == '' }}{{ m.content != '' }}",
    "{{ messages | map(attribute='content') | join('-') }}{{ messages | selectattr('content') | list | length }}",
    "{{ messages | selectattr('content', 'defined') | list | length }}{{ [m.content, 'b'] | join }}",
    "{% set c = m.content %}{% if c is string %}{{ c }}{% elif c %}{{ c[0].text }}{% endif %}{{ m == messages[0] }}",
    "{{ m.content | string | upper }}{{ '%s' % m.content }}{{ '{}'.format(m.content) }}{{ m.content | replace('a', 'b') }}",
]
"""What templates do with a content."""
SILENT = {
    "null beside calls": [USER, CALLING],
    "missing beside calls": [
        USER,
        {field: CALLING[field] for field in ("role", "tool_calls")},
    ],
    "empty beside calls": [USER, CALLING | {"content": ""}],
    "a text beside calls": [USER, CALLING | {"content": "so"}],
    "a tool's null": [USER, CALLING, {"role": "tool", "content": None, "tool_call_id": "1"}],
    "a tool's missing": [USER, CALLING, {"role": "tool"}],
    "a system's null": [USER, {"role": "system", "content": None}],
    "a developer's null": [USER, {"role": "developer", "content": None}],
    "an empty text": [USER, {"role": "assistant", "content": ""}],
}


@pytest.mark.parametrize("source", ASKS)
@pytest.mark.parametrize("name", SILENT)
def test_a_content_that_says_nothing_is_to_a_template_what_it_is_with_transformers(
    source, name
) -> None:
    """Which leaves fields out that are null, before it renders."""
    source, messages = "{% set m = messages[-1] %}" + source, SILENT[name]
    plain = [
        {field: value for field, value in each.items() if value is not None}
        for each in messages
    ]
    (expected,), _ = render_jinja_template(
        [plain], chat_template=source, add_generation_prompt=True
    )
    template = ChatTemplate(source, {})
    assert (
        template.render(template.conversation(messages), add_generation_prompt=True)
        == expected
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ m.content is none }}{{ m['content'] is not none }}{{ m.get('content') is none }}",
            "TrueFalseTrue",
        ),
        (
            "{{ m.content == none }}{{ m.content != none }}{{ m.content in [none] }}",
            "TrueFalseTrue",
        ),
        ("{{ messages | selectattr('content', 'none') | list | length }}", "1"),
        ("{{ m.get('content') }}.", "."),
        ("{{ m.content + 'a' }}{{ 'b' + m.content }}{{ 'c' + m.content + 'd' }}", "abcd"),
        (
            "{{ m.content.split('</think>')[-1].lstrip() }}{{ m.content.startswith('a') }}",
            "False",
        ),
        ("{{ m.content[:2] }}{{ m.content.strip() }}{{ m.content.format() }}.", "."),
        ("{{ m.content | tojson }}{{ [m.content] | tojson }}", "null[null]"),
        ("{{ m.content.nothing }}{{ m.content[0] }}{{ m.contents }}.", "."),
    ],
)
def test_a_content_of_calls_alone_is_none_and_writes_nothing(
    source: str, expected: str
) -> None:
    """So templates that ask get their answer, and those that take any content for a text do not fail."""
    template = ChatTemplate("{% set m = messages[-1] %}" + source, {})
    assert (
        template.render(template.conversation([USER, CALLING]), add_generation_prompt=True)
        == expected
    )


def test_a_content_of_calls_alone_opens_no_door() -> None:
    for source in (
        "{{ messages[1].content.__class__.__mro__ }}",
        "{{ messages[1].content._undefined_obj.role }}",
    ):
        template = ChatTemplate(source, {})
        with pytest.raises(UserError, match="unsafe"):
            template.render([USER, CALLING], add_generation_prompt=True)


@pytest.mark.parametrize(
    "arguments",
    [
        "true",
        "none",
        "false, 2",
        "true, none, (',', ':')",
        "false, none, none, true",
        "sort_keys=true, indent=1",
    ],
)
def test_to_json_takes_its_arguments_as_with_transformers(arguments: str) -> None:
    messages, source = (
        [USER | {"content": "<é>"}],
        "{{ messages | tojson(" + arguments + ") }}",
    )
    (expected,), _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True
    )
    assert ChatTemplate(source, {}).render(messages, add_generation_prompt=True) == expected


def test_a_template_may_name_roles_of_its_own() -> None:
    source = "{% for m in messages if m.role in ('user', 'document') %}{{ m.role }}:{{ m.content }} {% endfor %}"
    template = ChatTemplate(source, {})
    messages = template.conversation([{"role": "document", "content": "d"}, USER])
    assert template.render(messages, add_generation_prompt=True) == "document:d user:hello "


CONTINUED = {
    "mistral": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}</s>{% endif %}{% endfor %}",
    "trims": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}",
    "thinks": "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n\n{% endif %}{{ m.content }}<|end|>{% endfor %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{% endif %}|{% endfor %}",
}
TWO_PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": " b"}]


@pytest.mark.parametrize("source", CONTINUED.values(), ids=CONTINUED)
@pytest.mark.parametrize(
    "content", ["The answer", "  The answer \n", "", "<end> The", TWO_PARTS]
)
def test_a_continued_message_is_written_as_transformers_writes_it(
    source: str, content
) -> None:
    if content is TWO_PARTS and source is not CONTINUED["parts"]:
        return
    last = {"role": "assistant", "content": content, "reasoning_content": "why"}
    (expected,), _ = render_jinja_template(
        [[USER, last]], chat_template=source, continue_final_message=True
    )
    template = ChatTemplate(source, {})
    messages = template.conversation([USER, last])
    assert render_continued(template, messages, add_generation_prompt=False) == expected


def test_a_message_of_no_parts_is_continued_from_its_beginning() -> None:
    template = ChatTemplate(CONTINUED["parts"], {})
    contents: tuple[Any, ...] = ([], [{"type": "text", "text": ""}])
    said = [[USER, {"role": "assistant", "content": content}] for content in contents]
    none, empty = (
        render_continued(template, template.conversation(each), add_generation_prompt=False)
        for each in said
    )
    assert none == empty


def test_a_message_that_is_not_written_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    messages = template.conversation([USER, {"role": "assistant", "content": "x"}])
    with pytest.raises(UserError, match="does not write the last message"):
        render_continued(template, messages, add_generation_prompt=False)
