"""GGUF import: the same weights, the same tokens, the same logits as the model that was written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from common.models.gguf_import import import_gguf
from tests.common import tiny_gguf


def imported(tmp_path: Path, architecture: str, quantization: str = "F32"):
    model = tiny_gguf.write(tmp_path / "tiny.gguf", architecture, quantization)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    return model, tmp_path / "model"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_float_weights_and_logits_come_back_under_their_own_names(tmp_path, architecture):
    model, folder = imported(tmp_path, architecture)
    stored = load_file(folder / "model.safetensors")
    expected = dict(model.named_parameters())  # the tied head appears once
    assert stored.keys() == expected.keys()
    for name, weight in stored.items():
        # 1 + w loses the last bit of w, which the norms of Gemma can afford
        atol = 1e-7 if architecture == "gemma3" and "norm" in name else 0
        torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=atol)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(5, 45)[None]  # longer than the sliding window
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert again.dtype == torch.float32


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "Q5_0"])
def test_quantized_projections_are_dequantized_before_the_permutation_is_undone(
    tmp_path, quantization
):
    model, folder = imported(tmp_path, "llama", quantization)
    stored = load_file(folder / "model.safetensors")
    bits = int(quantization[1])
    for name, weight in model.named_parameters():
        error = (stored[name] - weight).abs().max()
        # Half a step of the coarsest block; a wrong row order would be off by whole weights.
        assert error <= 1.1 * weight.abs().max() / 2 ** (bits - 1), name


def test_sentencepiece_text_round_trips_with_spaces_bytes_and_symbols(tmp_path):
    _, folder = imported(tmp_path, "gemma3")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("ab  <b>\nxé🎉")
    assert encoded.tokens[:6] == ["<bos>", "ab", "  ", "<b>", "\n", "x"]
    assert encoded.tokens[-4:] == ["<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"]
    assert tokenizer.decode(encoded.ids) == "ab  <b>\nxé🎉"


def test_gemma_merges_say_what_the_scores_say(gemma3_folder):
    """Compare with SentencePiece's definition as a plain loop: join the neighbours with the best union."""
    model = json.loads((gemma3_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ours = Tokenizer.from_file(str(gemma3_folder / "tokenizer.json"))
    vocabulary = model["vocab"]
    made = {"".join(merge) for merge in model["merges"]}
    for text in (
        "internationalization",
        "Donaudampfschifffahrt",
        " the quick brown fox",
        "人工知能の研究開発",
    ):
        pieces = list(text.replace(" ", "▁"))
        while True:
            # A normal piece's score falls with its id, so the best union is the one with the lowest id.
            pairs = enumerate(itertools.pairwise(pieces))
            unions = [(vocabulary[a + b], i) for i, (a, b) in pairs if a + b in made]
            if not unions:
                break
            _, at = min(unions)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        assert ours.encode(text, add_special_tokens=False).tokens == pieces
