"""A drafter that is trained for one model: a head on its hidden states.

It follows EAGLE-3 (Li et al., arXiv 2503.01840): one layer that is given, beside each token, the hidden
states that a low, a middle and the last layer of the model had before it, and in place of those that do not
exist yet its own. EAGLE-3's trees are left out.

The head has the embedding of the model it drafts for, and of its output head the rows of the most frequent
tokens: the others are never drafted. How SmolLM2's was trained stands beside its weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from common.errors import UserError
from common.request import Request
from continuous.batch import upload
from continuous.engine import Engine
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from forward.attention import Attention
from forward.layers import RMSNorm
from forward.model import Model
from forward.models.llama import Llama, LlamaBlock
from forward.rope import Rope
from paged_cache import PagedEngine
from paged_cache.runner import PagedRunner
from quant.weights import QuantizedWeight
from speculative.draft_model import DraftModel, Shadow
from speculative.hidden_state_hooks import HiddenStateHooks, hooked_layers

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
"""Weights that come with the course: `<model>-head.safetensors`."""


KIND = "head"
"""Of drafter, in the metadata of a file."""


class ReducedHead(nn.Module):
    """An output head for some tokens of the vocabulary; the others have a logit of minus infinity.

    ids: `[N]` int64, which tokens. weight: `[N, hidden]`, the rows of these tokens in the large head's
        weight.
    """

    def __init__(self, weight: Tensor, ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("ids", ids)
        self.register_buffer("weight", weight[ids].detach().clone())
        self.ids: Tensor
        self.weight: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of `hidden [..., hidden]`; -inf for tokens that are not in `ids`."""
        some = hidden @ self.weight.T
        logits = some.new_full((*some.shape[:-1], self.vocab_size), float("-inf"))
        return logits.index_copy_(-1, self.ids, some)


class Head(Model):
    """The EAGLE-3 drafter: a small model on hidden states of the large one, whose embedding it shares.

    At position p it is given the token p + 1 and the hidden states from which that token was sampled, and
    predicts token p + 2. So its sequence is the request's without the first token. Its output head has only
    some tokens.

    large: the model it drafts for. layers: its number of layers. width: of their MLPs. ids: `[N]` int64, the
        tokens of its output head.
    hooks: indices of the large model's layers whose outputs it reads, beside the last layer's.
    features: `[most, hidden]`, what the next call reads beside the token ids, in their order: mixed hidden
        states. `most` is the number of tokens given to `room`.
    """

    features: Tensor
    lm_head: ReducedHead

    def __init__(self, large: Llama, layers: int, width: int, ids: Tensor) -> None:
        windows = (None,) * layers
        config = replace(
            large.config, num_layers=layers, intermediate_size=width, sliding_windows=windows
        )
        super().__init__(config)
        assert config.rope is not None
        self.embed_tokens = large.embed_tokens
        self.rope = Rope(config.rope, config.head_dim)
        self.layers = nn.ModuleList(LlamaBlock(config, spec) for spec in self.layer_specs)
        hidden, eps = config.hidden_size, config.norm_eps
        self.norm = RMSNorm(hidden, eps)
        tied = large.embed_tokens.weight
        weight = tied if config.tie_word_embeddings else head_weight(large)
        self.lm_head = ReducedHead(weight, ids, config.vocab_size)
        self.hooks = hooked_layers(large.config.num_layers)
        self.state_norms = nn.ModuleList(RMSNorm(hidden, eps) for _ in self.hooks)
        self.mix_states = nn.Linear((len(self.hooks) + 1) * hidden, hidden, bias=False)
        self.token_norm, self.feature_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.fuse = nn.Linear(2 * hidden, hidden, bias=False)

    def mix(self, states: Tensor) -> Tensor:
        """Return the drafter's input features `[..., hidden]`, mixed from hidden states of the large model.

        states: `[..., 3 * hidden]`, of a low, a middle and the last layer, end to end. Those of the first
            two have not been normalized yet, and some channels are a hundred times the rest.
        """
        *between, last = states.split(self.config.hidden_size, dim=-1)  # type: ignore[no-untyped-call]
        normed = [norm(x) for norm, x in zip(self.state_norms, between, strict=True)]
        mixed: Tensor = self.mix_states(torch.cat((*normed, last), dim=-1))
        return mixed

    def room(self, tokens: int) -> None:
        """Allocate `features`, what `forward` reads beside token ids, for up to `tokens` tokens.

        Its address stays, so a CUDA graph may read it.
        """
        self.features = torch.zeros(
            tokens, self.config.hidden_size, dtype=self.dtype, device=self.device
        )

    def feed(self, hidden: Tensor) -> None:
        """Store features `hidden [n, hidden]` for the next call of `forward`.

        They are the large model's hidden states (mixed by `mix`), or the drafter's own output for the token
        before.
        """
        self.features[: len(hidden)].copy_(hidden)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the drafter's hidden states `[n, hidden]`, which are also the next tokens' features.

        input_ids, positions: `[n]`; the first `n` stored `features` are read. attention: computes
            attention.
        """
        tokens = self.token_norm(self.embed_tokens(input_ids))
        features = self.feature_norm(self.features[: len(input_ids)])
        x = self.fuse(torch.cat((tokens, features), dim=-1))
        cos_sin = self.rope(positions)
        for layer in self.layers:
            x = layer(x, cos_sin, attention)
        return self.norm(x)

    def own(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained and saved, by name: all but the shared embedding."""
        return {
            name: value
            for name, value in self.named_parameters()
            if not name.startswith("embed_tokens.")
        }


