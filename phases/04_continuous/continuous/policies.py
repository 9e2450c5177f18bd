"""Scheduling policies: each computes a request's rank, once, when it arrives. Smaller goes first.

Waiting requests are sorted by rank, and the running one of the largest is preempted. A preempted request
keeps its rank, so it returns to its old position in line and not to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from common.request import Request

Policy = Callable[[Request], tuple[float, ...]]


by_rank = attrgetter("rank")
"""Return a request's rank, as a key for sorting."""


def fcfs(request: Request) -> tuple[float, ...]:
    """Return a request's rank by arrival: first come, first served, so no request waits for ever."""
    return (request.id,)


def shortest_first(request: Request) -> tuple[float, ...]:
    """Return a request's rank by the tokens it may have, the fewest first, for the shortest mean wait.

    These are the prompt and the most tokens that may be generated (Smith, 1956). A long request can
    starve as long as short ones keep coming.
    """
    return (request.limit, request.id)


def priority(request: Request) -> tuple[float, ...]:
    """Return a request's rank by the priority that the caller gave, lower first; equals by arrival."""
    return (request.priority, request.id)


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "shortest_first": shortest_first,
    "priority": priority,
}
"""Policies by the name that `load` and the command line take."""
