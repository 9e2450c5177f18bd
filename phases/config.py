"""An engine as a file: everything that makes one from phase 05 on, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from common.errors import UserError
from common.files import read_text
from common.options import helps, names, unknown
from paged_cache.parts import Feature, PagedSizes
from phases import Phase, registry

LARGEST_FILE = 1 << 20


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine, as a file has them.

    sizes: None where the features decide.
    features: a key for every feature there is, None where it is off; each can be switched by itself.
    """

    sizes: PagedSizes
    features: Mapping[str, Feature | None]

    @classmethod
    def of(cls, phase: Phase, options: Mapping[str, Any], device: torch.device) -> EngineConfig:
        """A phase's engine, changed by options. Raises `UserError` as `registry.choose` does."""
        chosen = registry.choose(phase, options, device)
        return cls(chosen.sizes, dict.fromkeys(registry.features()) | chosen.features)

    def to_yaml(self) -> str:
        """A file that `from_yaml` reads, with a line of help behind each option."""
        lines = ["# An engine: sizes first (null: what is usual), then its features (false: off)."]
        lines += _lines(asdict(self.sizes), helps(PagedSizes), "")
        for name, feature in self.features.items():
            if feature is None:
                lines.append(f"{name}: false")
                continue
            values = _values(feature)
            lines.append(f"{name}:" if values else f"{name}: true")
            lines += _lines(values, helps(type(feature)), "  ")
        return "\n".join(lines) + "\n"


def options_from_yaml(path: Path) -> dict[str, Any]:
    """The flat options that a file of the form of `EngineConfig.to_yaml` holds.

    Raises:
        UserError: it cannot be read, is no YAML, or has a key that there is not.
    """
    raw = _read(path)
    kinds = registry.features()
    found: dict[str, Any] = {}
    for key, value in raw.items():
        if key in names(PagedSizes):
            if value is not None:
                found[key] = value
        elif key not in kinds:
            raise UserError(f"{path}: {unknown(str(key), [*names(PagedSizes), *kinds])}")
        elif isinstance(value, Mapping):
            found[key] = True
            for name, option in value.items():
                if name not in names(kinds[key]):
                    raise UserError(f"{path}: {key}: {unknown(str(name), names(kinds[key]))}")
                if option is not None:
                    found[name] = option
        elif value is None or isinstance(value, bool):
            found[key] = bool(value)
        else:
            raise UserError(f"{path}: {key} is {value!r}, but must be true, false, or its options")
    return found


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        raw = yaml.safe_load(read_text(path, "--config", LARGEST_FILE))
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise UserError(f"--config {path} holds a {type(raw).__name__}, but must hold options by name")
    return raw


def _values(feature: Feature) -> dict[str, Any]:
    return {name: getattr(feature, name) for name in names(type(feature))}


def _lines(values: Mapping[str, Any], help: Mapping[str, str], indent: str) -> list[str]:
    shown = [f"{indent}{name}: {yaml.safe_dump(value).split(chr(10))[0]}" for name, value in values.items()]
    return [f"{text:<31} # {help[name]}" for text, name in zip(shown, values, strict=True)]
