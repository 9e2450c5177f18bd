#!/usr/bin/env bash
# Expected: llguidance's LLExecutor makes masks in its own threads without Python's lock, whatever the tokenizer is.
# Instead: with a tokenizer given as a Python object, each mask at which the grammar forces a text calls that object
# from the library's thread, to spell the text; such threads wait for Python's lock, and for each other. On 16 cores
# 256 masks took 15 threads twice as long as one. After compute_ff_tokens() in the caller's thread, whose result
# the matcher keeps for the next mask, no other thread calls it.
# Known since llguidance 1.9.1, 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import threading
from collections import Counter

import llguidance as ll
import numpy as np

callers = Counter()


class Bytes:
    """A token for each byte; token 256 ends a text."""

    is_tokenizer_wrapper, eos_token_id, bos_token_id, special_token_ids = True, 256, None, [256]
    tokens = [*(bytes([byte]) for byte in range(256)), b"<|end|>"]

    def __call__(self, text):
        own = threading.current_thread() is threading.main_thread()
        callers["the caller's thread" if own else "threads of the library"] += 1
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = ll.LLTokenizer(Bytes(), eos_token=256)
executor = ll.LLExecutor(2)
grammar = ll.LLMatcher.grammar_from_regex('"answer": [0-9]')


def masks(count, ask_first):
    """Make masks of `count` outputs; return who has called the tokenizer meanwhile."""
    matchers = [ll.LLMatcher(tokenizer, grammar, log_level=0) for _ in range(count)]
    words = np.zeros((count, 9), dtype=np.int32)
    callers.clear()
    if ask_first:
        for matcher in matchers:
            matcher.compute_ff_tokens()
    jobs = [(matcher, row) for row, matcher in enumerate(matchers)]
    executor.unsafe_compute_mask_ptr(jobs, words.ctypes.data, words.strides[0], count)
    return dict(callers)


print("llguidance", ll.__version__)
plain, asked = masks(64, False), masks(64, True)
print("masks of 64 outputs:                        ", plain)
print("the same, with compute_ff_tokens() before it:", asked)
if "the caller's thread" in plain or plain.get("threads of the library", 0) < 64 or set(asked) != {"the caller's thread"}:
    raise SystemExit("this has changed: see the head of this script")
PYTHON
