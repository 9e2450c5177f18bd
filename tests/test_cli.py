"""The `ladder` command: what it prints, and that wrong input is one line and exit code 2."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from benchmarks.evidence import Metric, Run, collect
from common.events import Completion, TokenEvent
from continuous.stats import Stats
from phases import PHASES, ROOT, find_phase
from phases.commands import demo, doctor
from phases.commands.demo import ELSEWHERE, SHOWS
from phases.commands.plain import version

WRONG = {
    "no such phase": (["run", "99"], "phase is '99'"),
    "no phase": (["run"], "PHASE"),
    "no such command": (["walk"], "walk"),
    "temperature below 0": (["run", "1", "--temperature", "-1"], "temperature is -1"),
    "no such file": (
        ["run", "1", "--prompts-file", "/nothing/here"],
        "/nothing/here cannot be read",
    ),
    "two kinds of prompts": (
        ["run", "1", "--prompts-file", "x", "--prompt", "x"],
        "are both given",
    ),
    "a trace as JSON": (
        ["run", "12", "--regex", "x", "--trace", "--json"],
        "--trace and --json are both given",
    ),
    "a trace with counts": (
        ["run", "12", "--regex", "x", "--trace", "--stats"],
        "--trace and --stats are both given",
    ),
    "unknown device": (["run", "1", "--device", "tpu"], "device is 'tpu'"),
    "unknown model": (["run", "1", "--model", "no/such/model"], "model is 'no/such/model'"),
    "model without tokenizer": (
        ["run", "1", "--model", "random:tiny"],
        "needs a model with a tokenizer",
    ),
    "nearly a model": (["run", "1", "--model", "smolm2"], "did you mean 'smollm2'?"),
    "a model of another spelling": (["fetch", "Gemma-3-270M"], "did you mean 'gemma3-270m'?"),
    "nothing to fetch": (
        ["fetch", "random:tiny"],
        "model is 'random:tiny', of random weights, which are in no folder",
    ),
    "a word that is no model": (
        ["run", "1", "--model", "nope"],
        "'nope', which is none of smollm2, gemma3-270m, ",
    ),
    "the beginning of a model": (["serve", "gemma"], "did you mean 'gemma3-270m'?"),
    "a switch of a later phase": (
        ["run", "2", "--no-prefix-cache"],
        "--no-prefix-cache is for phases from 08 on",
    ),
    "a switch of a phase far above": (
        ["run", "5", "--no-guidance"],
        "--no-guidance is for phases from 12 on",
    ),
    "a phase that serves one batch": (
        ["serve", "--phase", "2"],
        "phases are served from 04 on, but the phase is 02_kv_cache",
    ),
    "a prompt without its option": (
        ["run", "2", "Why is the sky blue?"],
        "(Why is the sky blue?): a prompt is given with --prompt",
    ),
    "a file of weights": (
        ["run", "2", "--model", __file__],
        "which is a file, but must be a folder with config.json",
    ),
    "nearly a phase": (["run", "paged-cach"], "did you mean 'paged_cache'?"),
    "no server": (
        ["load", "http://127.0.0.1:9"],
        "no server answers at http://127.0.0.1:9 (Connection",
    ),
    "no defaults": (
        ["serve", "random:tiny", "--generation-config", "mine"],
        "generation_config is 'mine'",
    ),
    "no log": (["serve", "random:tiny", "--access-log", "/nothing/here"], "cannot be written"),
    "no origin": (
        ["serve", "random:tiny", "--allowed-origins", "a.org"],
        "--allowed-origins has 'a.org'",
    ),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_one_line_and_exit_code_2(cli, arguments, words):
    code, out, err = cli(*arguments)
    assert code == 2
    assert out == ""
    before = ("float32, 1 sample of", "Starting random:tiny")
    (line,) = [line for line in err.splitlines() if not any(words in line for words in before)]
    assert line.startswith("error: ")
    assert words in line


EARLY = (
    "--help",
    "--version",
    "list",
    "walk",
    "run 99",
    "run 1 --temperature -1",
    "run 1 --model smolm2",
    "run 9 --help",
    "serve --port 99999",
    "profile 4 --dtype int4",
    "load http://127.0.0.1:9",
    "serve --generation-config mine",
)
"""Commands that say what they say before PyTorch is imported, which takes seconds."""
IMPORTED = """
import sys
from phases.cli import main
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
    except SystemExit:
        print("torch" in sys.modules, line)
