"""How often two draws agree: the measure of drafters that are sampled, for phase 11."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.coupling import agreement as agreement_of
from benchmarks.coupling import greedy, optimum
from benchmarks.evidence import BenchOptions, Run
from benchmarks.measure import Samples, summarize
from benchmarks.workloads import PASSAGES, Item, Workload
from common.models.hub import model_folder
from common.text.tokenizer import Tokenizer
from forward.attention import RecomputeAttention
from forward.loading import load_model
from forward.model import Model
from forward.surgery import clone

NOISES = (0.02, 0.05, 0.1, 0.15, 0.2)
"""Drafters: the model with noise in its weights, in standard deviations of each matrix."""
PLACES = 48
"""Of real text, at which model and drafter are compared."""


def agreement(phase: str, options: BenchOptions) -> list[Run]:
    """Sampled drafts on real text: the optimum, 1 - total variation, and what three ways reach.

    The model's own probabilities at temperature 1, behind each place of a passage, and those of drafters
    that are nearly the same to quite another model. Nothing is drawn: how often two draws with the same noise
    agree is a formula (`coupling.agreement`). Computed on the CPU in float32.
    """
    tokenizer = Tokenizer(model_folder(options.model or ""))
    model = load_model(options.model or "", device="cpu", dtype="float32")
    text = tokenizer.encode(PASSAGES[0])[: 8 if options.quick else PLACES]
    target = probabilities(model, text)
    work = Workload("agreement", (Item(tuple(text), 1),), vocab=tokenizer.vocab_size)
    found: dict[str, Tensor] = {}
    for noise in NOISES[:2] if options.quick else NOISES:
        found[f"noise {noise:g}"] = probabilities(noisy(model, noise), text)
    rules = {"optimum": optimum, "coupled": agreement_of, "greedy": greedy}
    runs = []
    for name, draft in found.items():
        shares = {rule: float(share(target, draft).mean()) for rule, share in rules.items()}
        samples = Samples(kept=[{"seconds": 0.0, **shares}])
        facts = {"drafter": name}
        runs.append(
            summarize(
                phase,
                work,
                samples,
                model=options.model or "",
                dtype=torch.float32,
                options=facts,
            )
        )
    return runs


@torch.inference_mode()
def probabilities(model: Model, text: Sequence[int]) -> Tensor:
    """What the model says behind each token of the text: `[len(text), V]`."""
    ids = torch.tensor(text)
    hidden = model(ids, torch.arange(len(ids)), RecomputeAttention())
    return model.logits(hidden).softmax(-1)


def noisy(model: Model, noise: float) -> Model:
    """A copy with noise in its matrices: a drafter that is worse by a knob."""
    other, generator = clone(model), torch.Generator().manual_seed(0)
    for name, layer in other.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            weight = layer.weight.detach()
            change = noise * weight.std() * torch.randn(weight.shape, generator=generator)
            layer.weight = torch.nn.Parameter(weight + change, requires_grad=False)
    return other
