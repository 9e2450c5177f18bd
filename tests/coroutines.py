"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


def asynchronously(
    test: Callable[[], Coroutine[Any, Any, None]],
    seconds: float = 60.0,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a test's coroutine; whatever hangs fails. loop: makes the event loop; None: a plain one."""

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await test()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(limited())


class LoopOfItsOwnTime(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while callbacks run, and jumps to the next timer when none can.

    What coroutines of one process do by this clock does not depend on how busy the machine is. Threads are
    not waited for.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        super().__init__(_Jumping(clock))

    def time(self) -> float:
        return self.clock()


class Clock:
    """A clock that goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else 0)
        if timeout and not found:
            self.clock.now += timeout
        return found