"""


def test_lists_help_and_errors_do_not_load_torch(tmp_path):
    def imported(*lines: str) -> list[str]:
        environment = {**os.environ, "LADDER_HOME": str(tmp_path)}
        call, given = [sys.executable, "-c", IMPORTED], "\n".join(lines)
        done = subprocess.run(
            call,
            input=given,
            env=environment,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        return [
            line for line in done.stdout.splitlines() if line.startswith(("True ", "False "))
        ]

    assert imported(*EARLY) == [f"False {line}" for line in EARLY]


STARTS_ANOTHER = """
import multiprocessing
import phases.cli
from phases.__main__ import main

def start():
    child = multiprocessing.get_context("spawn").Process(target=print, args=("started",))
    child.start()
    child.join()

if __name__ == "__main__":
    phases.cli.main = start
    main()
"""


def test_processes_of_a_command_import_nothing_from_its_folder(tmp_path):
    """A learner's folder has files such as `random.py` and `select.py`, and may be a stranger's."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "select.py").write_text("raise SystemExit('this is not the library')")
    (tmp_path / "program.py").write_text(STARTS_ANOTHER)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.stdout == "started\n", done.stderr


def test_version(cli):
    code, out, _ = cli("--version")
    assert code == 0
    installed = metadata.version(
        "torch"
    )  # a registry's file may not name its build, such as +cu130
    assert (
        out == f"ladder {version()}, torch {installed}, Python {platform.python_version()}\n"
    )
    assert torch.__version__.partition("+")[0] == installed.partition("+")[0]


def test_help(cli):
    code, out, _ = cli("--help")
    assert code == 0
    assert all(
        name in out
        for name in ("list", "doctor", "fetch", "run", "bench", "profile", "plot", "demo")
    )
    assert cli()[0] == 0


@pytest.mark.parametrize(
    "text", ["1", "01", "forward", "01_forward", "01-forward", " Forward "]
)
def test_names_of_a_phase(text):
    assert find_phase(text).name == "01_forward"


def test_list(cli, monkeypatch):
    metrics = {"output_tokens_per_s": Metric((10.0,))}
    before = Run("01_forward", "w", "h", "m", "real", "float32", metrics)
    after = Run(
        "02_kv_cache",
        "w",
        "h",
        "m",
        "real",
        "float32",
        {"output_tokens_per_s": Metric((73.0,))},
    )
    evidence = collect("02_kv_cache", [before, after], torch.device("cpu"))
    monkeypatch.setattr(
        "benchmarks.evidence.results", lambda: {"cpu": {"02_kv_cache": evidence}}
    )
    monkeypatch.setattr("phases.commands.plain.out.width", 80)
    code, out, _ = cli("list")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(
        lines[lines.index(phase.name) + 1].strip() for phase in PHASES if phase.number != 2
    )
    assert "02_kv_cache  output tokens per second: 7.3× on cpu" in lines
    code, out, _ = cli("list", "--names")
    assert out.split() == [phase.name for phase in PHASES]


def test_doctor(cli, monkeypatch):
    """With probes that take no time: the real ones take two seconds."""
    monkeypatch.setattr(doctor, "probe_read", lambda device: 28.26e9)
    monkeypatch.setattr(doctor, "probe_matmul", lambda device, dtype: 1234.4e9)
    monkeypatch.setattr("phases.commands.doctor.out.width", 160)
    code, out, _ = cli("doctor")
    assert code == 0
    names = (
        "Python",
        "PyTorch",
        torch.__version__,
        "Triton",
        "Device",
        "dtype",
        "smollm2",
        "Phases",
    )
    assert "Decode steps in C++" in out
    for words in (*names, "28.3 GB/s, measured now", "1,234 GFLOP/s in "):
        assert words in out


