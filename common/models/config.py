"""Read a checkpoint's ``config.json`` into one set of field names for all families.

Hugging Face spells the same fact in several ways (``n_embd`` and ``hidden_size``, ``rope_theta`` and
``rope_parameters``). This module and its tables, `hf_fields`, are the only place that knows those
spellings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError, shown
from common.models import hf_fields as hf
from common.models.fields import Field, read_object
from common.text.tokenizer_files import eos_of_tokenizer


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    ``kind`` is ``default``, ``linear`` (every frequency divided by ``factor``), or the scaling of a longer
    context ``llama3`` or ``yarn``; fields have the names of ``config.json``. If ``attention_factor`` is None,
    it is computed from the other fields. ``share`` is the fraction of a head's dimensions, the first ones,
    that rotate.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        """Raise `UserError` for fields with which the scaling of llama3 or yarn would divide by zero."""
        if self.kind == "yarn" and self.theta <= 1:
            raise UserError(
                f"rope_theta is {self.theta}, but must be above 1 for the rope_type 'yarn'"
            )
        if self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"low_freq_factor is {self.low_freq_factor}, but must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class ExpertConfig:
    """Sizes of a mixture of experts, which replaces the MLP of a layer.

    ``count`` experts, of which a token uses ``top_k``; each has an inner size of ``intermediate_size``.
    ``normalize``: the weights of a token's ``top_k`` experts sum to 1. ``shared_size`` is the inner size of
    the expert that every token uses, 0 where there is none.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalize: bool = True
    shared_size: int = 0

    def __post_init__(self) -> None:
        """Raise `UserError` for more experts a token than there are."""
        if self.top_k > self.count:
            raise UserError(
                f"num_experts_per_tok is {self.top_k}, but there are {self.count} experts"
            )


