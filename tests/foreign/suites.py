"""Which files of which suites are run, with what server, and why cases fail that need not pass.

Chosen are files that ask over HTTP and do not depend on what one model says. A case may still ask for another
server's own routes or fields; it is run all the same, and stands in the list with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Files:
    """Test files that one server can serve.

    flags: of `ladder serve`, besides those of all.
    """

    paths: Sequence[str]
    model: str
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class Suite:
    """One project's tests.

    folder: where in its checkout pytest is started.
    env: variables; `{port}` and `{url}` are filled in.
    reasons: (part of a case's name, message or traceback, why it need not pass); the first that fits counts.
    """

    name: str
    folder: str
    groups: Sequence[Files]
    env: Mapping[str, str] = field(default_factory=dict)
    reasons: Sequence[tuple[str, str]] = ()


OPENAI = Suite(
    "openai",
    ".",
    (
        # Most do not say how many tokens they want, and get as many as there is room for.
        Files(
            ("tests/api_resources/chat/test_completions.py",), "gpt-5.4", ("--max-len", "128")
        ),
        Files(
            ("tests/api_resources/test_completions.py",),
            "gpt-3.5-turbo-instruct",
            ("--max-len", "128"),
        ),
        Files(("tests/api_resources/test_models.py",), "gpt-4o-mini"),
    ),
    {"TEST_API_BASE_URL": "{url}/v1", "PYTHONPATH": "src"},
    reasons=(
        (
            "/v1/chat/completions/completion_id",
            "asks for a stored completion, and ours stores none",
        ),
        (
            "/v1/chat/completions takes POST",
            "asks for stored completions, and ours stores none",
        ),
        ("use tools", "sets `functions`, which the API has replaced by `tools`"),
        ("suffix is not supported", "sets `suffix`, for models that fill in the middle"),
        ("takes GET, not DELETE", "deletes a model"),
    ),
)

SUITES = {suite.name: suite for suite in (OPENAI,)}
