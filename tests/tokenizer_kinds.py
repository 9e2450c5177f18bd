"""Small tokenizers of every published kind, for all that makes tokens of a text or a text of tokens.

They are trained on some lines, and have the normalizer, pre-tokenizer, decoder and post-processor of the
published files of the models that they are named after.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = """The capital of France is Paris. The capital of Norway is Oslo, and Is it? yes or no, yes and no.
def f(x):\n    return 1\n    if x:\n        return 100\n{"name": "Ada", "age": 36, "city": "Paris"}
{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n<tool_call>\n</tool_call> a an in is the of
user: say yes assistant: no system: """
SPECIAL = ["<unk>", "<s>", "</s>"]
BOS, EOS = 1, 2

WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
UNDERLINE, SPACE = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
BYTES, FUSE, STRIP = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
LLAMA = decoders.Sequence([SPACE, BYTES, FUSE, STRIP])
BY_WORDS = [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
BY_BYTES, BYTE_LEVEL = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()

KINDS = {  # normalizer, pre-tokenizer, decoder
    "llama-2": (normalizers.Sequence([normalizers.Prepend("▁"), UNDERLINE]), None, LLAMA),
    "mistral-0.3": (None, pre_tokenizers.Metaspace("▁", "first", split=False), LLAMA),
    "metaspace": (None, pre_tokenizers.Metaspace("▁", "always"),
        decoders.Sequence([BYTES, decoders.Metaspace("▁", "always")])),
    "gemma": (UNDERLINE, pre_tokenizers.Split(" ", "merged_with_previous"),
        decoders.Sequence([SPACE, BYTES, FUSE])),
    "smollm2": (None, BY_BYTES, BYTE_LEVEL),
    "llama-3": (None, pre_tokenizers.Sequence(BY_WORDS), BYTE_LEVEL),
    "qwen": (normalizers.NFC(), pre_tokenizers.Sequence(BY_WORDS), BYTE_LEVEL),
    "nfkc": (normalizers.NFKC(), BY_BYTES, BYTE_LEVEL),
    "lowercase": (normalizers.Lowercase(), BY_BYTES, BYTE_LEVEL),
    "add-prefix-space": (None, pre_tokenizers.ByteLevel(True), BYTE_LEVEL),
}  # fmt: skip


def write_kind(folder: Path, name: str, template: str) -> int:
    """Write the files of a tokenizer of this kind; returns the number of its tokens."""
    normalizer, cut, decoder = KINDS[name]
    by_bytes = decoder is BYTE_LEVEL
    first = [*SPECIAL] if by_bytes else [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = pre_tokenizers.ByteLevel.alphabet() if by_bytes else []
    trained = Tokenizer(models.BPE() if by_bytes else models.BPE(byte_fallback=True, unk_token="<unk>"))
    # SentencePiece's merges stay within words as well.
    trained.pre_tokenizer = cut if by_bytes else pre_tokenizers.Metaspace("▁", "always")
    trainer = trainers.BpeTrainer(vocab_size=640, special_tokens=first, initial_alphabet=letters)
    trained.train_from_iterator([TEXT] * 4, trainer)
    made = Tokenizer(trained.model)
    made.add_special_tokens(SPECIAL)
    made.decoder = decoder
    if normalizer is not None:
        made.normalizer = normalizer
    if cut is not None:
        made.pre_tokenizer = cut
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    made.save(str(folder / "tokenizer.json"))
    size = made.get_vocab_size()
    config = {"vocab_size": size, "bos_token_id": BOS, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"chat_template": template, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return size