def head_weight(large: Model) -> Tensor:
    """Return the weight of the output head of `large`, `[V, hidden]`, dequantized if it is quantized."""
    layer: Any = large.get_submodule("lm_head")
    layer = getattr(layer, "linear", layer)
    weight: Tensor | QuantizedWeight = layer.weight
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def load(path: Path, large: Model) -> Head:
    """Return the EAGLE-3 drafter in the file `path`, for `large`, the model that it was trained for.

    Raises:
        UserError: there is no such file, it holds no drafter, or one for another model.
    """
    if not path.is_file():
        raise UserError(f"draft_model is {str(path)!r}, but there is no such file")
    if not isinstance(large, Llama):
        raise UserError(
            f"{path.name} drafts for models of the Llama family, not for {large.config.family}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            shape = json.loads((file.metadata() or {}).get("drafter", "{}"))
            own = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"draft_model is {str(path)!r}, which is no file of weights ({error})"
        ) from None
    if not isinstance(shape, dict) or shape.get("kind") != KIND:
        raise UserError(f"draft_model is {str(path)!r}, but that holds no drafter")
    layers = max(1, sum(name.endswith("input_layernorm.weight") for name in own))
    width = len(own.get("layers.0.mlp.gate_proj.weight", ()))
    config = large.config
    sizes = {
        "layers": layers,
        "width": width,
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
    }
    for name, value in sizes.items():
        if shape.get(name) != value:
            fault = f"{name} is {shape.get(name)!r}, not {value}"
            raise UserError(f"{path.name} is another model's or damaged: {fault}")
    ids = own.pop("ids", torch.empty(0)).long().to(large.device)
    if ids.ndim != 1 or not len(ids) or bool(((ids < 0) | (ids >= config.vocab_size)).any()):
        raise UserError(f"{path.name} is damaged: its ids name no tokens")
    model = Head(large, layers, width, ids)
    with torch.no_grad():
        for name, value in model.own().items():
            there, must = list(own.get(name, torch.empty(0)).shape), list(value.shape)
            if there != must:
                raise UserError(
                    f"{path.name} is damaged: {name} is {there}, but must be {must}"
                )
            value.copy_(own[name])
    return model.to(device=large.device, dtype=large.dtype).requires_grad_(False).eval()


