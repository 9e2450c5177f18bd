"""Read a checkpoint's ``quantization_config``, and refuse settings that this engine cannot compute.

Each of the methods (``quant_method``) has its own names for the same facts. A scheme that is not known is
refused by its name: numbers that are read in a wrong format still make fluent text, only worse. In
compressed-tensors the fields of a scheme are a closed list, so any other field is refused. Configurations of
the other methods may have fields about the tool that wrote them; there only fields that change what the
numbers mean are refused.

Formats: https://github.com/vllm-project/compressed-tensors (``compressed-tensors``), ``fp8`` as in
    https://huggingface.co/Qwen/Qwen3-8B-FP8, GPTQ as AutoGPTQ and GPTQModel write it, AWQ as AutoAWQ writes
    it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import UserError, shown
from common.models.fields import Field
from phases.appendix.checkpoint_formats.layouts import TensorLayout
from quant.formats import BLOCK, FP8, FP8_BLOCK, Activations, Scheme

_BITS = Field("bits num_bits", int, 1, 32)
_TYPE = Field("type", str, default="int", choices=("int", "float"))
_GROUP = Field("group_size q_group_size", int, -1, 1 << 20)
_UNREAD = {
    "gptq": "meta_quantizer rotation is_marlin_format adapter dynamic modules_in_block_to_quantize",
    "compressed-tensors": "sparsity_config transform_config kv_cache_scheme",
}
"""Fields that change what numbers mean, or give layers a format of their own, if they say anything."""
LINEAR = ("Linear",)
_PATTERN = 200
"""The longest pattern for names, in characters."""
_GROUP_FIELDS = ("targets", "weights", "input_activations", "output_activations", "format")
_ARGUMENTS = (
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
)
_FLOATS = tuple(
    f"{prefix}{kind}"
    for prefix in ("torch.", "")
    for kind in ("float16", "bfloat16", "float32")
)
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
"""What checkpoints put before our names of layers."""


Rule = tuple[tuple[str, ...], TensorLayout]
"""Targets, and the layout of the layers that they name."""


@dataclass(frozen=True)
class Stored:
    """The storage format of each layer's weight in a checkpoint.

    rules: pairs (patterns of layer names, layout); the first pair with a matching pattern decides.
    plain: patterns of layers that are not quantized, whatever the rules say.
    """

    rules: tuple[Rule, ...]
    plain: tuple[str, ...]

    def layout(self, name: str) -> TensorLayout | None:
        """Return the layout in which layer `name` of the model is stored; None if it is not quantized.

        name: such as `layers.0.mlp.up_proj`, without the checkpoint's prefix.
        """
        if any(matches(each, name) for each in self.plain):
            return None
        for targets, layout in self.rules:
            if any(each == "Linear" or matches(each, name) for each in targets):
                return layout
        return None


def stored(raw: Mapping[str, Any]) -> Stored:
    """Return the format (`Stored`) that a checkpoint's ``quantization_config`` (`raw`) describes.

    Raises:
        UserError: the method or a setting is not supported; the message names it.
    """
    method = Field("quant_method", str, choices=tuple(_METHODS)).read(raw)
    try:
        for name in _UNREAD.get(method, "").split():
            if raw.get(name):
                raise UserError(f"{name} is {shown(raw[name])}, but is not supported")
        return _METHODS[method](raw)
    except UserError as error:
        raise UserError(f"quantization_config: {method}: {error}") from None


def matches(pattern: str, name: str) -> bool:
    """Return True if `pattern`, from a checkpoint's configuration, matches the model's layer `name`.

    pattern: the layer's full name in the checkpoint, or ``re:`` and a regular expression that its beginning
        must match; outside of the blocks, also the last part of the name, such as `lm_head`.
    name: the layer's name in the model, without the checkpoint's prefix, such as `layers.0.mlp.up_proj`.
    """
    names = [prefix + name for prefix in _PREFIXES]
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], each) for each in names)
    return pattern in names or (
        not name.startswith("layers.") and pattern == name.rpartition(".")[2]
    )


def _parts(
    raw: Mapping[str, Any], name: str, start: str = ".*", end: str = ""
) -> tuple[str, ...]:
    """Return a pattern ``re:{start}TEXT{end}`` of layer names for each TEXT in the list `raw[name]`.

    Empty if there is no such list. start, end: regular expressions for what may stand before and after TEXT
    in a layer's name.
    """
    given = Field(name, list, default=[]).read(raw)
    return tuple(
        f"re:{start}{re.escape(Field(name, str).check(part, name))}{end}" for part in given
    )


def _patterns(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the list `raw[name]` of layer names and ``re:`` patterns; empty if it is missing.

    Raises:
        UserError: an entry is no text, or a pattern that may take forever to match.
    """
    given = Field(name, list, default=[]).read(raw)
    for pattern in given:
        if Field(name, str).check(pattern, name).startswith("re:"):
            # Repeated groups, and many repetitions after each other, are how a short pattern takes years.
            too_slow = (
                re.search(r"\)[*+{]", pattern)
                or len(re.findall(r"(?<!\\)[*+?{]", pattern)) > 4
            )
            try:
                re.compile(pattern[3:])
            except (re.error, RecursionError):
                too_slow = True
            if too_slow or len(pattern) > _PATTERN:
                raise UserError(
                    f"{name} {shown(pattern)} is too involved, or no regular expression"
                )
    return tuple(given)


