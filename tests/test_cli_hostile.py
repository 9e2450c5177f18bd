"""The `ladder` command where things go wrong: streams, signals, folders, numbers and files that nobody expects."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import continuous
from benchmarks import roofline
from benchmarks.roofline import Ceilings, ceilings
from common.console import StandardError, Terminal
from common.device import pick_device
from common.errors import UserError
from common.files import check_folder, whole
from common.models.gguf_import import import_gguf
from common.sampling.params import SamplingParams
from phases import PHASES, ROOT, find_phase
from phases.cli import main
from phases.commands import benches, doctor, engines, listing
from phases.commands.engines import read_prompts
from phases.process import LONGEST_LINE, exit_code
from tests.common import tiny_gguf

LONG = "9" * 5000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_gguf.write(folder / "tiny.gguf", "llama")
    import_gguf(folder / "tiny.gguf", folder / "model")
    return folder / "model"


@pytest.fixture
def cli(capsys: Any) -> Callable[..., tuple[int, str, str]]:
    def ladder(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return ladder


@contextmanager
def stdout(stream: Any) -> Iterator[None]:
    """Standard output is `stream`."""
    before, sys.stdout = sys.stdout, stream
    try:
        yield
    finally:
        sys.stdout = before


def nobody_reads() -> Any:
    """A pipe whose reader has gone, as `| head -1` leaves it."""
    reads, writes = os.pipe()
    os.close(reads)
    return open(writes, "w", encoding="utf-8")


# Numbers and names.

WRONG = {
    "a phase of 5,000 digits": (["run", LONG], "phase is '999"),
    "a superscript": (["run", "²"], "phase is '²'"),
    "a GPU of 5,000 digits": (["run", "1", "--device", f"cuda:{LONG}"], "device is 'cuda:999"),
    "a GPU in Arabic digits": (["run", "1", "--device", "cuda:٣"], "device is 'cuda:٣'"),
    "a superscript GPU": (["run", "1", "--device", "cuda:²"], "device is 'cuda:²'"),
    "a GPU below 0": (["run", "1", "--device", "cuda:-1"], "device is 'cuda:-1'"),
    "a million rows": (["run", "5", "--max-rows", "1000000"], "max_rows is 1000000, but must be between"),
    "no tokens a step": (["run", "5", "--step-tokens", "0"], "step_tokens is 0, but must be between 1"),
    "tokens of 5,000 digits": (["run", "1", "--max-tokens", LONG], "--max-tokens"),
    "endless samples": (["bench", "1", "--repeats", str(10**18)], "--repeats is 1000000000000000000"),
    "a huge batch": (["profile", "1", "--batch", str(10**18)], "--batch is 1000000000000000000"),
    "a huge product": (["profile", "1", "--batch", "100000", "--context", "9999"], "make 1,000,700,000 tokens"),
    "no UTF-8": (["run", "1", "--prompt", "a\udcff"], r"--prompt is 'a\udcff', but must have a UTF-8 form"),
    "a folder below a file": (["profile", "1", "--output", "/dev/null/x"], "--output /dev/null/x cannot be"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_told_before_anything_is_fetched(
    cli: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    for command in ("run", "profile", "demo"):
        monkeypatch.setattr(
            f"phases.commands.{command}.fetch_with_progress", lambda name: pytest.fail(f"{name} is fetched")
        )
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert len(err) < LONGEST_LINE + 50, "nobody reads such a line"


def test_numbers_beyond_int() -> None:
    assert find_phase(LONG) is None and find_phase("²") is None
    assert find_phase("0" * 5000 + "2") is PHASES[1]
    with pytest.raises(UserError, match="but PyTorch finds"):
        pick_device(f"cuda:{LONG}")


def test_more_tokens_than_there_is_room_for(cli: Any, tiny: Path) -> None:
    code, _, err = cli("run", "4", "--model", str(tiny), "--device", "cpu", "--max-tokens", "9" * 20)
    assert code == 0 and "generated" in err


# Streams.


def outcome(command: Callable[[], int]) -> int:
    return exit_code(command)


def raises(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


def test_what_a_command_raises_becomes_a_code_and_a_line(capsys: Any) -> None:
    for error, code, line in (
        (UserError("x is 3"), 2, "error: x is 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 0, ""),
        (OSError(errno.ENOSPC, "No space left"), 1, "error: the output cannot be written: No space left\n"),
        (OSError(errno.EROFS, "Read-only", "/a"), 1, "error: /a cannot be written: Read-only\n"),
        (SystemExit(143), 143, ""),
        (SystemExit(), 0, ""),
    ):
        assert exit_code(raises(error)) == code, repr(error)
        assert capsys.readouterr() == ("", line), repr(error)
    assert exit_code(lambda: 130) == 130
    assert capsys.readouterr().err == "interrupted\n"
    for defect in (ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "No such file", "/a")):
        with pytest.raises(type(defect)):
            exit_code(raises(defect))


def test_ctrl_c_inside_a_command(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "run", lambda names: os.kill(os.getpid(), signal.SIGINT) or time.sleep(9))
    code, out, err = cli("list")
    assert (code, out, err.strip()) == (130, "", "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is given back"


TEXTS = {
    "help": ["--help"],
    "names": ["list", "--names"],
    "list": ["list"],
    "doctor": ["doctor"],
    "config": ["config", "9", "--device", "cpu"],
    "run": ["run", "4", "--device", "cpu", "--max-tokens", "2"],
    "json": ["run", "4", "--device", "cpu", "--max-tokens", "2", "--json"],
}


@pytest.fixture
def text_of(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The arguments of a command that writes much, and nothing that takes long."""
    monkeypatch.setattr(doctor, "probe_read", lambda device: 1e9)
    monkeypatch.setattr(doctor, "probe_matmul", lambda device, dtype: 1e9)
    monkeypatch.setattr("phases.commands.run.fetch_with_progress", lambda name: tiny)
    return TEXTS.__getitem__


