"""The operations of PyTorch that a piece of code runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the name of each operation, or what `note` makes of name and arguments, unless that is None."""

    def __init__(self, note: Callable[[str, Any], Any] = lambda name, args: name) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note, self.names = note, list[Any]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (noted := self.note(func._schema.name.removeprefix("aten::"), args)) is not None:
            self.names.append(noted)
        return func(*args, **(kwargs or {}))
