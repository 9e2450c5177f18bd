"""Messages from rank 0 to the other ranks, their answers, and the line on which they come, pickled."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from common.events import TextStream
from common.request import Request
from common.text.tokenizer import Tokenizer


class Enter(NamedTuple):
    """The samples of a prompt stand in line, as they are sent: without what an engine finds out by itself."""

    requests: list[Request]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Enter:
        """Make a message of requests that have just been put in line."""
        sent = [
            replace(r, text=None, constraint=None, siblings=[], rank=(), numbers=None)
            for r in requests
        ]
        return cls(sent)

    def taken(self, tokenizer: Tokenizer | None) -> list[Request]:
        """Return the requests on another rank."""
        for one in self.requests:
            if tokenizer is not None and one.params.stop:
                one.text = TextStream(tokenizer, one.params, one.tokens[: one.prompt_len])
        return self.requests


class Leave(NamedTuple):
    """A request is aborted."""

    id: int


class StepMessage(NamedTuple):
    """A step begins.

    commands: what has happened since the last one, in order.
    waits: what the drafter says before the step is scheduled.
    """

    number: int
    commands: list[Enter | Leave]
    waits: bool = False


class Drafts(NamedTuple):
    """The drafts of the step that was scheduled; follows a `StepMessage` where there is a drafter.

    asks: whether the drafter was asked. drafts: what it proposed, by request.
    """

    asks: bool
    drafts: dict[int, tuple[int, ...]]


class FailedGrammars(NamedTuple):
    """The requests whose grammar cannot be followed any further; sent with the masks of each masked step."""

    ids: list[int]


class Join(NamedTuple):
    """Meet the other ranks: on the device that many places behind rank 0's, in the store of this path."""

    size: int
    device: str
    path: str
    threads: int


class Here(NamedTuple):
    """This rank has come as far as to meet the others."""


class Build(NamedTuple):
    """Make an engine. recipe: for `build`, but for the tokenizer, of which `tokenizer` is the folder."""

    recipe: Any
    tokenizer: str | None


class RunFunction(NamedTuple):
    """Run a function of one module, or of `source` where that is not empty, and answer what it returns."""

    module: str
    name: str
    source: str
    given: tuple[Any, ...]


class Rehearsed(NamedTuple):
    """The rehearsal is over."""


class Closed(NamedTuple):
    """The engine and the ranks are not needed any more."""


class Sum(NamedTuple):
    """A rank's checksum after a step."""

    number: int
    value: int


class BroadcastChannel:
    """The connection of another rank to rank 0."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def receive(self) -> Any:
        """The next message. Ends this process when rank 0 is gone."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    def send(self, message: Any) -> None:
        """Answer rank 0."""
        self.connection.send_bytes(pickle.dumps(message))
