"""The `ladder` command with streams, signals, folders, numbers and files that nobody expects."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import bench_command
from common.errors import UserError
from common.models.gguf_import import import_gguf
from cuda_graphs.overlap import OverlappedLoop
from phases import registry
from phases.cli import main
from phases.commands import doctor, engines, plain
from phases.commands.engines import read_prompts
from phases.process import LONGEST_LINE
from prefix_cache import PrefixCache
from tests.test_process import nobody_reads, stdout

LONG = "9" * 5000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a tokenizer."""
    from tests.common import tiny_gguf  # slow to import

    folder = tmp_path_factory.mktemp("tiny")
    tiny_gguf.write(folder / "tiny.gguf", "llama")
    import_gguf(folder / "tiny.gguf", folder / "model")
    return folder / "model"


# Numbers and names.

WRONG = {
    "a phase of 5,000 digits": (["run", LONG], "phase is '999"),
    "a superscript": (["run", "²"], "phase is '²'"),
    "a GPU of 5,000 digits": (["run", "1", "--device", f"cuda:{LONG}"], "device is 'cuda:999"),
    "a million rows": (["run", "5", "--max-rows", "1000000"], "max_rows is 1000000, but must be between"),
    "endless samples": (["bench", "1", "--repeats", str(10**18)], "--repeats is 1000000000000000000"),
    "a huge product": (["profile", "4", "--batch", "100000", "--context", "9999"], "make 1,000,700,000"),
    "no UTF-8": (["run", "1", "--prompt", "a\udcff"], r"--prompt is 'a\udcff', but must have a UTF-8 form"),
    "a folder below a file": (["profile", "4", "--output", "/dev/null/x"], "--output /dev/null/x cannot be"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_told_before_anything_is_fetched(
    cli: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    for module in (
        "phases.commands.run",
        "benchmarks.profile_command",
        "phases.commands.demo",
    ):
        monkeypatch.setattr(
            f"{module}.model_folder",
            lambda name: pytest.fail(f"{name} is fetched"),
        )
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert len(err) < LONGEST_LINE + 50, "nobody reads such a line"


# Streams.


def test_ctrl_c_inside_a_command(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plain,
        "list_phases",
        lambda given: os.kill(os.getpid(), signal.SIGINT) or time.sleep(9),
    )
    code, out, err = cli("list")
    assert (code, out, err.strip()) == (130, "", "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, (
        "the handler is given back"
    )


TEXTS = {
    "help": ["--help"],
    "names": ["list", "--names"],
    "doctor": ["doctor"],
    "json": ["run", "4", "--device", "cpu", "--max-tokens", "2", "--json"],
}


@pytest.fixture
def text_of(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The arguments of a command that writes much, and nothing that takes long."""
    monkeypatch.setattr("common.console.out.quiet", False)  # as it is left when a pipe breaks
    monkeypatch.setattr(doctor, "probe_read", lambda device: 1e9)
    monkeypatch.setattr(doctor, "probe_matmul", lambda device, dtype: 1e9)
    monkeypatch.setattr("phases.commands.run.model_folder", lambda name: tiny)
    return TEXTS.__getitem__


def full_disk() -> Any:
    return open("/dev/full", "w", encoding="utf-8")


FULL = "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("broken", "code", "said"), [(nobody_reads, 0, ""), (full_disk, 1, FULL)]
)
@pytest.mark.parametrize("name", TEXTS)
def test_an_output_that_nobody_can_read(
    name: str, broken: Any, code: int, said: str, text_of: Any, capsys: Any
) -> None:
    """A reader that has gone, as with `| head -1`, is no error; a disk that is full is one."""
    with broken() as stream, stdout(stream), pytest.raises(SystemExit) as ended:
        main(text_of(name))
    err = capsys.readouterr().err
    assert (
        (ended.value.code or 0) == code
        and err.endswith(said)
        and ("error" in err) == bool(said)
    )


@pytest.mark.parametrize("name", TEXTS)
def test_an_output_that_knows_only_ascii(name: str, text_of: Any, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with (
        path.open("w", encoding="ascii") as stream,
        stdout(stream),
        pytest.raises(SystemExit) as ended,
    ):
        main(text_of(name))
    assert not ended.value.code
    assert path.read_bytes().isascii() and path.stat().st_size > 1


def test_a_bench_whose_result_has_no_place_does_not_begin(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("LADDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(bench_command, "_announce", lambda *_: pytest.fail("it measures"))
    code, out, err = cli("bench", "1", "--quick", "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        f"{tmp_path}/home/quick/benchmarks/results/cpu cannot be written: Not a directory"
        in err
    )


def read(tmp_path: Path, content: bytes) -> list[str]:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    return read_prompts(None, path)


def test_lines_of_a_prompts_file(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfone\r\ntwo\n") == ["one", "two"]
    odd = "a\u2028b\u0085c\x0bd\x0ce\x1cf\rg"
    assert read(tmp_path, f"{odd}\n \n{odd}".encode()) == [odd, odd]


def test_prompts_files_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"prompts\.txt is not text: it holds a NUL character"):
        read(tmp_path, b"a\0b\n")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read(tmp_path, b"\xff\xfe\x00")
    with pytest.raises(UserError, match="holds no prompt"):
        read(tmp_path, b"\n  \n")
    with pytest.raises(UserError, match="holds 10,001 prompts, but may hold 10,000"):
        read(tmp_path, b"a\n" * 10_001)
    monkeypatch.setattr(engines, "LARGEST_FILE", 100)
    with pytest.raises(UserError, match="has more than 100 bytes"):
        read(tmp_path, b"a" * 101)
    with pytest.raises(UserError, match="has more than 100 bytes"):
        read_prompts(None, Path("/dev/zero"))


@pytest.mark.parametrize(
    "flags",
    [[], ["--no-prefix-cache"], ["--no-overlap"], ["--no-kernels"]],
    ids=lambda flags: "".join(flags) or "none",
)
def test_flags_of_the_last_engine_reach_it(
    flags: list[str], cli: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def load(*given: Any, **options: Any) -> Any:
        made.append(registry.load_folder(*given, **options))
        return made[-1]

    monkeypatch.setattr("phases.commands.run.load_folder", load)
    small = [
        "--max-rows",
        "2",
        "--max-len",
        "32",
        "--step-tokens",
        "32",
        "--cache-bytes",
        str(1 << 20),
    ]
    arguments = [
        "--model",
        str(tiny),
        "--device",
        "cpu",
        "--prompt",
        "abc",
        "--max-tokens",
        "3",
        *small,
    ]
    code, out, _ = cli("run", "09", *arguments, *flags, "--json")
    assert code == 0 and json.loads(out)["completion_tokens"] <= 3
    (engine,) = made
    assert engine.scheduler.rows.count == 2
    assert isinstance(engine.cache, PrefixCache) == ("--no-prefix-cache" not in flags)
    assert isinstance(engine.loop, OverlappedLoop) == ("--no-overlap" not in flags)


@pytest.mark.parametrize("columns", ["x", "20"])
@pytest.mark.parametrize("name", ["help", "doctor"])
def test_screens_of_odd_widths(
    name: str, columns: str, text_of: Any, cli: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("common.console.out.width", Console().width)
    code, out, _ = cli(*text_of(name))
    assert code == 0 and len(out) > 100