@pytest.mark.parametrize("name", TEXTS)
def test_a_reader_that_has_gone(name: str, text_of: Any, capsys: Any) -> None:
    with nobody_reads() as stream, stdout(stream), pytest.raises(SystemExit) as ended:
        main(text_of(name))
    assert not ended.value.code, "as with `| head -1`"
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize("name", TEXTS)
def test_a_full_disk_behind_the_output(name: str, text_of: Any, capsys: Any) -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream, stdout(stream):
        with pytest.raises(SystemExit) as ended:
            main(text_of(name))
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith("error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("name", TEXTS)
def test_an_output_that_knows_only_ascii(name: str, text_of: Any, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding="ascii") as stream, stdout(stream), pytest.raises(SystemExit) as ended:
        main(text_of(name))
    assert not ended.value.code
    assert path.read_bytes().isascii() and path.stat().st_size > 9


def test_lines_and_bars_are_ascii_where_the_output_is(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as stream, stdout(stream):
        screen = Terminal(width=20)
        screen.rule()
        assert screen.options.ascii_only
    assert "---" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("columns", ["0", "²", "-3", "x", LONG, "1", "20"])
@pytest.mark.parametrize("name", ["help", "list", "doctor"])
def test_screens_of_odd_widths(name: str, columns: str, text_of: Any, cli: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    exit_code(lambda: 0)  # what a new process does before it makes its consoles
    monkeypatch.setattr("common.console.out.width", Terminal().width)
    code, out, _ = cli(*text_of(name))
    assert code == 0 and len(out) > 100


def test_messages_are_lost_where_nobody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = open(os.devnull, "w", encoding="utf-8")
    closed.close()
    for stream in (None, closed, nobody_reads(), open("/dev/full", "w", encoding="utf-8", buffering=1)):
        monkeypatch.setattr(sys, "stderr", stream)
        Terminal(file=StandardError()).print("a line")
    monkeypatch.undo()


def process(*arguments: str, redirect: str = "", **environment: str) -> tuple[int, str, str]:
    """One call of a real process, through a shell."""
    line = f'"$0" -m phases {" ".join(arguments)} {redirect}'
    call = ["bash", "-o", "pipefail", "-c", line, sys.executable]
    done = subprocess.run(
        call, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("redirect", "code", "err"),
    [
        (">&-", 1, "error: the output cannot be written: Bad file descriptor\n"),
        (">/dev/full", 1, "error: the output cannot be written: No space left on device\n"),
        ("<&- 2>&-", 0, ""),
        (">&- 2>&-", 1, ""),
        (">/dev/full 2>/dev/full", 1, ""),
        ("| head -1", 0, ""),
    ],
)
def test_streams_of_a_process(redirect: str, code: int, err: str) -> None:
    found, out, said = process("list", "--names", redirect=redirect)
    assert (found, said) == (code, err), "nothing else may be said when Python shuts down"
    assert out.startswith("01_forward\n") == (code == 0)


def test_names_do_not_wait_for_torch() -> None:
    code = "import sys\nfrom phases.commands import listing\nlisting.run(True)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize(("number", "code", "says"), [("SIGINT", 130, "interrupted\n"), ("SIGTERM", 143, "")])
def test_a_signal_while_torch_is_imported(tmp_path: Path, number: str, code: int, says: str) -> None:
    """PyTorch's and numpy's own code makes an ImportError of whatever comes up meanwhile."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        f"try:\n    os.kill(os.getpid(), signal.{number})\n    time.sleep(20)\n"
        "except BaseException:\n    raise ImportError('numpy failed to import')\n"
    )
    found = process("run", "1", PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT}/phases/05_paged_cache")
    assert found == (code, "", says)


def test_sigterm_ends_children_too(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\nfrom phases.process import exit_code\n"
        "command = 'echo $$; exec sleep 60'\n"
        "sys.exit(exit_code(lambda: subprocess.run(['sh', '-c', command], check=False).returncode))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.terminate()
        assert parent.wait(20) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# Files and folders.


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "made" / "evidence.json"
    with whole(path) as scratch:
        scratch.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as on a full disk
    try:
        with pytest.raises(UserError, match=r"evidence\.json cannot be written: File too large"):
            with whole(path) as scratch:
                scratch.write_bytes(bytes(5000))
        with pytest.raises(UserError, match="cannot be written: File too large"):
            check_folder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(KeyboardInterrupt), whole(path) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and [file.name for file in path.parent.iterdir()] == [path.name]
    check_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_bench_whose_result_has_no_place_does_not_begin(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("LADDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(benches, "_measure", lambda *_: pytest.fail("it measures"))
    code, out, err = cli("bench", "1", "--quick", "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path}/home/quick/benchmarks/results/cpu cannot be written: Not a directory" in err


def test_ceilings_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("LADDER_HOME", "/dev/null/home")
    monkeypatch.setattr(roofline, "_probe", lambda device, dtype: (Ceilings(1.0, 2.0), True))
    roofline._say_once.cache_clear()
    for _ in range(2):
        assert ceilings("cpu", continuous.engine.torch.float32) == Ceilings(1.0, 2.0)
    said = capsys.readouterr().err
    assert said.count("the ceilings are measured each time: ") == 1 and said.count("\n") == 1


# Prompts.


def read(tmp_path: Path, content: bytes) -> list[str]:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    return read_prompts(None, path, "")


def test_lines_of_a_prompts_file(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfone\r\ntwo\n") == ["one", "two"]
    odd = "a\u2028b\u0085c\x0bd\x0ce\x1cf\rg"
    assert read(tmp_path, f"{odd}\n \n{odd}".encode()) == [odd, odd]


def test_prompts_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="prompts.txt is not text: it holds a NUL character"):
        read(tmp_path, b"a\0b\n")
    with pytest.raises(UserError, match="holds 10,001 prompts, but may hold 10,000"):
        read(tmp_path, b"a\n" * 10_001)
    monkeypatch.setattr(engines, "LARGEST_FILE", 100)
    with pytest.raises(UserError, match="has more than 100 bytes"):
        read(tmp_path, b"a" * 101)
    with pytest.raises(UserError, match="has more than 100 bytes"):
        read_prompts(None, Path("/dev/zero"), "")


def test_what_is_no_prompt(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = continuous.LLM(tiny, device="cpu", max_rows=2, max_len=16)
    for wrong, says in (
        ({"role": "user", "content": "Hi"}, "prompts is a message, .* put it into one"),
        ([], "prompts is empty, but must hold at least 1 prompt"),
        (None, "prompts is None, but must be a text"),
        (7, "prompts is 7, but must be a text"),
        (["a", None], "a prompt is None, but must be a text or a list of messages"),
    ):
        with pytest.raises(UserError, match=says):
            llm.generate(wrong)  # type: ignore[arg-type]
    assert llm.engine.idle
    monkeypatch.setattr(sys, "stderr", None)  # the bar goes where the other messages go
    (done,) = llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(done.token_ids) == 2
