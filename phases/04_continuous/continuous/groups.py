"""Requests of a ragged batch in groups, of which each is one call of attention.

The requests of a step differ in their numbers of queries and of keys. One call for all would pad every
request to the longest; one call for each costs a launch each. So `group` puts similar requests together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from continuous.batch import HostBatch, Ints
from forward.attention import LayerSpec, attend, causal_mask

PADDING_PER_CALL = {"cpu": 128, "cuda": 32_768, "mps": 8192}
"""How many padded query-key pairs cost as much as one more call, roughly (measured on a CPU: a decode reads a
key in 0.1 microseconds, a call costs 12)."""


@dataclass
class Group:
    """Requests whose attention is computed in one call, padded to the longest query and context among them.

    members: `[G]`, the indices of these requests in the batch. host: the batch.
    queries, context: the longest query and context.
    gather: which tokens of the batch are the group's queries: a slice if they are adjacent and need no
        padding, or `[G, queries]` int64 on the device, where padding repeats a request's last token.
    scatter: for a padded group, the tokens to write and where in the flat `[G * queries]` their results are.
    masks: by sliding window, made when a layer first needs one.
    """

    members: Ints
    host: HostBatch
    queries: int
    context: int
    gather: slice | Tensor
    scatter: tuple[Tensor, Tensor] | None = None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        members: Ints,
        host: HostBatch,
        device: torch.device,
        meant: NDArray[np.bool_] | None = None,
    ) -> Group:
        """Return a `Group` of these members of a batch, with its indices copied to the device.

        members: `[G]`, indices into the batch. host: the batch's lengths.
        meant: `[G]` bool, False for members that only fill a gap; their results are dropped. None: all True.
        """
        starts, lens = host.query_starts[members], host.query_lens[members]
        queries, context = int(lens.max()), int(host.context_lens[members].max())
        padded = bool((lens != queries).any()) or (meant is not None and not meant.all())
        if not padded and (len(members) == 1 or bool((np.diff(starts) == queries).all())):
            adjacent = slice(int(starts[0]), int(starts[0]) + len(members) * queries)
            return cls(members, host, queries, context, adjacent)
        columns = np.arange(queries)
        gather = starts[:, None] + np.minimum(columns, lens[:, None] - 1)  # [G, queries]
        plan = cls(members, host, queries, context, torch.from_numpy(gather).to(device))
        if padded:
            filled = columns < lens[:, None]  # [G, queries]
            real = (filled if meant is None else filled & meant[:, None]).ravel()
            tokens = torch.from_numpy(gather.ravel()[real]).to(device)
            plan.scatter = tokens, torch.from_numpy(np.flatnonzero(real)).to(device)
        return plan

    def mask(self, window: int | None, columns: int, device: torch.device) -> Tensor | None:
        """Return the mask `[G, 1, queries, columns]` of visible keys; None if every query sees every key.

        window: tokens that a query sees; None: all. columns: keys. Made once a step for each window.
        """
        if window not in self.masks:
            contexts = self.host.context_lens[self.members]
            lens = self.host.query_lens[self.members]
            inside = window is None or columns <= window
            if self.queries == 1 and contexts.min() == columns and inside:
                self.masks[window] = None
            else:
                first = torch.from_numpy(contexts - lens).to(device)  # [G], of the first query
                later = torch.arange(self.queries, device=device)
                positions = first[:, None] + later  # [G, queries]
                seen = causal_mask(positions, torch.arange(columns, device=device), window)
                self.masks[window] = seen.unsqueeze(1)
        return self.masks[window]

    def take(self, x: Tensor) -> Tensor:
        """Return the group's tokens of `x [T, heads, D]`, heads first: `[G, heads, queries, D]`."""
        taken = x[self.gather]
        return taken.reshape(len(self.members), self.queries, *x.shape[1:]).transpose(1, 2)

    def put(self, out: Tensor, result: Tensor) -> None:
        """Write `result [G, H, queries, D]` to the group's tokens of `out [T, H, D]`."""
        flat = result.transpose(1, 2).reshape(-1, *out.shape[1:])  # [G * queries, H, D]
        if isinstance(self.gather, slice):
            out[self.gather] = flat
        elif self.scatter is None:
            out[self.gather.view(-1)] = flat
        else:
            tokens, source = self.scatter
            out[tokens] = flat[source]


def group(
    order: Sequence[int], queries: Ints, contexts: Ints, padding: int, rows: Ints | None = None
) -> list[Ints]:
    """Return requests in groups, each padded to its longest query and context, so that little is padded.

    order: indices into the batch, sorted so that neighbours have similar lengths.
    queries, contexts: `[B]`, numbers of new tokens and of keys. padding: most padded pairs of a group.
    rows: `[B]`, increasing in this order; if given, one view must cover a group's rows, and rows between them
        that no request of the group has are padding too. None: rows do not matter.

    Returns the members of each group, as indices into the batch. Requests are taken in the given order. One
    is added to the current group as long as the group's padding stays within `padding` query-key pairs, so
    every further call saves more padding than it costs.
    """
    groups: list[Ints] = []
    current: list[int] = []
    longest = widest = pairs = 0
    q, c = queries.tolist(), contexts.tolist()
    r = None if rows is None else rows.tolist()
    for i in order:
        longer, wider = max(longest, q[i]), max(widest, c[i])
        own = q[i] * c[i]
        height = len(current) + 1 if r is None or not current else r[i] - r[current[0]] + 1
        waste = height * longer * wider - pairs - own
        if current and waste > padding:
            groups.append(np.array(current))
            current = []
            pairs = 0
            longer = q[i]
            wider = c[i]
        current.append(i)
        longest = longer
        widest = wider
        pairs = pairs + own
    if current:
        groups.append(np.array(current))
    return groups


def attend_masked(
    layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """Return a layer's attention `[G, H, S, D]` by one fused call, which never writes the scores to memory.

    q: `[G, H, S, D]`. k, v: `[G, KH, C, D]`. mask: `[G or 1, 1, S, C]` bool, True: visible; None: all keys.
    The fused call knows no sinks; for a layer with sinks, phase 01's `attend` is called instead.
    """
    if layer.sinks is not None:
        return attend(layer, q, k, v, mask)
    heads = layer.num_heads // layer.num_kv_heads
    # The query heads of one key/value head become rows of one matrix, as in `attend`.
    grouped = q.reshape(q.shape[0], layer.num_kv_heads, heads * q.shape[2], layer.head_dim)
    if mask is not None and heads > 1 and q.shape[2] > 1:
        mask = mask.repeat(1, 1, heads, 1)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=layer.scale)
    return out.reshape(q.shape)


def prompt_groups(host: HostBatch, device: torch.device) -> tuple[list[Group], Ints]:
    """Return the requests without cached tokens in `Group`s of similar length, and the others' indices.

    host: the batch's lengths. A request without cached tokens attends to this step's keys and values.
    """
    fresh = (host.query_lens == host.context_lens) & (host.query_lens > 1)
    found = np.flatnonzero(fresh)
    order = found[np.argsort(host.query_lens[found], kind="stable")].tolist()
    groups = group(order, host.query_lens, host.context_lens, PADDING_PER_CALL[device.type])
    return [Group.of(members, host, device) for members in groups], np.flatnonzero(~fresh)
