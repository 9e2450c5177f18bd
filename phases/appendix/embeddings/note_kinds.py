"""Kinds of notes: results about a prompt that the API process may ask the engine's process for.

`prompt_states` computes them.
"""

from __future__ import annotations

MEAN = "mean"
"""The kind of a note: the mean of a prompt's hidden states, of length 1, as the bytes of float32."""
PROMPT_LOGPROBS = "prompt_logprobs"
"""The kind of notes, one a token of the prompt but the first: its log-probability, and pairs of the most
likely tokens and theirs."""
