"""Sampling that a model asks for: what holds where a request says nothing.

The authors of a model publish it in `generation_config.json`, and vLLM serves it so: a small model that is
meant for a temperature of 0.2 gives gibberish at OpenAI's 1.0. What a request says comes first.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError
from common.models.fields import read_object
from common.names import choice
from common.sampling.params import NUMBERS, SamplingParams

MODEL, NEUTRAL = "model", "neutral"
"""Where defaults come from: the model's file, or nowhere."""
FILE = "generation_config.json"
FIELDS = ("top_k", *NUMBERS)
"""Taken, by their names in the file and in `SamplingParams`. `do_sample` is not looked at, as in vLLM."""


def sampling_defaults(folder: Path, source: str = MODEL) -> dict[str, float]:
    """Return a model's sampling defaults, by names of `SamplingParams`, from its `generation_config.json`.

    Args:
        folder: the model's. Without a file the result is empty.
        source: `model` for these defaults; `neutral` for an empty result.

    Raises:
        UserError: the file is damaged or has a value out of its limits; or there is no such source.
    """
    path = folder / FILE
    if choice("generation_config", source, (MODEL, NEUTRAL)) == NEUTRAL or not path.exists():
        return {}
    raw = read_object(path)
    given = {name: raw[name] for name in FIELDS if raw.get(name) is not None}
    try:
        checked = SamplingParams(**given)
    except UserError as error:
        raise UserError(
            f"{path}: {error}; `--generation-config neutral` leaves the file out"
        ) from None
    return {name: getattr(checked, name) for name in given}
