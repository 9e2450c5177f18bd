"""A dense model's MLPs cut into experts, with a router fitted to what the model itself computes.

`down(a)`, `a = act(gate(x)) * up(x)`, is a sum over neurons, so an MLP is a sum of eight smaller ones, each
of an eighth of them: with all eight, and weights of 1, the dense model's output. With fewer, those that add
little should be left out. So neurons that are large for the same tokens go into one expert (MoEfication,
arXiv 2110.01786), and a router learns to predict from `x` how large each expert's part is.

Nothing is trained by gradients: it takes one pass over some thousand tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.errors import UserError
from common.files import whole
from common.models.config import ExpertConfig
from common.paths import cache_home
from experts.kernels.stack import ExpertStack, Swiglu
from experts.layer import Experts
from experts.stacked import StackedExperts
from forward.attention import RecomputeAttention
from forward.layers import GatedMLP
from forward.model import Model
from quant.loading import replace_layer

COUNT = 8
"""Experts that an MLP is cut into."""
PIECES, LENGTH = 8, 512
"""Of the text that is looked at: its last `PIECES` pieces of `LENGTH` tokens."""
ROUNDS = 8
"""In which neurons may change their expert."""
RIDGE = 0.01
FORMAT = 1
"""Raise it when other experts are made of the same model, and those kept before are made anew."""


def cut(model: Model, tokens: Sequence[int], top_k: int) -> None:
    """Put `Experts` in the places of a model's MLPs, of which a token goes through `top_k`.

    Args:
        tokens: a text. What is found for it is kept in the cache folder.

    Raises:
        UserError: a model's MLPs are not `GatedMLP`s of plain weights, or `COUNT` does not divide them.
    """
    mlps = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, GatedMLP)
    }
    size, parts = (
        model.config.intermediate_size,
        [part for mlp in mlps.values() for part in mlp.children()],
    )
    plain = all(isinstance(part, nn.Linear) and part.bias is None for part in parts)
    if not mlps or size % COUNT or not plain:
        raise UserError(
            f"active_experts cuts MLPs of gate, up and down in {COUNT} experts, but this model's have "
            f"{size} neurons, biases, or few bits, or no gate"
        )
    facts = ExpertConfig(COUNT, top_k, size // COUNT, normalize=False, weighted=False)
    model.config = replace(model.config, experts=facts)
    for (name, mlp), found in zip(
        mlps.items(), kept(model, [*mlps.values()], tokens), strict=True
    ):
        replace_layer(model, name, experts_of(mlp, *found, model))


def experts_of(mlp: GatedMLP, neurons: Tensor, router: Tensor, model: Model) -> Experts:
    """Return the MLP's neurons as experts; see `divide`."""
    with torch.device("meta"):
        layer = Experts(model.config)
    neurons, router = neurons.to(model.device), router.to(model.device, model.dtype)
    gate_up = torch.cat([mlp.gate_proj.weight[neurons], mlp.up_proj.weight[neurons]], dim=1)
    down = mlp.down_proj.weight[:, neurons].transpose(0, 1).contiguous()  # [E, hidden, I / E]
    layer.gate.weight = nn.Parameter(router, requires_grad=False)
    layer.experts = StackedExperts(
        ExpertStack(gate_up), ExpertStack(down), Swiglu(model.config.activation)
    )
    return layer


def kept(
    model: Model, mlps: Sequence[GatedMLP], tokens: Sequence[int]
) -> Iterable[tuple[Tensor, Tensor]]:
    """Return what `divide` says of every MLP, from the cache folder if it was asked before."""
    digest = hashlib.sha256(f"{FORMAT} {COUNT} {list(tokens)[-PIECES * LENGTH :]}".encode())
    for mlp in mlps:
        digest.update(mlp.gate_proj.weight[0].float().cpu().numpy().tobytes())
    path = cache_home() / "experts" / f"{digest.hexdigest()[:24]}.safetensors"
    if not path.is_file():
        neurons, router = zip(*look(model, mlps, tokens), strict=True)
        with whole(path) as scratch:
            save_file(
                {"neurons": torch.stack(neurons), "router": torch.stack(router)}, scratch
            )
    stored = load_file(path)
    return zip(stored["neurons"], stored["router"], strict=True)


