"""Load a Hugging Face folder of safetensors into a model that was built on the `meta` device.

Format: https://github.com/huggingface/safetensors#format (a JSON header, then the tensors' bytes). The header
is enough to find every mistake, so all of them are reported together, before the first weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from common.errors import UserError, shown
from common.models.fields import Field, read_object

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = Field("weight_map", str)
_NAMES_SHOWN = 10
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Any of these can be rounded to any other. Other formats mean something only to the module that asks for
exactly them: packed integers, or eight bits with a scale.
"""


def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    rename: Callable[[str], str | None] = lambda name: name,
    transform: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    tied: Mapping[str, str] | None = None,
    place: Callable[[nn.Module, str, Tensor], None] | None = None,
    read: Callable[[str, Any, str], Tensor] | None = None,
) -> None:
    """Replace all parameters and persistent buffers of `model`, in place, by a checkpoint's tensors.

    folder: holds `model.safetensors`, or shards and `model.safetensors.index.json`.
    device, dtype: of the loaded weights; integers and eight-bit floats keep their dtype.
    rename: returns the model's name for a checkpoint's tensor, or None to ignore it.
    transform: given the model's name and the tensor (or a `meta` tensor), returns it in the model's layout.
    tied: maps a parameter to the one whose memory it shares, such as an output head to the embedding. The
        checkpoint has them under either name, or the same under both.
    place: called with the model, a name and a finished tensor to store it, instead of `assign` (which
        replaces the parameter). It may replace a layer, such as by a quantized one, so that old and new
        layers are never all in memory.
    read: given the model's name, an open file and the tensor's name in it, returns the tensor or a part of
        it, instead of `transform`.

    The files are memory-mapped and each tensor is copied once, straight to its device and format, so the peak
    is the finished model and the largest single tensor, not two models. Buffers, such as quantized weights,
    stay mapped on a CPU, so that processes share their memory. Afterwards no parameter requires a gradient.
    Buffers registered with `persistent=False` are in no checkpoint and stay as they are.

    Where the model has integers or eight-bit floats (a quantized linear has), the file must hold exactly
    those, and they are kept. A buffer of floats is kept as the file has it: scales are not to be rounded.

    Raises:
        UserError: there is no checkpoint, a file is damaged, or tensors are missing, unexpected or misshapen.
            Biases of zeros are never unexpected: tools write them for layers that have none.
    """
    folder = Path(folder)
    tied = dict(tied or {})
    put = place or assign
    expected = model.state_dict(keep_vars=True)  # tied ones under each of their names
    with ExitStack() as stack:
        stored = _stored(folder, stack)
        sources = _match(folder, stored, expected, rename, transform, tied)
        for target, source in sources.items():
            file = stored[source]
            tensor = (
                read(target, file, source)
                if read
                else transform(target, file.get_tensor(source))
            )
            # One number by itself is a vector of one.
            tensor = tensor.reshape(tensor.shape or (1,))
            wanted = expected[target]
            rounded = isinstance(wanted, nn.Parameter) and wanted.dtype in _FLOATS
            if rounded or torch.device(device).type != "cpu":
                # Copied even where nothing is converted: a parameter's file may change while the model lives.
                kept = dtype if rounded else tensor.dtype
                tensor = torch.empty(tensor.shape, device=device, dtype=kept).copy_(tensor)
            put(model, target, tensor)
    for target, source in tied.items():
        if source in expected:
            put(model, target, model.get_parameter(source))


def stores_once(
    folder: str | Path,
    tied: Mapping[str, str],
    rename: Callable[[str], str | None] = lambda name: name,
) -> bool:
    """Return True if the checkpoint has one matrix, not two, for each pair of output head and embedding.

    The matrix may stand under either name, or be the same under both.

    Args:
        folder: the checkpoint's.
        tied: maps the name of an output head's weight to that of the embedding.
        rename: returns the model's name for a checkpoint's tensor; None: the tensor is ignored.
    """
    with ExitStack() as stack:
        stored = _stored(Path(folder), stack)
        named = {rename(name): (file, name) for name, file in stored.items()}
        for head, embedding in tied.items():
            owner = head.rpartition(".")[0] + "."
            if not any(name is not None and name.startswith(owner) for name in named):
                continue
            if embedding in named and not (
                head in named and _same_tensor(named[head], named[embedding])
            ):
                return False
    return True


def _same_tensor(*stored: tuple[Any, str]) -> bool:
    """Return True if two tensors, `stored` as (open file, name) each, are equal; they are memory-mapped."""
    one, other = (file.get_tensor(name) for file, name in stored)
    return one.dtype == other.dtype in _FLOATS and torch.equal(one, other)


