#!/usr/bin/env bash
# Expected: AutoTokenizer encodes with what tokenizer.json says, whatever class tokenizer_config.json names beside it.
# Instead: for the class GPT2Tokenizer, also beside a config.json of another family such as a Llama, it takes the
# vocabulary and the merges and drops the normalizer and the pre-tokenizer. Digits that tokenizer.json splits are one
# token, and NFC is not applied. PreTrainedTokenizerFast obeys the same tokenizer.json. Nothing warns.
# Known since transformers 5.24.0, 2026-11-30.
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
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
made = Tokenizer(models.BPE(vocab={**alphabet, "12": 256}, merges=[("1", "2")]))
made.normalizer = normalizers.NFC()
made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
made.decoder = decoders.ByteLevel()
made.add_special_tokens(["<|endoftext|>"])
same = {}
for kind in ("PreTrainedTokenizerFast", "GPT2Tokenizer"):
    home = Path(sys.argv[1], kind)
    home.mkdir()
    made.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    (home / "config.json").write_text('{"model_type": "llama"}')
    found = AutoTokenizer.from_pretrained(str(home))
    for text in ("12", "e\u0301"):
        ids, expected = found(text)["input_ids"], made.encode(text).ids
        same[kind, text] = ids == expected
        print(f"{kind}: {text!a} -> {ids}, tokenizer.json says {expected}")
if list(same.values()) != [True, True, False, False]:
    raise SystemExit("this has changed: see the head of this script")
PYTHON