@dataclass(frozen=True)
class DeltaConfig:
    """Layers of Gated DeltaNet (arXiv 2412.06464), which keep one state instead of keys and values.

    ``layers[i]`` is true where layer ``i`` is a layer of Gated DeltaNet; the others are layers of attention.
    Value head ``h`` has the queries and keys of key head ``h // (value_heads / key_heads)``. ``conv_width``
    is how many tokens, its own included, each token's convolution sees.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[bool, ...]

    def __post_init__(self) -> None:
        """Raise `UserError` unless key heads divide the value heads, and some layer has attention."""
        if self.value_heads % self.key_heads:
            raise UserError(
                f"linear_num_value_heads is {self.value_heads}, which is not a multiple of "
                f"linear_num_key_heads {self.key_heads}"
            )
        if all(self.layers):
            raise UserError(
                "layer_types has no full_attention, but a model needs a layer of attention"
            )

    @property
    def channels(self) -> int:
        """Return how many numbers of a token the convolution mixes: those of its queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of a request's state in a layer: ``[value heads, DK, DV]``, one matrix a head.

        DK, DV: numbers in a key and in a value of one head.
        """
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Return the shape of the past inputs that a convolution sees, ``[conv_width - 1, channels]``."""
        return self.conv_width - 1, self.channels


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer; sizes count numbers, heads or layers.

    ``sliding_windows[i]`` is layer ``i``'s window in tokens, the query's own position included, or ``None``
    for full attention. ``rope_local`` is the embedding of the sliding-window layers where a family gives
    them one of their own (Gemma 3). ``delta`` says which layers have no attention, if any. ``quantization``
    is the checkpoint's ``quantization_config``, unread, or ``None`` where the weights are plain numbers.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_scale: float
    rope: RopeConfig | None = None
    rope_local: RopeConfig | None = None
    sliding_windows: tuple[int | None, ...] = ()
    attention_bias: bool = False
    mlp_bias: bool = False
    final_soft_cap: float | None = None
    scale_by_layer: bool = False
    delta: DeltaConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    experts: ExpertConfig | None = None
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Raise `UserError` for shapes that no attention layer can have."""
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads is {self.num_heads}, which is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.rope is not None and int(self.rope.share * self.head_dim) % 2:
            raise UserError(
                f"head_dim is {self.head_dim}, but rotary embeddings turn pairs: it must be even"
            )
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        kinds = self.sliding_windows if self.delta is None else self.delta.layers
        if len(kinds) != self.num_layers:
            raise UserError(
                f"layer_types has {len(kinds)} entries for {self.num_layers} layers"
            )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Return the configuration that ``folder/config.json`` describes.

        Raises:
            UserError: the file is missing, is not JSON, or describes a model we do not have.
        """
        path = Path(folder) / "config.json"
        if not path.exists():
            raise UserError(f"{path} does not exist: a model folder needs a config.json")
        raw = read_object(path)
        with _named(path):
            config = cls.from_hf(raw)
        generation = Path(folder) / "generation_config.json"
        ids = config.eos_token_ids
        if generation.exists():  # chat models name the tokens that end a turn only here
            with _named(generation):
                ids = _eos_token_ids(read_object(generation), config.vocab_size) or ids
        own = eos_of_tokenizer(Path(folder))  # or only among the tokenizer's settings
        if own is not None and own < config.vocab_size and own not in ids:
            ids = (*ids, own)
        return replace(config, eos_token_ids=ids)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration that a parsed ``config.json`` of Hugging Face describes.

        Raises:
            UserError: a field is missing, of another type or out of its limits, or the fields contradict
                each other or describe something that is not computed here.
        """
        model_type = hf.MODEL_TYPE.read(raw)
        family = hf.FAMILIES[model_type]
        _refuse_unsupported(raw, family)
        wrapper = raw.get("text_config") is not None or family in hf.WRAPPED
        if "text_config" in raw and wrapper:  # multimodal: the language model is inside
            inner = Field("text_config", dict).check(raw["text_config"], "text_config")
            inner_type = hf.MODEL_TYPE.read({"model_type": model_type, **inner})
            if hf.FAMILIES[inner_type] != family:
                raise UserError(f"text_config is a {inner_type} inside a {model_type} model")
            outside = {name: raw[name] for name in hf.OUTSIDE if name in raw}
            ends = raw.get("eos_token_id")
            raw = {**outside, **inner} | ({} if ends is None else {"eos_token_id": ends})
            _refuse_unsupported(raw, family)
        if family in hf.NEEDED:
            said = {**hf.ROPE_PARAMETERS.read(raw), **hf.ROPE_SCALING.read(raw), **raw}
            for name in hf.NEEDED[family]:
                if said.get(name) is None:
                    raise UserError(
                        f"there is no field {name!r}, which a {family} model needs"
                    )
        values = _read(hf.FIELDS[family], raw)
        values |= _gpt2(values) if family == "gpt2" else _rope_family(family, raw, values)
        if family in hf.EXPERTS:
            values["experts"] = ExpertConfig(**_read(hf.EXPERTS[family], raw))
        values["quantization"] = _quantization(raw)
        bos: int = _token_id("bos_token_id", values["vocab_size"]).read(raw)
        values["bos_token_id"] = None if bos < 0 else bos
        values["eos_token_ids"] = _eos_token_ids(raw, values["vocab_size"])
        return cls(family=family, **values)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers that keep keys and values, so are not Gated DeltaNet."""
        return tuple(
            i for i in range(self.num_layers) if self.delta is None or not self.delta.layers[i]
        )

    def check_keys_only(self) -> None:
        """Raise `UserError` if there are Gated DeltaNet layers, whose state has no room in a KV cache."""
        if self.delta is not None:
            raise UserError(
                "layer_types has linear_attention (Gated DeltaNet), whose state this phase's cache cannot "
                "keep: take a phase from 17 on, with its hybrid_cache"
            )

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values of one token in all attention layers; windows are ignored."""
        return (
            2 * len(self.attention_layers) * self.num_kv_heads * self.head_dim * dtype.itemsize
        )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Return a context that puts the file's path before the message of a `UserError` raised in it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse_unsupported(
    raw: Mapping[str, Any], family: str, known: Mapping[str, Any] = hf.ONLY
) -> None:
    """Raise `UserError` if a field of ``raw`` (a ``config.json``) has a value that is not supported.

    known: the only value supported, for each field that is checked. Values of False and 0 are ignored if
        models of this ``family`` do not have the field.
    """
    for name, only in known.items():
        given = raw.get(name)
        known_here = family in hf.KNOWN_BY.get(name, (family,))
        ignored = not given and not (only and known_here)
        if given not in (None, only) and not ignored:
            raise UserError(f"{name} is {shown(given)}, but only {only} is supported")


def _quantization(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return ``quantization_config`` of ``raw`` (a ``config.json``); None if there is none.

    Raises `UserError` if it names no ``quant_method``.
    """
    given: Mapping[str, Any] | None = Field("quantization_config", dict, default=None).read(
        raw
    )
    if given is not None:
        Field("quant_method", str).read(given)
    return given


