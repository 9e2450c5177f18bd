"""The script that scores backends: on a tiny checkout in the layout of JSONSchemaBench."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import json_schema_suite as suite
from common.errors import UserError
from common.sampling.grammar import Grammar
from structured.automata.backend import AutomataBackend
from structured.matcher import Backend, Compiled

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "object", "properties": {"year": {}, "day": {}}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def case(schema: Any, *values: tuple[Any, bool]) -> dict[str, Any]:
    """A file of MaskBench."""
    tests = [{"description": "made up", "valid": valid, "data": value} for value, valid in values]
    return {"description": "a sample", "meta": {"features": []}, "schema": schema, "tests": tests}


@pytest.fixture()
def checkout(tmp_path: Path) -> Path:
    files = {
        "Tiny---person": case(
            PERSON,
            ({"name": "Ada"}, True),
            ({"name": "Ada", "born": {"year": 1815, "day": 10}}, True),
            ({"born": {"day": 10, "year": 1815}, "name": "Ada"}, True),
            ({"born": {}}, False),
            ({"name": 3}, False),
        ),
        "Tiny---not": case({"not": {"type": "null"}}, (1, True), (None, False)),
        "Tiny---four": case(
            {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}, (1, True), (1.5, False)
        ),
        "Tiny---six": case({"type": "integer"}, (1.0, True), (1.5, False)),
        "Tiny---day": case({"properties": {"day": {"format": "date"}}}, ({"day": "tomorrow"}, False)),
    }
    folder = tmp_path / "maskbench" / "data"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "notes.json").write_text(json.dumps({"no": "cases"}))
    return tmp_path


def test_a_checkout_is_read_and_scored(checkout: Path) -> None:
    given = suite.folder_cases(checkout)
    assert [found.name.split(":")[0] for found in given] == [
        "Tiny---day", "Tiny---four", "Tiny---not", "Tiny---person", "Tiny---six",
    ]  # fmt: skip
    found = suite.score_apart(partial(AutomataBackend, suite.byte_vocabulary()), given)
    assert (found.schemas, found.refused, found.passed, found.given_up) == (5, 2, 3, 0), found
    assert (found.wrong_accepts, found.wrong_rejects) == (0, 0), found.wrong


class Fatal(Backend):
    """Lets its process die, or hang, at one schema each."""

    def compile(self, grammar: Grammar) -> Compiled:
        schema = grammar.loaded()
        if "die" in schema:
            os._exit(3)
        while "hang" in schema:
            pass
        raise UserError("grammar is refused")


def test_a_schema_that_kills_or_hangs_is_given_up_and_the_others_are_scored() -> None:
    given = [
        suite.Case(str(number), schema, ((1, True),))
        for number, schema in enumerate([{}, {"die": 1}, {}, {"hang": 1}, {}])
    ]
    found = suite.score_apart(partial(Fatal, suite.byte_vocabulary()), given, seconds=0.5)
    assert (found.schemas, found.refused, found.given_up) == (5, 3, 2), found
    assert [line for line in found.wrong] == ["1: given up", "3: given up"]
