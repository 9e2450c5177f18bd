"""Refusals before PyTorch is imported: a wrong word must not take two seconds to be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.device_names import check_device, check_dtype
from common.errors import UserError
from common.models.hub import local
from phases import Phase, phase_named, too_early

RANDOM = "random:"


def check(
    phase: str | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Phase | None:
    """Raise `UserError` for a phase, device, dtype or model that there is not, or an option of a later phase.

    Values of options are checked by the phases, and what the machine has by PyTorch.
    """
    named = None if phase is None else phase_named(phase)
    check_device(device)
    check_dtype(dtype)
    if named is not None and options:
        from phases.commands.flags import all_flags

        first = {flag.name: flag.first for flag in all_flags()}
        for name, value in options.items():
            if first.get(name, 0) > named.number and value is not False:
                raise UserError(too_early(name, first[name], named))
    if model is not None and not model.startswith(RANDOM):
        local(model)
    return named
