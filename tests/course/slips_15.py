"""Mistakes in the exercises of phase 15."""

from tests.course.slips import Slip

SLIPS = {
    "15.1": (
        "chain-of-blocks-alone",
        "salt-left-out",
        "tools-left-out",
        Slip(
            "part-of-a-block",
            "range(0, len(text) - BLOCK + 1, BLOCK)",
            "range(0, len(text), BLOCK)",
            "Counts a block that is not full, so that a conversation that goes on is another one.",
        ),
        Slip("without-end", 'b"".join(parts)[: BLOCK * LONGEST]', 'b"".join(parts)', "Hashes all of a book."),
        Slip(
            "last-message-only",
            "*map(bytes, found.messages),",
            "*map(bytes, found.messages[-1:]),",
            "Knows the last message only.",
        ),
        Slip(
            "refuses-loudly",
            "except (msgspec.DecodeError, RecursionError):",
            "except RecursionError:",
            "Fails on what others will refuse.",
        ),
    ),
    "15.2": (
        "no-bound",
        "gap-skipped",
        "beginnings-forgotten-first",
        "any-match-wins",
        Slip(
            "bound-one-too-small",
            "if loads[name] <= most",
            "if loads[name] < most",
            "Stops one request too soon.",
        ),
        Slip(
            "never-worth-it",
            "if found[best] - found[order[0]] > WORTH * len(chain):",
            "if False:",
            "Goes by load alone.",
        ),
        Slip(
            "first-come-first-known",
            "key=lambda name: found[name])",
            "key=lambda name: 0)",
            "Prefers nobody.",
        ),
        Slip(
            "all-is-remembered",
            "while len(blocks) > self.capacity:",
            "while False:",
            "Remembers what the replica has long evicted.",
        ),
        Slip(
            "used-is-no-newer",
            "            blocks.move_to_end(digest)\n",
            "",
            "Forgets what is used again and again.",
        ),
        Slip(
            "somebody-left-out",
            "            order.insert(0, best)\n",
            "            order = [best]\n",
            "Names one replica only.",
        ),
    ),
    "15.3": (
        "counted-at-both",
        Slip(
            "ends-twice",
            "        replica = self._where.pop(request, None)\n",
            "        replica = self._where.get(request)\n",
            "Takes a request off as often as it is said to end.",
        ),
        Slip(
            "never-less",
            "            self._loads[replica] -= 1\n",
            "            pass\n",
            "Counts requests that have ended.",
        ),
        Slip(
            "unknown-is-an-error",
            "        return self._loads.get(replica, 0)\n",
            "        return self._loads[replica]\n",
            "Fails for a replica that has never had a request.",
        ),
        Slip(
            "loads-kept",
            "        self._loads = {name: count for name, count in self._loads.items() if name in replicas}\n",
            "        pass\n",
            "Remembers the load of a replica that has left.",
        ),
        Slip(
            "requests-kept",
            "        self._where = {request: name for request, name in self._where.items() if name in replicas}\n",
            "        pass\n",
            "Fails, or counts below zero, when a request of a replica that left ends.",
        ),
    ),
}
