"""Phase 16: mixture of experts. A router sends each token through some of many MLPs."""

from __future__ import annotations

from experts.expert_parallel import ExpertParallel
from experts.feature import MixtureOfExperts
from parallel import PRESET as BELOW

__all__ = ["LLM", "PRESET", "ExpertParallel", "MixtureOfExperts", "load"]

PRESET = BELOW.plus(on=[MixtureOfExperts, ExpertParallel])


load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Options are those of `parallel.load`, and the fields of `MixtureOfExperts` and `ExpertParallel`.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