class HeadSource(DraftModel):
    """A proposer of drafts by an EAGLE-3 head, which reads the model's hidden states after every step.

    For each request, the head's sequence begins at the first token whose hidden state it has seen: behind
    the prefix found in the cache, or where drafting has begun again. The head knows nothing of earlier
    tokens.
    """

    watches = True

    def __init__(self, engine: PagedEngine, hooks: HiddenStateHooks) -> None:
        super().__init__(engine)
        assert isinstance(engine.runner.model, Head)
        self.head, self.hooks = engine.runner.model, hooks
        self._runner: PagedRunner | None = None
        self._first: dict[Request, int] = {}  # the position of the first hidden state
        self._fed: dict[
            Request, list[Tensor]
        ] = {}  # hidden states that are not computed on yet
        self._count: dict[Request, int] = {}  # the hidden states seen, from the first on
        self._starts: tuple[Forwarded | None, dict[int, int]] = (None, {})

    def attach(self, engine: Engine) -> None:
        """Store the runner of the engine whose hidden states are read."""
        assert isinstance(engine.runner, PagedRunner)
        self._runner = engine.runner

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Store the hidden states of one request's tokens in a finished step, without those of wrong drafts.

        work: the request's tokens in the step. accepted: how many of its drafts the model confirmed.
        """
        assert self._runner is not None and self._runner.last is not None
        last = self._runner.last
        if self._starts[0] is not last:
            starts = accumulate((one.count for one in last.works), initial=0)
            self._starts = last, dict(zip(map(id, last.works), starts, strict=False))
        request, place = work.request, self._starts[1].get(id(work))
        if request.row < 0:
            return
        if place is None:  # guessing has just begun, and another step has been launched since
            self.leave(request)
            return
        if (
            request in self._first
            and self._first[request] + self._count[request] != work.start
        ):
            self.leave(request)  # steps have passed unseen
        if request not in self._first:
            self._first[request] = work.start
            self._count[request] = 0
            self._fed[request] = []
        count = work.count - len(work.drafts) + accepted
        some = slice(place, place + count)
        self._fed[request].append(
            torch.cat((self.hooks.kept[some], last.hidden[some]), dim=-1)
        )
        self._count[request] += count

    def _skipped(self, request: Request) -> int:
        return self._first[request] + 1

    def _ready(self, request: Request, length: int) -> Shadow | None:
        known = self._count.get(request, 0)
        if not known or self._first[request] + known + 1 != len(request.tokens):
            return None  # steps have passed unseen
        return super()._ready(request, length)

    def _write(self, some: Sequence[tuple[Shadow, int]]) -> None:
        behind = {shadow.request: place for place, (shadow, _) in enumerate(some)}
        requests = {shadow.request: request for request, shadow in self.shadows.items()}
        for own in behind:
            # What the head made of its own features is made again of the model's.
            own.num_computed_tokens = len(own.tokens) - sum(map(len, self._fed[requests[own]]))
        fed = [torch.cat(self._fed[requests[own]]) for own in behind]
        mixed = self.head.mix(torch.cat(fed)).split([len(some) for some in fed])  # type: ignore[no-untyped-call]
        self._waiting = dict(zip(behind, mixed, strict=True))
        super()._write(some)
        for own in behind:
            self._fed[requests[own]] = []

    def _step(self, works: list[Work]) -> Pending:
        parts = []
        for work in works:
            own = self._waiting[work.request]
            parts.append(own[: work.count])
            self._waiting[work.request] = own[work.count :]
        features = torch.cat(parts)
        self.head.feed(features)
        ends = np.cumsum([work.count for work in works]) - 1
        at = upload(features.device, {"ends": ends})[
            "ends"
        ]  # before the step, or the copy would wait for it
        step = self.runner.forward(works)
        out = step.hidden[at]
        for place, work in enumerate(works):
            if work.sampled_requests:
                self._waiting[work.request] = out[place : place + 1]
        return self.runner.sample(step)

    def leave(self, request: Request) -> None:
        """Free the row and blocks that a request has in the drafter's engine, and its hidden states."""
        super().leave(request)
        for kept in (self._first, self._fed, self._count):
            kept.pop(request, None)
