"""The tokenizer inside a GGUF file, rebuilt as the `tokenizer.json` of Hugging Face's `tokenizers`.

Two kinds occur in the bundled models. GPT-2's is byte-level BPE with an explicit list of merges.
SentencePiece's BPE (https://github.com/google/sentencepiece) has a score for each piece instead: among all
neighbours it joins those whose union has the highest score. Ranking every way to split every piece by the
piece's score says the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from common.errors import UserError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # GGUF's tokenizer.ggml.token_type


def tokenizer_files(meta: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json` of the tokenizer that the GGUF metadata describes.

    Raises:
        UserError: it is neither SmolLM's byte-level BPE nor a SentencePiece BPE without space prefix.
    """
    kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre == "smollm":
        tokenizer = _byte_level(meta)
    elif kind == "llama" and not meta.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer = _sentencepiece(meta)
    else:
        raise UserError(f"tokenizer.ggml.model is {kind!r} with pre {pre!r}, which cannot be imported")
    _add_special_tokens(tokenizer, meta)
    config = _config(meta)
    if config["add_bos_token"]:
        bos = config["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, meta["tokenizer.ggml.bos_token_id"])],
        )
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def _byte_level(meta: Mapping[str, Any]) -> Tokenizer:
    """SmolLM's: each digit by itself, then GPT-2's split into words, then BPE over bytes."""
    vocabulary = {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: Mapping[str, Any]) -> Tokenizer:
    """Gemma's: spaces become `▁`, no split into words, unknown characters fall back to bytes."""
    tokens = meta["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        BPE(
            {token: index for index, token in enumerate(tokens)},
            _merges(tokens, meta["tokenizer.ggml.scores"], meta["tokenizer.ggml.token_type"]),
            unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose union is a piece, the best union first.

    Only normal pieces are made by merging: the text is cut at all others before.
    """
    score = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL
    }
    merges = []
    for token in sorted(score, key=lambda token: -score[token]):
        splits = [(token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1)]
        merges += [(left, right) for left, right in splits if left in score and right in score]
    return merges


def _add_special_tokens(tokenizer: Tokenizer, meta: Mapping[str, Any]) -> None:
    """Cut the text at control tokens (left out of decoded text) and at the tokenizer author's own symbols."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    symbols = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in symbols])


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json`: names of the special tokens and the chat template, where there is one."""
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = meta.get(f"tokenizer.ggml.{theirs}_token_id")
        config[f"{ours}_token"] = None if index is None else tokens[index]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config
