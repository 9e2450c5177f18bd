#!/usr/bin/env bash
# Expected: llguidance, given a tokenizer.json, takes an added token for special where the file says "special": true,
# and its mask and its matcher agree on every token.
# Instead: it takes every added token whose text is <...> for special. Of Qwen's <think> ("special": false) the mask
# forces the token, because the text <think> is forced and the tokenizer spells it so; the matcher refuses it.
# Given as an object that names its special tokens, the same tokenizer works.
# Known since llguidance 1.9.1, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1 tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import llguidance as ll
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.add_special_tokens(["<|end|>"])
made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
end, think = made.token_to_id("<|end|>"), made.token_to_id("<think>")


class Object:
    is_tokenizer_wrapper, eos_token_id, bos_token_id, special_token_ids = True, end, None, [end]
    tokens = [made.decode([token], skip_special_tokens=False).encode() for token in range(made.get_vocab_size())]

    def __call__(self, text):
        return made.encode(text, add_special_tokens=False).ids


def tried(tokenizer):
    """Whether the token is called special, is in the mask of the text <think>, and is taken."""
    matcher = ll.LLMatcher(tokenizer, ll.LLMatcher.grammar_from_regex("<think>x"), log_level=0)
    allowed = matcher.compute_logit_bias()[think] != 0
    return tokenizer.is_special_token(think), allowed, matcher.try_consume_tokens([think]) == 1


print("llguidance", ll.__version__, "tokenizers", tokenizers.__version__)
as_file, as_object = tried(ll.LLTokenizer(made.to_str(), eos_token=end)), tried(ll.LLTokenizer(Object(), eos_token=end))
print("as a file:   special, in the mask, taken:", as_file)
print("as an object: special, in the mask, taken:", as_object)
if as_file != (True, True, False) or as_object != (False, True, True):
    raise SystemExit("this has changed: see the head of this script")
PYTHON
