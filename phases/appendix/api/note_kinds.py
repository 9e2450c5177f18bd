"""Kinds of notes about prompts, by which the API process asks for them; see `prompt_logprobs`."""

from __future__ import annotations

PROMPT_LOGPROBS = "prompt_logprobs"
"""The kind of notes, one a token of the prompt but the first: its log-probability, and pairs of the most
likely tokens and theirs."""