def _fp8(raw: Mapping[str, Any]) -> Stored:
    """Return the storage format of an `fp8` configuration `raw`: weights of type e4m3.

    A weight has a scale for each block of 128 x 128, or one in all; inputs get their scales at run time.

    Raises:
        UserError: a setting is not supported.
    """
    _only(raw, "activation_scheme", "dynamic")
    _only(raw, "fmt", "e4m3", missing=True)
    _only(raw, "weight_block_size", [BLOCK, BLOCK], missing=True)
    layout = TensorLayout("plain", FP8_BLOCK, "weight_scale_inv")
    if raw.get("weight_block_size") is None:
        layout = TensorLayout("plain", FP8, one_scale=True)
    skipped: tuple[str, ...] = ()
    # The beginning or the end of a layer's name.
    for name in ("modules_to_not_convert", "ignored_layers"):
        skipped += (
            _patterns(raw, name)
            + _parts(raw, name, "", r"(\.|$)")
            + _parts(raw, name, end="$")
        )
    return Stored(((LINEAR, layout),), ("lm_head", *skipped))


def _gptq(raw: Mapping[str, Any]) -> Stored:
    """Return the storage format of a GPTQ configuration `raw`: four-bit weights in groups of inputs.

    With act-order (`desc_act`), the tensor `g_idx` gives the group of each input.
    """
    _only(raw, "bits", 4)
    head = () if Field("lm_head", bool, default=False).read(raw) else ("lm_head",)
    version = Field(
        "checkpoint_format format", str, default="gptq", choices=("gptq", "gptq_v2")
    ).read(raw)
    zeros = not Field("sym", bool, default=True).read(raw)
    scheme = Scheme("gptq", "int4", "group", group=_GROUP.read(raw), zeros=zeros)
    layout = TensorLayout("gptq", scheme, "scales", one_less=version == "gptq")
    return Stored(((LINEAR, layout),), head)


def _awq(raw: Mapping[str, Any]) -> Stored:
    """Return the storage format of an AutoAWQ configuration `raw`: 4-bit weights with zero points.

    Inputs form groups, which have a scale and a zero point for each output.
    """
    _only(raw, "bits", 4)
    _only(raw, "version", "gemm", missing=True)
    _only(raw, "zero_point", True, missing=True)
    scheme = Scheme("awq", "int4", "group", group=_GROUP.read(raw), zeros=True)
    skipped = _parts(raw, "modules_to_not_convert")
    return Stored(((LINEAR, TensorLayout("awq", scheme, "scales")),), ("lm_head", *skipped))


