"""`ladder config`: an engine's options as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.console import out
from common.device import pick_device
from common.errors import UserError
from phases import phase_named, registry
from phases.config import EngineConfig, options_from_yaml


def run(phase_name: str, *, device: str, config: Path | None, options: Mapping[str, Any]) -> int:
    """Print the file. What the flags say comes before what a given file says."""
    phase = phase_named(phase_name)
    if phase.number < registry.BLOCKS:
        raise UserError(
            f"phase is {phase.name}, but only engines from phase {registry.BLOCKS:02d} on are files"
        )
    given = {**(options_from_yaml(config) if config else {}), **options}
    whole = EngineConfig.of(phase, given, pick_device(device))
    out.out(f"# ladder run {phase.number:02d} --config FILE", highlight=False)
    out.out(whole.to_yaml(), end="", highlight=False)
    return 0
