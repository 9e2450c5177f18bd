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
    conftest: whether its own conftest files are read.
    reasons: (part of a case's name, message or traceback, why it need not pass); the first that fits counts.
    """

    name: str
    folder: str
    groups: Sequence[Files]
    env: Mapping[str, str] = field(default_factory=dict)
    plugin: str = ""
    conftest: bool = True
    reasons: Sequence[tuple[str, str]] = ()


ROUTE = "asks for a route that only that server has"
FIELD = "asks for a field, or a value of one, that only that server has"
MODEL = "expects what one model says, its tokens, its context or its template"
CODE = "tests their own code, of which only names are here"
FLAGS = "expects the server to be started with flags of theirs"
WORDS = "expects their words for an error that ours words otherwise"
NAME = "asks for a model by another name than it is served by"
ROOM = "expects more tokens than the context holds to be refused; ours end where it is full"

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

VLLM = Suite(
    "vllm",
    ".",
    (
        Files(
            (
                "tests/entrypoints/openai/completion/test_completion.py",
                "tests/entrypoints/openai/models/test_models.py",
                "tests/entrypoints/openai/test_chunked_prompt.py",
                "tests/entrypoints/openai/test_return_tokens_as_ids.py",
            ),
            "Qwen/Qwen3-0.6B",
        ),
        Files(
            (
                "tests/entrypoints/openai/chat_completion/test_chat_completion.py",
                "tests/entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
                "tests/entrypoints/openai/test_return_token_ids.py",
            ),
            "Qwen/Qwen2.5-1.5B-Instruct",
        ),
        Files(("tests/entrypoints/openai/chat_completion/test_chat.py",), "HuggingFaceH4/zephyr-7b-beta"),
        Files(("tests/entrypoints/openai/chat_completion/test_chat_echo.py",), "Qwen/Qwen2-1.5B-Instruct"),
        Files(
            ("tests/entrypoints/serve/tokenize/test_tokenization.py",), "HuggingFaceTB/SmolLM2-135M-Instruct"
        ),
    ),
    {"LADDER_URL": "{url}", "LADDER_TOKENIZER": "{folder}"},
    plugin="stand_in",
    conftest=False,
    reasons=(
        ("MagicMock", CODE),
        ("Cannot spec a Mock", CODE),
        ("isinstance() arg 2 must be a type", CODE),
        ("failed on setup", CODE),
        ("beam search", FIELD),
        ("truncation_side", FIELD),
        ("logprob_token_ids", FIELD),
        ("per_request_metrics", FIELD),
        ("prompt_token_ids", FIELD),
        ("no attribute 'prompt_logprobs'", FIELD),
        ("test_comparison_with_prompt_logprobs", FIELD),
        ("multiple_non_integer_keys", WORDS),
        ("test_echo_logprob_completion", "expects special tokens of the prompt to be written out"),
        ("test_tokenizer_info", ROUTE),
        ("test_tokenize_", FLAGS),
        ("tools cannot be had from this model", MODEL),
        ("must have at most 2047", MODEL),
        ("assert 'stop' == 'length'", MODEL),
        ("unique completions", MODEL),
        ("CompletionUsage(", MODEL),
    ),
)

SGLANG = Suite(
    "sglang",
    ".",
    (
        Files(
            (
                "test/manual/openai_server/features/test_continuous_usage_stats.py",
                "test/registered/openai_server/basic/test_openai_server.py",
                "test/registered/openai_server/features/test_json_mode.py",
                "test/registered/openai_server/features/test_openai_server_ebnf.py",
                "test/registered/openai_server/validation/test_large_max_new_tokens.py",
                "test/registered/openai_server/validation/test_openai_server_ignore_eos.py",
            ),
            "default",
        ),
        Files(
            ("test/registered/openai_server/validation/test_request_length_validation.py",),
            "default",
            ("--max-len", "1000"),
        ),
    ),
    {"LADDER_URL": "{url}", "LADDER_TOKENIZER": "{folder}"},
    plugin="stand_in",
    conftest=False,
    reasons=(
        ("Event loop is closed", "its client outlives the event loop that it was made in"),
        ("MagicMock", CODE),
        ("test_large_max_new_tokens", CODE),
        ("v1Responses", ROUTE),
        ("V1Rerank", ROUTE),
        ("V1Score", ROUTE),
        ("reasoning_content", FIELD),
        ("attribute 'root'", FIELD),
        ("test_regex", FIELD),
        ("test_ebnf", FIELD),
        ("token_ids_logprob", FIELD),
        ("test_max_tokens_validation", ROOM),
        ("longer than the model's context length", WORDS),
        ("meta-llama/Llama-3.1-8B-Instruct", NAME),
        ("Timeout", "asks for more tokens than two busy cores say in the time for one case"),
    ),
)

SUITES = {suite.name: suite for suite in (LLAMA, OPENAI, VLLM, SGLANG)}
