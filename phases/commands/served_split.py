"""The two engines of `ladder serve --prefill-device`, by phase 19."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from common.errors import UserError
from moving_blocks.handover import HandoverObserver, SplitEngine
from phases.appendix.embeddings.prompt_states import PromptObserver
from serving.liveness import EngineProcess


class DecodeObserver(HandoverObserver, PromptObserver):
    """The observer of the engine that decodes: it hears what is handed over, and what others ask."""


def split_engine(
    make: Callable[..., Any], made: tuple[Any, ...], prefill_device: str
) -> SplitEngine:
    """Return the processes of two engines of one model, which are not started yet.

    make: makes one of them, given `made`: phase, engine options, device and dtype.
    prefill_device: of the one that computes prompts; the other is on the device in `made`.

    Raises:
        UserError: the options name no folder through which blocks could go.
    """
    phase, options, _, dtype = made
    if options.get("disk_folder") is None:
        raise UserError(
            "prefill_device needs a disk_folder, through which blocks go from one engine to the other; in "
            "shared memory: --disk-folder /dev/shm/blocks"
        )
    prefill = EngineProcess(partial(make, phase, options, prefill_device, dtype))
    return SplitEngine(partial(make, *made), prefill, DecodeObserver)
