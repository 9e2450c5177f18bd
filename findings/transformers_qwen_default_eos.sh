#!/usr/bin/env bash
# Expected: a tokenizer.json beside the config.json of a Qwen3 model is loaded as it is: the tokens it has, and no more.
# Instead: without a "tokenizer_class" in tokenizer_config.json, AutoTokenizer takes Qwen's class by the config's
# "model_type", and that class adds its default end token, <|endoftext|>, behind the vocabulary. Then the tokenizer has
# one token more than the model has embeddings, eos_token_id and pad_token_id are that token, which the model can
# neither read nor write, and the end token that config.json names is not used.
# Known since transformers 5.24.0, 2026-12-01.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
"$folder/venv/bin/python" - "$folder" 2> /dev/null <<'PYTHON'
import json
import sys
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
VOCAB = {"<end>": 0, "a": 1, "b": 2, "c": 3}
found = {}
for kind in (None, "PreTrainedTokenizerFast"):
    home = Path(sys.argv[1], str(kind))
    home.mkdir()
    made = Tokenizer(models.BPE(vocab=VOCAB, merges=[]))
    made.add_special_tokens(["<end>"])
    made.save(str(home / "tokenizer.json"))
    model = {"model_type": "qwen3", "vocab_size": len(VOCAB), "eos_token_id": 0}
    (home / "config.json").write_text(json.dumps(model))
    (home / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} if kind else {}))
    tokenizer = AutoTokenizer.from_pretrained(home)
    found[kind] = len(tokenizer), tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id
    print(f"tokenizer_class {kind}: {type(tokenizer).__name__}, tokens, eos, its id, pad's id: {found[kind]}")

print(f"the model has {len(VOCAB)} embeddings and ends with token 0, <end>")
if found != {None: (5, "<|endoftext|>", 4, 4), "PreTrainedTokenizerFast": (4, None, None, None)}:
    sys.exit("this has changed: see the comment at the top of the script")
PYTHON
