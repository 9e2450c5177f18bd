"""Mistakes in phase 11, speculative decoding. The first two are planted on every run of the test suite."""

from tests.planted.planting import Bug

SPECULATION = "phases/11_speculative/speculative/speculation.py"
SCHEDULER = "phases/04_continuous/continuous/scheduler.py"
CHUNKED = "phases/07_chunked_prefill/chunked_prefill/scheduler.py"
SAMPLER = "common/sampling/sampler.py"
OPS = "common/sampling/ops.py"
LOOPS = "phases/11_speculative/speculative/loops.py"
NGRAM = "phases/11_speculative/speculative/ngram.py"
MODEL = "phases/11_speculative/speculative/draft_model.py"
HEAD = "phases/11_speculative/speculative/head.py"
CHUNK = "phases/09_cuda_graphs/cuda_graphs/chunk_graph.py"
REJECTION = "phases/11_speculative/speculative/rejection.py"
STATS = "phases/11_speculative/speculative/stats.py"
SYNTHETIC = "phases/11_speculative/speculative/synthetic.py"

BUGS = (
    Bug(
        "compares-with-the-next-place",
        SPECULATION,
        "sampled[right] == drafts[right]:",
        "sampled[right + 1] == drafts[right]:",
        "Compares a draft with what was sampled behind it.",
    ),
    Bug(
        "penalties-blind-to-drafts",
        SAMPLER,
        "                counts.scatter_add_(1, before.clamp(min=0), (before >= 0).int())\n",
        "                pass\n",
        "Penalizes all places for what was said before the first of them.",
    ),
    Bug(
        "wrong-drafts-counted",
        SAMPLER,
        "                ones = ones * ops.behind_right_drafts(tokens, drafts)\n",
        "                pass\n",
        "Counts for the penalties what was sampled behind wrong drafts.",
    ),
    Bug(
        "one-wrong-is-enough",
        OPS,
        "return (right | ~guessed).all(1).int()",
        "return (right | ~guessed)[:, -1].int()",
        "Looks at the last draft before a place only.",
    ),
    Bug(
        "guesses-before-it-knows",
        LOOPS,
        "            self.inner.land(engine)\n        self.inner.advance(engine)\n\n    def land",
        "            pass\n        self.inner.advance(engine)\n\n    def land",
        "Schedules a step while the tokens that drafts depend on are on their way.",
    ),
    Bug(
        "nothing-is-learned",
        SPECULATION,
        "                self.control.saw(work.request, len(work.drafts), accepted)\n",
        "                pass\n",
        "Never tells the control what was accepted.",
    ),
    Bug(
        "finds-itself",
        NGRAM,
        "                if place >= order:\n"
        "                    self._ends[tuple(self.tokens[place - order :])] = place\n"
        "            self.tokens.append(token)\n",
        "                if place >= order:\n"
        "                    self._ends[tuple(self.tokens[place - order :])] = place - 1\n"
        "            self.tokens.append(token)\n",
        "Goes on one token too early.",
    ),
    Bug(
        "takes-everything-in-again",
        NGRAM,
        "for token in tokens[self.seen :]:",
        "for token in tokens:",
        "Takes the whole text in at every step.",
    ),
    Bug(
        "shortest-first",
        NGRAM,
        "ORDERS = (4, 3, 2)",
        "ORDERS = (2, 3, 4)",
        "Looks for the shortest n-gram first.",
    ),
    Bug(
        "wrong-drafts-stay-computed",
        MODEL,
        "            if own.tokens[known + right] != shadow.drafts[right]:\n                break\n",
        "",
        "Takes what the draft model computed behind a wrong draft for right.",
    ),
    Bug(
        "last-draft-counts-as-computed",
        MODEL,
        "right < len(shadow.drafts) - 1:",
        "right < len(shadow.drafts):",
        "Takes the last draft for computed, which nobody has computed.",
    ),
    Bug(
        "own-seed",
        MODEL,
        "params, seed=request.seed)",
        "params, seed=request.seed + 1)",
        "Drafts with other noise than the model's.",
    ),
    Bug(
        "draft-blocks-leak",
        MODEL,
        "            self.cache.release(shadow.request)\n",
        "",
        "Never gives the draft model's blocks back.",
    ),
    Bug(
        "head-reads-itself",
        HEAD,
        "own.num_computed_tokens = len(own.tokens) - sum(map(len, self._fed[requests[own]]))",
        "own.num_computed_tokens = len(own.tokens) - 1",
        "Keeps what the head made of its own hidden states where the model's are known.",
    ),
    Bug(
        "head-one-behind",
        HEAD,
        "return request.tokens[self._first[request] + 1 :]",
        "return request.tokens[self._first[request] :]",
        "Gives the head each token with the hidden state behind it, not before it.",
    ),
    Bug(
        "head-skips-a-gap",
        HEAD,
        "            self.leave(request)  # steps have passed unseen\n",
        "            pass\n",
        "Goes on behind hidden states that nobody has seen.",
        unseen="such a gap is noticed a second time, when drafts are asked for",
    ),
    Bug(
        "wrong-hidden-states-kept",
        HEAD,
        "count = work.count - len(work.drafts) + accepted",
        "count = work.count",
        "Reads hidden states of wrong drafts.",
    ),
    Bug(
        "replaced-by-p",
        REJECTION,
        "draw(residual(p, q), generator)",
        "draw(p, generator)",
        "Replaces a rejected draft by any token of the model's.",
    ),
    Bug(
        "accepts-the-likely",
        REJECTION,
        "generator=generator) * q[token] >= p[token]:",
        "generator=generator) >= p[token]:",
        "Accepts a draft with the model's probability, whatever the drafter's was.",
    ),
    Bug(
        "marks-one-late",
        STATS,
        "first = work.start + work.count - drafts - request.prompt_len",
        "first = work.start + work.count - drafts - request.prompt_len + 1",
        "Tints the token behind each accepted draft.",
    ),
    Bug(
        "synthetic-owes-nothing",
        SYNTHETIC,
        "        self._owed = min(self._owed - right, 1.0)\n",
        "        self._owed = 0.0\n",
        "Forgets the half draft that it owes.",
    ),
    Bug(
        "asked-for-drafts-not-dropped",
        SCHEDULER,
        "        if computed and self.drafter is not NO_DRAFTS:\n"
        "            self.drafter.landed(work, accepted)\n",
        "",
        "Never tells the drafter what became of its drafts.",
    ),
    Bug(
        "guesses-take-places",
        SCHEDULER,
        "budget - count - self.kept(len(queue) - at)",
        "budget - count",
        "Lets guesses use up the budget before others have had their tokens.",
    ),
    Bug(
        "guesses-take-the-quarter",
        CHUNKED,
        "return later + self._kept",
        "return later",
        "Lets guesses use up what is kept for prompts.",
    ),
    Bug(
        "graph-without-its-drafts",
        CHUNK,
        'given["drafts"] = NOTHING if drafts is None else drafts',
        'given["drafts"] = NOTHING',
        "Verifies what stood in the row before, in the place of the drafts.",
    ),
    Bug(
        "drafts-one-place-too-early",
        "phases/11_speculative/speculative/verify_graph.py",
        "drafts[end - len(work.drafts) : end] = work.drafts",
        "drafts[end - len(work.drafts) - 1 : end - 1] = work.drafts",
        "Puts the drafts in a graph in the place of the newest token and behind it.",
    ),
)
