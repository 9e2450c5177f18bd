"""Loading weights: the right tensors, in the right format, without a second copy, every mistake named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from common.errors import UserError
from common.models.checkpoint import load_weights


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


def test_every_tensor_arrives_and_the_head_shares_the_embedding(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    net = load(tmp_path, tied=TIED)
    for name, expected in tensors().items():
        assert torch.equal(net.state_dict()[name], expected), name
    assert net.head.weight is net.embed.weight
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert net.scratch.is_meta  # not in a checkpoint: whoever registered it fills it


def test_floats_are_converted_and_integers_are_not(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    net = load(tmp_path, torch.bfloat16, tied=TIED)
    assert net.layer.weight.dtype == torch.bfloat16 and net.kept.dtype == torch.int64
    assert torch.equal(net.layer.weight, tensors()["layer.weight"].bfloat16())


def test_a_stored_copy_of_a_tied_head_is_ignored(tmp_path):
    save_file({**tensors(), "head.weight": torch.zeros(9, 9)}, tmp_path / "model.safetensors")
    assert load(tmp_path, tied=TIED).head.weight.shape == (5, 3)


def test_an_untied_head_is_loaded(tmp_path):
    save_file({**tensors(), "head.weight": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).head.weight, torch.ones(5, 3))


def test_gpt2_prefix_transposed_weights_and_mask_buffers(tmp_path):
    stored = {f"transformer.{name}": tensor for name, tensor in tensors().items()}
    stored["transformer.layer.weight"] = tensors()["layer.weight"].t().contiguous()
    stored["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(stored, tmp_path / "model.safetensors")

    def rename(name: str) -> str | None:
        return None if name.endswith(".attn.bias") else name.removeprefix("transformer.")

    def transform(name: str, tensor: Tensor) -> Tensor:
        return tensor.t() if name == "layer.weight" else tensor

    net = load(tmp_path, rename=rename, transform=transform, tied=TIED)
    assert torch.equal(net.layer.weight, tensors()["layer.weight"])
    assert net.layer.weight.is_contiguous()


def shard(folder: Path) -> None:
    parts: list[dict[str, Tensor]] = [{}, {}]
    weight_map = {}
    for index, (name, tensor) in enumerate(tensors().items()):
        parts[index % 2][name] = tensor
        weight_map[name] = f"model-{index % 2}.safetensors"
    for index, part in enumerate(parts):
        save_file(part, folder / f"model-{index}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_put_together(tmp_path):
    shard(tmp_path)
    net = load(tmp_path, tied=TIED)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in tensors().items())


def test_an_index_must_name_shards_that_are_there(tmp_path):
    shard(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"names the shard 'model-1\.safetensors', which is not in that folder"
    ):
        load(tmp_path, tied=TIED)
    (tmp_path / "inner").mkdir()
    save_file(tensors(), tmp_path / "other.safetensors")
    outside = {"weight_map": dict.fromkeys(tensors(), "../other.safetensors")}
    (tmp_path / "inner" / "model.safetensors.index.json").write_text(json.dumps(outside))
    with pytest.raises(UserError, match=r"\.\./other\.safetensors"):
        load(tmp_path / "inner", tied=TIED)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="holds a list"):
        load(tmp_path, tied=TIED)


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


def test_a_refused_checkpoint_leaves_the_model_as_it_was(tmp_path):
    save_file({"embed.weight": torch.rand(5, 3)}, tmp_path / "model.safetensors")
    net = meta_net()
    with pytest.raises(UserError):
        load_weights(net, tmp_path, device="cpu", dtype=torch.float32, tied=TIED)
    assert net.embed.weight.is_meta


def test_long_lists_are_cut(tmp_path):
    save_file({f"extra.{i:02}": torch.zeros(1) for i in range(30)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"30 unexpected: extra\.00, .*, extra\.09 and 20 more$"):
        load(tmp_path, tied=TIED)


def test_two_names_for_one_tensor_are_refused(tmp_path):
    save_file({**tensors(), "x.embed.weight": torch.rand(5, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"stores embed\.weight twice"):
        load(tmp_path, tied=TIED, rename=lambda name: name.removeprefix("x."))


def test_integers_are_not_taken_for_weights(tmp_path):
    save_file(
        {**tensors(), "layer.weight": torch.ones(4, 3, dtype=torch.int8)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UserError, match=r"layer\.weight of type I8 instead of floating point"):
        load(tmp_path, tied=TIED)


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_no_second_copy_in_memory(tmp_path):
    """16 tensors of 16 MiB: the peak must stay near one model, in float32 and converted from bfloat16."""
    each = 1 << 22
    for dtype in (torch.float32, torch.bfloat16):
        save_file(
            {f"{i}.weight": torch.zeros(each // 1024, 1024, dtype=dtype) for i in range(16)},
            tmp_path / "model.safetensors",
        )
        script = f"""
            import torch
            from torch import nn
            from common.models.checkpoint import load_weights

            def anonymous():  # without the mapped pages of the file, which the system can take back
                status = open("/proc/self/status").read()
                return int(status.split("RssAnon:")[1].split()[0]) * 1024

            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(1024, {each // 1024}, bias=False) for _ in range(16)))
            before, peak = anonymous(), 0

            def watch(name, tensor):
                global peak
                peak = max(peak, anonymous())
                return tensor

            load_weights(model, {str(tmp_path)!r}, device="cpu", dtype=torch.float32, transform=watch)
            print(max(peak, anonymous()) - before)
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert grown < 16 * each * 4 * 1.2
