"""Phase 19 beside the other phases: a block that comes back is what was computed, or is refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forward
import moving_blocks
from batch_invariance import BatchInvariance
from common.events import generate
from forward.loading import load_model
from forward.model import Model
from moving_blocks.disk import BlockFiles
from moving_blocks.names import chain, namespace_of
from paged_cache import PagedEngine
from tests.compiling import spilled
from tests.phases.test_19_moving_blocks import (
    ALWAYS,
    check,
    connector_of,
    engine_of,
    files_in,
    finish,
    prompt_of,
    right,
    serve,
    settle,
)
from tests.schedules import greedy

pytestmark = pytest.mark.timeout(120)

# With every other phase.


def whole(model: Model | str, folder: Path | None = None, **options: Any) -> PagedEngine:
    """An engine of all phases up to this one, in float32, whose blocks always move."""
    return moving_blocks.load(
        model,
        **{
            "device": "cpu",
            "dtype": "float32",
            "max_len": 96,
            "max_rows": 3,
            "block_size": 4,
            "disk_folder": None if folder is None else str(folder),
            **ALWAYS,
            **options,
        },
    )


def logprobs_of(engine: PagedEngine, prompt: list[int]) -> list[float]:
    """The log-probabilities of the tokens that the engine generates."""
    params = replace(greedy(6), logprobs=0)
    engine.add(prompt, params)
    found: list[float] = []
    while not engine.idle:
        outputs = engine.step()
        found += [each.logprob.chosen for each in outputs if each.logprob is not None]
    settle(engine)
    check(engine)
    return found


def test_experts_go_with_it(tmp_path: Path) -> None:
    model = load_model("random:tiny-moe", device="cpu", dtype="float32")
    prompt = prompt_of(1, 40)
    expected = generate(forward.load(model), [prompt], greedy(4))[0].token_ids
    for life in range(2):
        engine = whole("random:tiny-moe", tmp_path / "blocks")
        (request,) = engine.add(prompt, greedy(4))
        finish(engine)
        assert request.output_ids == expected
        assert connector_of(engine).stats.read == 9 * life
    other = whole("random:tiny-moe", tmp_path / "blocks", quantization="int8")
    serve(other, prompt)
    assert connector_of(other).stats.read == 0, "other weights make other keys"


def test_a_draft_model_goes_with_it(tmp_path: Path) -> None:
    model = load_model("random:tiny", device="cpu", dtype="float32")
    prompt = [3, 4, 5, 6] * 10
    expected = generate(forward.load(model), [prompt], greedy(12))[0].token_ids
    for life in range(2):
        engine = whole(
            "random:tiny", tmp_path / "blocks", drafter="model", draft_model="random:tiny"
        )
        assert serve(engine, prompt, count=12) == [expected]
        assert connector_of(engine).stats.read == 9 * life


def test_loaded_blocks_have_the_bits_that_batch_invariance_promises(tmp_path: Path) -> None:
    prompt = prompt_of(2, 40)
    invariant = partial(engine_of, features=[BatchInvariance()])
    computed = logprobs_of(invariant(), prompt)
    serve(invariant(folder=tmp_path / "blocks"), prompt_of(3, 20), prompt, prompt_of(4, 9))
    engine = invariant(folder=tmp_path / "blocks")
    assert logprobs_of(engine, prompt) == computed
    assert connector_of(engine).stats.read == 9


def test_blocks_without_batch_invariance_are_no_hit_with_it(tmp_path: Path) -> None:
    """The sums of the one have another order, and so other last bits."""
    invariance_apart(tmp_path)


def invariance_apart(folder: Path) -> None:
    prompt = prompt_of(2, 40)
    serve(engine_of(folder=folder / "blocks"), prompt)
    engine = engine_of(folder=folder / "blocks", features=[BatchInvariance()])
    serve(engine, prompt)
    assert connector_of(engine).stats.read == 0


def test_a_request_that_is_preempted_says_the_same() -> None:
    """It is computed again and not loaded, since it is in the line already; the next one is loaded."""
    engine = engine_of(blocks=20, host=100, rows=3)
    prompts = [prompt_of(seed, 24) for seed in (5, 6, 7)]
    for turn in range(2):
        before = engine.stats.computed_tokens
        answers = serve(engine, *prompts, count=20)
        assert answers == [right(tuple(prompt), 20) for prompt in prompts]
        assert engine.scheduler.preemptions > 0
        if turn:
            assert connector_of(engine).stats.loaded > 0
        else:
            assert engine.stats.computed_tokens - before > 3 * 43, "one was computed twice"


# Processes that die.

CHILD = """
import os, sys, time
from pathlib import Path
from tests.phases.test_19_moving_blocks import engine_of, prompt_of, serve