def test_a_phase_that_is_not_native_here_says_so(cli, monkeypatch, smollm2_folder):
    silent = SimpleNamespace(
        stream=lambda prompts, params: iter([TokenEvent(0, 0, "stop", 0.0)]),
        runner=SimpleNamespace(model=torch.nn.Identity()),
        stats=Stats(),
        cache=SimpleNamespace(block_size=16, allocator=SimpleNamespace(count=4)),
    )
    monkeypatch.setattr("phases.registry.load_checked", lambda *_, **__: silent)
    _, _, err = cli("run", "6", "--device", "cpu")
    assert "06_triton_paged_attention needs a CUDA device to be fast" in err
    _, _, err = cli("run", "5", "--device", "cpu")
    assert "to be fast" not in err


@pytest.mark.parametrize("phase", ["4", "5"])
def test_a_cache_without_room_is_named_as_it_was_given(cli, smollm2_folder, phase):
    code, _, err = cli("run", phase, "--device", "cpu", "--cache-bytes", "100")
    assert code == 2
    assert err.startswith("error: cache_bytes is 100, but one ")


@pytest.mark.parametrize(
    ("phase", "option", "first"),
    [("2", "--max-rows", "04"), ("3", "--cache-bytes", "04"), ("4", "--block-size", "05")],
)
def test_an_option_of_a_later_phase(cli, phase, option, first):
    code, _, err = cli("run", phase, option, "4")
    assert code == 2
    assert f"{option} is for phases from {first} on" in err


def test_a_missing_triton_is_named(cli, monkeypatch, smollm2_folder):
    monkeypatch.setitem(sys.modules, "triton", None)
    code, _, err = cli("run", "6", "--device", "cpu")
    assert code == 2
    assert (
        err.splitlines()[-1]
        == "error: kernels need triton, which is not installed: see `ladder doctor`"
    )


def run_json(cli, *arguments: str) -> dict[str, object]:
    code, out, _ = cli("run", "--no-chat", *arguments, "--json", "--device", "cpu")
    assert code == 0
    return json.loads(out)


def test_run_json_has_exactly_the_agreed_fields(cli, smollm2_folder):
    found = run_json(cli, "2", "--prompt", "The capital of France is", "--max-tokens", "4")
    fields = (
        "phase model completions prompt_tokens completion_tokens seconds tokens_per_second"
    )
    assert set(found) == {*fields.split(), "time_to_first_token"}
    (completion,) = found["completions"]
    assert set(completion) == {"prompt", "text", "token_ids", "finish_reason"}
    assert (found["phase"], found["model"]) == ("02_kv_cache", "smollm2")
    assert (
        completion["text"].strip().startswith("Paris")
        and completion["finish_reason"] == "length"
    )
    assert (
        (found["prompt_tokens"], found["completion_tokens"])
        == (5, len(completion["token_ids"]))
        == (5, 4)
    )
    assert found["tokens_per_second"] == pytest.approx(4 / found["seconds"])
    assert 0 < found["time_to_first_token"] < found["seconds"]


def test_run_chat_ends_with_its_end_token_and_without_its_text(cli, smollm2_folder):
    found = run_json(cli, "2", "--chat", "--prompt", demo.QUESTION, "--max-tokens", "24")
    (completion,) = found["completions"]
    assert completion["text"] == "The capital of France is Paris."
    assert completion["finish_reason"] == "stop"


