"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def asynchronously(
    test: Callable[[], Coroutine[Any, Any, None]], seconds: float = 60.0
) -> None:
    """Run a test's coroutine; whatever hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await test()

    asyncio.run(limited())
