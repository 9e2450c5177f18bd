"""Policies that choose a replica for a request. Plain Python, which the router in Ray and the tests share.

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
        """Return the names in `loads`, best first; Ray tries the next if a replica takes no more requests.

        chain: hashes of longer and longer beginnings of the request's prompt. loads: how many requests each
            replica has, by its name.
        """
        raise NotImplementedError

    def sent(self, chain: Sequence[int], replica: str) -> None:
        """Record that a request was sent to `replica`, whose prefix cache will hold the request's prompt.

        chain: hashes of longer and longer beginnings of that prompt.
        """

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every replica but those named. (A restarted replica has a new name, and an empty cache.)"""


class RoundRobin(Policy):
    """Chooses each replica in its turn, whatever its load is."""

    def __init__(self) -> None:
        self._turn = -1

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """Return the names in `loads`, sorted and rotated by one more at each call; `chain` is not used."""
        names = sorted(loads)
        self._turn = (self._turn + 1) % len(names)
        return names[self._turn :] + names[: self._turn]


class LeastLoaded(RoundRobin):
    """Chooses the replica with the fewest requests; among equally loaded ones, each in its turn."""

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """Return the names in `loads`, those with the fewest requests first; `chain` is not used."""
        return sorted(super().rank(chain, loads), key=lambda name: loads[name])


class Memory:
    """The blocks, by hash, that a replica's prefix cache is assumed to hold: the most recently sent ones.

    capacity: how many blocks at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def found(self, chain: Sequence[int]) -> int:
        """Return how many blocks, from the start of the prompt, the replica is assumed to hold.

        chain: hashes of the prompt's beginnings, one a block.
        """
        count = 0
        for digest in chain:
            if digest not in self._blocks:
                break
            count += 1
        return count

    def learn(self, chain: Sequence[int]) -> None:
        """Record that the replica holds the blocks of a prompt; beyond the capacity the oldest are forgotten.

        A prompt's last blocks are forgotten before its first. chain: hashes of the prompt's beginnings, one a
        block.
        """
        blocks = self._blocks
        for digest in reversed(chain):
            blocks[digest] = None
            blocks.move_to_end(digest)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)


class PrefixAware(Policy):
    """Chooses the replica whose cache holds the longest beginning of the request, unless it is too busy.

    imbalance: no request goes to a replica that has more than this number of requests over the least loaded
        one.

    This bound keeps a prefix that all requests share from making one replica do all the work. Beyond it the
    request goes to another replica, and from then on both know the prefix.
    """

    def __init__(self, imbalance: int = 8) -> None:
        self.imbalance = imbalance
        self._memory: dict[str, Memory] = {}
        self._idle = LeastLoaded()

    def rank(self, chain: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """Return the names in `loads`, those with the fewest requests first.

        The replica that holds most of the prompt comes before them, if it has at most `imbalance` requests
        more than the least loaded one, and holds more than a share `WORTH` of the prompt's blocks beyond what
        that one holds. chain: hashes of the prompt's beginnings, one a block.
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
        """Record that the cache of `replica` will hold a prompt's blocks. chain: hashes of its beginnings."""
        self.memory(replica).learn(chain)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget the blocks of every replica but those named."""
        for name in self._memory.keys() - replicas:
            del self._memory[name]

    def memory(self, replica: str) -> Memory:
        """Return the blocks that the replica of this name is assumed to hold."""
        return self._memory.setdefault(replica, Memory(CAPACITY))


def make_policy(route: str, imbalance: int) -> Policy:
    """Return the policy called `route`: "prefix", "least-loaded" or "round-robin".

    imbalance: for "prefix", see `PrefixAware`.
    """
    if route == "prefix":
        return PrefixAware(imbalance)
    return LeastLoaded() if route == "least-loaded" else RoundRobin()


class InFlight:
    """Records which replica has which request, and so every replica's load.

    A request counts from the moment it is assigned, not from when the replica has it: of a hundred that come
    at once, the second must see the first.
    """

    def __init__(self) -> None:
        self._where: dict[str, str] = {}
        self._loads: dict[str, int] = {}

    def begin(self, request: str, replica: str) -> None:
        """Assign a request, by its id, to a replica, by its name, and to no other any more."""
        self.end(request)
        self._where[request] = replica
        self._loads[replica] = self._loads.get(replica, 0) + 1

    def end(self, request: str) -> None:
        """Forget the request with this id, which has ended; do nothing if it is not known."""
        replica = self._where.pop(request, None)
        if replica is not None:
            self._loads[replica] -= 1

    def of(self, replica: str) -> int:
        """Return how many requests in flight the replica of this name has."""
        return self._loads.get(replica, 0)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every replica but those named, and their requests."""
        self._where = {
            request: name for request, name in self._where.items() if name in replicas
        }
        self._loads = {name: count for name, count in self._loads.items() if name in replicas}
