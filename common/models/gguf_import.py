"""Turn a GGUF file of the Llama or Gemma 3 architecture into a folder as Hugging Face lays it out.

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is llama.cpp's format: one file with
metadata, tokenizer and block-quantized weights. The bundled models come in it because that makes them small
enough for a package registry. Everything after this module knows one format only.

The weights are stored as float32. A quantized weight is a float16 scale times an integer, plus a float16
minimum in some formats; such a product has up to 18 significant bits, which float16 (11) and bfloat16 (8)
would round. From float32 each later format is rounded once, and `transformers` computes in float32 unless
told otherwise, which is what an oracle should do. The price is disk space: 0.5 GB for SmolLM2-135M, 1.1 GB
for Gemma-3-270M.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from common.errors import UserError
from common.models.gguf_tokenizer import tokenizer_files

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[Any]

_ROWS_AT_ONCE = 16_384

_SHARED_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAMES = {
    "llama": {**_SHARED_NAMES, "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        **_SHARED_NAMES,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Metadata(dict[str, Any]):
    """A GGUF file's key-value pairs as Python values; a missing key is a `UserError`, not a traceback."""

    def __missing__(self, key: str) -> Any:
        raise UserError(f"the GGUF file has no field {key!r}")


def import_gguf(source: Path, folder: Path) -> None:
    """Write the model in `source` to the new directory `folder`.

    The folder gets `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json` and
    `tokenizer_config.json`. One tensor at a time is in memory.

    Args:
        source: the GGUF file.
        folder: must not exist; it is incomplete until this function returns.

    Raises:
        UserError: the file is damaged, or holds something other than a Llama or Gemma 3 text model.
    """
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise UserError(f"{source} is not a readable GGUF file ({error})") from None
    meta = Metadata({key: field.contents() for key, field in reader.fields.items()})
    architecture = meta["general.architecture"]
    if architecture not in _LAYER_NAMES:
        supported = " and ".join(_LAYER_NAMES)
        raise UserError(f"general.architecture is {architecture!r}, but only {supported} can be imported")
    tensors = {hf_name(tensor.name, architecture): tensor for tensor in reader.tensors}
    config = model_config(meta, tied="lm_head.weight" not in tensors)

    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", token_ids)
    for name, content in tokenizer_files(meta).items():
        (folder / name).write_text(content, encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", tensors, meta)


def hf_name(name: str, architecture: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        UserError: this architecture has no such tensor.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _LAYER_NAMES[architecture]:
        raise UserError(f"the GGUF file holds the tensor {name!r}, which no {architecture} model has")
    return f"model.layers.{layer}.{_LAYER_NAMES[architecture][part]}.{kind}"


def model_config(meta: Metadata, tied: bool) -> dict[str, Any]:
    """The `config.json` of the model that `meta` describes, in the field names of `transformers`."""
    architecture = meta["general.architecture"]
    key = f"{architecture}.rope.scaling.type"
    if meta.get(key, "none") != "none":
        raise UserError(f"the GGUF file's {key} is {meta[key]!r}, but only 'none' is supported")

    def get(key: str) -> Any:
        return meta[f"{architecture}.{key}"]

    heads = get("attention.head_count")
    config: dict[str, Any] = {
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": meta.get(f"{architecture}.attention.key_length", get("embedding_length") // heads),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base")),
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    if architecture == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **config,
        }
    # What GGUF leaves to the reader, because it is the same in every Gemma 3 of this size: Gemma 3 Technical
    # Report (https://arxiv.org/abs/2503.19786), section 2, and google/gemma-3-270m's config.json.
    layers = range(config["num_hidden_layers"])
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **config,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": get("attention.sliding_window"),
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in layers],
    }


def hf_weight(tensor: ReaderTensor, meta: Metadata) -> Iterator[Floats]:
    """Dequantize `tensor` and undo what the conversion to GGUF did to it.

    Yields it in pieces of whole rows (each `[rows, columns]`, a vector `[1, size]`), because Gemma's
    embedding alone is 0.7 GB.
    """
    quantized = np.atleast_2d(tensor.data)  # [rows, bytes of a row], or [rows, columns] when not quantized
    architecture = meta["general.architecture"]
    if architecture == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        key = "head_count" if tensor.name.endswith("attn_q.weight") else "head_count_kv"
        quantized = unpermute(quantized, meta[f"llama.attention.{key}"])
    # Gemma multiplies by 1 + w; GGUF stores that sum, so that one RMSNorm serves every architecture.
    one_more = np.float32(architecture == "gemma3" and tensor.name.endswith("norm.weight"))
    for start in range(0, len(quantized), _ROWS_AT_ONCE):
        rows = dequantize(quantized[start : start + _ROWS_AT_ONCE], tensor.tensor_type)
        yield rows.astype(np.float32, copy=False) - one_more


def unpermute(rows: Rows, heads: int) -> Rows:
    """Reorder the rows of a query or key projection `[heads * D, ...]` from GGUF's order to Hugging Face's.

    RoPE rotates pairs of a head's D values. llama.cpp pairs neighbours (0 and 1, 2 and 3, ...), Hugging Face
    pairs the halves (0 and D/2, 1 and D/2 + 1, ...), so one's row order is a permutation of the other's.
    """
    count, width = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


def _write_safetensors(path: Path, tensors: dict[str, ReaderTensor], meta: Metadata) -> None:
    """Write the tensors piece by piece; `safetensors` itself would want all of them in memory at once.

    Format: eight bytes of header length, the JSON header, the bytes. https://github.com/huggingface/safetensors
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF gives the fastest dimension first
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % 64)  # so that mapped tensors begin on a cache line
    done = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            for rows in hf_weight(tensor, meta):
                done += file.write(np.ascontiguousarray(rows, dtype="<f4").data)
    if done != end:
        raise UserError(f"{path} got {done} bytes of weights instead of {end}: the GGUF file is inconsistent")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as readable JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF's 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
