"""Grammars on the command line: flags, files, and the trace."""

from __future__ import annotations

from pathlib import Path

import pytest

import forward
import structured
from common.errors import UserError
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from phases import find_phase
from phases.commands.grammars import check_grammar, chosen_grammar, show_trace
from tests.structured_kit import tokenizer

SCHEMA = '{"type": "boolean"}'


def test_each_flag_makes_its_grammar(tmp_path: Path) -> None:
    schema, rules = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text("\ufeff" + SCHEMA, encoding="utf-8")
    rules.write_text('start: "a"', encoding="utf-8")
    assert chosen_grammar(None, None, None, None) is None
    assert chosen_grammar(schema, None, None, None) == Grammar.json_schema(SCHEMA)
    assert chosen_grammar(None, "a+", None, None) == Grammar.regex("a+")
    assert chosen_grammar(None, None, "yes,no", None) == Grammar.choice(["yes", "no"])
    assert chosen_grammar(None, None, None, rules) == Grammar.lark('start: "a"')


def test_wrong_flags(tmp_path: Path) -> None:
    missing, binary, empty = tmp_path / "none.json", tmp_path / "b.json", tmp_path / "e.json"
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_text("")
    with pytest.raises(UserError, match="--regex and --choice are both given"):
        chosen_grammar(None, "a", "b", None)
    with pytest.raises(UserError, match=r"--json-schema .*none.json cannot be read: No such file"):
        chosen_grammar(missing, None, None, None)
    with pytest.raises(UserError, match="is not UTF-8 text"):
        chosen_grammar(binary, None, None, None)
    with pytest.raises(UserError, match="is empty"):
        chosen_grammar(empty, None, None, None)
    with pytest.raises(UserError, match="holds ''"):
        chosen_grammar(None, None, "a,,b", None)


def test_phases_before_have_none() -> None:
    phase = find_phase("09")
    assert phase is not None
    bound = SamplingParams(grammar=Grammar.regex("a"))
    with pytest.raises(UserError, match="a grammar is for phases from 12 on, but the phase is 09"):
        check_grammar(phase, bound, False, 1)
    this = find_phase("12")
    assert this is not None
    with pytest.raises(UserError, match="--trace shows a grammar's masks"):
        check_grammar(this, SamplingParams(), True, 1)
    with pytest.raises(UserError, match="shows one prompt, but there are 2"):
        check_grammar(this, bound, True, 2)
    check_grammar(this, bound, True, 1)


@pytest.mark.parametrize(("most", "ends"), [(9, "the grammar is satisfied"), (2, "may be incomplete")])
def test_the_trace_counts_what_was_allowed(most: int, ends: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = forward.load_model("random:tiny", device="cpu", dtype="float32")
    engine = structured.load(model, tokenizer=tokenizer(), max_rows=2, max_len=64)
    code = show_trace(
        engine, tokenizer(), [5, 6], SamplingParams(max_tokens=most, grammar=Grammar.regex("[ac]dez"))
    )
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert code == 0 and ends in shown.err
    assert lines[0].startswith("step") and lines[1].split()[:2] == ["1", "2"], lines
    assert lines[2].split()[:3] == ["2", "1", "'d'"], lines
    assert len(lines) == 1 + (5 if most == 9 else 2)
