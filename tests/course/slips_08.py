"""Mistakes in the exercises of phase 08."""

from tests.course.slips import Slip

SLIPS = {
    "08.1": (
        Slip(
            "all-of-the-last-node",
            "path.append((node, length))",
            "path.append((node, len(node.keys)))",
            "Takes the whole of a node that matches in part.",
        ),
        Slip(
            "goes-on-behind-a-difference",
            "            if length < len(node.keys):\n                break\n",
            "",
            "Looks for children of a node that has not matched whole.",
        ),
        Slip(
            "first-key-is-enough",
            "if held[:length] == keys[at : at + length]:",
            "if held[:1] == keys[at : at + 1]:",
            "Compares the first block and believes the rest.",
        ),
        Slip(
            "one-key-at-a-time",
            "at += length",
            "at += 1",
            "Goes on one key further, however long the node was.",
        ),
        Slip(
            "one-tree-for-all",
            "self._roots.get(salt), 0",
            "next(iter(self._roots.values()), None), 0",
            "Looks into another tenant's tree.",
        ),
    ),
    "08.2": (
        "split-loses-pins",
        "split-loses-the-rest",
        Slip(
            "under-its-old-parent",
            "        node.parent = upper\n",
            "",
            "Leaves the lower part with its old parent.",
        ),
        Slip(
            "parent-keeps-the-old",
            "        node.parent.children[upper.keys[0]] = upper\n",
            "",
            "Does not tell the parent of the upper part.",
        ),
        Slip(
            "keys-stay",
            "del node.keys[:length], node.blocks[:length]",
            "del node.blocks[:length]",
            "Cuts the blocks and not the keys.",
        ),
        Slip(
            "age-is-lost",
            "upper.pins, upper.used = node.pins, node.used",
            "upper.pins = node.pins",
            "Makes the upper part as old as can be.",
        ),
    ),
    "08.3": (
        "shared-leaf-grows",
        "inner-node-grows",
        Slip(
            "way-not-pinned",
            "            node = child\n            self._pin_one(node)\n",
            "            node = child\n",
            "Does not pin what it follows.",
        ),
        Slip(
            "leaf-not-pinned",
            "                self._pin_one(node)\n        return",
            "        return",
            "Does not pin a new leaf.",
        ),
        Slip(
            "held-though-it-differs",
            "            if length < len(child.keys):\n                child = self._split(child, length)\n",
            "",
            "Takes the whole of a node that matches in part.",
        ),
        Slip(
            "new-ones-only",
            "return node, held + new, new",
            "return node, new, new",
            "Leaves out what was held already.",
        ),
    ),
    "08.4": (
        "evicted-still-counted",
        "age-of-creation",
        "parents-never-evicted",
        Slip(
            "stale-entries-count",
            "            if not self._current(leaf, used):\n                continue\n",
            "",
            "Believes entries of the heap that are out of date.",
        ),
        Slip(
            "beginnings-first",
            "freed.append(leaf.blocks.pop())",
            "freed.append(leaf.blocks.pop(0))",
            "Evicts a leaf from its beginning.",
        ),
        Slip(
            "whole-leaves",
            "while leaf.blocks and len(freed) < count:",
            "while leaf.blocks:",
            "Evicts more than was asked for.",
        ),
        Slip(
            "rest-is-lost",
            "            else:\n                self._offer(leaf)\n",
            "",
            "Forgets a leaf that has blocks left.",
        ),
    ),
    "08.5": (
        "nothing-left-to-compute",
        "pins-cost-nothing",
        "hits-count-as-new",
        "cached-is-not-free",
        "tenants-together",
    ),
    "08.6": (
        "partial-blocks-committed",
        "evicts-all-it-takes",
        "evicted-but-taken",
        "duplicates-kept",
        "theirs-without-user",
        "mine-not-given-back",
        "index-is-no-user",
    ),
}