def test_each_prompt_is_a_request(cli, smollm2_folder):
    arguments = [
        "3",
        "--prompt",
        "1, 2, 3,",
        "--prompt",
        "The capital of France is",
        "--max-tokens",
        "2",
    ]
    found = run_json(cli, *arguments)
    assert [one["prompt"] for one in found["completions"]] == [
        "1, 2, 3,",
        "The capital of France is",
    ]
    assert [len(one["token_ids"]) for one in found["completions"]] == [2, 2]
    _, out, _ = cli("run", "--no-chat", *arguments, "--device", "cpu")
    assert "[1/2] 1, 2, 3,\n" in out and "[2/2] The capital of France is\n" in out
    texts = re.split(r"\[[12]/2\] .*\n", out)[1:]
    for one, shown in zip(found["completions"], texts, strict=True):
        assert one["text"].strip() in shown, (
            "completions are not shown in the order of their prompts"
        )


def test_run_with_a_prompt_that_is_too_long(cli, tmp_path, smollm2_folder):
    path = tmp_path / "long.txt"
    path.write_text("word " * 9000, encoding="utf-8")
    code, out, err = cli("run", "2", "--prompts-file", str(path), "--device", "cpu")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "tokens, but must have at most" in err


def test_an_instruct_model_chats_and_the_question_and_the_work_are_shown(cli, smollm2_folder):
    code, out, err = cli("run", "8", "--device", "cpu")
    assert code == 0
    assert out == "The capital of France is Paris.\n"
    question, _, work, *_ = err.splitlines()
    assert question == "What is the capital of France?"
    assert work == (
        "08_prefix_cache: 44 tokens computed in 8 steps, 0 of 37 found in the prefix cache"
    )
    _, out, err = cli("run", "8", "--no-chat", "--max-tokens", "1", "--device", "cpu")
    assert out == " Paris\n" and err.startswith("The capital of France is\n")


def test_help_has_ten_options_and_help_all_those_of_the_phase(cli):
    def options(*arguments: str) -> set[str]:
        return set(re.findall(r"(?m)^│ (--[\w-]+)", cli(*arguments)[1]))

    for command in ("run", "serve"):
        assert len(options(command, "--help")) == 11
        assert "--block-size" in options(command, "--help-all")
    assert "--help-all" in cli("run", "--help")[1]
    of_four = options("run", "04", "--help-all")
    assert "--max-rows" in of_four and "--block-size" not in of_four


def test_a_terminal_sees_at_once_what_is_loaded(cli, monkeypatch):
    monkeypatch.setattr("common.console.err._force_terminal", True)
    monkeypatch.setattr("phases.commands.run.run", lambda given: 0)
    assert cli("run", "8")[2].strip() == "Loading smollm2 for phase 8 ..."


def test_names_and_texts_of_others_are_no_markup(cli, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "[" / "x]:key:"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("common.console.err._force_terminal", True)
    monkeypatch.setattr("phases.commands.run.run", lambda given: 0)
    code, _, err = cli("run", "8", "--model", str(folder))
    assert code == 0 and "[/x]:key:" in "".join(err.split())
    said = Completion(0, 0, [1], 0.0, text="no [/INST] :key:")
    demo._summary(demo.table("Phase"), {1: [said]}, torch.device("cpu"))
    assert "no [/INST] :key:" in capsys.readouterr().out


@pytest.mark.slow
def test_demo_answers_and_ends_with_a_table(cli, monkeypatch, smollm2_folder):
    monkeypatch.setattr(demo, "OTHERS", demo.OTHERS[:1])
    monkeypatch.setattr(demo, "SHOWS", {number: SHOWS[number] for number in (7, 8)})
    monkeypatch.setattr("phases.commands.demo.out.width", 120)
    code, out, _ = cli("demo", "--device", "cpu")
    assert code == 0
    assert "The capital of France is Paris." in out
    table = out[out.rindex("tokens/s") :]
    assert "07_chunked_prefill" in table and "08_prefix_cache" in table
    assert "tokens computed: " in table and "fewer)" in table
    assert all(command in " ".join(out.split()) for command in ELSEWHERE.values())
    assert "Every phase gave the same answers" in table
