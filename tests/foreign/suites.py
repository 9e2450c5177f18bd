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
    plugin: for pytest, in this folder: what is changed before its tests are run.
    reasons: (part of a case's name, message or traceback, why it need not pass); the first that fits counts.
    """

    name: str
    folder: str
    groups: Sequence[Files]
    env: Mapping[str, str] = field(default_factory=dict)
    plugin: str = ""
    reasons: Sequence[tuple[str, str]] = ()


ROUTE = "asks for a route that only that server has"
FIELD = "asks for a field, or a value of one, that only that server has"
MODEL = "expects what one model says, its tokens, its context or its template"
FLAGS = "expects the server to be started with flags of theirs"

LLAMA = Suite(
    "llama.cpp",
    "tools/server/tests",
    (
        Files(
            ("unit/test_chat_completion.py", "unit/test_completion.py", "unit/test_tokenize.py"),
            "tinyllama-2",
        ),
        Files(("unit/test_basic.py", "unit/test_ignore_eos.py"), "tinyllama-2"),
        Files(("unit/test_security.py",), "tinyllama-2", ("--api-key", "sk-this-is-the-secret-key")),
    ),
    {"DEBUG_EXTERNAL": "1", "PORT": "{port}", "LADDER_MODEL": "tinyllama-2"},
    plugin="any_name",
    reasons=(
        ("stream_with_openai_library", MODEL),
        ("with_openai_library", FIELD),
        ("system_fingerprint", FIELD),
        ("test_chat_completion_cached_tokens", MODEL),
        (
            "assert '' is None",
            "expects the first chunk's content to be null; OpenAI's is empty, and so is ours",
        ),
        ("__verbose", FIELD),
        ("mutual_exclusion", FIELD),
        ("test_apply_chat_template", ROUTE),
        ("test_completion_with_json_schema", FIELD),
        ("test_completion_with_grammar", FIELD),
        ("test_completion_with_invalid_grammar", FIELD),
        ("messages7", "expects two answers in a row to be refused; ours leaves that to the model's template"),
        ("test_chat_completion::test_logit_bias", FIELD),
        ("context_size_exceeded", FLAGS),
        ("return_progress", FIELD),
        ("token_count", ROUTE),
        ("test_tokenize::", FIELD),
        ("test_completion::", ROUTE),
        ("test_ignore_eos", ROUTE),
        ("multiple_addresses", FLAGS),
        ("no_ui", FLAGS),
        ("test_basic::", ROUTE),
        (
            "static_assets",
            "expects the page to need no key; with a key ours needs it everywhere but for health",
        ),
        ("cors", "expects pages from elsewhere to be let in; ours lets in none"),
        ("local_media", "asks about pictures"),
        ("test_correct_api_key", FIELD),
    ),
)

OPENAI = Suite(
    "openai",
    ".",
    (
        # Most do not say how many tokens they want, and get as many as there is room for.
        Files(("tests/api_resources/chat/test_completions.py",), "gpt-5.4", ("--max-len", "128")),
        Files(("tests/api_resources/test_completions.py",), "gpt-3.5-turbo-instruct", ("--max-len", "128")),
        Files(("tests/api_resources/test_models.py",), "gpt-4o-mini"),
    ),
    {"TEST_API_BASE_URL": "{url}/v1", "PYTHONPATH": "src"},
    reasons=(
        ("/v1/chat/completions/completion_id", "asks for a stored completion, and ours stores none"),
        ("/v1/chat/completions takes POST", "asks for stored completions, and ours stores none"),
        ("use tools", "sets `functions`, which the API has replaced by `tools`"),
        ("suffix is not supported", "sets `suffix`, for models that fill in the middle"),
        ("takes GET, not DELETE", "deletes a model"),
    ),
)

SUITES = {suite.name: suite for suite in (LLAMA, OPENAI)}
