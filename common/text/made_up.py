"""A tokenizer for a model of random weights, so that it can be served like any other.

What such a model says is noise, but it has to be noise with the right amount of text: every byte is a token,
and the other tokens are made-up words.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def write_tokenizer(folder: Path, vocab_size: int, eos: tuple[int, ...]) -> None:
    """Write a made-up tokenizer of `vocab_size` tokens to `folder`, in the files that `Tokenizer` reads.

    eos: ids of the end-of-sequence tokens. The vocabulary has room for all 256 bytes.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {index: f"<end{place or ''}>" for place, index in enumerate(eos)}
    rng = random.Random(0)
    seen = set(letters)
    vocab = dict[str, int]()
    for index in range(vocab_size):
        if index in special:
            vocab[special[index]] = index
        elif letters:
            vocab[letters.pop(0)] = index
        else:
            word = ""
            while not word or word in seen:
                word = "Ġ" + "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4)))
            seen.add(word)
            vocab[word] = index
    made = Tokenizer(BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": vocab_size, "eos_token_id": list(eos)})
    )
    settings = {"chat_template": TEMPLATE, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