def _compressed(raw: Mapping[str, Any]) -> Stored:
    """Return the storage format of a compressed-tensors configuration `raw`.

    The configuration has groups of layers, each with a format of its own.
    """
    _only(raw, "quantization_status", "compressed", missing=True)
    groups = Field("config_groups", dict).read(raw)
    rules = []
    for key, given in groups.items():
        try:
            group = Field(key, dict).check(given, key)
            _known(group, _GROUP_FIELDS)
            form = group.get("format") or raw.get("format")
            rules.append((_patterns(group, "targets"), _compressed_layout(group, form)))
        except UserError as error:
            raise UserError(f"{shown(key)}: {error}") from None
    # "Linear" means all of them, so the groups that name layers come first.
    rules.sort(key=lambda rule: "Linear" in rule[0])
    return Stored(tuple(rules), _patterns(raw, "ignore"))


_FORMATS = {
    "float-quantized": ("fp8",),
    "int-quantized": ("int8",),
    "naive-quantized": ("fp8", "int8"),
    "pack-quantized": ("int4", "int8"),
}
"""The numbers that each holds."""
_NUMBERS = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4"}


def _compressed_layout(group: Mapping[str, Any], form: Any) -> TensorLayout:
    form = Field("format", str, choices=tuple(_FORMATS)).check(form, "format")
    if group.get("output_activations"):
        raise UserError("output_activations are not supported")
    weights = Field("weights", dict).read(group)
    _known(weights, _ARGUMENTS, "weights.")
    Field("scale_dtype", str, default="", choices=_FLOATS).read(weights)
    bits, kind = _BITS.read(weights), _TYPE.read(weights)
    numbers: Any = _NUMBERS.get((bits, kind))
    if numbers not in _FORMATS[form]:
        raise UserError(f"weights of {bits} bits and type {kind} are not supported in {form}")
    _only(weights, "dynamic", False, missing=True)
    strategy = Field("strategy", str, choices=("tensor", "channel", "block", "group")).read(
        weights
    )
    if strategy == "block":
        _only(weights, "block_structure", [BLOCK, BLOCK])
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise UserError(
            f"actorder is {shown(weights['actorder'])}, but must be weight or static"
        )
    one = strategy == "tensor" and form != "pack-quantized"
    scheme = Scheme(
        name=f"{form}-{numbers}",
        weights=numbers,
        scales="channel" if one else strategy,
        group=_GROUP.read(weights) if strategy == "group" else 0,
        zeros=not Field("symmetric", bool, default=True).read(weights),
        activations=_activations(group),
    )
    return TensorLayout(
        "packed" if form == "pack-quantized" else "plain", scheme, one_scale=one
    )


def _activations(group: Mapping[str, Any]) -> Activations | None:
    """Return the format to which layers round their inputs, "fp8" or "int8"; None: no rounding.

    group: an entry of compressed-tensors' `config_groups`. Each token's input has its own scale.

    Raises:
        UserError: the inputs have another format.
    """
    name = "input_activations"
    if group.get(name) is None:
        return None
    given = Field(name, dict).read(group)
    _known(given, _ARGUMENTS, f"{name}.")
    kind, strategy = _TYPE.read(given), given.get("strategy") or "token"
    eight = (
        _BITS.read(given) == 8 and given.get("dynamic") and given.get("symmetric") is not False
    )
    # An input of fp8 in groups has finer scales than a token's.
    if not eight or strategy not in (("token", "group") if kind == "float" else ("token",)):
        raise UserError(
            f"{name} is {shown(given)}, but only 8 dynamic bits for each token are supported"
        )
    return "fp8" if kind == "float" else "int8"


def _known(raw: Mapping[str, Any], fields: Sequence[str], where: str = "") -> None:
    """Raise `UserError` if `raw` has a field whose name is not in `fields`.

    where: what stands before the field's name in the error, such as "weights.".
    """
    for name in raw:
        if name not in fields:
            raise UserError(f"{where}{shown(name)} is not known, only {', '.join(fields)}")


def _only(raw: Mapping[str, Any], name: str, value: Any, missing: bool = False) -> None:
    """Raise `UserError` unless `raw[name]` equals `value`; the case of letters does not matter.

    missing: whether the field may also be absent.
    """
    given = raw.get(name)
    if given is None and missing:
        return
    same = (
        given.lower() == value
        if isinstance(given, str)
        else given == value and type(given) is type(value)
    )
    if not same:
        raise UserError(f"{name} is {shown(given)}, but only {shown(value)} is supported")


_METHODS: dict[str, Callable[[Mapping[str, Any]], Stored]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
