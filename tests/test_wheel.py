"""The wheel, installed in an environment of its own: a package is used where there is no checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest

from phases import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.weights]

ALL_NAMES = """
import importlib.util, sys
print([name for name in ("common", "phases", "serving") if importlib.util.find_spec(name)])
from inference_ladder import LLM, SamplingParams
import prefix_cache
print(prefix_cache.__file__)
print(LLM("smollm2").generate(["Hello"], SamplingParams(max_tokens=3))[0].token_ids)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's folder of programs: it has the wheel, and sees what else the tests' one has."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "env", with_pip=False)
    (packages,) = (place / "env").glob("lib/python*/site-packages")
    # Python reads no .pth file of a folder that a .pth file names: the editable install is not seen.
    seen = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "packages_of_the_tests.pth").write_text("\n".join(seen))
    programs = place / "env" / "bin"
    install = [
        "--python",
        str(programs / "python"),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        str(wheel),
    ]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    return programs


def surroundings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "COLUMNS": "200"
    }


def called(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, beside no checkout."""
    first, *rest = command
    return subprocess.run(
        [str(folder / first), *rest],
        cwd=folder,
        env=surroundings(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["--help"], "serve"),
        (["--version"], "ladder 0."),
        (["list"], "08_prefix_cache"),
        (["doctor"], "PyTorch"),
        (["run", "02", "--max-tokens", "3", "--prompt", "Hello"], ""),
        (["run", "08", "--max-tokens", "3", "--prompt", "Hello"], ""),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_command_of_the_wheel_works(folder, arguments, shows):
    done = called(folder, "ladder", *arguments)
    assert done.returncode == 0, done.stderr
    assert shows in done.stdout and done.stdout.strip()


@pytest.mark.parametrize(
    "arguments", ["bench 02", "plot", "profile 04", "load http://127.0.0.1:9", "course make x"]
)
def test_a_command_that_needs_the_checkout_says_so_in_a_line(folder, arguments):
    done = called(folder, "ladder", *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "checkout" in done.stderr


def test_the_library_takes_one_name_of_the_environment(folder):
    done = called(folder, "python", "-c", ALL_NAMES)
    assert done.returncode == 0, done.stderr
    before, module, tokens = done.stdout.splitlines()
    assert before == "[]"
    assert (
        "site-packages/inference_ladder/phases/08_prefix_cache" in module
        and str(folder.parent) in module
    )
    assert len(json.loads(tokens)) == 3


def test_its_server_answers(folder):
    command = [str(folder / "ladder"), "serve", "random:tiny", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, env=surroundings(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            lines = (re.search(r"Ready: (http://\S+)", line) for line in process.stdout)
            url = next(filter(None, lines))[1]
            body = json.dumps(
                {
                    "messages": [{"role": "user", "content": "Hello"}],
                    "max_tokens": 4,
                    "ignore_eos": True,
                }
            )
            asked = urllib.request.Request(
                f"{url}/v1/chat/completions",
                body.encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            for path in ("/", "/docs"):
                with urllib.request.urlopen(url + path, timeout=60) as page:
                    assert b"<html" in page.read()
        finally:
            process.terminate()
