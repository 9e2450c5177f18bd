"""A pattern has one meaning: Python's `re` and both backends agree on generated ones."""

from __future__ import annotations

import json
import random
import re
import warnings
from functools import cache
from typing import Any, NamedTuple

import pytest

from benchmarks.json_schema_suite import byte_vocabulary
from common.errors import UserError
from common.sampling.grammar import Grammar
from phases.appendix.guidance.patterns import rewrite_pattern
from structured.matcher import Backend
from tests.guidance_kit import backend_named
from tests.structured_kit import EOS, mask

BACKENDS = ("llguidance", "automata")
SPACE, LINE_ENDS = (
    "\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
    r"\n\r\u2028\u2029",
)
LETTERS = "abzAlph019_-&~[]^:.|{}$()*+?/\\\"' \t\n\r\xa0\x85\u180e\u2028\u2029\u3000\ufeffé٧ſK\U0001d4b3"


class Written(NamedTuple):
    """A pattern, and the same for Python's `re` where that reads ECMAScript's otherwise."""

    pattern: str
    python: str


IN_CLASSES = [
    "a",
    "b-d",
    "a-z",
    "&&",
    "--",
    "~~",
    "||",
    "[",
    "[:alpha:",
    "0-9",
    "é",
    "^",
    ".",
    "$",
    "(",
    "-",
    "+--",
]
IN_CLASSES += [
    r"\]",
    r"\\",
    r"\-",
    r"\^",
    r"\n",
    r"\t",
    r"\x41",
    r"\u00e9",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\[",
    "&&[^b",
]
ATOMS = [
    "a",
    "b",
    "é",
    "0",
    "&",
    "-",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\S",
    ".",
    r"\.",
    r"\-",
    r"\[",
    r"\n",
    "]",
    "}",
]
ATOMS += [r"\u2028", r"\x41", r"\/", "/", "~", '"', "\\\\", " ", "&&", "--"]


def written(rng: random.Random, *, json: bool, depth: int = 2) -> Written:
    """A random pattern, of ECMAScript or of the dialect of `regex`."""
    parts = list[Written]()
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.5:
            inner = rng.choices(IN_CLASSES, k=rng.randint(1, 3))
            inner = ["a"] if inner == ["^"] else inner  # `[^]` is read in three ways
            begin = rng.choice(("[", "[^"))
            known = [part.replace(r"\s", SPACE) if json else part for part in inner]
            part = Written(begin + "".join(inner) + "]", begin + "".join(known) + "]")
        elif kind < 0.85 or not depth:
            atom = rng.choice(ATOMS)
            own = (
                {r"\s": f"[{SPACE}]", r"\S": f"[^{SPACE}]", ".": f"[^{LINE_ENDS}]"}
                if json
                else {}
            )
            part = Written(atom, own.get(atom, atom))
        else:
            one, other = (written(rng, json=json, depth=depth - 1) for _ in range(2))
            begin = rng.choice(("(", "(?:"))
            part = Written(*(f"{begin}{a}|{b})" for a, b in zip(one, other, strict=True)))
        count = rng.choice(("", "", "", "*", "+", "?", "{2}", "{1,2}", "+?"))
        several = len(part.python) > 1 and part.python[0] not in "([\\"
        parts.append(
            Written(
                *(f"(?:{each}){count}" if several and count else each + count for each in part)
            )
        )
    return Written(
        "".join(part.pattern for part in parts), "".join(part.python for part in parts)
    )


@cache
def backend(name: str) -> Backend:
    return backend_named(name)(byte_vocabulary())


def accepts(name: str, grammar: Grammar, texts: list[str]) -> list[bool]:
    """Whether each text may be the whole output."""
    compiled, found = backend(name).compile(grammar), list[bool]()
    for text in texts:
        matcher = compiled.matcher()
        tokens = [byte + 1 for byte in text.encode()]
        found.append(matcher.advance(tokens) == len(tokens) and EOS in mask(matcher))
    return found


def texts_for(rng: random.Random, pattern: str) -> list[str]:
    """Short texts, most of letters that the pattern may be about."""
    near = [char for char in pattern if char in LETTERS] or ["a"]
    pools = (near, near, LETTERS)
    return [
        "",
        *("".join(rng.choices(rng.choice(pools), k=rng.randint(1, 4))) for _ in range(30)),
        *LETTERS,
    ]


def compared(seed: int, *, json_pattern: bool) -> bool:
    """Compare the backends with each other and with Python on one pattern; False: Python does not read it."""
    rng = random.Random(seed)
    pattern, python = written(rng, json=json_pattern)
    if json_pattern and rng.random() < 0.7:
        pattern, python = f"^(?:{pattern})$", rf"\A(?:{python})\Z"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may be an operator in a later Python
            known = re.compile(python, re.ASCII)
    except re.error:
        return False
    texts = texts_for(rng, pattern)
    expected = [
        bool(known.search(text) if json_pattern else known.fullmatch(text)) for text in texts
    ]
    schema: dict[str, Any] = {"type": "string", "pattern": pattern}
    grammar = Grammar.json_schema(schema) if json_pattern else Grammar.regex(pattern)
    outputs = (
        [json.dumps(text, ensure_ascii=False) for text in texts] if json_pattern else texts
    )
    for name in BACKENDS[: 1 if json_pattern else 2]:  # the automata know no `pattern`
        try:
            taken = accepts(name, grammar, outputs)
        except UserError as error:
            assert not any(expected), f"{name} refuses {pattern!r}: {error}"
            continue
        wrong = [
            text
            for text, said, right in zip(texts, taken, expected, strict=True)
            if said != right
        ]
        assert not wrong, (
            f"{name}, pattern {pattern!r}: {wrong[0]!r} is {'not ' * (wrong[0] in texts)}as in re"
        )
    return True


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("json_pattern", [True, False], ids=["schema", "regex"])
def test_generated_patterns_mean_what_pythons_do(json_pattern: bool, block: int) -> None:
    read = sum(compared(25 * block + seed, json_pattern=json_pattern) for seed in range(25))
    assert read > 12, "most of the patterns should be ones that Python reads"


SCHEMAS = [  # a pattern, values that it allows, and values that it does not
    ("^[a-z&&[^b]]$", ["b]", "&]"], ["a", "b"]),
    ("^[[:alpha:]]$", ["a]", "[]", ":]"], ["a", "b]"]),
    ("^[a-z--b]$", ["-", "a", "5", "_"], ["!"]),
    (r"^[\d~~1]$", ["~", "1", "2"], ["a"]),
    (r"^\s$", ["\ufeff", "\xa0", "\u2028", "\u3000"], ["\x85", "\u180e", "x"]),
    (r"^\S$", ["\x85", "x"], ["\ufeff", " "]),
    ("^.$", ["\x85", "x"], ["\n", "\r", "\u2028", "\u2029"]),
    (r"^\d\w$", ["1a"], ["٧a", "1é"]),
    ("^[^]$", ["\n", "x"], [""]),
    (r"^[\w-.]$", ["-", ".", "a"], ["x."]),
    (r"^\ud83d\ude00$", ["\U0001f600"], ["x"]),
    ("^(?<stop>b)c$", ["bc"], ["b"]),
    (r"^\p{L}[^\p{L}]$", ["é1"], ["1é"]),
    ("^(?i:ab).$", ["ABx"], ["AB\n"]),
    ("^(?s:.)$", ["\n"], [""]),
    ("(^a|b)c", ["ac", "xbc"], ["xac"]),
]


@pytest.mark.parametrize(("pattern", "allowed", "others"), SCHEMAS)
def test_a_pattern_of_a_schema_is_ecmascripts(
    pattern: str, allowed: list[str], others: list[str]
) -> None:
    outputs = [json.dumps(text, ensure_ascii=False) for text in (*allowed, *others)]
    expected = [True] * len(allowed) + [False] * len(others)
    schema = {"type": "string", "pattern": pattern}
    again = {"type": "string", "pattern": rewrite_pattern(rewrite_pattern(pattern, "#"), "#")}
    keys = {
        "type": "object",
        "patternProperties": {pattern: {"const": 1}},
        "additionalProperties": False,
    }
    inside = Grammar.lark(f"start: %json {json.dumps(schema)}")
    for grammar in (Grammar.json_schema(schema), Grammar.json_schema(again), inside):
        assert accepts("llguidance", grammar, outputs) == expected
    members = [f"{{{output}: 1}}" for output in outputs]
    assert accepts("llguidance", Grammar.json_schema(keys), members) == expected


REGEXES = [
    (r"\d{2}", ["12"], ["٧٧"]),
    (r"\w\s", ["a ", "_\t"], ["é ", "a\xa0"]),
    (".", ["\r", "\u2028", "x"], ["\n"]),
    ("[a-z&&[^b]]", ["b]", "&]"], ["a"]),
    ("[[:alpha:]]", [":]"], ["b"]),
    (r"\/[/]", ["//"], ["/"]),
    ("(?i:k)", ["k", "K"], ["x"]),
]


@pytest.mark.parametrize(("pattern", "allowed", "others"), REGEXES)
def test_a_regex_is_pythons_of_ascii_and_so_is_a_larks(
    pattern: str, allowed: list[str], others: list[str]
) -> None:
    expected = [True] * len(allowed) + [False] * len(others)
    escaped = re.sub(r"(?<!\\)/", r"\\/", pattern)
    grammars = [Grammar.regex(pattern), Grammar.lark(f"start: /{escaped}/")]
    grammars.append(Grammar.lark(f'start: A // /x/ "\nA: "" /{escaped}/ # /y/ \n'))
    for grammar in grammars:
        assert accepts("llguidance", grammar, [*allowed, *others]) == expected
    if "(?" not in pattern:
        assert accepts("automata", Grammar.regex(pattern), [*allowed, *others]) == expected


def test_flags_behind_a_larks_regex() -> None:
    assert accepts("llguidance", Grammar.lark("start: /a.b/is"), ["A\nB", "a.b", "ab"]) == [
        True,
        True,
        False,
    ]
    gbnf = Grammar.lark("root ::= [a-z&] [^0-9-]+")
    assert accepts("llguidance", gbnf, ["&é\n", "b-", "a"]) == [True, False, False]


REFUSED = [
    r"\bx",
    r"(a)\1",
    r"\cJ",
    r"\u{110000}",
    r"\ud800",
    r"\01",
    r"[\B]",
    "\\",
    "(?=a)",
    "(?x:a)",
    "(?#x)",
]
REFUSED += ["a**", "a++", "a{,3}", "a{2}{3}", "*a", "^*", "(|*)", "[b-a]", "[a", "(a", "a)"]


@pytest.mark.parametrize("pattern", REFUSED)
@pytest.mark.parametrize("kind", ["regex", "schema", "lark"])
def test_what_no_grammar_follows_is_refused(pattern: str, kind: str) -> None:
    schema = Grammar.json_schema({"type": "string", "pattern": pattern})
    lark = Grammar.lark("start: /" + pattern + ("" if pattern.endswith("\\") else "/"))
    grammar = {"regex": Grammar.regex(pattern), "schema": schema, "lark": lark}[kind]
    for name in BACKENDS[: 1 if kind == "lark" else 2]:
        with pytest.raises(UserError, match="refused"):
            backend(name).compile(grammar)
