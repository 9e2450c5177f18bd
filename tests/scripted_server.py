"""A server whose model says a given text, so that what is made of an output can be seen without weights."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from common.text.tokenizer import Tokenizer
from phases.appendix.server import whole_app
from serving import messages
from serving.app import App
from serving.client import EngineClient
from serving.messages import AbortRequests, AddRequest, End, Ready, StepReport, StepStats
from tests.servers import tokenizer_for

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
THINKING = "{# <think> #}" + TEMPLATE
TOOLS = """{# <tool_call> #}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"""
ALTERNATING = """{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}\
{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}\
[{{ m.role }}] {{ m.content }}
{% endfor %}"""


class Scripted(EngineClient):
    """An engine that answers every prompt with the same text, a token a turn of the event loop.

    prompts: what it was asked, in order.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__()
        self.tokens = [*tokenizer.backend.encode(text, add_special_tokens=False).ids, 0]
        self.ready = Ready(16384, tokenizer.vocab_size, 8, 1000, 16, "fcfs")
        self.state = "ready"
        self.prompts: list[AddRequest] = []
        self._running: dict[int, tuple[int, int]] = {}
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Live as long as the server, which ends with its engine."""
        await asyncio.Event().wait()

    def transmit(self, data: bytes) -> None:
        """See `EngineClient`."""
        for command in messages.commands(data):
            if isinstance(command, AddRequest):
                self.prompts.append(command)
                for number in range(command.first, command.first + command.params.n):
                    self._running[number] = 0, command.params.max_tokens
            elif isinstance(command, AbortRequests):
                for number in command.numbers:
                    self._running.pop(number, None)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._go())

    async def _go(self) -> None:
        while self._running:
            await asyncio.sleep(0)
            self.now = time.perf_counter()
            step = StepReport([], [], [], StepStats())
            for number, (at, most) in [*self._running.items()]:
                token = self.tokens[at]
                reason = "stop" if token == 0 else "length" if at + 1 >= most else None
                if reason is not None:
                    step.ends.append(End(number, reason, "", len(step.tokens)))
                    del self._running[number]
                else:
                    self._running[number] = at + 1, most
                step.numbers.append(number)
                step.tokens.append(token)
            self._route_tokens(step)


def scripted(
    folder: Path,
    text: str,
    template: str = TEMPLATE,
    added: tuple[str, ...] = (),
    special: bool = False,
) -> App:
    """Return the whole server around a model that says a text.

    added: tokens beside the vocabulary; `special`: whether they are left out of texts.
    """
    tokenizer_for(folder, 257)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template})
    )
    tokenizer = Tokenizer(folder)
    tokens: list[Any] = [AddedToken(one, special=special, normalized=False) for one in added]
    if tokens:
        tokenizer.backend.add_tokens(tokens)
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"eos_token_id": [0]}))
        tokenizer = Tokenizer(folder)
    return whole_app(Scripted(tokenizer, text), tokenizer, "tiny")