call, number = sys.argv[2], int(sys.argv[3])
original, seen = getattr(os, call), []

def stop(*args, **options):
    seen.append(args)
    if len(seen) == number:
        print("here", os.getpid(), flush=True)
        time.sleep(1000)
    return original(*args, **options)

setattr(os, call, stop)
serve(engine_of(folder=Path(sys.argv[1])), prompt_of(8, 60))
"""
LOOP = """
import itertools, os, sys
from pathlib import Path
from moving_blocks.disk import BlockFiles
from moving_blocks.names import chain

files = BlockFiles(Path(sys.argv[1]), 1 << 26, 1 << 20)
print("here", os.getpid(), flush=True)
for number in itertools.count():
    (name,) = chain(b"n", "", [number.to_bytes(16, "little")])
    files.write(name, memoryview(bytes([number % 256]) * (1 << 20)))
"""


FORKS = """
import json, os, sys
import tests.phases.test_19_moving_blocks  # once for all that are killed

for line in sys.stdin:
    code, *sys.argv[1:] = json.loads(line)
    if not (child := os.fork()):
        exec(code, {})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """A process that runs each program that it is given in a fork."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        yield started


def kill_in(
    forks: subprocess.Popen[str], code: str, *arguments: str, after: float = 0.0
) -> None:
    """Start a process, and kill it (SIGKILL) once it says that it has come to the place, or a bit later."""
    assert forks.stdin is not None and forks.stdout is not None
    print(json.dumps([code, *arguments]), file=forks.stdin, flush=True)
    said = forks.stdout.readline()
    assert said.startswith("here "), said
    time.sleep(after)
    os.kill(int(said.removeprefix("here ")), signal.SIGKILL)
    assert forks.stdout.readline() == f"{-signal.SIGKILL}\n"


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fsync", "utime", "replace"])
def test_kill_9_in_the_middle_of_a_write_leaves_nothing_that_is_read_wrongly(
    call: str, tmp_path: Path, forks: subprocess.Popen[str]
) -> None:
    """a3 with a real process: the sixth file is begun, and is none."""
    folder = tmp_path / "blocks"
    kill_in(forks, CHILD, str(folder), call, "6")
    suffixes = [path.suffix for path in files_in(folder)]
    assert sorted(suffixes) == [".kv"] * 5 + [".tmp"]
    engine = engine_of(folder=folder)
    prompt = prompt_of(8, 60)
    (request,) = engine.add(prompt, greedy(4))
    finish(engine)
    assert request.output_ids == right(tuple(prompt))
    assert request.cached_tokens == 5 * 4
    assert connector_of(engine).stats.unread == 0


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_whole_files(
    tmp_path: Path, forks: subprocess.Popen[str]
) -> None:
    folder = tmp_path / "blocks"
    for moment in (0.0, 0.01, 0.02, 0.05, 0.1):
        kill_in(forks, LOOP, str(folder), after=moment)
    files = BlockFiles(folder, 1 << 26, 1 << 20)
    whole_files = 0
    for number in range(100_000):  # a process on a busy machine is killed late
        (name,) = chain(b"n", "", [number.to_bytes(16, "little")])
        if files.contains(name.digest):
            target = bytearray(1 << 20)
            assert files.read(name, memoryview(target))
            assert target == bytes([number % 256]) * (1 << 20)
            whole_files += 1
    assert whole_files == len(files.known)


# What the interpreter cannot run.


@pytest.mark.slow
def test_copies_with_pauses_compile_for_gpus() -> None:
    assert spilled(80, "90", "--moves") == [0] * 8


# The fault that makes a test above red.


def test_a_namespace_that_forgets_how_attention_sums_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "moving_blocks.feature.namespace_of",
        lambda model, pool, attention: namespace_of(model, pool),
    )
    with pytest.raises(AssertionError):
        invariance_apart(tmp_path)
