"""Mistakes in the exercises of phase 14."""

from tests.course.slips import Slip

SLIPS = {
    "14.1": (
        Slip(
            "last-tokens-for-nobody",
            "room = -(-whole // self.size)",
            "room = whole // self.size",
            "Leaves the last tokens of an odd vocabulary to nobody.",
        ),
        Slip(
            "empty-places-are-tokens",
            "min(whole, first + room) - first, room",
            "room, room",
            "Counts places that no token fills.",
        ),
        Slip(
            "heads-dealt-out-in-turn",
            "self.rank * kv_heads // self.size",
            "self.rank % kv_heads",
            "Deals shared key/value heads out in turn, not to neighbours.",
        ),
        Slip("always-rows", "dim = cut[0]", "dim = 0", "Cuts every matrix by its outputs."),
        Slip(
            "nobody-has-a-head",
            "max(1, heads // size)",
            "heads // size",
            "Leaves a rank without key/value heads where there are fewer than ranks.",
        ),
        Slip(
            "any-number-of-heads",
            "if heads % size and size % heads:",
            "if False:",
            "Takes any number of key/value heads.",
        ),
        Slip(
            "scales-cut-in-two",
            "if len(cut) > 1 or own[dim] * parts != whole[dim]:",
            "if len(cut) > 1:",
            "Cuts groups of weights that share a scale.",
        ),
        Slip(
            "bias-on-every-rank",
            'return leaf == "bias" and owner.endswith(ROWS)',
            "return False",
            "Adds a bias once for each rank.",
        ),
        Slip(
            "every-bias-on-one-rank",
            'return leaf == "bias" and owner.endswith(ROWS)',
            'return leaf == "bias"',
            "Takes the bias of layers that are cut by their outputs from all ranks but one.",
        ),
    ),
    "14.2": (
        Slip(
            "part-not-added-up",
            "return self.ranks.all_reduce(self.linear(x))",
            "return self.linear(x)",
            "Takes a rank's part of a sum for the sum.",
        ),
        Slip(
            "added-up-before",
            "return self.ranks.all_reduce(self.linear(x))",
            "return self.linear(self.ranks.all_reduce(x))",
            "Adds up inputs that belong to different weights.",
        ),
        Slip(
            "foreign-tokens-have-a-row",
            "found.masked_fill(~here.unsqueeze(-1), 0)",
            "found",
            "Adds row 0 of every rank that does not have the token.",
        ),
        Slip(
            "ids-of-all",
            "own = input_ids - self.first",
            "own = input_ids",
            "Reads a token's id as its place.",
        ),
        Slip(
            "below-the-first",
            "(own >= 0) & (own < self.count)",
            "own < self.count",
            "Takes tokens before its own.",
        ),
        Slip("one-too-many", "own < self.count)", "own <= self.count)", "Takes the next rank's first token."),
        Slip(
            "rows-not-added-up",
            "return self.ranks.all_reduce(found.masked_fill(~here.unsqueeze(-1), 0))",
            "return found.masked_fill(~here.unsqueeze(-1), 0)",
            "Leaves zeros for the tokens of others.",
        ),
    ),
    "14.3": (
        Slip(
            "largest-of-a-part",
            "largest = self.ranks.gather(values).amax(0)",
            "largest = self.ranks.gather(values)[self.ranks.rank]",
            "Weighs each rank's tokens against its own largest logit.",
        ),
        Slip(
            "noise-by-place",
            "sampler.ids[self.first_token : self.first_token + logits.shape[1]]",
            "sampler.ids[: logits.shape[1]]",
            "Draws the noise of a token by its place in the part.",
        ),
        Slip(
            "places-for-tokens",
            "return self._best(values, at + self.first_token)",
            "return self._best(values, at)",
            "Takes a place in the part for a token's id.",
        ),
        Slip(
            "empty-places-win",
            "own = logits[:, : self.own_tokens].float()",
            "own = logits.float()",
            "Lets places without a token win.",
        ),
        Slip(
            "each-its-own",
            "return found[..., 1].gather(0, winner[None])[0].long()",
            "return tokens",
            "Takes each rank's winner for the winner.",
        ),
        Slip("the-least", ".max(0).indices", ".min(0).indices", "Takes the token of the smallest value."),
        Slip(
            "nobody-draws",
            "if Feature.RANDOM in plan.features:",
            "if False:",
            "Takes the largest logit for rows that have a temperature.",
        ),
    ),
    "14.4": (
        Slip(
            "last-step-only",
            "hash((self.checksum, *what))",
            "hash(what)",
            "Forgets the steps before in the checksum.",
        ),
        Slip("order-is-no-matter", "hash((self.checksum, *what))", "self.checksum + hash(what)", "Adds up."),
        Slip(
            "looked-at-none",
            "if self._sums.get(message.number) != message.value:",
            "if False:",
            "Collects checksums and looks at none.",
        ),
        Slip(
            "against-the-newest",
            "self._sums.get(message.number) != message.value",
            "self.checksum != message.value",
            "Compares a step with another one.",
        ),
        Slip(
            "aborts-not-told",
            "        self._commands.append(Leave(request.id))\n",
            "        pass\n",
            "Ends a request on rank 0 alone.",
        ),
        Slip(
            "deaf-to-leaving",
            "                self._leave(engine, command)\n",
            "                pass\n",
            "Aborts nobody.",
        ),
        Slip("never-tells", "if turn.number % self.every == 0:", "if False:", "Sends no checksum."),
        Slip(
            "comes-alone",
            "Add(requests)",
            "Add(requests[:1])",
            "Takes in the first sample of several.",
        ),
    ),
}
