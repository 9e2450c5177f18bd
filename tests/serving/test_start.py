"""How a server starts: two processes side by side, of which only the engine's has PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from phases import ROOT
from tests.servers import Running

API_MODULES = ("phases.cli", "phases.commands.early", "phases.commands.serve")
SERVING_MODULES = ("phases.commands.served_app", "phases.commands.served_engine")
HEAVY = ("torch", "triton", "transformers", "ray", "gguf", "xgrammar", "continuous", "forward")


def imported(*modules: str) -> set[str]:
    """Return the packages of a fresh process that has imported these modules."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    paths = [str(ROOT), *map(str, sorted((ROOT / "phases").glob("[0-9]*")))]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_what_the_api_process_imports_has_no_pytorch_and_no_engine():
    assert not imported(*API_MODULES, *SERVING_MODULES).intersection(HEAVY)


def test_an_engine_is_launched_before_the_application_is_imported():
    assert not imported(*API_MODULES).intersection({"uvicorn", "jinja2"})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="maps of a process are Linux's")
def test_of_a_running_server_only_the_engine_has_pytorch():
    with Running("--access-log", "none") as server:
        api = psutil.Process(server.process.pid)
        children = api.children(recursive=True)
        mapped = [has_pytorch(process.pid) for process in (api, *children)]
        assert not mapped[0] and mapped.count(True) == 1
        assert server.stderr().startswith("Starting random:tiny on port ")


def has_pytorch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