def _stored(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return {tensor name: the open safetensors file that holds it}; `stack` closes the files."""
    stored: dict[str, Any] = {}
    for file in [_open(path, stack) for path in _files(folder)]:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in stored:
                raise UserError(
                    f"{folder} stores {_printable(name)} twice, in two of its shards"
                )
            stored[name] = file
    return stored


def _files(folder: Path) -> Iterator[Path]:
    """Yield the safetensors files that make up the checkpoint in `folder`."""
    if (folder / _SINGLE).exists():
        yield folder / _SINGLE
        return
    index = folder / _INDEX
    if not index.exists():
        if any(folder.glob("pytorch_model*.bin")):
            raise UserError(
                f"{folder} holds pytorch_model.bin, but only safetensors files are supported"
            )
        raise UserError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
    raw = read_object(index)
    try:
        weight_map = Field("weight_map", dict).read(raw)
        shards = {
            _SHARD.check(shard, f"the shard of {_printable(name)}")
            for name, shard in weight_map.items()
        }
    except UserError as error:
        raise UserError(f"{index} is not an index of safetensors shards: {error}") from None
    there = {path.name for path in folder.iterdir() if path.is_file()}
    for shard in sorted(shards):
        if shard not in there:
            raise UserError(
                f"{index} names the shard '{_printable(shard)}', which is not in that folder"
            )
        yield folder / shard


def _open(path: Path, stack: ExitStack) -> Any:
    if not path.is_file():
        raise UserError(f"{path} must be a regular file, but is none")
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or incomplete, fetch it again ({error})") from None


def _match(
    folder: Path,
    stored: Mapping[str, Any],
    expected: Mapping[str, Tensor],
    rename: Callable[[str], str | None],
    transform: Callable[[str, Tensor], Tensor],
    tied: Mapping[str, str],
) -> dict[str, str]:
    """Return {the model's name: the checkpoint's name} of tensors; raise one `UserError` with every
    mismatch.

    folder: for the message. stored: the open file of each tensor in the checkpoint. expected: the model's
        tensors by name. rename, transform, tied: as given to `load_weights`, from the checkpoint's names and
        layouts to the model's.
    """
    sources: dict[str, str] = {}
    unexpected = []
    misshapen = []
    biases = []
    owners = {name.rpartition(".")[0] for name in expected}
    for source, file in stored.items():
        name = rename(source)
        if name is None:
            continue
        target = tied.get(name, name)
        if target not in expected:
            owner, _, leaf = target.rpartition(".")
            if leaf != "bias" or owner not in owners:
                unexpected.append(source)
            elif bool(file.get_tensor(source).any()):
                biases.append(source)
            continue
        if target in sources:
            if rename(sources[target]) != name:  # tied, and stored under both names
                continue
            raise UserError(
                f"{folder} stores {target} twice, as {sources[target]} and as {source}"
            )
        sources[target] = source
        header = file.get_slice(source)
        want, have = tuple(expected[target].shape), tuple(header.get_shape()) or (1,)
        # No file can ask for a tensor that torch cannot even describe.
        if prod(have) == prod(want):
            have = tuple(transform(target, torch.empty(have, device="meta")).shape)
        if have != want:
            misshapen.append(f"{target} {list(have)} instead of {list(want)}")
        elif problem := _other_format(expected[target].dtype, file.get_tensor(source).dtype):
            misshapen.append(f"{target} {problem}")
    missing = [name for name in expected if name not in sources and name not in tied]
    found = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    found["with a bias that is not zero, where the model has none"] = biases
    problems = [
        f"{len(names)} {kind}: {_some(names)}" for kind, names in found.items() if names
    ]
    if problems:
        raise UserError(f"the weights in {folder} do not fit the model; {'; '.join(problems)}")
    return sources


def _other_format(expected: torch.dtype, stored: torch.dtype) -> str:
    """Return why a tensor of dtype `stored` cannot become one of `expected`; an empty string if it can."""
    fits = stored in _FLOATS if expected in _FLOATS else stored == expected
    wanted = "floating point" if expected in _FLOATS else expected
    return "" if fits else f"of type {str(stored).removeprefix('torch.')} instead of {wanted}"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(_printable, names[:_NAMES_SHOWN])) + (
        f" and {more} more" if more > 0 else ""
    )


def _printable(name: str) -> str:
    """Return a tensor's name as one line: quoted and shortened if it is long or not printable."""
    return name if name.isprintable() and len(name) < 200 else shown(name)[1:-1]


def assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer `name` of `model`, such as `layers.0.norm.weight`, by `tensor`."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    elif isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor  # the very same one: that is what makes it tied
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
