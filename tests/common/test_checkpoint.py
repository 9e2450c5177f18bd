"""Loading weights: the right tensors, in the right format, without a second copy, every mistake named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from common.errors import UserError
from common.models.checkpoint import load_weights, stores_once


class Net(nn.Module):
    """An embedding, a tied head, a linear layer, and both kinds of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 4)
        self.head = nn.Linear(3, 5, bias=False)
        self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


TIED = {"head.weight": "embed.weight"}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.rand(5, 3, generator=generator),
        "layer.weight": torch.rand(4, 3, generator=generator),
        "layer.bias": torch.rand(4, generator=generator),
        "kept": torch.tensor([7, 8]),
    }


def meta_net() -> Net:
    with torch.device("meta"):
        return Net()


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> Net:
    net = meta_net()
    load_weights(net, folder, device="cpu", dtype=dtype, **options)
    return net


@pytest.mark.parametrize("shards", [1, 2])
def test_every_tensor_arrives_and_the_head_shares_the_embedding(tmp_path, shards):
    if shards == 1:
        save_file(tensors(), tmp_path / "model.safetensors")
    else:
        shard(tmp_path)
    net = load(tmp_path, tied=TIED)
    for name, expected in tensors().items():
        assert torch.equal(net.state_dict()[name], expected), name
    assert net.head.weight is net.embed.weight
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert net.scratch.is_meta  # not in a checkpoint: whoever registered it fills it


def test_tied_tensors_are_stored_under_either_name_or_under_both(tmp_path):
    stored, path = tensors(), tmp_path / "model.safetensors"
    embedding = stored.pop("embed.weight")
    for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        save_file({**stored, **{name: embedding.clone() for name in names}}, path)
        assert stores_once(tmp_path, TIED)
        net = load(tmp_path, tied=TIED)
        assert net.head.weight is net.embed.weight and torch.equal(
            net.embed.weight, embedding
        ), names


@pytest.mark.parametrize(
    "head", [torch.zeros(5, 3), torch.zeros(9, 9), tensors()["embed.weight"].half()]
)
def test_another_matrix_is_not_tied(tmp_path, head):
    save_file({**tensors(), "head.weight": head}, tmp_path / "model.safetensors")
    assert not stores_once(tmp_path, TIED)


def shard(folder: Path) -> None:
    parts: list[dict[str, Tensor]] = [{}, {}]
    weight_map = {}
    for index, (name, tensor) in enumerate(tensors().items()):
        parts[index % 2][name] = tensor
        weight_map[name] = f"model-{index % 2}.safetensors"
    for index, part in enumerate(parts):
        save_file(part, folder / f"model-{index}.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )


def test_one_error_names_everything_that_does_not_fit(tmp_path):
    stored = {**tensors(), "layer.weight": torch.rand(3, 4), "rotary.inv_freq": torch.rand(2)}
    del stored["layer.bias"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    text = str(caught.value)
    assert "2 missing: layer.bias, head.weight" in text
    assert "1 unexpected: rotary.inv_freq" in text
    assert "1 misshapen: layer.weight [3, 4] instead of [4, 3]" in text


NO_FIT: dict[str, tuple[dict[str, Tensor], str]] = {
    "a bias": (
        {"embed.bias": torch.tensor([0.0, 0.0, 0.1])},
        r"1 with a bias that is not zero, .*: embed\.bias$",
    ),
    "a long list": (
        {f"extra.{i:02}": torch.zeros(1) for i in range(30)},
        r"30 unexpected: extra\.00, .*, extra\.09 and 20 more$",
    ),
    "two names of one": ({"x.embed.weight": torch.rand(5, 3)}, r"stores embed\.weight twice"),
}


@pytest.mark.parametrize(("more", "says"), NO_FIT.values(), ids=NO_FIT.keys())
def test_what_does_not_fit_is_named_in_one_line(tmp_path, more, says):
    save_file(
        {**tensors(), "embed.bias": torch.zeros(3), **more}, tmp_path / "model.safetensors"
    )
    net, options = meta_net(), {"tied": TIED, "rename": lambda name: name.removeprefix("x.")}
    with pytest.raises(UserError, match=says) as caught:
        load_weights(net, tmp_path, device="cpu", dtype=torch.float32, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert net.embed.weight.is_meta, "a refused checkpoint changes the model"


NO_NAMES = [1, None, [], "", "..", "m" * 300, "a\0b", "/etc/passwd", "../other.safetensors"]
INDICES = [{"weight_map": dict.fromkeys(tensors(), name)} for name in NO_NAMES]
INDICES += [
    [],
    {},
    {"weight_map": None},
    {"weight_map": []},
    {"weight_map": "model.safetensors"},
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: repr(index)[:60])
def test_an_index_must_name_shards_of_its_folder(tmp_path, index):
    (tmp_path / "inner").mkdir()
    save_file(tensors(), tmp_path / "other.safetensors")
    (tmp_path / "inner" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        UserError, match=r"index\.json (names the shard|is not an index|holds a list)"
    ) as caught:
        load(tmp_path / "inner", tied=TIED)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda path: path.unlink(), r"names the shard 'model-1\.safetensors', which is not in that folder"),
    (lambda path: save_file(tensors(), path), r"stores embed\.weight twice, in two of its shards"),
])  # fmt: skip
def test_shards_are_there_and_have_each_tensor_once(tmp_path, spoil, says):
    shard(tmp_path)
    spoil(tmp_path / "model-1.safetensors")
    with pytest.raises(UserError, match=says):
        load(tmp_path, tied=TIED)


class Packed(nn.Module):
    """What a quantized linear has instead of a weight: packed integers or eight-bit floats, and scales."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2).to(kind), requires_grad=False)
        self.register_buffer("packed", torch.zeros(4, 3, dtype=kind))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float32))


@pytest.mark.parametrize(
    "kind", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_packed_weights_keep_their_format_and_take_no_other(tmp_path, kind):
    stored = {
        "weight": torch.randint(0, 100, (4, 2)).to(kind),
        "packed": torch.randint(0, 100, (4, 3)).to(kind),
        "scale": torch.rand(4),
    }
    with torch.device("meta"):
        net = Packed(kind)
    save_file(stored, tmp_path / "model.safetensors")
    load_weights(net, tmp_path, device="cpu", dtype=torch.bfloat16)
    assert isinstance(net.weight, nn.Parameter)
    assert net.scale.dtype == torch.float32 and torch.equal(net.scale, stored["scale"]), (
        "scales were rounded"
    )
    for name in ("weight", "packed"):
        assert net.state_dict()[name].dtype == kind
        assert torch.equal(
            net.state_dict()[name].view(torch.uint8), stored[name].view(torch.uint8)
        ), name
    for other in {torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float32} - {
        kind
    }:
        save_file(
            {**stored, "packed": stored["packed"].to(other)}, tmp_path / "model.safetensors"
        )
        with pytest.raises(
            UserError, match=rf"misshapen: packed of type \w+ instead of {kind}"
        ):
            load_weights(net, tmp_path, device="cpu", dtype=torch.bfloat16)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the open files from /proc")
def test_a_refused_checkpoint_is_closed(tmp_path):
    shard(tmp_path)
    save_file({"more": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(UserError):
        load(tmp_path, tied=TIED)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not [
        fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(fd.resolve())
    ]


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(UserError, match=r"holds neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="only safetensors files are supported"):
        load(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:4], whole[:50], whole[:-4], b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged or incomplete"):
            load(tmp_path, tied=TIED)
