"""Mistakes in phase 11, speculative decoding. The first two are planted on every run of the test suite."""

from tests.planted.planting import Bug

VERIFY = "phases/11_speculative/speculative/verify.py"
SCHEDULER = "phases/04_continuous/continuous/scheduler.py"
CHUNKED = "phases/07_chunked_prefill/chunked_prefill/scheduler.py"
SAMPLER = "common/sampling/sampler.py"
OPS = "common/sampling/ops.py"
LOOPS = "phases/11_speculative/speculative/loops.py"
SPECULATOR = "phases/11_speculative/speculative/speculator.py"
CONTROL = "phases/11_speculative/speculative/control.py"
NGRAM = "phases/11_speculative/speculative/ngram.py"
SUFFIX = "phases/11_speculative/speculative/suffix.py"
MODEL = "phases/11_speculative/speculative/draft_model.py"
HEAD = "phases/11_speculative/speculative/head.py"
CHUNK = "phases/09_cuda_graphs/cuda_graphs/chunk_graph.py"
REJECTION = "phases/11_speculative/speculative/rejection.py"
STATS = "phases/11_speculative/speculative/stats.py"
DRAFTS = "phases/11_speculative/speculative/ahead/drafts.py"
AHEAD = "phases/11_speculative/speculative/ahead/kernels.py"
PRICE = "phases/11_speculative/speculative/price.py"
LOOKUP = "phases/11_speculative/speculative/ahead/lookup.py"
GRAPH = "phases/11_speculative/speculative/ahead/graph.py"
COLUMNS = "phases/11_speculative/speculative/cuda/columns.py"
STEPS = "phases/11_speculative/speculative/ahead/steps.py"
SYNTHETIC = "phases/11_speculative/speculative/synthetic.py"

