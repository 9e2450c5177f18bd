"""Options of replicas on the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from common.errors import UserError, choice, integer, number
from common.options import option

ROUTES = ("prefix", "least-loaded", "round-robin")
MOST_REPLICAS = 1024


@dataclass(frozen=True)
class ReplicaOptions:
    """Number of replicas, and how requests find one. Raises `UserError` for a value out of its limits."""

    replicas: int = option(
        0, "copies of the server, run by Ray Serve; 0: one server, without Ray"
    )
    max_replicas: int | None = option(None, "add replicas up to so many while requests queue")
    queue: float = option(
        16.0, "requests of each replica beyond which there should be another"
    )
    patience: float = option(
        30.0, "seconds of too much or too little load before the number changes"
    )
    route: Literal["prefix", "least-loaded", "round-robin"] = option(
        "prefix", "choice of a replica"
    )
    imbalance: int = option(
        8, "requests that a replica may have more than the least loaded, for a prefix"
    )
    cluster: str | None = option(
        None, "address of a Ray cluster of several machines; none: this one alone"
    )

    def __post_init__(self) -> None:
        """Check."""
        integer("replicas", self.replicas, low=0, high=MOST_REPLICAS)
        if self.max_replicas is not None:
            integer(
                "max_replicas",
                self.max_replicas,
                low=max(1, self.replicas),
                high=MOST_REPLICAS,
            )
        number("queue", self.queue, low=0.0, high=1e6, above_low=True)
        number("patience", self.patience, low=0.0, high=1e6, above_low=True)
        choice("route", self.route, ROUTES)
        integer("imbalance", self.imbalance, low=0, high=1 << 20)
        for item in fields(self):
            if not self.replicas and getattr(self, item.name) != item.default:
                raise UserError(
                    f"{item.name} is for replicas, but there are none: give --replicas as well"
                )

    @property
    def most(self) -> int:
        """Replicas that there may be at once."""
        return self.max_replicas or self.replicas
