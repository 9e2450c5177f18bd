"""Grammars by hand: patterns against `re`, masks against llguidance, schemas against `jsonschema`."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from common.errors import UserError
from common.sampling.grammar import Grammar
from structured.automata.backend import AutomataBackend
from structured.automata.dfa import Dfa, compile, determinize, minimize
from structured.automata.json_schema import rules_of
from structured.automata.nfa import Nfa, utf8
from structured.automata.nodes import Alt, Call, Cat, literal
from structured.automata.pushdown import Machine
from structured.automata.regex import parse
from structured.automata.trie import Trie
from structured.vocabulary import Vocabulary
from tests.servers import tokenizer_for
from tests.structured_kit import EOS, SCHEMAS, mask, must_validate, tokenizer, vocabulary

pytestmark = pytest.mark.timeout(120)

PATTERNS = [
    "(ab|c)+d",
    "a*",
    "[a-c]{2,4}",
    "x?y?z?",
    "(a|b)*abb",
    "é+|[à-ü]{2}",
    ".{3}",
    r"\d+(\.\d+)?",
    "[^a]b",
]
PATTERNS += ["(|a)b", "(a*)*", "a{0}b", "(?:ab)?c", r"\.\d", "(a|ab)(c|bc)", "[\\]x]", "a|"]


def state_after(dfa: Dfa, text: bytes) -> int:
    state = 0
    for byte in text:
        state = int(dfa.table[state, byte]) if state >= 0 else -1
    return state


def accepts(dfa: Dfa, text: str) -> bool:
    state = state_after(dfa, text.encode())
    return state >= 0 and bool(dfa.accepting[state])


def after(machine: Machine, place: Any, data: bytes) -> Any:
    """The place of a machine behind these bytes, or nothing."""
    for byte in data:
        place = machine.step(place, byte)
    return place


@pytest.fixture(scope="module")
def backend() -> AutomataBackend:
    return AutomataBackend(vocabulary())


# Patterns.


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_what_pythons_do(pattern: str) -> None:
    dfa, large = compile(parse(pattern)), determinize(Nfa(parse(pattern)))
    for length in range(5):
        for letters in itertools.product("abcdxyz1.é", repeat=length):
            text = "".join(letters)
            expected = bool(re.fullmatch(pattern, text))
            assert accepts(large, text) == expected, (
                f"{pattern!r} and {text!r}, before it is made small"
            )
            assert accepts(dfa, text) == expected, f"{pattern!r} and {text!r}"


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("(a|b)*abb", 4),
        ("a*", 1),
        ("(ab|c)+d", 4),
        ("(a|b)*a(a|b){5}", 64),
        ("aa|ab|ba|bb", 3),
    ],
)
def test_automata_are_as_small_as_can_be(pattern: str, states: int) -> None:
    found = len(compile(parse(pattern)).table)
    assert found == states, f"{pattern!r} needs {states} states, not {found}"


def test_the_lesson_s_table_of_states_is_what_the_three_steps_make() -> None:
    def states(dfa: Dfa) -> list[int]:
        found = list[int]()
        for text in (b"", b"a", b"ab", b"aba", b"abd"):
            state = 0
            for byte in text:
                state = int(dfa.table[state, byte])
            found.append(state)
        return found

    nfa = Nfa(parse("(ab|c)+d"))
    # The lesson calls the states 0, 4, 3, 5, 6, 2 and 1 p, q, r, s, t, u and v.
    edges = [{chr(low): target for low, _, target in edges} for edges in nfa.edges]
    assert edges == [{"a": 4, "c": 3}, {}, {"d": 1}, {}, {"b": 3}, {"a": 6, "c": 5}, {"b": 5}]
    assert nfa.free == [[], [], [], [5], [], [2], []]
    large = determinize(nfa)
    assert states(large) == [0, 1, 2, 3, 4]
    assert len(large.table) == 5, "a set has a state that reads nothing and is not the end"
    assert states(minimize(large)) == [0, 1, 2, 1, 3]


def test_no_two_states_are_alike() -> None:
    for pattern in PATTERNS:
        dfa = compile(parse(pattern))
        seen: dict[Any, int] = {}
        # With equal rows and ends two states would be one.
        for state in range(len(dfa.table)):
            key = dfa.table[state].tobytes(), bool(dfa.accepting[state])
            assert key not in seen, (
                f"{pattern!r}: states {state} and {seen.get(key)} are the same"
            )
            seen[key] = state


def test_a_pattern_may_say_that_it_is_whole() -> None:
    for pattern in ("^ab$", "^a|b$", "^$"):
        whole = compile(parse(pattern.strip("^$")))
        assert np.array_equal(compile(parse(pattern)).table, whole.table)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a(", "not closed"), ("a)", "out of place"), ("*a", "out of place"), ("[a", "not closed"),
        ("[]", "is empty"), ("[b-a]", "a later one"), ("a{3,2}", "must count up"), ("a{5", "must begin a count"),
        (r"(a)\1", "is not known"), ("(?=a)", r"must begin with '\?:'"), (r"\bword", "is not known"),
        (r"\x1", "is not known"), ("(a", "not closed"),
        ("a^b", "out of place"), ("a$b", "out of place"),
    ],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(pattern)


def test_a_count_is_limited_by_its_states() -> None:
    for pattern in ("a{9999}", "(a{0}){999999}"):
        with pytest.raises(UserError, match="states"):
            compile(parse(pattern))


@pytest.mark.parametrize(
    "low", [0, 0x41, 0x7F, 0x80, 0x7FE, 0xD7FF, 0xE001, 0xFFFE, 0x10000, 0x10FFF0]
)
def test_every_character_has_one_form(low: int) -> None:
    for high in (low, low + 1, low + 70, 0x10FFFF):
        if high > 0x10FFFF:
            continue
        forms = list(utf8(((low, high),)))
        total = sum(int(np.prod([last - first + 1 for first, last in form])) for form in forms)
        surrogates = max(0, min(high, 0xDFFF) - max(low, 0xD800) + 1)
        assert total == high - low + 1 - surrogates
        for code in {low, high, (low + high) // 2} - set(range(0xD800, 0xE000)):
            raw = chr(code).encode()
            alike = [form for form in forms if len(form) == len(raw)]
            hits = [
                all(a <= byte <= b for (a, b), byte in zip(form, raw, strict=True))
                for form in alike
            ]
            assert sum(hits) == 1, f"U+{code:04X} in {low:x}..{high:x}"


# Masks.


def test_the_trie_holds_every_token() -> None:
    trie = Trie(vocabulary().tokens)
    assert int(trie.token_nodes[EOS]) == trie.size, "a token without bytes stands in the trie"
    for token, text in enumerate(vocabulary().tokens):
        node, spelled = int(trie.token_nodes[token]), []
        while text and node:
            spelled.append(int(trie.bytes[node]))
            node = int(trie.parents[node])
        assert bytes(reversed(spelled)) == text, f"token {token}"


GUIDED = [
    "(ab|c)+d",
    "[a-c]{2,4}",
    "x?y?z?",
    "[0-9]+([.][0-9]+)?",
    "(true|false|null)",
    "é+|[à-ü]{2}",
    "(in|an|the)*",
]


@pytest.mark.parametrize("pattern", GUIDED)
def test_a_token_may_come_when_its_text_may(pattern: str, backend: AutomataBackend) -> None:
    """Any token whose text some output goes on with, however it is cut; in every state of the automaton."""
    dfa, grammar = compile(parse(pattern)), backend.compile(Grammar.regex(pattern))
    queue: list[list[int]] = [[]]
    seen = {0}
    for tokens in queue:  # which grows
        matcher = grammar.matcher()
        assert matcher.advance(tokens) == len(tokens)
        found, text = mask(matcher), b"".join(vocabulary().tokens[token] for token in tokens)
        for token, more in enumerate(vocabulary().tokens):
            state = state_after(dfa, text + more)
            can = (token == EOS and bool(dfa.accepting[state])) or (bool(more) and state >= 0)
            assert (token in found) == can, f"{pattern!r}: {more!r} behind {text!r}"
            if can and more and state not in seen:
                seen.add(state)
                queue.append([*tokens, token])
    assert len(seen) == len(dfa.table), f"{pattern!r}: only the states {seen} were reached"


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_mask_says_exactly_what_can_be_read(name: str, backend: AutomataBackend) -> None:
    """Token by token, without the trie."""
    grammar: Any = backend.compile(Grammar.json_schema(SCHEMAS[name]))
    machine: Machine = grammar.machine
    rng, matcher = random.Random(3), grammar.matcher()
    for _ in range(25):
        place, found = matcher.history[-1], mask(matcher)
        for token, text in enumerate(vocabulary().tokens):
            can = bool(text and after(machine, place, text)) or (
                token == EOS and machine.may_end(place)
            )
            assert (token in found) == can, f"{name}: {text!r} at {place}"
        found = [token for token in found if token != EOS]
        if not found:
            break
        matcher.advance([rng.choice(found)])


def test_rollback_returns(backend: AutomataBackend) -> None:
    matcher = backend.compile(Grammar.json_schema(SCHEMAS["tree"])).matcher()
    before = mask(matcher)
    tokens = tokenizer().encode('{"v":1')
    assert matcher.advance(tokens) == len(tokens)
    assert matcher.advance(tokenizer().encode("}x")) == 1
    matcher.rollback(len(tokens) + 1)
    assert mask(matcher) == before and matcher.advance(tokenizer().encode("x")) == 0


# Schemas.


def must_agree(schema: Any, values: list[Any]) -> None:
    machine = Machine(rules_of(schema), "start")
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        place = machine.start
        if isinstance(value, dict) and isinstance(
            schema, dict
        ):  # keys in the order of the schema
            order = (*schema.get("properties", ()), *schema.get("required", ()), *value)
            value = {key: value[key] for key in dict.fromkeys(order) if key in value}
        for byte in json.dumps(value, ensure_ascii=False).encode():
            nested = isinstance(value, (list, dict))
            assert not (nested and machine.may_end(place)), (
                f"{schema}: {value!r} may end before its end"
            )
            place = machine.step(place, byte)
        assert machine.may_end(place) == validator.is_valid(value), f"{schema}: {value!r}"


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2.5,
    10**6,
    "",
    "a",
    "ab",
    "abcde",
    'é\n"\\',
    "\x00",
    [],
    [1],
    [1, "a"],
]
VALUES += [
    ["a"] * 4,
    [[]],
    {},
    {"a": 1},
    {"a": "x", "b": 2},
    {"b": 2},
    {"c": None},
    {"a": 1, "b": 2, "c": [{}]},
]
AGREED: list[Any] = [
    True, {}, {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": ["null", "integer"]},
    {"type": "number"}, {"type": "array", "minItems": 3},
    {"enum": [1, "a", None, [], {"a": 1}]}, {"const": 2.5}, {"type": "array", "minItems": 1, "maxItems": 2},
    {"type": "array", "items": {"type": "integer"}}, {"type": ["array", "null"], "minItems": 2, "maxItems": 1}, {"enum": [1.0]},
    {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]}, {"type": "object", "required": ["c"]},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]}, {"type": "array", "maxItems": 0},
    {"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"type": "boolean"}}}, {"type": "integer", "title": "n"},
]  # fmt: skip


@pytest.mark.parametrize("schema", AGREED, ids=lambda schema: json.dumps(schema)[:50])
def test_schemas_take_what_jsonschema_takes(schema: Any) -> None:
    must_agree(schema, VALUES)


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_walks_validate(name: str, backend: AutomataBackend) -> None:
    grammar = backend.compile(Grammar.json_schema(SCHEMAS[name]))
    ended = 0
    for seed in range(40):
        rng = random.Random(seed)
        matcher = grammar.matcher()
        out = list[int]()
        for _ in range(200):
            found = mask(matcher)
            assert found, f"{name}: nothing may follow {tokenizer().decode(out)!r}"
            token = EOS if EOS in found and rng.random() < 0.4 else rng.choice(found)
            if token == EOS:
                ended += 1
                must_validate(tokenizer().decode(out), SCHEMAS[name], f"{name}, walk {seed}")
                break
            out.append(token)
            assert matcher.advance([token]) == 1
    assert ended > 10


def test_keys_that_have_a_schema_come_once() -> None:
    """Behind the first, a second `a` would count, and it is any value."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": True}}
    machine = Machine(rules_of(schema), "start")
    for text, fits in (
        ('"a": 1, "b": 2', True),
        ('"a": 1, "a": "x"', False),
        ('"c": 1, "a": "x"', False),
    ):
        assert (
            machine.may_end(after(machine, machine.start, f"{{{text}}}".encode())) == fits
        ), text


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a/b": {"not": {}}}}, r"#/properties/a~1b/not: not is not known"),
    ({"items": {"oneOf": []}}, "#/items/oneOf: oneOf"),
    ({"items": {"minimum": 3}}, "#/items/minimum: minimum is not known"),
    ({"type": "string", "pattern": "a"}, "#/pattern: pattern is not known here"),
    ({"$ref": "http://x/y"}, r"#/\$ref: 'http://x/y' is no reference"),
    ({"$ref": "#/$defs/no"}, "points to nothing"),
    ({"anyOf": [{"$ref": "#"}]}, "no output that ever ends"),
    (
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
        "no output that ever ends",
    ),
    ({"enum": [1], "minLength": 3}, "#/enum: enum beside minLength"),
    ({"type": "wat"}, "#/type: 'wat' is no type"),
    ({"minLength": -1}, "#/minLength: -1 is no whole number"),
    ({"maxLength": 10**9}, "#/maxLength: 1000000000 is no whole number from 0 to 500"),
    ({"properties": {"a": 3}}, "#/properties/a: 3 is no schema"),
    (False, "no output that ever ends"),
]


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=lambda case: json.dumps(case)[:40])
def test_schemas_that_are_refused(schema: Any, says: str, backend: AutomataBackend) -> None:
    with pytest.raises(UserError, match=says):
        backend.compile(Grammar.json_schema(schema))


