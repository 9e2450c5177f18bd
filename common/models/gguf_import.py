"""Convert the GGUF file of a bundled model into a folder as Hugging Face lays it out.

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is llama.cpp's format: one file with
metadata, tokenizer and block-quantized weights. The bundled models come in it because that makes them small
enough for a package registry. All other code reads the format of Hugging Face only. This module reads Llama
with SmolLM's tokenizer and Gemma 3, and checks nothing: a file's SHA-256 has been compared before.

The weights are stored as float32. Where all matrices are of the types in `BLOCKS`, they are stored a second
time as the file has them, in the folder `blocks`: a quantized checkpoint, for phase 10. A quantized weight is
a float16 scale times an integer, plus a float16 minimum in some formats; such a product has up to 18
significant bits, which float16 (11) and bfloat16 (8) would round. From float32 each later format is rounded
once, and `transformers`, to which results are compared, computes in float32 by default. The price is disk
space: 0.6 GB for SmolLM2-135M, 1.1 GB for Gemma-3-270M, and once as much memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FFN_NORM = {"llama": "post_attention_layernorm", "gemma3": "pre_feedforward_layernorm"}
BLOCKS = {
    GGMLQuantizationType.Q4_1: "q4_1",
    GGMLQuantizationType.Q8_0: "q8_0",
}
"""The types of which a quantized copy is kept, with their names in its `quantization_config`."""
_BLOCK_TYPES = {
    "q4_1": np.dtype([("scale", "f2"), ("minimum", "f2"), ("data", "u1", 16)]),
    "q8_0": np.dtype([("scale", "f2"), ("data", "i1", 32)]),
}
"""A block of 32 numbers as it lies in the file."""
BLOCKS_FOLDER = "blocks"
# GGUF's tokenizer.ggml.token_type
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4


def import_gguf(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file `source` to the new directory `folder`.

    The folder gets `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json` and
    `tokenizer_config.json`, and the folder `blocks`, a quantized checkpoint, if all matrices are q8_0 or
    q4_1.
    """
    reader = GGUFReader(source)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config, settings = model_config(meta), _tokenizer_config(meta)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", token_ids)
    write_json(folder / "tokenizer_config.json", settings)
    _tokenizer(meta, settings).save(str(folder / "tokenizer.json"), pretty=False)
    weights = {
        hf_name(each.name, meta["general.architecture"]): hf_weight(each, meta)
        for each in reader.tensors
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if all(each.tensor_type in BLOCKS for each in reader.tensors if len(each.shape) > 1):
        _write_blocks(reader, meta, config, folder / BLOCKS_FOLDER)


def _write_blocks(
    reader: GGUFReader, meta: dict[str, Any], config: dict[str, Any], folder: Path
) -> None:
    """Write a quantized checkpoint to `folder`: each matrix as numbers, scales and minimums (`block_parts`).

    reader: the open GGUF file. meta: its metadata. config: content of `config.json`, to which
        `quantization_config` is added.
    """
    kinds: dict[str, str] = {}
    stored: dict[str, npt.NDArray[Any]] = {}
    for each in reader.tensors:
        name = hf_name(each.name, meta["general.architecture"])
        if each.tensor_type not in BLOCKS:
            stored[name] = hf_weight(each, meta)
            continue
        module = name.removesuffix(".weight")
        kinds[module] = BLOCKS[each.tensor_type]
        parts = block_parts(_hf_rows(each, meta), kinds[module])
        stored |= {f"{module}.{part}": array for part, array in parts.items()}
    folder.mkdir()
    quantization = {"quant_method": "gguf", "types": kinds}
    write_json(folder / "config.json", {**config, "quantization_config": quantization})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def block_parts(rows: npt.NDArray[np.uint8], kind: str) -> dict[str, npt.NDArray[Any]]:
    """Return a matrix `[N, K]` as arrays by name: its numbers, and the scales and minimums of its blocks.

    A block is 32 numbers of a row. Nothing is rounded.

    Args:
        rows: `[N, bytes of a row]`, the blocks as the file has them.
        kind: the type of block, `q8_0` or `q4_1`.

    Returns:
        `data`: q8_0 int8 `[N, K]`; q4_1 uint8 `[N, K / 2]`, where byte i of a block's 16 holds number i in
            its low and number i + 16 in its high half. `scale`, and of q4_1 `minimum`: float16 `[N, K / 32]`.
    """
    blocks = np.ascontiguousarray(rows).view(_BLOCK_TYPES[kind])  # [N, K / 32]
    return {
        name: np.ascontiguousarray(blocks[name]).reshape(len(rows), -1)
        for name in _BLOCK_TYPES[kind].names or ()
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` as indented JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# The model.


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of the model that `meta` describes, in the field names of `transformers`."""
    architecture = meta["general.architecture"]

    def get(key: str) -> Any:
        return meta[f"{architecture}.{key}"]

    heads, gemma = get("attention.head_count"), architecture == "gemma3"
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM" if gemma else "LlamaForCausalLM"],
        "model_type": "gemma3_text" if gemma else "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": meta.get(
            f"{architecture}.attention.key_length", get("embedding_length") // heads
        ),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base")),
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    if not gemma:
        return config
    # What GGUF leaves to the reader, because it is the same in every Gemma 3 of this size: Gemma 3 Technical
    # Report (https://arxiv.org/abs/2503.19786), section 2, and google/gemma-3-270m's config.json.
    layers = range(config["num_hidden_layers"])
    return {
        **config,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": get("attention.sliding_window"),
        "layer_types": [
            "full_attention" if i % 6 == 5 else "sliding_attention" for i in layers
        ],
    }


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32 as `value`: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def hf_name(name: str, architecture: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; `architecture` is GGUF's, such as `llama`.

    `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.
    """
    *block, part, kind = name.split(".")
    found = _FFN_NORM[architecture] if part == "ffn_norm" else _NAMES[part]
    return f"model.layers.{block[1]}.{found}.{kind}" if block else f"{found}.{kind}"


def hf_weight(tensor: ReaderTensor, meta: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Return `tensor` dequantized, in Hugging Face's order of rows; `meta` is the file's metadata."""
    architecture = meta["general.architecture"]
    weight = dequantize(_hf_rows(tensor, meta), tensor.tensor_type).astype(
        np.float32, copy=False
    )
    # Gemma multiplies by 1 + w; GGUF stores that sum, so that one RMSNorm serves every architecture.
    return (
        weight - 1
        if architecture == "gemma3" and tensor.name.endswith("norm.weight")
        else weight
    )


def _hf_rows(tensor: ReaderTensor, meta: dict[str, Any]) -> npt.NDArray[Any]:
    """Return a tensor's quantized data with rows in Hugging Face's order. meta: the GGUF file's metadata."""
    if meta["general.architecture"] == "llama" and tensor.name.endswith(
        ("attn_q.weight", "attn_k.weight")
    ):
        key = "head_count" if tensor.name.endswith("attn_q.weight") else "head_count_kv"
        return unpermute(tensor.data, meta[f"llama.attention.{key}"])
    data: npt.NDArray[Any] = tensor.data
    return data


def unpermute(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Return the rows of a query or key projection `[heads * D, ...]` in Hugging Face's order, given GGUF's.

    RoPE rotates pairs of a head's D values. llama.cpp pairs neighbours (0 and 1, 2 and 3, ...), Hugging Face
    pairs the halves (0 and D/2, 1 and D/2 + 1, ...), so one's row order is a permutation of the other's.
    """
    count, width = rows.shape
    return (
        rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)
    )


# The tokenizer. GPT-2's kind is byte-level BPE with an explicit list of merges. SentencePiece's BPE
# (https://github.com/google/sentencepiece) has a score for each piece instead: among all neighbours it joins
# those whose union has the highest score. Ranking every way to split every piece by its score says the same.


def _tokenizer(meta: dict[str, Any], config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that GGUF metadata describes. config: content of `tokenizer_config.json`."""
    tokens = meta["tokenizer.ggml.tokens"]
    types = list(zip(tokens, meta["tokenizer.ggml.token_type"], strict=True))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if meta["tokenizer.ggml.model"] == "gpt2":
        # SmolLM's: each digit by itself, then GPT-2's words, then bytes.
        merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(BPE(vocabulary, merges))
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        # Gemma's: spaces become `▁`, no split into words, unknown characters fall back to bytes.
        pieces = zip(types, meta["tokenizer.ggml.scores"], strict=True)
        merges = _merges({token: score for (token, kind), score in pieces if kind == _NORMAL})
        unknown = config["unk_token"]
        model = BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(parts)
    # The text is cut at control tokens (left out of decoded text) and at the tokenizer author's own symbols.
    control = [token for token, kind in types if kind == _CONTROL]
    symbols = [token for token, kind in types if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in symbols])
    if config["add_bos_token"]:
        bos = config["bos_token"]
        special = [(bos, meta["tokenizer.ggml.bos_token_id"])]
        tokenizer.post_processor = TemplateProcessing(
            f"{bos} $A", f"{bos} $A {bos} $B", special
        )
    return tokenizer


def _merges(score: dict[str, float]) -> list[tuple[str, str]]:
    """Return BPE merges (left, right) of a vocabulary with scores: every split of a piece into two pieces.

    score: by piece; merges that make a piece of higher score come first.
    """
    merges = []
    for token in sorted(score, key=lambda token: -score[token]):
        splits = [(token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1)]
        merges += [(left, right) for left, right in splits if left in score and right in score]
    return merges


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`, made from GGUF metadata.

    It has the names of the special tokens, and the chat template if there is one.
    """
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in {
        "bos": "bos",
        "eos": "eos",
        "unk": "unknown",
        "pad": "padding",
    }.items():
        index = meta.get(f"tokenizer.ggml.{theirs}_token_id")
        config[f"{ours}_token"] = None if index is None else tokens[index]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config
