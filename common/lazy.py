"""Import members of a package only when they are used: a server's other modules need no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any


def members_of(module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`: given a name, it imports `module` and returns this member.

    names: the members of `module` that it returns; for others it raises `AttributeError`.
    """

    def member(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"there is no {name!r} here")
        return resolve_name(f"{module}:{name}")

    return member
