"""The engine of `ladder serve`, made in a process of its own.

The API process pickles this module's functions by their names, so the module imports PyTorch only inside
them.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.models.hub import RANDOM, model_folder
from phases.process import signals

if TYPE_CHECKING:
    from continuous.engine import Engine
    from phases.registry import Checked
    from serving.seams import Observer


def check(phase: str, options: Mapping[str, Any], device: str, dtype: str) -> Checked:
    """Return the checked options of a phase's engine, for `load_folder` (what makes the engine).

    Args:
        phase: its name or number.
        options: name -> value, of the engine.
        device, dtype: as on the command line, such as "auto".

    Raises:
        UserError: an option is wrong, or this machine lacks the device or the dtype.
    """
    from common.device import pick_device, pick_dtype
    from phases import phase_named
    from phases.registry import check_options

    where = pick_device(device)
    pick_dtype(dtype, where)
    return check_options(phase_named(phase), options, where)


def fetch(
    model: str,
    folder: Path,
    phase: str,
    options: Mapping[str, Any],
    device: str,
    dtype: str,
    found: Connection,
) -> None:
    """Check options, then fetch a model, and send its folder through `found`; or send a `UserError`.

    This runs in a child process: what only a download imports takes no memory of the API process.

    Args:
        folder: an empty one for the tokenizer of random weights, which need no other file.
        phase, options, device, dtype: of the engine.
        found: the sending end of a pipe.
    """
    with signals():  # a download that runs is ended
        try:
            check(phase, options, device, dtype)
            found.send(_folder_of(model, folder))
        except UserError as error:
            found.send(error)
        except KeyboardInterrupt:
            return  # it is the API process that says so


def _folder_of(model: str, folder: Path) -> Path:
    from common.text.made_up import write_tokenizer
    from forward.shapes import SHAPES

    if not model.startswith(RANDOM):
        return model_folder(model)
    shape = SHAPES.get(model.removeprefix(RANDOM))
    if shape is None:
        raise UserError(f"model is {model!r}, but the random shapes are {', '.join(SHAPES)}")
    write_tokenizer(folder, shape.vocab_size, shape.eos_token_ids)
    return folder


def make_engine(
    model: str, folder: str, phase: str, options: Mapping[str, Any], device: str, dtype: str
) -> Any:
    """Return the engine of a phase, 04 or later.

    A line on standard error says what the phase lacks on this machine.

    Args:
        model: `random:SHAPE`, or the model's folder.
        folder: of the tokenizer.
        phase, options, device, dtype: as for `check`, which this calls.
    """
    from common.device import pick_device
    from common.text.tokenizer import Tokenizer
    from phases.registry import load_folder

    checked = check(phase, options, device, dtype)
    gc.freeze()  # modules stay: to look for garbage among them takes 0.1 s
    return load_folder(checked, model, pick_device(device), dtype, Tokenizer(Path(folder)))


def make_observer(engine: Engine) -> Observer:
    """Return an observer, which adds extra data to the engine process's messages to the API process.

    The data are results about prompts (such as embeddings), and pictures of the engine's blocks and requests.
    """
    from phases.appendix.embeddings.prompt_states import PromptObserver

    return PromptObserver(engine)
