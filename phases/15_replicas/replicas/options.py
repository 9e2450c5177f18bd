"""Options of replicas on the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from common.errors import UserError, integer
from common.options import check_options, option

ROUTES = ("prefix", "least-loaded", "round-robin")
MOST_REPLICAS = 1024
POSITIVE = {"low": 0.0, "high": 1e6, "above_low": True}


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of a cluster: number of replicas, and how a request's replica is chosen.

    Raises:
        UserError: a value is out of its limits.
    """

    replicas: int = option(
        0,
        "copies of the server, run by Ray Serve; 0: one server, without Ray",
        low=0,
        high=MOST_REPLICAS,
    )
    max_replicas: int | None = option(
        None, "most replicas; they are added while requests queue"
    )
    queue: float = option(
        16.0, "requests per replica above which another replica is added", **POSITIVE
    )
    patience: float = option(
        30.0, "seconds of high or low load before replicas are added or removed", **POSITIVE
    )
    route: Literal["prefix", "least-loaded", "round-robin"] = option(
        "prefix", "how a request's replica is chosen", choices=ROUTES
    )
    imbalance: int = option(
        8,
        "requests that the replica with the prefix may have more than the least loaded",
        low=0,
        high=1 << 20,
    )
    cluster: str | None = option(
        None, "address of a Ray cluster of several machines; none: this machine alone"
    )

    def __post_init__(self) -> None:
        """Raise `UserError` for a value out of its limits."""
        check_options(self)
        if self.max_replicas is not None:
            integer(
                "max_replicas",
                self.max_replicas,
                low=max(1, self.replicas),
                high=MOST_REPLICAS,
            )
        for item in fields(self):
            if not self.replicas and getattr(self, item.name) != item.default:
                raise UserError(
                    f"{item.name} is for replicas, but there are none: give --replicas as well"
                )

    @property
    def most(self) -> int:
        """Return the largest number of replicas that may run at a time."""
        return self.max_replicas or self.replicas
