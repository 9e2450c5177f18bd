"""Find a model's folder: one of the bundled models, a local folder, or a model of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import UserError, shown
from common.models.bundled import BUNDLED, damage, fetch_bundled
from common.names import near
from common.paths import expand

RANDOM = "random:"
"""Begins the name of a model with random weights, `random:SHAPE`. It has no folder."""
_FILES = ["*.safetensors", "*.json", "tokenizer.model"]
_TEMPLATES = ["chat_template.jinja", "additional_chat_templates/*.jinja"]


def model_folder(name: str | Path, *, contents: bool = False) -> Path:
    """Return the folder with `config.json`, weights and tokenizer of the model called `name`.

    Args:
        name: a bundled model (`smollm2`, `gemma3-270m`), a local folder, or a hub id like
            `Qwen/Qwen3-0.6B`. Bundled and hub models are fetched when they are not in the cache.
        contents: read a stored bundled model completely, to check that it is undamaged.

    Raises:
        UserError: there is no such model, or it could not be fetched.
    """
    if str(name) in BUNDLED:
        return fetch_bundled(str(name), contents=contents)
    return local(name) or _fetch_from_hub(str(name))


def stored(name: str) -> Path | None:
    """Return the folder of a model that need not be fetched: a local one, or a bundled one in the cache.

    None for any other. Raises `UserError` for a name that no model can have.
    """
    if name in BUNDLED:
        return None if damage(name) else fetch_bundled(name)
    return local(name)


def local(name: str | Path) -> Path | None:
    """Return the local folder called `name`, or None if that is a bundled model or may be a hub id.

    Raises:
        UserError: the name is no folder, bundled model or hub id, or the folder has no model.
    """
    if str(name) in BUNDLED:
        return None
    folder = expand("model", name)
    try:
        if str(name) and folder.is_dir():  # Path("") is the current directory
            if not (folder / "config.json").exists():
                raise UserError(f"the model folder {folder} has no config.json")
            return folder
        if folder.is_file():
            raise UserError(
                f"model is {shown(str(name))}, which is a file, but must be a folder with config.json, "
                "tokenizer.json and weights in safetensors files"
            )
        looks_local = (
            isinstance(name, Path) or folder.exists() or name.startswith((".", "~", "/"))
        )
    except OSError as error:  # longer than names can be, or without the right to look inside
        raise UserError(
            f"model is {str(name)!r}, which cannot be looked at ({error.strerror})"
        ) from None
    if looks_local or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        if str(name).startswith(RANDOM):
            raise UserError(
                f"model is {shown(str(name))}, of random weights, which are in no folder"
            )
        known = ", ".join([*BUNDLED, f"{RANDOM}SHAPE"])
        meant = near(str(name).lower(), BUNDLED)
        raise UserError(
            f"model is {shown(str(name))}, which is none of {known}, a folder, or a hub id such as "
            f"Qwen/Qwen3-0.6B{meant}"
        )
    return None


def _fetch_from_hub(name: str) -> Path:
    """Download a model's safetensors, configuration and tokenizer into the hub's cache; return the folder."""
    # Takes half a second, and most runs need none.
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=[*_FILES, *_TEMPLATES],
                ignore_patterns=[
                    f"*/{name}" for name in _FILES
                ],  # other formats, in folders of their own
            )
        )
    except errors.GatedRepoError:
        raise UserError(
            f"the hub model {name!r} is gated: accept its terms there and run `hf auth login`"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        bundled = ", ".join(BUNDLED)
        raise UserError(
            f"model is {name!r}, which is none of {bundled}, a folder, or a model on the hub"
        ) from None
    except Exception as error:  # network, disk, proxy, server: each with a type of its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"the hub model {name!r} could not be fetched, check the network ({reason})"
        ) from None
