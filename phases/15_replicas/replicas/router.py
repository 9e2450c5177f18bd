"""The routing policies of this phase as a request router of Ray Serve.

https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html
"""

from __future__ import annotations

import pickle
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from replicas import heartbeats  # Ray copies what else this file names, but not a module
from replicas.gate import KEY, NOTES
from replicas.routing import InFlight, Policy, make_policy


class Router(RequestRouter):  # type: ignore[misc]
    """Chooses replicas by a `Policy`; it runs in the proxy's process, and in every other that calls replicas.

    Several proxies share replicas and know nothing of each other. So a replica's load is the number of
    requests sent from this process, or the number that the replica has reported with its last response,
    whichever is larger.

    policy: ranks the replicas.
    """

    policy: Policy

    def initialize_state(self, route: str = "prefix", imbalance: int = 8) -> None:
        """Make the policy, and the record of requests in flight; Ray calls this once.

        route: the policy's name, as in `--route`. imbalance: for "prefix": how many requests the chosen
            replica may have more than the least loaded one.
        """
        self.policy, self.in_flight = make_policy(route, imbalance), InFlight()
        self._unsent: dict[str, PendingRequest] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return lists of replicas, best first: Ray tries the next list if a replica takes no more requests.

        candidate_replicas: those that run. pending_request: the request to be sent; None: all replicas are
            equally good, in one list.
        """
        if pending_request is None:
            return [candidate_replicas]
        said = routing_fields(pending_request)
        by_name = {name_of(replica.replica_id): replica for replica in candidate_replicas}
        avoided = {*said["avoid"], *heartbeats.ASSIGNMENTS.suspects()}
        by_name = {name: by_name[name] for name in by_name.keys() - avoided} or by_name
        if (wanted := said["wanted"]) in by_name:
            heartbeats.ASSIGNMENTS.replicas[said["number"]] = wanted
            if said["body"]:  # it goes on from a conversation that this replica has
                self._give(pending_request, said, wanted)
            return [[by_name[wanted]]]
        self._forget_cancelled()
        loads = {name: self.load(name, replica) for name, replica in by_name.items()}
        order = self.policy.rank(said["chain"], loads)
        self._give(pending_request, said, order[0])
        return [[by_name[name]] for name in order]

    def load(self, name: str, replica: RunningReplica) -> int:
        """Return how many requests the replica `name` has, as far as this process knows.

        replica: Ray's object for it, by whose id its last reported number is found.
        """
        reported = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(reported, self.in_flight.of(name))

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record that the replica `replica_id` has accepted a request; Ray calls this.

        It changes something only if `choose_replicas` had put another replica first. result: not used.
        """
        if self._unsent.pop(id_of(pending_request), None) is not None:
            self._give(pending_request, routing_fields(pending_request), name_of(replica_id))
            self._unsent.pop(id_of(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget the request with Ray's id `internal_request_id`, which has ended. replica_id: not used."""
        self._unsent.pop(internal_request_id, None)
        self.in_flight.end(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Store Ray's new list of replicas, and forget what the policy knows of replicas that are missing."""
        super().update_replicas(replicas)
        names = {name_of(replica_id) for replica_id in self.curr_replicas}
        self.policy.keep(names)
        self.in_flight.keep(names)

    def _give(self, request: PendingRequest, said: dict[str, Any], name: str) -> None:
        """Record that `request` goes to the replica `name`, unless Ray reports another one later.

        said: the fields that the proxy has added to the request, such as `chain`.
        """
        self.in_flight.begin(id_of(request), name)
        self.policy.sent(said["chain"], name)
        self._unsent[id_of(request)] = request
        heartbeats.ASSIGNMENTS.replicas[said["number"]] = name

    def _forget_cancelled(self) -> None:
        """Forget requests whose clients left before dispatch, which Ray does not report."""
        for request, pending in list(self._unsent.items()):
            if pending.future.cancelled():
                self.on_request_completed(None, request)


def id_of(request: PendingRequest) -> str:
    """Return Ray's own id of a request."""
    return str(request.metadata.internal_request_id)


def name_of(replica: ReplicaID) -> str:
    """Return the name of a replica, as the header `x-ladder-replica` shows it."""
    return str(replica.unique_id)


def routing_fields(request: PendingRequest) -> dict[str, Any]:
    """Return the fields that the proxy has added to a request for its router, by name, or their defaults.

    They are `number` (the proxy's, of the request), `chain` (hashes of the prompt's beginnings), `body`,
    `wanted` (name of the replica to be asked, if it runs) and `avoid` (names of replicas that have failed at
    the request).
    """
    said: dict[str, Any] | None = None
    if request.args and isinstance(request.args[0], bytes):
        said = pickle.loads(request.args[0]).asgi_scope.get(KEY)
    return said or NOTES
