#!/usr/bin/env bash
# Expected: "add_bos_token" in a model's tokenizer_config.json says whether a prompt begins with the token <s>: true
# adds it and false leaves it out, as the tokenizers of Llama did in transformers 4.
# Instead: beside a tokenizer.json it is read and changes nothing. With a post-processor that adds <s>, false still
# adds it; without one, true does not. What tokenizer.json says decides alone, for LlamaTokenizer and for
# PreTrainedTokenizerFast.
# Known since transformers 5.24.0, 2026-11-29.
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
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
found = {}
for kind in ("LlamaTokenizer", "PreTrainedTokenizerFast"):
    for file_adds in (True, False):
        for config_says in (None, True, False):
            home = Path(sys.argv[1], f"{kind}-{file_adds}-{config_says}")
            home.mkdir()
            made = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, "\u2581": 2, "a": 3, "b": 4}, merges=[]))
            made.add_special_tokens(["<s>", "</s>"])
            if file_adds:
                made.post_processor = processors.TemplateProcessing(
                    single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
                )
            made.save(str(home / "tokenizer.json"))
            config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
            if config_says is not None:
                config["add_bos_token"] = config_says
            (home / "tokenizer_config.json").write_text(json.dumps(config))
            (home / "config.json").write_text('{"model_type": "llama"}')
            ids = AutoTokenizer.from_pretrained(str(home))("ab")["input_ids"]
            found[kind, file_adds, config_says] = ids[0] == 0
            print(f"{kind}: tokenizer.json adds <s>: {file_adds}, add_bos_token: {config_says} -> {ids}")
if any(begins != file_adds for (_, file_adds, _), begins in found.items()):
    raise SystemExit("this has changed: see the head of this script")
PYTHON
