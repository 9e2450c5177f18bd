#!/usr/bin/env bash
# Expected: decode(skip_special_tokens=True) leaves out every special token, and id_to_token gives its content.
# Instead: a special token whose "normalized" is true is taken by its normalized form. With a normalizer that changes
# it, such as the one that begins every text with a space, id_to_token gives that form, and decode shows it.
# Known since tokenizers 0.23.3, 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
"$folder/venv/bin/python" <<'PYTHON'
import tokenizers
from tokenizers import AddedToken, Tokenizer, models, normalizers

print("tokenizers", tokenizers.__version__)
found = []
for normalized in (False, True):
    made = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    made.normalizer = normalizers.Prepend("\u2581")
    made.add_special_tokens([AddedToken("</s>", normalized=normalized)])
    text, name = made.decode([0, 2], skip_special_tokens=True), made.id_to_token(2)
    print(f"normalized={normalized}: id_to_token(2) is {name!a}, decode([0, 2]) without special tokens {text!a}")
    found.append((text, name))
if found != [("a", "</s>"), ("a \u2581</s>", "\u2581</s>")]:
    raise SystemExit("this has changed: see the head of this script")
PYTHON
