"""Members of a package that are imported when they are used: a server's other modules need no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any


def members_of(module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package, which takes members of these names from a module."""

    def member(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"there is no {name!r} here")
        return resolve_name(f"{module}:{name}")

    return member