@torch.no_grad()
def look(
    model: Model, mlps: Sequence[GatedMLP], tokens: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Run the model once over the text's end, and cut each MLP by what it computes there."""
    length = min(LENGTH, model.max_len, len(tokens))
    ids = torch.tensor(
        tokens[-(len(tokens) // length) * length :][-PIECES * length :], device=model.device
    )
    ids = ids.view(-1, length)
    found: list[tuple[Tensor, Tensor]] = []

    def note(mlp: GatedMLP, given: tuple[Tensor]) -> None:
        x = given[0].flatten(0, -2)
        found.append(
            divide(x, mlp.act(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight)
        )

    hooks = [mlp.register_forward_pre_hook(note) for mlp in mlps]
    model(
        ids, torch.arange(length, device=model.device).expand(ids.shape), RecomputeAttention()
    )
    for hook in hooks:
        hook.remove()
    return found


def divide(x: Tensor, neurons: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return the neurons of each expert of an MLP, `[E, I / E]` int64, and the router, `[E, hidden]` float32.

    Args:
        x: `[T, hidden]`, the MLP's inputs. neurons: `[T, I]`, what `down [hidden, I]` is multiplied with.
    """
    x = x.float().cpu()
    neurons = neurons.float().cpu()
    down = down.float().cpu()
    owner = split_into_equal_groups(F.normalize((neurons.abs() * down.norm(dim=0)).t(), dim=1))
    own = torch.stack([(owner == expert).nonzero()[:, 0] for expert in range(COUNT)])
    sizes = torch.stack(
        [(neurons[:, mine] @ down[:, mine].t()).norm(dim=1) for mine in own], dim=1
    )
    return own, fit(x, sizes)


def split_into_equal_groups(directions: Tensor) -> Tensor:
    """Put rows of like direction together, in `COUNT` groups of one size: balanced k-means.

    Args:
        directions: `[I, T]`, of length 1.

    Returns:
        `[I]`, each row's group.
    """
    count = len(directions)
    middles = directions[torch.linspace(0, count - 1, COUNT).long()]
    owner = torch.full((count,), -1)
    for _ in range(ROUNDS):
        nearest = (directions @ middles.t()).flatten().argsort(descending=True).tolist()
        groups, room = [-1] * count, [count // COUNT] * COUNT
        for row, group in (
            divmod(place, COUNT) for place in nearest
        ):  # the nearest pair first
            if groups[row] < 0 and room[group]:
                groups[row] = group
                room[group] -= 1
        owner = torch.tensor(groups)
        middles = torch.stack(
            [F.normalize(directions[owner == group].mean(0), dim=0) for group in range(COUNT)]
        )
    return owner


def fit(x: Tensor, sizes: Tensor) -> Tensor:
    """Fit a router `[E, hidden]` to inputs `x [T, hidden]` and the sizes `[T, E]` of the experts' parts.

    It solves `(x^T x + r I) router^T = x^T scores` for the scores: the logarithms of the sizes, of which
    none counts as less than 1e-9. What all experts have in common decides nothing between them, so each
    token's mean is taken off. r is `RIDGE` times the mean of the diagonal of `x^T x`, so that few tokens
    decide nothing alone.
    """
    wanted = sizes.clamp_min(1e-9).log()
    wanted -= wanted.mean(dim=1, keepdim=True)
    square = x.t() @ x
    square += torch.eye(len(square)) * square.diagonal().mean() * RIDGE
    return torch.linalg.solve(square, x.t() @ wanted).t().contiguous()
