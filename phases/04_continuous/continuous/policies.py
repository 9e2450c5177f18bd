"""Scheduling policies: each computes a request's rank once, when the request arrives. Smaller goes first.

Waiting requests are sorted by rank. If cache memory runs out, the running request of the largest rank is
preempted. It keeps its rank, so it returns to its old position in the queue and not to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from common.request import Request

Policy = Callable[[Request], tuple[float, ...]]
"""Returns the rank of a request; no two requests have the same, since each policy ends with their ids."""

fcfs: Policy = attrgetter("arrival", "id")
"""First come, first served, so no request waits for ever."""

shortest_first: Policy = attrgetter("limit", "id")
"""The fewest tokens first that a request may have, prompt and output, for the shortest mean wait (Smith,
1956). A long request can starve as long as short ones keep coming."""

priority: Policy = attrgetter("priority", "id")
"""The priority that the caller gave, lower first; equals by arrival."""

POLICIES = {"fcfs": fcfs, "shortest_first": shortest_first, "priority": priority}
"""Policies by the name that `load` and the command line take."""

POLICY_NAMES = {policy: name for name, policy in POLICIES.items()}

by_rank = attrgetter("rank")
"""Return a request's rank, as a key for sorting."""