BUGS = (
    Bug(
        "compares-with-the-next-place",
        VERIFY,
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
        "always-waits",
        SPECULATOR,
        "        return self._on\n",
        "        return True\n",
        "Gives up overlap though nobody guesses.",
    ),
    Bug(
        "as-many-as-it-likes",
        SPECULATOR,
        "                self._guesses[request] = drafts[:length]\n",
        "                self._guesses[request] = drafts\n",
        "Takes more drafts than it has asked for.",
    ),
    Bug(
        "guesses-in-prompts",
        SPECULATOR,
        "if not (r.placeholders or r.prefilling or r.siblings)",
        "if not (r.prefilling or r.siblings)",
        "Guesses what follows a token that it does not know.",
    ),
    Bug(
        "nothing-is-learned",
        SPECULATOR,
        "                self.control.saw(work.request, len(work.drafts), accepted)\n",
        "                pass\n",
        "Never tells the control what was accepted.",
    ),
    Bug(
        "losses-are-free",
        CONTROL,
        "if self.on and self.lost > allowed:",
        "if self.on and self.lost > 100 * allowed:",
        "Lets guessing lose twice the time there is.",
    ),
    Bug(
        "gains-without-end",
        CONTROL,
        "        self.lost = max(self.lost, -CREDIT * self.plain)\n",
        "",
        "Lets guessing lose for ever what it gained once.",
    ),
    Bug(
        "interruptions-count",
        CONTROL,
        "            seconds = min(seconds, 1.5 * self.plain)\n",
        "            pass\n",
        "Believes a step that was interrupted.",
    ),
    Bug(
        "interrupted-drafts-count",
        CONTROL,
        "        return 2 * (self.plain + (fixed",
        "        return 9 * (self.plain + (fixed",
        "Lets one step that was interrupted use up what guessing may lose.",
    ),
    Bug(
        "guessing-pays-for-the-machine",
        SPECULATOR,
        "if not drafts and (self.in_turn or cost.samples < SAMPLES)",
        "if not drafts and cost.samples < SAMPLES",
        "Charges guessing for what a laptop does meanwhile.",
    ),
    Bug(
        "untried-drafts-count",
        CONTROL,
        "+ min(drafts, accepted + 1)",
        "+ drafts",
        "Counts drafts behind the first wrong one as wrong, though nobody knows.",
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
        "copies-share-children",
        SUFFIX,
        "copy = self._state(dict(self.next[target]),",
        "copy = self._state(self.next[target],",
        "Lets a state and the one cut off from it have the same transitions.",
    ),
    Bug(
        "links-not-moved",
        SUFFIX,
        "        while state >= 0 and self.next[state].get(token) == target:\n"
        "            self.next[state][token] = copy\n"
        "            state = self.link[state]\n",
        "",
        "Cuts a state off, and leads nobody there.",
    ),
    Bug(
        "texts-run-together",
        SUFFIX,
        "        if token == BREAK:\n"
        "            self.tokens.append(token)\n"
        "            self.last = 0\n"
        "            return\n",
        "",
        "Lets a match run from one text into the next.",
        unseen="a text that goes through the break has the break in it, which no request says",
    ),
    Bug(
        "tenants-together",
        SUFFIX,
        "automaton = self.young.setdefault(request.salt, SuffixAutomaton())",
        'automaton = self.young.setdefault("b", SuffixAutomaton())',
        "Tells one tenant's text to another.",
    ),
    Bug(
        "preempted-are-told",
        SUFFIX,
        " or request.finish_reason is None or ",
        " or ",
        "Shares what a preempted request has said so far, again and again.",
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
    Bug(
        "columns-are-no-tokens",
        AHEAD,
        "        draft = tl.load(names + draft)\n",
        "        draft = draft + 0\n",
        "Takes the place in a reduced vocabulary for the token itself.",
    ),
    Bug(
        "chain-one-place-behind",
        AHEAD,
        "position = tl.where(real, start + 1 + right + j - base, -1)",
        "position = tl.where(real, start + right + j - base, -1)",
        "Computes every draft in the place of the token before it.",
    ),
    Bug(
        "chain-blind-to-itself",
        AHEAD,
        "tl.store(chain_contexts + place, (position + 1).to(tl.int32))",
        "tl.store(chain_contexts + place, position.to(tl.int32))",
        "A token does not see its own key.",
    ),
    Bug(
        "angles-of-the-first-step",
        DRAFTS,
        "(cos[number], sin[number])",
        "(cos[0], sin[0])",
        "Turns all drafts of a chain by the first one's angle.",
    ),
    Bug(
        "features-as-they-are",
        DRAFTS,
        "eps, ids=ids, norm_last=True)",
        "eps, ids=ids, norm_last=False)",
        "Gives the head hidden states that nobody has normalized.",
    ),
    Bug(
        "last-states-normalized",
        AHEAD,
        "if NORM_LAST or part < PARTS - 1:",
        "if part < PARTS:",
        "Normalizes the last layer's hidden states a second time.",
    ),
    Bug(
        "off-at-the-first-mistake",
        CONTROL,
        "self.lost = -FIRST_CREDIT * self.plain",
        "self.lost = 0.0",
        "Judges a drafter by its first guesses.",
    ),
    Bug(
        "judged-by-steps-that-wait",
        CONTROL,
        "self.unsure = REST - 1 if waited else max(0, self.unsure - 1)",
        "self.unsure = 0",
        "Compares guessing with steps that had to wait, as those without guessing do not.",
    ),
    Bug(
        "back-in-the-middle",
        SPECULATOR,
        "return (self._on or self.control.fresh) and self.control.decide(rows)",
        "return self.control.decide(rows)",
        "Lets a head come back to texts whose beginning it has not seen.",
    ),
    Bug(
        "begins-at-nothing",
        PRICE,
        "        return max(0.0, y - each * x), each\n",
        "        return 0.0, max(first / 100, y / x)\n",
        "Thinks that half as many drafts cost half as much.",
    ),
    Bug(
        "having-any-is-free",
        CONTROL,
        "gain >= each * count + having",
        "gain >= each * count",
        "Overlooks what it costs to have any drafts.",
    ),
    Bug(
        "everybody-pays-for-all",
        CONTROL,
        "max(0.0, fixed - cost.idle) / rows",
        "max(0.0, fixed - cost.idle)",
        "Lets each request pay alone for what drafts cost all.",
    ),
    Bug(
        "waiting-is-free",
        CONTROL,
        "max(0.0, fixed - cost.idle) / rows",
        "fixed / rows",
        "Stops guessing for a moment, where steps wait for each other all the same.",
    ),
    Bug(
        "wrong-for-ever",
        CONTROL,
        "            self.overall = Rate(FIRST_RATE)\n",
        "",
        "Tries again, and believes still that all drafts are wrong.",
    ),
    Bug(
        "dear-for-ever",
        CONTROL,
        "                cost.price.forget(OLD / rows)\n",
        "",
        "Believes for ever what drafts cost in the step that was interrupted.",
    ),
    Bug(
        "others-are-forgotten",
        CONTROL,
        "                self.overall.forget(OLD / rows, FIRST_RATE)\n",
        "",
        "Believes for ever that all drafts are wrong, if those of the first few were.",
    ),
    Bug(
        "old-losses-count-for-ever",
        CONTROL,
        "LONGEST = 1 - 1 / 4000",
        "LONGEST = 1.0",
        "Waits the longer for another try the longer it has served.",
    ),
    Bug(
        "most-at-once",
        CONTROL,
        "self.most if cost.tried >= GRACE else min(self.most, 1 << cost.tried)",
        "self.most",
        "Begins with the most drafts, before it knows what they cost.",
    ),
    Bug(
        "two-tokens-are-enough",
        LOOKUP,
        "agree * 0x1000000 + place",
        "0x1000000 + place",
        "Takes the last place where two tokens agree, however many agree elsewhere.",
    ),
    Bug(
        "match-for-what-follows",
        LOOKUP,
        "(found & 0xFFFFFF) + 1, newest",
        "found & 0xFFFFFF, newest",
        "Drafts the end of the n-gram that was found, not what followed it.",
    ),
    Bug(
        "over-the-newest-token",
        LOOKUP,
        "tl.store(text + newest + 1 + j, draft, mask=real)",
        "tl.store(text + newest + j, draft, mask=real)",
        "Writes drafts one place too early.",
    ),
    Bug(
        "nothing-looks-like-something",
        LOOKUP,
        "tl.where(found >= 0, draft, -1)",
        "draft",
        "Does not tell the host that nothing was found.",
    ),
    Bug(
        "no-guess-counts-as-wrong",
        STEPS,
        "if work.row in self.blank and not right:",
        "if False:",
        "Counts a step in which nobody guessed as a mistake.",
    ),
    Bug(
        "once-blank-always-blank",
        STEPS,
        "(self.blank.discard if guessed else self.blank.add)(work.row)",
        "self.blank.add(work.row)",
        "Does not count guesses behind a step in which there were none.",
    ),
    Bug(
        "a-token-behind",
        STEPS,
        "                    work.request.num_computed_tokens = work.start + 1\n",
        "                    pass\n",
        "Forgets that a step without drafts computes a token, too.",
    ),
    Bug(
        "tiles-stand-still",
        GRAPH,
        "            self._tiles[:, 3] = batch.positions[self._first]\n",
        "            pass\n",
        "Leaves query tiles at the positions that they were captured with.",
    ),
    Bug(
        "comes-back-behind-the-prompt",
        SPECULATOR,
        "                self._on = self.control.decide(1)\n",
        "",
        "Turns a head on when the step with the prompt, which it should see, is on its way already.",
    ),
    Bug(
        "columns-with-an-odd-gate",
        COLUMNS,
        "    if part is None or rows % tiles or",
        "    if part is None or",
        "Takes a gated matrix whose rows are not two by two.",
    ),
    Bug(
        "columns-wait-in-line",
        COLUMNS,
        "        tiles *= 2\n",
        "        break\n",
        "Gives large matrices more programs than run side by side.",
    ),
)
