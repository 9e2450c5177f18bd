"""What `--autotune` found on this machine, and how the defaults in `tuning.py` are overruled by it.

The winners of a search stand in one JSON file a device, outside the checkout. They are used only by the
Triton version that they were timed with, and not at all when the environment says `LADDER_TUNING=off`, as
`ladder bench` does: evidence is about the defaults that everybody has.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import triton

from common.device import device_folder, device_name
from common.paths import cache_home

Config = TypeVar("Config")
NEAREST = "pairs"
"""The one argument that need not match exactly: there is a decode configuration for every batch size."""

_forced: dict[str, tuple[Mapping[str, Any], Any]] = {}
_tables: list[Tuned[Any]] = []


def winners_path(device: torch.device) -> Path:
    """Where the winners of a device are kept."""
    return cache_home() / "tuning" / f"{device_folder(device.type, device_name(device))}.json"


@cache
def winners(device: torch.device) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The entries of each kind of configuration; none without a file, and none from another Triton."""
    if os.environ.get("LADDER_TUNING", "").lower() in ("off", "0", "no"):
        return {}
    try:
        found = json.loads(winners_path(device).read_text(encoding="utf-8"))
        if found["triton"] != triton.__version__:
            return {}
        entries: Mapping[str, Sequence[Mapping[str, Any]]] = found["winners"]
        return entries
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # no file, or not one of ours: the defaults always work


def save_winner(device: torch.device, kind: str, at: Mapping[str, Any], found: Mapping[str, Any]) -> Path:
    """Put one entry into the device's file, in the place of an older one for the same arguments.

    found: `config`, its fields by name (None: the default was the best), and what there is to say about it.
    """
    path = winners_path(device)
    kept = {name: list(entries) for name, entries in winners(device).items()}
    mine = [entry for entry in kept.get(kind, []) if entry["at"] != dict(at)]
    kept[kind] = [*mine, {"at": dict(at), **found}]
    whole = {"device": device_name(device), "triton": triton.__version__, "winners": kept}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)  # a reader sees the old file or the new one
    forget()
    return path


def forget() -> None:
    """Read the files again at the next look-up."""
    winners.cache_clear()
    for table in _tables:
        table.forget()


@contextmanager
def using(kind: str, at: Mapping[str, Any], config: Any) -> Iterator[None]:
    """Look-ups of this kind with the arguments `at` give `config`: for trying one out."""
    _forced[kind] = at, config
    try:
        yield
    finally:
        del _forced[kind]


class Tuned(Generic[Config]):
    """A table of defaults that winners for the same arguments come before; called like the table itself.

    Arguments are compared by name; the device among them (or the current one) chooses the file.
    """

    def __init__(self, kind: str, config_type: type[Config], table: Callable[..., Config]) -> None:
        self.kind, self.config_type, self.table = kind, config_type, table
        self._signature = inspect.signature(table)
        self._chosen = cache(self._choose)
        self.__doc__ = table.__doc__
        _tables.append(self)

    def __call__(self, *arguments: Any, **named: Any) -> Config:
        """The configuration for the table's arguments."""
        if self.kind in _forced:
            at, config = _forced[self.kind]
            if self._at(arguments, named) == at:
                forced: Config = config
                return forced
        return self._chosen(*arguments, **named)

    def forget(self) -> None:
        """Look every argument up again."""
        self._chosen.cache_clear()

    def _at(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, without the device."""
        values = self._signature.bind(*arguments, **named).arguments
        return {name: value for name, value in values.items() if not isinstance(value, torch.device)}

    def _choose(self, *arguments: Any, **named: Any) -> Config:
        given = (*arguments, *named.values())
        device = next((v for v in given if isinstance(v, torch.device)), None) or _current_device()
        at = self._at(arguments, named)
        default = self.table(*arguments, **named)
        entry = _closest(winners(device).get(self.kind, ()), at)
        if entry is None or entry["config"] is None:
            return default
        try:
            found = self.config_type(**entry["config"])
        except TypeError:  # written when a configuration had other fields
            return default
        return _fit(found, at, default, device)


def winners_first(kind: str, config_type: type[Config]) -> Callable[[Callable[..., Config]], Tuned[Config]]:
    """Decorate a table of defaults: see `Tuned`."""
    return partial(Tuned, kind, config_type)


def _fit(found: Any, at: Mapping[str, Any], default: Any, device: torch.device) -> Any:
    """A winner of another batch size must not split more than the workspace in `attention` has room for."""
    from .tuning import multiprocessors  # which imports this module

    if NEAREST in at and getattr(found, "splits", 1) > 1:
        most = max(default.splits, 4 * multiprocessors(device) // at[NEAREST])
        found = replace(found, splits=min(found.splits, most))
    return found


def _closest(entries: Sequence[Mapping[str, Any]], at: Mapping[str, Any]) -> Mapping[str, Any] | None:
    fixed = {name: value for name, value in at.items() if name != NEAREST}
    matching = [e for e in entries if {n: v for n, v in e["at"].items() if n != NEAREST} == fixed]
    if NEAREST not in at:
        return matching[0] if matching else None
    return min(
        matching, key=lambda e: abs(math.log(max(1, e["at"][NEAREST]) / max(1, at[NEAREST]))), default=None
    )


def _current_device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
