"""Files that come with a model are read with a limit, and only regular ones: nothing waits for a pipe."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.files import read_bytes, whole
from common.models.checkpoint import load_weights
from common.models.config import ModelConfig
from common.models.fields import MOST_BYTES
from common.models.gguf_import import import_gguf
from common.sampling.defaults import sampling_defaults
from common.text.tokenizer import Tokenizer
from common.text.tokenizer_files import (
    MOST_TEMPLATE_BYTES,
    MOST_TEMPLATES,
    MOST_TOKENIZER_BYTES,
)
from tests.common import tiny_gguf


def _template(folder: Path) -> None:
    Tokenizer(folder).chat([{"role": "user", "content": "hi"}])


def _weights(folder: Path) -> None:
    load_weights(nn.Linear(1, 1), folder, device="cpu", dtype=torch.float32)


READERS: dict[str, tuple[int, Callable[[Path], object]]] = {
    "config.json": (MOST_BYTES, ModelConfig.from_folder),
    "generation_config.json": (MOST_BYTES, sampling_defaults),
    "model.safetensors.index.json": (MOST_BYTES, _weights),
    "tokenizer.json": (MOST_TOKENIZER_BYTES, Tokenizer),
    "tokenizer_config.json": (MOST_BYTES, Tokenizer),
    "special_tokens_map.json": (MOST_BYTES, Tokenizer),
    "chat_template.json": (MOST_BYTES, _template),
    "chat_template.jinja": (MOST_TEMPLATE_BYTES, _template),
    "additional_chat_templates/tool_use.jinja": (MOST_TEMPLATE_BYTES, _template),
}
"""Files of a model's folder: the bytes each may have, and what reads it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without weights and without a chat template."""
    parent = tmp_path_factory.mktemp("made")
    tiny_gguf.write(parent / "tiny.gguf", "gemma3")
    import_gguf(parent / "tiny.gguf", parent / "model")
    (parent / "model" / "model.safetensors").unlink()
    (parent / "model" / "additional_chat_templates").mkdir()
    return parent / "model"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def _to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _to_pipe(path: Path) -> None:
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    path.symlink_to(pipe)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [_to_device, _to_pipe, os.mkfifo])
def test_a_file_without_an_end_is_refused_by_its_name(
    folder: Path, name: str, make: Callable[[Path], None]
):
    path = folder / name
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(
        UserError, match=f"{name} is a pipe or a device, but must be a regular file"
    ):
        READERS[name][1](folder)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("linked", [False, True])
def test_a_file_that_is_too_large_is_refused_with_its_limit(
    folder: Path, name: str, linked: bool
) -> None:
    """It is sparse, and so large that no memory could hold it."""
    path, (most, read) = folder / name, READERS[name]
    path.unlink(missing_ok=True)
    large = path.with_name("large") if linked else path
    with large.open("wb") as file:
        file.truncate(1 << 42)
    if linked:
        path.symlink_to(large)
    with pytest.raises(UserError, match=f"{name} has {1 << 42} bytes, but .* at most {most}$"):
        read(folder)


def test_a_file_may_have_exactly_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(UserError, match="has 5 bytes, but a file of this kind has at most 4"):
        read_bytes(path, 4)


def test_a_file_that_says_it_is_empty_has_its_limit_too() -> None:
    """As those of the kernel do, some of which have no end."""
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(UserError, match=r"/proc/self/status has 11 bytes, but .* at most 10"):
        read_bytes(Path("/proc/self/status"), 10)


@pytest.mark.parametrize("name", READERS)
def test_a_folder_in_place_of_a_file_is_named(folder: Path, name: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        READERS[name][1](folder)


def test_weights_are_a_regular_file(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors must be a regular file"):
        _weights(folder)


def test_templates_have_a_limit_in_number(folder: Path) -> None:
    for number in range(MOST_TEMPLATES + 1):
        (folder / "additional_chat_templates" / f"{number}.jinja").write_text("hi")
    with pytest.raises(UserError, match=f"has more than {MOST_TEMPLATES} templates"):
        _template(folder)
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "chat_template.jinja").write_text("hi")
    _template(folder)


def test_two_writers_of_one_number_write_their_own_files(tmp_path: Path) -> None:
    """As in two containers, whose processes have the number 1 and which share a folder."""
    target = tmp_path / "weights"
    with whole(target) as first:
        first.write_text("first, and more of it")
        with whole(target) as second:
            assert second != first, "both write to one file"
            second.write_text("second")
        assert target.read_text() == "second"
    assert target.read_text() == "first, and more of it", "half of one, and half of the other"
    assert [each.name for each in tmp_path.iterdir()] == ["weights"]
