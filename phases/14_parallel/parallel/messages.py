"""Messages from rank 0 to the other ranks, and their answers. Messages are pickled."""

from __future__ import annotations

from typing import Any, NamedTuple

from common.events import TextStream
from common.request import Request
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer


class EnteredRequest(NamedTuple):
    """A request as it stands in line, for ranks that have none of it."""

    id: int
    tokens: list[int]
    prompt_len: int
    limit: int
    params: SamplingParams
    seed: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    sample: int
    priority: int
    salt: str

    @classmethod
    def of(cls, request: Request) -> EnteredRequest:
        """Of a request that has just been put in line."""
        return cls(*(getattr(request, name) for name in cls._fields))

    def request(self, tokenizer: Tokenizer | None) -> Request:
        """The same request on another rank."""
        made = Request(**self._asdict())
        if tokenizer is not None and self.params.stop:
            made.text = TextStream(tokenizer, self.params, self.tokens[: self.prompt_len])
        return made


class Enter(NamedTuple):
    """The samples of a prompt stand in line."""

    entries: list[EnteredRequest]


class Leave(NamedTuple):
    """A request is aborted (`error` is False), or its grammar has failed."""

    id: int
    error: bool = False


class Turn(NamedTuple):
    """A step begins.

    commands: what has happened since the last one, in order.
    waits: what the drafter says before the step is scheduled.
    """

    number: int
    commands: list[Enter | Leave]
    waits: bool = False


class Drafts(NamedTuple):
    """The drafts of the step that was scheduled; follows a `Turn` where there is a drafter.

    asks: whether the drafter was asked. drafts: what it proposed, by request.
    """

    asks: bool
    drafts: dict[int, tuple[int, ...]]


class Join(NamedTuple):
    """Meet the other ranks: on the device that many places behind rank 0's, at rank 0's store."""

    size: int
    device: str
    port: int
    prefix: str
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
