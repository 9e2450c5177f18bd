"""Coding agents in a loop of three turns: they read a file, add its numbers with a command, and say the sum.

Each speaks one protocol, from a prompt of its own with tens of tools, for which a small model has no mind and
no context. So the server is the whole one, around a model that says given texts. An agent that is not in the
PATH is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.text.tokenizer import Tokenizer
from phases.appendix.connections.server import HttpServer
from serving import messages
from serving.messages import AddRequest, Ready
from tests.scripted_server import THINKING, TOOLS, Scripted, scripted

pytestmark = pytest.mark.slow  # real processes

TASK = "Read numbers.txt, add its two numbers, and say the sum."
CONTEXT = 1 << 20
"""In tokens, which are single characters here."""
SECONDS = 150


class Turns(Scripted):
    """Says one text after the other to prompts that have tools, and a title to the others."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        super().__init__(tokenizer, "")
        self.ready = Ready(CONTEXT, tokenizer.vocab_size, 8, CONTEXT, 16, "fcfs")
        self.tokenizer = tokenizer
        self.texts = texts
        self.seen: list[str] = []
        self.statuses: set[int] = set()

    def transmit(self, data: bytes) -> None:
        """See `EngineClient`."""
        for command in messages.commands(data):
            if isinstance(command, AddRequest):
                prompt = self.tokenizer.backend.decode(command.prompt)
                text = "A title"
                if prompt.startswith("{"):
                    text = self.texts[min(len(self.seen), len(self.texts) - 1)]
                    self.seen.append(prompt)
                encoded = self.tokenizer.backend.encode(text, add_special_tokens=False)
                self.tokens = [*encoded.ids, 0]
        super().transmit(data)


def texts(read: dict[str, Any], add: dict[str, Any]) -> list[str]:
    """Return what the model says: two calls at once, one more, and an answer, each behind a thought."""
    reading, adding = (f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in (read, add))
    said = [f"I look.\n{reading}\n{reading}", adding, "The sum is 42."]
    return [f"<think>\nHm.\n</think>\n\n{one}" for one in said]


@contextmanager
def served(folder: Path, said: list[str]) -> Iterator[tuple[str, Turns]]:
    """Serve in a thread; yield where, and the model."""
    app = scripted(folder, "", TOOLS + THINKING)
    engine = Turns(app.model.tokenizer, said)
    app.engine = engine
    app.on_end.append(lambda http: engine.statuses.add(http.status))
    server = HttpServer(app)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", engine
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


def run(folder: Path, command: list[str], env: dict[str, str]) -> str:
    """Run an agent in a folder with a home of its own, and return what it prints."""
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    (folder / "numbers.txt").write_text("17 25\n")
    done = subprocess.run(
        [program, *command[1:], TASK],
        cwd=folder,
        env=os.environ | {"HOME": str(folder), "PWD": str(folder)} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(engine: Turns, printed: str) -> None:
    """Fail unless the agent came to its end, and each of its prompts went on from the one before."""
    assert "The sum is 42." in printed and engine.statuses == {200}
    first, second, third = (prompt.partition("user: ")[2] for prompt in engine.seen)
    counts = [prompt.count("17 25") for prompt in (first, second, third)]
    assert counts == [0, 2, 2] and "Hm." not in second + third
    assert "42" in third.rpartition("17 25")[2]


def test_opencode_by_chats(tmp_path: Path) -> None:
    file = str(tmp_path / "work" / "numbers.txt")
    read = {"name": "read", "arguments": {"filePath": file}}
    add = {"command": "expr 17 + 25", "description": "Add"}
    work = tmp_path / "work"
    work.mkdir()
    with served(tmp_path, texts(read, {"name": "bash", "arguments": add})) as (url, engine):
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {"tiny": {}},
        }
        config = {"provider": {"ladder": provider}, "model": "ladder/tiny"}
        (work / "opencode.json").write_text(json.dumps(config))
        check(engine, run(work, ["opencode", "run"], {}))


def test_codex_by_responses(tmp_path: Path) -> None:
    read = {"name": "exec_command", "arguments": {"cmd": "cat numbers.txt"}}
    add = {"name": "exec_command", "arguments": {"cmd": "expr 17 + 25"}}
    with served(tmp_path, texts(read, add)) as (url, engine):
        (tmp_path / "config.toml").write_text(
            'model = "tiny"\nmodel_provider = "ladder"\n[model_providers.ladder]\nname = "ladder"\n'
            f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "LADDER_KEY"\n'
        )
        env = {"CODEX_HOME": str(tmp_path), "LADDER_KEY": "none"}
        command = ["codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access"]
        check(engine, run(tmp_path, command, env))


def test_claude_code_by_messages(tmp_path: Path) -> None:
    read = {"name": "Read", "arguments": {"file_path": str(tmp_path / "numbers.txt")}}
    add = {"command": "expr 17 + 25", "description": "Add"}
    with served(tmp_path, texts(read, {"name": "Bash", "arguments": add})) as (url, engine):
        env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none"}
        env |= {"CLAUDE_CONFIG_DIR": str(tmp_path), "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny"}
        env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        command = ["claude", "-p", "--model", "tiny", "--allowedTools=Read,Bash"]
        check(engine, run(tmp_path, command, env))
