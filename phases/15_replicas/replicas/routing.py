"""Policies that choose a replica for a request. Plain Python, which Ray and the tests share.

A replica is a name. Its load is the number of its requests that have not ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

WORTH = 0.1
"""Share of a request's blocks that a busier replica must have in addition to be preferred."""
CAPACITY = 1 << 16
"""Blocks that a replica's cache is assumed to hold: 8 MB of text, some two million tokens."""


class Policy:
    """Ranks replicas for a request; the base class of all policies."""

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """Return the names in `loads`, best first; Ray tries the others if the best refuses.

        chain: hashes of longer and longer beginnings of the request's prompt. loads: requests of each
            replica, by its name.
        """
        raise NotImplementedError

    def sent(self, chain: Sequence[int], replica: str) -> None:
        """Record that a request was sent to `replica`, whose cache will hold its beginning.

        chain: hashes of longer and longer beginnings of its prompt.
        """

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every replica but those named. One that comes back has a new name, and an empty cache."""


class RoundRobin(Policy):
    """Chooses each replica in its turn, whatever its load is."""

    def __init__(self) -> None:
        self._turn = -1

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """Return the names in `loads` in order, starting one further at each call; `chain` does not
        matter.
        """
        names = sorted(loads)
        self._turn = (self._turn + 1) % len(names)
        return names[self._turn :] + names[: self._turn]


class LeastLoaded(RoundRobin):
    """Chooses the replica with the fewest requests; equally loaded ones in turn, or the first would get every
    single request.
    """

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """Return the names in `loads`, those with the fewest requests first; `chain` does not matter."""
        return sorted(super().rank(chain, loads), key=lambda name: loads[name])


class Memory:
    """The blocks that a replica's prefix cache is assumed to hold: the `capacity` most recently sent ones."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def found(self, chain: Sequence[int]) -> int:
        """Return how many blocks from the start of the chain (hashes of a prompt's beginnings) the replica
        holds.
        """
        count = 0
        for digest in chain:
            if digest not in self._blocks:
                break
            count += 1
        return count

    def learn(self, chain: Sequence[int]) -> None:
        """Record that the replica holds the blocks of a chain (hashes of a prompt's beginnings).

        Its end is forgotten before its beginning.
        """
        blocks = self._blocks
        for digest in reversed(chain):
            blocks[digest] = None
            blocks.move_to_end(digest)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)


class PrefixAware(Policy):
    """Chooses the replica that has the longest beginning of the request in its cache, within a bound.

    imbalance: the bound: no request goes to a replica that has more than so many requests over the least
        loaded one.

    The bound keeps a prefix that all requests share from making one replica do all the work. Beyond it the
    request goes elsewhere, and from then on two replicas know the prefix.
    """

    def __init__(self, imbalance: int = 8) -> None:
        self.imbalance = imbalance
        self._memory: dict[str, Memory] = {}
        self._idle = LeastLoaded()

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """Return the names in `loads`: first a replica that holds enough of the chain's blocks, then by
        load.
        """
        found = {name: self.memory(name).found(chain) for name in loads}
        # Where no block is known: an idle replica; of several, the one that knows fewest blocks.
        order = self._idle.rank(chain, loads)
        order.sort(key=lambda name: (loads[name], -found[name], len(self.memory(name))))
        most = loads[order[0]] + self.imbalance
        best = max(
            (name for name in order if loads[name] <= most), key=lambda name: found[name]
        )
        if found[best] - found[order[0]] > WORTH * len(chain):
            order.remove(best)
            order.insert(0, best)
        return order

    def sent(self, chain: Sequence[int], replica: str) -> None:
        """Record that the cache of `replica` will hold the blocks of this chain (hashes of a prompt's
        beginnings).
        """
        self.memory(replica).learn(chain)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget the blocks of every replica but those named."""
        for name in self._memory.keys() - replicas:
            del self._memory[name]

    def memory(self, replica: str) -> Memory:
        """Return the blocks that the replica of this name is assumed to hold."""
        return self._memory.setdefault(replica, Memory(CAPACITY))


def make_policy(route: str, imbalance: int) -> Policy:
    """Return the policy called `route`: "prefix", "least-loaded" or "round-robin". imbalance: for
    "prefix".
    """
    if route == "prefix":
        return PrefixAware(imbalance)
    return LeastLoaded() if route == "least-loaded" else RoundRobin()


class InFlight:
    """Records which replica has which request, and so every replica's load.

    A request counts from the moment it is assigned, not from when it has arrived: of a hundred that come at
    once, the second must see the first.
    """

    def __init__(self) -> None:
        self._where: dict[str, str] = {}
        self._loads: dict[str, int] = {}

    def begin(self, request: str, replica: str) -> None:
        """Assign a request, by its id, to a replica, by its name, and no longer to any other."""
        self.end(request)
        self._where[request] = replica
        self._loads[replica] = self._loads.get(replica, 0) + 1

    def end(self, request: str) -> None:
        """Forget a request, by its id, that has ended; does nothing if it is not known."""
        replica = self._where.pop(request, None)
        if replica is not None:
            self._loads[replica] -= 1

    def of(self, replica: str) -> int:
        """Return the number of requests that the replica of this name has."""
        return self._loads.get(replica, 0)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every replica but those named, and their requests."""
        self._where = {
            request: name for request, name in self._where.items() if name in replicas
        }
        self._loads = {name: count for name, count in self._loads.items() if name in replicas}