def _even_share(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise UserError(
            f"the hidden size is {hidden}, which {heads} attention heads do not divide"
        )
    return hidden // heads


def _gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = values["hidden_size"], values["num_heads"]
    head_dim = _even_share(hidden, heads)
    return {
        "intermediate_size": values["intermediate_size"] or 4 * hidden,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "attention_bias": True,
        "mlp_bias": True,
    }


def _rope_family(
    family: str, raw: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    heads, context = values["num_heads"], values["max_position_embeddings"]
    head_dim = values["head_dim"] or _even_share(values["hidden_size"], heads)
    rope, rope_local = _ropes(raw, family, context)
    if rope.kind == "yarn":  # model cards add the scaling and leave the length as it was
        context = max(context, int(rope.factor * rope.original_max_position))
    return {
        "num_kv_heads": values["num_kv_heads"] or heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "attention_scale": (hf.QUERY_SCALE.read(raw) if family == "gemma3" else head_dim)
        ** -0.5,
        "rope": rope,
        "delta": _delta(raw, values["num_layers"]) if family == "qwen3_5" else None,
        "rope_local": rope_local,
        "sliding_windows": _sliding_windows(family, raw, values["num_layers"]),
    }


def _delta(raw: Mapping[str, Any], layers: int) -> DeltaConfig:
    """Return the configuration of Gated DeltaNet layers in ``raw``, the ``config.json`` of `layers` layers.

    ``layer_types`` says which layers these are; without such a field, all but every fourth layer
    (``full_attention_interval``).
    """
    _refuse_unsupported(raw, "qwen3_5", hf.DELTA_ONLY)
    full = _full_layers(raw, hf.DELTA_LAYER_TYPE, layers, hf.FULL_INTERVAL.read(raw))
    return DeltaConfig(**_read(hf.DELTA, raw), layers=tuple(not each for each in full))


def _sliding_windows(
    family: str, raw: Mapping[str, Any], layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window in tokens, None for full attention, from ``raw`` (a ``config.json``).

    The fields are ``layer_types``, or the older ones that imply it. layers: number of layers.
    """
    if family == "qwen3_5":
        return ()  # `_delta` reads their layers
    window, kinds = None, hf.FULL_LAYER_TYPE
    interval = 1  # every layer has full attention
    if family in hf.WINDOWED:
        window, kinds = hf.WINDOW.read(raw), hf.LAYER_TYPE
    if family == "gemma3":
        interval = hf.WINDOW_PATTERN.read(raw)
    elif family == "mistral" and window is not None:
        interval = layers + 1
    full = _full_layers(raw, kinds, layers, interval)
    if window is None and not all(full):
        raise UserError("sliding_window is null, but there are layers of sliding attention")
    return tuple(None if everything else window for everything in full)


def _full_layers(
    raw: Mapping[str, Any], kinds: Field, layers: int, interval: int
) -> list[bool]:
    """Return for each layer whether it has full attention: by ``layer_types``, or else every `interval`-th.

    raw: a ``config.json``. kinds: the allowed types of a layer. layers: number of layers.
    """
    types = hf.LAYER_TYPES.read(raw)
    if types is None:
        return [(i + 1) % interval == 0 for i in range(layers)]
    return [
        kinds.check(kind, f"layer_types[{i}]") == "full_attention"
        for i, kind in enumerate(types)
    ]


def _ropes(
    raw: Mapping[str, Any], family: str, context: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embeddings (global, local) of a model; local is None in families other than Gemma 3.

    raw: a ``config.json``. The fields are read in their older and their newer spelling. context: longest text
        of the model, in tokens.
    """
    parameters, scaling = hf.ROPE_PARAMETERS.read(raw), hf.ROPE_SCALING.read(raw)
    if parameters and scaling:
        raise UserError(
            "rope_parameters and rope_scaling are both given: say all of it in rope_parameters"
        )
    gemma = family == "gemma3"
    for name, given in (
        ("rope_parameters", {} if gemma else parameters),
        ("rope_scaling", scaling),
    ):
        for kind in hf.LAYER_TYPE.choices:
            if kind in given:
                raise UserError(
                    f"{name} has a part for {kind}, which only Gemma 3's rope_parameters have"
                )
    around = {
        name: raw.get(name)
        for name in ("rope_theta", hf.ORIGINAL.names, "partial_rotary_factor")
    }
    if not gemma:
        defaults = dict(hf.ROPE_DEFAULTS.get(family, {"rope_theta": 10_000.0}))
        if "partial_rotary_factor" in raw:  # null there is all of a head, as in `transformers`
            defaults.pop("partial_rotary_factor", None)
        return _rope(defaults | _merged(around, parameters or scaling), family, context), None
    full, sliding = (
        Field(kind, dict).read(parameters) if parameters else {}
        for kind in hf.LAYER_TYPE.choices
    )
    unread = [(scaling, "" if "rope_type" in scaling else "type"), (raw, hf.ORIGINAL.names)]
    for given, name in (
        *unread,
        (full, "truncate"),
        (sliding, "truncate"),
        (scaling, "truncate"),
    ):
        if given.get(name) is not None:
            raise UserError(
                f"{name} is {shown(given[name])}, but `transformers` ignores it there in Gemma 3"
            )
    local = {"rope_theta": 10_000.0} | _merged(
        {"rope_theta": hf.LOCAL_THETA.read(raw)}, sliding
    )
    everywhere = {"rope_theta": 1_000_000.0} | _merged(around, full or scaling)
    return _rope(everywhere, family, context), _rope(local, family, context)


def _merged(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of several objects as one object, without null values.

    Raises:
        UserError: two objects give a field different values.
    """
    merged: dict[str, Any] = {}
    for name, value in (item for source in sources for item in source.items()):
        if value is not None and merged.setdefault(name, value) != value:
            raise UserError(
                f"{name} is {shown(merged[name])} at one place, and {shown(value)} at another"
            )
    return merged


def _rope(parameters: Mapping[str, Any], family: str, context: int) -> RopeConfig:
    _refuse_unsupported(parameters, family)
    values = _read(hf.ROPE, parameters)
    if values["share"] != 1 and family != "qwen3_5":
        raise UserError(f"partial_rotary_factor is {values['share']}, but only 1 is supported")
    kind = values["kind"]
    for name in hf.ROPE_NEEDS[kind]:
        if parameters.get(name) is None:
            raise UserError(f"there is no field {name!r}, which the rope_type {kind!r} needs")
    original = context
    if kind in ("llama3", "yarn"):
        original = replace(hf.ORIGINAL, default=context).read(parameters)
    if values["factor"] is None:
        values["factor"] = context / original
    return RopeConfig(**values, original_max_position=original)


def _read(fields: Mapping[str, Field], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each of `fields` in ``raw`` (a ``config.json``), by our name, a key of `fields`."""
    return {ours: field.read(raw) for ours, field in fields.items()}


def _token_id(name: str, vocab_size: int) -> Field:
    return Field(name, int, -1, vocab_size - 1, -1)


def _eos_token_ids(raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids in ``raw``, a ``config.json``.

    Its ``eos_token_id`` may be a number, a list or null; -1 is no token. Raises `UserError` for an
    id beyond -1 .. `vocab_size` - 1.
    """
    value, field = raw.get("eos_token_id"), _token_id("eos_token_id", vocab_size)
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids = [field.check(each, "eos_token_id") for each in given]
    return tuple(each for each in ids if each >= 0)
