"""Triton's interpreter without what it does again at every call, a quarter of the time of most kernels."""

from __future__ import annotations

import sys
from typing import Any


def patch_once() -> None:
    """Let a function that kernels call put the interpreter's language in place in its first call alone.

    Triton does so in each call, though it is never undone, and every launch of a kernel does it as well.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "ladder_called"):
        return
    kind, interpreter.ladder_called = interpreter.InterpretedFunction, set()
    first = kind.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn in interpreter.ladder_called:
            return self.rewrite()(*args, **options)
        interpreter.ladder_called.add(self.fn)
        return first(self, *args, **options)

    kind.__call__ = call
