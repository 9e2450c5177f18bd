"""What `--autotune` found on this machine, and how it overrules the tables of defaults.

The winners of a search stand in one JSON file a device, outside the checkout. They are used only by the
Triton version that they were timed with, and not at all when the environment says `LADDER_TUNING=off`, as
`ladder bench` does: evidence is about the defaults that everybody has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import triton

from common.device import device_name
from common.device_names import device_folder
from common.files import whole
from common.paths import cache_home

Key = TypeVar("Key", bound=tuple[Any, ...])
Config = TypeVar("Config")
Entry = Mapping[str, Any]
"""One winner: `at`, the key's fields, and `config`, the configuration's (None: the default was the best)."""
Winners = Mapping[str, Sequence[Entry]]
"""A device's entries, by kind."""


def winners_path(device: torch.device) -> Path:
    """Where the winners of a device are kept."""
    return cache_home() / "tuning" / f"{device_folder(device.type, device_name(device))}.json"


@cache
def winners(device: torch.device) -> Winners:
    """The entries of each kind of configuration; none without a file, and none from another Triton."""
    if os.environ.get("LADDER_TUNING", "").lower() in ("off", "0", "no"):
        return {}
    try:
        found = json.loads(winners_path(device).read_text(encoding="utf-8"))
        if found["triton"] != triton.__version__:
            return {}
        entries: Winners = found["winners"]
        return entries
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # no file, or not one of ours: the defaults always work


def forget() -> None:
    """Read the files again at the next look-up."""
    winners.cache_clear()


def save_winner(device: torch.device, kind: str, at: Mapping[str, Any], found: Mapping[str, Any]) -> Path:
    """Put one entry into the device's file, in the place of an older one for the same key.

    at: the key's fields by name.
    found: `config`, its fields by name (None: the default was the best), and what there is to say about it.
    """
    path = winners_path(device)
    kept = {name: list(entries) for name, entries in winners(device).items()}
    mine = [entry for entry in kept.get(kind, []) if entry["at"] != dict(at)]
    kept[kind] = [*mine, {"at": dict(at), **found}]
    content = {"device": device_name(device), "triton": triton.__version__, "winners": kept}
    with whole(path) as scratch:
        scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    forget()
    return path


class Table(Generic[Key, Config]):
    """One kind of configuration: a function from a key (a NamedTuple) to defaults, overruled by winners.

    kind: the name under which the winners' file has it.
    config_type: a dataclass.
    default: the configuration for a key on a device, whatever a search may have found.
    """

    def __init__(
        self, kind: str, config_type: type[Config], default: Callable[[Key, torch.device], Config]
    ) -> None:
        self.kind, self.config_type, self.default = kind, config_type, default
        self._chosen: dict[tuple[Key, torch.device], tuple[Winners, Config]] = {}
        self._override: tuple[Key, Config] | None = None

    def lookup(self, key: Key, device: torch.device) -> Config:
        """The winner for a key, or its default. Kernels ask for it at every launch."""
        if self._override is not None and self._override[0] == key:
            return self._override[1]
        known = winners(device)
        chosen = self._chosen.get((key, device))
        if chosen is None or chosen[0] is not known:  # never asked for, or the files were read again since
            chosen = self._chosen[key, device] = known, self._choose(key, device, known)
        return chosen[1]

    @contextmanager
    def override(self, key: Key, config: Config) -> Iterator[None]:
        """Within this context, `config` is what a key gives: to try it out."""
        before, self._override = self._override, (key, config)
        try:
            yield
        finally:
            self._override = before

    def find(self, entries: Sequence[Entry], key: Key) -> Entry | None:
        """The entry that decides about a key."""
        at = key._asdict()  # type: ignore[attr-defined]  # a NamedTuple's
        return next((entry for entry in entries if entry["at"] == at), None)

    def fit(self, found: Config, key: Key, device: torch.device) -> Config:
        """A winner, made to fit a key that it was not found for."""
        return found

    def _choose(self, key: Key, device: torch.device, known: Winners) -> Config:
        try:
            entry = self.find(known.get(self.kind, ()), key)
            if entry is not None and entry["config"] is not None:
                return self.fit(self.config_type(**entry["config"]), key, device)
        except TypeError:  # written when a key or a configuration had other fields
            pass
        return self.default(key, device)
