"""Mistakes in tensor parallel, of phase 14."""

from tests.planted.planting import Bug

PARALLEL = "phases/14_parallel/parallel/"

BUGS = (
    Bug(
        "keys-of-the-wrong-head",
        PARALLEL + "shard.py",
        "parts, place = kv_heads, self.rank * kv_heads // self.size",
        "parts, place = kv_heads, self.rank % kv_heads",
        "Deals shared key/value heads out in turn, not to neighbours.",
    ),
    Bug(
        "vocabulary-rounded-down",
        PARALLEL + "shard.py",
        "room = -(-whole // self.size)",
        "room = whole // self.size",
        "Leaves the last tokens of an odd vocabulary to nobody.",
    ),
    Bug(
        "any-part-will-do",
        PARALLEL + "shard.py",
        "if len(cut) > 1 or own[dim] * parts != whole[dim]:",
        "if len(cut) > 1:",
        "Cuts groups of weights that share a scale.",
    ),
    Bug(
        "heads-not-checked",
        PARALLEL + "shard.py",
        "if heads % size and size % heads:",
        "if False:",
        "Takes any number of key/value heads.",
    ),
    Bug(
        "bias-on-every-rank",
        PARALLEL + "shard.py",
        'return leaf == "bias" and owner.endswith(ROWS)',
        "return False",
        "Adds a bias once for each rank.",
    ),
    Bug(
        "scales-of-a-part",
        PARALLEL + "loading.py",
        "return rows and isinstance(self.linears, Quantize) and self.linears.scheme is not None",
        "return False",
        "Quantizes each rank's part by itself: scales of a channel are then those of a part of its inputs.",
    ),
    Bug(
        "drafter-of-a-part",
        PARALLEL + "drafts.py",
        "    seen.config = whole\n",
        "",
        "Gives a drafter as many heads as a rank of the model has.",
    ),
    Bug(
        "watched-parts",
        PARALLEL + "fused.py",
        "if not block._forward_hooks:",
        "if True:",
        "Lets a drafter read a rank's part of a hidden state.",
    ),
    Bug(
        "one-place-for-all",
        PARALLEL + "kernels/all_reduce.py",
        "    counter = COUNTERS + program.to(tl.int64) * ALIGN\n",
        "    counter = COUNTERS + 0 * program.to(tl.int64)\n",
        "Counts all programs' meetings in one counter.",
    ),
    Bug(
        "part-not-added-up",
        PARALLEL + "layers.py",
        "return self.ranks.all_reduce(self.linear(x))",
        "return self.linear(x)",
        "Takes a rank's part of a sum for the sum.",
    ),
    Bug(
        "foreign-tokens-have-a-row",
        PARALLEL + "layers.py",
        "return self.ranks.all_reduce(found.masked_fill(~here.unsqueeze(-1), 0))",
        "return self.ranks.all_reduce(found)",
        "Adds row 0 of every rank that does not have the token.",
    ),
    Bug(
        "largest-of-a-part",
        PARALLEL + "sampler.py",
        "largest = self.ranks.gather(values).amax(0)  # [B]",
        "largest = values",
        "Weighs each rank's tokens against its own largest logit.",
    ),
    Bug(
        "noise-of-other-tokens",
        PARALLEL + "sampler.py",
        "ids = sampler.ids[self.first_token : self.first_token + logits.shape[1]]",
        "ids = sampler.ids[: logits.shape[1]]",
        "Draws the noise of a token by its place in the part.",
    ),
    Bug(
        "aborts-not-told",
        PARALLEL + "engine.py",
        "        self._commands.append(Leave(request.id))\n",
        "        pass\n",
        "Ends a request on rank 0 alone.",
    ),
    Bug(
        "checksums-not-compared",
        PARALLEL + "engine.py",
        "if self._sums.get(message.number) != message.value:",
        "if False:",
        "Collects checksums and looks at none.",
    ),
    Bug(
        "loss-not-noticed",
        PARALLEL + "crew.py",
        '        self._lost(f"rank {self.rank} has ended (exit code {code})")',
        "        del code",
        "Does not watch the other processes.",
    ),
)
