"""Random models of a few thousand weights, written the way llama.cpp's converter writes real ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@cache
def oracle(architecture: str) -> transformers.PreTrainedModel:
    """A model of `transformers` with random weights, its norms' too."""
    torch.manual_seed(0)
    if architecture == "llama":
        config = transformers.LlamaConfig(
            **SIZES,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            rms_norm_eps=1e-5,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(**SIZES, sliding_window=8)
        model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(-0.5, 0.5)
    return model.eval()


def write(
    path: Path, architecture: str, quantization: str = "F32", embedding: str = "F32"
) -> transformers.PreTrainedModel:
    """Write `oracle(architecture)` to `path` with its projections in `quantization`; returns the oracle.

    embedding: the type of the embedding.
    """
    model = oracle(architecture)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0 if architecture == "llama" else 1_000_000.0)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer, architecture)
    for name, weight in model.named_parameters():
        kind = (
            embedding if "embed_tokens" in name else quantization if "proj" in name else "F32"
        )
        _add_tensor(writer, name, weight.detach().numpy(), architecture, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tensor(writer, name, weight, architecture, config, quantization):
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        # As in llama.cpp's convert_hf_to_gguf.py: the two halves of each head are interleaved.
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    if architecture == "gemma3" and "norm" in name:
        weight = weight + 1
    names = {**LAYER, "post_attention_layernorm": "ffn_norm"}
    if architecture == "gemma3":
        names["post_attention_layernorm"] = "post_attention_norm"
        names["pre_feedforward_layernorm"] = "ffn_norm"
        names["post_feedforward_layernorm"] = "post_ffw_norm"
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in top:
        target = top[name]
    else:
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        target = f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight"
    kind = gguf.GGMLQuantizationType[quantization]
    if kind != gguf.GGMLQuantizationType.F32:
        writer.add_tensor(target, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    else:
        writer.add_tensor(target, weight)


def _add_tokenizer(writer, architecture):
    if architecture == "llama":
        alphabet = byte_alphabet()
        tokens = [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            *alphabet,
            "he",
            "ll",
            "hell",
            "hello",
            "42",
        ]
        tokens += [f"<unused{i}>" for i in range(300 - len(tokens))]
        types = [3, 3, 3] + [1] * (len(alphabet) + 5)
        types += [3] * (300 - len(types))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["h e", "l l", "he ll", "hell o", "4 2"])
        writer.add_chat_template(
            "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        )
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    else:
        control = ["<pad>", "<eos>", "<bos>", "<unk>"]
        symbols = ["\n", "  ", "<b>"]
        single = [f"<0x{byte:02X}>" for byte in range(256)]
        normal = ["▁a", "ab", "▁ab", "▁", "a", "b", "bc", "c", "é", "x"]
        tokens = control + symbols + single + normal
        tokens += [f"<unused{i}>" for i in range(300 - len(tokens))]
        types = [3] * 4 + [4] * 3 + [6] * 256 + [1] * len(normal)
        types += [3] * (300 - len(types))
        scores = [-1000.0] * 7 + [0.0] * 256 + [-float(rank) for rank in range(len(normal))]
        scores += [-1000.0] * (300 - len(scores))
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_pad_token_id(0)
    writer.add_token_list(tokens)
    writer.add_token_types(types)


def byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())
