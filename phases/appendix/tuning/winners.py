"""Winners: what `--autotune` found on this machine, and how it comes before the tables of defaults.

The winners of a search stand in one JSON file a device, outside the checkout. They are used only by the
Triton version that they were timed with, and not at all when the environment says `LADDER_TUNING=off`, as
`ladder bench` does: evidence is about the defaults that everybody has.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Generic

import torch
import triton

from common.device import device_name
from common.device_names import device_folder
from common.files import whole
from common.paths import cache_home
from triton_paged_attention.hardware import multiprocessors
from triton_paged_attention.tables import (
    DECODE,
    PREFILL,
    Config,
    DecodeConfig,
    DecodeKey,
    Key,
    PrefillConfig,
    Table,
)

Entry = Mapping[str, Any]
"""One winner: `at`, the key's fields, and `config`, the configuration's (None: the default was the best)."""
Found = Mapping[str, Sequence[Entry]]
"""A device's entries, by kind."""


def winners_path(device: torch.device) -> Path:
    """Return the file of a device's winners."""
    return cache_home() / "tuning" / f"{device_folder(device.type, device_name(device))}.json"


@cache
def winners(device: torch.device) -> Found:
    """Return the entries of each kind of configuration; none without a file, and none from another Triton."""
    if os.environ.get("LADDER_TUNING", "").lower() in ("off", "0", "no"):
        return {}
    try:
        found = json.loads(winners_path(device).read_text(encoding="utf-8"))
        if found["triton"] != triton.__version__:
            return {}
        entries: Found = found["winners"]
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


class TunedWinners(Generic[Key, Config]):
    """The winners of one kind, which a table is asked for before its defaults.

    kind: the name under which the file has them.
    table: whose `tuned` this is, from `use` on.
    config_type: of its configurations, a dataclass.
    """

    def __init__(self, kind: str, table: Table[Key, Config], config_type: type[Config]) -> None:
        self.kind, self.table, self.config_type = kind, table, config_type
        self._chosen: dict[tuple[Key, torch.device], tuple[Found, Config | None]] = {}

    def use(self) -> None:
        """Let the table ask for winners from now on."""
        self.table.tuned = self

    def __call__(self, key: Key, device: torch.device) -> Config | None:
        """Return the winner for a key, if there is one."""
        known = winners(device)
        chosen = self._chosen.get((key, device))
        if chosen is None or chosen[0] is not known:  # never asked for, or the files were read again since
            chosen = self._chosen[key, device] = known, self._choose(key, device, known)
        return chosen[1]

    def find(self, entries: Sequence[Entry], key: Key) -> Entry | None:
        """Return the entry that decides about a key."""
        at = key._asdict()  # type: ignore[attr-defined]  # a NamedTuple's
        return next((entry for entry in entries if entry["at"] == at), None)

    def fit(self, found: Config, key: Key, device: torch.device) -> Config:
        """Make a winner fit a key that it was not found for."""
        return found

    def _choose(self, key: Key, device: torch.device, known: Found) -> Config | None:
        try:
            entry = self.find(known.get(self.kind, ()), key)
            if entry is not None and entry["config"] is not None:
                return self.fit(self.config_type(**entry["config"]), key, device)
        except TypeError:  # written when a key or a configuration had other fields
            pass
        return None


class DecodeWinners(TunedWinners[DecodeKey, DecodeConfig]):
    """There is a batch of every size, so the search's nearest number of pairs decides."""

    def find(self, entries: Sequence[Entry], key: DecodeKey) -> Entry | None:
        """Return the entry of the nearest batch size with these heads."""
        alike = [(DecodeKey(**entry["at"]), entry) for entry in entries]
        alike = [(at, entry) for at, entry in alike if at._replace(pairs=key.pairs) == key]
        if not alike:
            return None
        return min(alike, key=lambda pair: abs(math.log(max(1, pair[0].pairs) / max(1, key.pairs))))[1]

    def fit(self, found: DecodeConfig, key: DecodeKey, device: torch.device) -> DecodeConfig:
        """A winner of another batch size may not split more than the workspace has room for."""
        most = max(self.table.default(key, device).splits, 4 * multiprocessors(device) // key.pairs)
        return replace(found, splits=min(found.splits, most))


DECODING = DecodeWinners("decode", DECODE, DecodeConfig)
PREFILLING = TunedWinners("prefill", PREFILL, PrefillConfig)


@contextmanager
def trying(table: Table[Key, Config], key: Key, config: Config) -> Iterator[None]:
    """Within this context, `config` is what the table gives for a key."""
    before = table.tuned
    table.tuned = lambda asked, device: config if asked == key else before(asked, device)
    try:
        yield
    finally:
        table.tuned = before