def test_a_rule_that_calls_itself_first_is_refused() -> None:
    """It would push for ever; one that has nothing to do behind the call needs no stack."""
    again = Alt((Cat((Call("a"), literal("x"))), literal("y")))
    with pytest.raises(UserError, match="calls itself before it reads"):
        Machine({"a": again}, "a")
    machine = Machine({"a": Alt((Call("a"), literal("y")))}, "a")
    assert machine.may_end(machine.step(machine.start, ord("y")))


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE: dict[str, Grammar] = {
    "many loops": Grammar.regex("(a*b*c*d*){200}"),
    "deep schema": Grammar.json_schema(nested(60)),
    "long strings": Grammar.json_schema({"type": "string", "maxLength": 500}),
    "wide": Grammar.json_schema(
        {"type": "object", "properties": {f"k{n}": {"enum": [n]} for n in range(2000)}}
    ),
    "choices": Grammar.choice([f"{n:x}" * 4 for n in range(9000)]),
    "alike": Grammar.json_schema(
        {"anyOf": [{"type": "array", "minItems": n} for n in range(60)]}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow
def test_hostile_grammars_end_soon(name: str, backend: AutomataBackend) -> None:
    started = time.process_time()
    try:
        compiled = backend.compile(HOSTILE[name])
    except UserError as error:
        assert "\n" not in str(error)
    else:
        mask(compiled.matcher())
        assert compiled.bytes < 200 << 20
    assert time.process_time() - started < 6, "two seconds on an idle machine"


def test_a_grammar_allows_no_special_token(tmp_path: Path) -> None:
    """No text shows it, so that the client's text would lack what the grammar has counted."""
    made = tokenizer_for(tmp_path, 257)
    made.backend.add_special_tokens(["<|own|>"])
    own, size = made.backend.token_to_id("<|own|>"), made.vocab_size
    found = Vocabulary.of(made, size, (EOS,))
    matcher = AutomataBackend(found).compile(Grammar.regex("[^x]*")).matcher()
    assert own not in mask(matcher, size), f"the mask of token 0 allows <|own|>, token {own}"
    assert made.backend.token_to_id("<") in mask(matcher, size)
