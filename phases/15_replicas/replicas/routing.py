"""Policies that choose a replica. Plain Python, which Ray and the tests share.

A replica is a name. Its load is the number of its requests that have not ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

WORTH = 0.1
"""Share of a request that has to be found in addition before it is worth going to a busier replica."""
CAPACITY = 1 << 16
"""Blocks that a replica is taken to remember: 8 MB of text, some two million tokens."""


class Policy:
    """Ranks replicas for a request; what is sent where only matters to those that remember it."""

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """The names in `loads`, best first; the others are for when the best refuses.

        chain: see `prefixes.chain_of`.
        """
        raise NotImplementedError

    def sent(self, chain: Sequence[int], replica: str) -> None:
        """A request has gone there: what it begins with will be in that replica's cache."""

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every replica but these. One that comes back has a new name, and an empty cache."""


class RoundRobin(Policy):
    """Each in its turn, however busy it is."""

    def __init__(self) -> None:
        self._turn = -1

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """See `Policy`."""
        names = sorted(loads)
        self._turn = (self._turn + 1) % len(names)
        return names[self._turn :] + names[: self._turn]


class LeastLoaded(Policy):
    """The one with the fewest requests; among equals in turn, or the first would get every single request."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """See `Policy`."""
        return sorted(self._turns.rank(chain, loads), key=lambda name: loads[name])


class Memory:
    """The blocks that a replica's prefix cache is taken to hold: those that were sent there last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def found(self, chain: Sequence[int]) -> int:
        """Count the blocks of the chain that it holds, from the first without a gap."""
        count = 0
        for digest in chain:
            if digest not in self._blocks:
                break
            count += 1
        return count

    def learn(self, chain: Sequence[int]) -> None:
        """It holds these now. The end of a chain is older than its beginning, and forgotten before it."""
        blocks = self._blocks
        for digest in reversed(chain):
            blocks[digest] = None
            blocks.move_to_end(digest)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)


class PrefixAware(Policy):
    """The replica that has the longest beginning of the request in its cache, within a bound.

    The bound keeps a prefix that all requests share from making one replica do all the work: no request goes
    to a replica that has more than `imbalance` requests over the least loaded one. Beyond it the request
    goes elsewhere, and from then on two replicas know the prefix.

    Args:
        imbalance: requests.
        capacity: blocks that each replica remembers.
    """

    def __init__(self, imbalance: int = 8, capacity: int = CAPACITY) -> None:
        self.imbalance, self.capacity = imbalance, capacity
        self._memory: dict[str, Memory] = {}
        self._idle = LeastLoaded()

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """See `Policy`."""
        found = {name: self.memory(name).found(chain) for name in loads}
        # Where nothing is known: an idle replica, and of several that which knows least.
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
        """See `Policy`."""
        self.memory(replica).learn(chain)

    def keep(self, replicas: Collection[str]) -> None:
        """See `Policy`."""
        self._memory = {
            name: memory for name, memory in self._memory.items() if name in replicas
        }

    def memory(self, replica: str) -> Memory:
        """Return the blocks that the replica is taken to hold."""
        return self._memory.setdefault(replica, Memory(self.capacity))


def make_policy(route: str, imbalance: int) -> Policy:
    """The policy of `ReplicaOptions.route`."""
    if route == "prefix":
        return PrefixAware(imbalance)
    return LeastLoaded() if route == "least-loaded" else RoundRobin()


class InFlight:
    """Which replica has which request, and so every replica's load.

    A request counts from the moment it is given away, not from when it has arrived: of a hundred that come
    at once, the second must see the first.
    """

    def __init__(self) -> None:
        self._where: dict[str, str] = {}
        self._loads: dict[str, int] = {}

    def begin(self, request: str, replica: str) -> None:
        """It is given to this replica, and no longer to another."""
        self.end(request)
        self._where[request] = replica
        self._loads[replica] = self._loads.get(replica, 0) + 1

    def end(self, request: str) -> None:
        """It is over, however; harmless if it was before."""
        replica = self._where.pop(request, None)
        if replica is not None:
            self._loads[replica] -= 1

    def of(self, replica: str) -> int:
        """The replica's load."""
        return self._loads.get(replica, 0)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every replica but these, and what it had."""
        self._where = {
            request: name for request, name in self._where.items() if name in replicas
        }
        self._loads = {name: count for name, count in self._loads.items() if name in replicas}
