"""Mistakes in phase 09, graphs and overlap. The first two are planted on every run of the test suite.

Its kernels run in the interpreter here, so none of these may write outside of a tensor.
"""

from tests.planted.planting import Bug

HOME = "phases/09_cuda_graphs/cuda_graphs/"
STEP = HOME + "step_kernels.py"
TABLES = HOME + "tables.py"
CHUNK = HOME + "chunk_graph.py"
DECODE = HOME + "decode_graph.py"
PLANS = HOME + "plans.py"
STAGING = HOME + "staging.py"
BUCKETS = HOME + "buckets.py"
LOOP = HOME + "overlap.py"
ENGINE = "phases/04_continuous/continuous/engine.py"
FEATURE = HOME + "feature.py"
CHUNKED = "phases/07_chunked_prefill/chunked_prefill/scheduler.py"
SCHEDULER = "phases/04_continuous/continuous/scheduler.py"

BUGS = (
    Bug(
        "padding-is-stored",
        STEP,
        "tl.store(slots + i, tl.where(real, block * P + place % P, -1))",
        "tl.store(slots + i, block * P + place % P)",
        "Stores padding's key and value in the first slot of row 0.",
    ),
    Bug(
        "launched-after-it-is-read",
        LOOP,
        "        landing, self.flying = self.flying, engine.launch(engine.schedule())\n",
        "        self.land(engine)\n        landing, self.flying = None, engine.launch(engine.schedule())\n",
        "Waits for the last step before it launches the next, so that nothing overlaps.",
    ),
    Bug(
        "padding-has-a-key",
        STEP,
        "tl.store(contexts + i, (position + 1).to(tl.int32))",
        "tl.store(contexts + i, (place + 1).to(tl.int32))",
        "Gives padding a context of one token.",
    ),
    Bug(
        "last-block-not-copied",
        STEP,
        "used = tl.where(real, place // P + 1, 0)",
        "used = tl.where(real, tl.cdiv(place, P), 0)",
        "Copies one block too few when a token is the first of its block.",
    ),
    Bug(
        "token-of-the-row-before",
        STEP,
        "token = tl.load(tokens + row * max_len + place)",
        "token = tl.load(tokens + i * max_len + place)",
        "Reads a token by the request's place in the batch, not by its row.",
    ),
    Bug(
        "sampled-in-its-own-place",
        STEP,
        "tl.store(tokens + row * max_len + position + 1, tl.load(sampled + i), mask=position >= 0)",
        "tl.store(tokens + row * max_len + position, tl.load(sampled + i), mask=position >= 0)",
        "Writes a sampled token over the one that it was computed from.",
    ),
    Bug(
        "padding-writes-its-token",
        STEP,
        "tl.load(sampled + i), mask=position >= 0)",
        "tl.load(sampled + i), mask=position >= -1)",
        "Lets padding write the token that it has sampled, into the first place of row 0.",
    ),
    Bug(
        "all-tables-sent",
        TABLES,
        "        self._sent[rows[line], column] = values\n",
        "",
        "Forgets what it has sent, and sends it again at every step.",
    ),
    Bug(
        "only-new-blocks-sent",
        TABLES,
        "found = np.flatnonzero(now != self._sent[rows, :blocks])",
        "found = np.flatnonzero((now != self._sent[rows, :blocks]) & (self._sent[rows, :blocks] == 0))",
        "Sends a block that is new, and not one that has taken another's place.",
    ),
    Bug(
        "table-of-the-place",
        TABLES,
        "places = rows[line] * self.data.shape[1] + column",
        "places = line * self.data.shape[1] + column",
        "Writes a table where the request stands in the batch, not in its row.",
    ),
    Bug(
        "stale-padding",
        CHUNK,
        "            part[len(values) :] = self.empty.get(name, 0)\n",
        "",
        "Leaves what the last step has put where this one has padding.",
    ),
    Bug(
        "padding-repeats-a-request",
        CHUNK,
        'self.empty = {"positions": -1, "members": requests,',
        'self.empty = {"positions": -1, "members": 0,',
        "Pads the list of decodes with request 0, which may have a chunk.",
    ),
    Bug(
        "padding-tiles-of-a-request",
        CHUNK,
        "self.tile = np.array([requests, 0, 0, 0])",
        "self.tile = np.array([0, 0, 1, 0])",
        "Pads the query tiles with one that computes a token.",
    ),
    Bug(
        "starts-end-with-zero",
        CHUNK,
        '        self.part(flat, "query_starts")[len(host.query_starts) :] = host.query_starts[-1]\n',
        "",
        "Lets the requests that pad begin at 0: the first of them then has minus so many tokens.",
    ),
    Bug(
        "old-samples",
        CHUNK,
        "        count = len(host.sample_at)\n",
        "        count = self.layout.sizes['sample_at']\n",
        "Samples also where this step has padding.",
    ),
    Bug(
        "graph-with-old-tables",
        PLANS,
        "    runner.tables.update(rows, (max(starts) + steps - 1) // runner.cache.block_size + 1)\n",
        "",
        "Replays a decode with the tables of some step before.",
    ),
    Bug(
        "last-block-not-sent",
        PLANS,
        "runner.tables.update(rows, (max(starts) + steps - 1) // runner.cache.block_size + 1)",
        "runner.tables.update(rows, -(-(max(starts) + steps - 1) // runner.cache.block_size))",
        "Sends one block too few when a token is the first of its block.",
    ),
    Bug(
        "chunk-with-old-tables",
        PLANS,
        "    runner.tables.update(host.rows, runner.cache.blocks_for(int(host.context_lens.max())))\n",
        "",
        "Replays a mixed step with the tables of some step before.",
    ),
    Bug(
        "copies-forgotten",
        PLANS,
        "        self.runner.refresh(works)\n        count, rows = len(works), self.stage(works, size)\n",
        "        count, rows = len(works), self.stage(works, size)\n",
        "Replays a decode before the copies and settings that it depends on are made.",
    ),
    Bug(
        "steps-count-the-prompt",
        PLANS,
        "inputs[2, :count] = inputs[1, :count] + 1 - runner.rows.prompt_lens[rows]",
        "inputs[2, :count] = inputs[1, :count] + 1",
        "Draws by the position of a token where the random numbers go by output tokens.",
    ),
    Bug(
        "old-rows-as-padding",
        PLANS,
        "        inputs[:, count:] = _PADDING\n",
        "",
        "Leaves the last step's requests in the places that this one pads.",
    ),
    Bug(
        "chunk-taken-for-a-decode",
        PLANS,
        "return all(work.count == 1 and len(work.takers) == 1 for work in works)",
        "return all(work.count == 1 for work in works)",
        "Takes a chunk of one token for a decode, and writes a token over the rest of the prompt.",
    ),
    Bug(
        "samples-not-counted",
        PLANS,
        "samples = sum(max(1, len(work.takers)) + len(work.drafts) for work in works)",
        "samples = len(works)",
        "Looks for room for the requests, though one may take many samples.",
    ),
    Bug(
        "masks-come-too-late",
        PLANS,
        "inside = captured(plan) and not masked",
        "inside = captured(plan)",
        "Samples inside the graph, where the masks are still to come.",
    ),
    Bug(
        "no-logprobs-inside",
        DECODE,
        "return plan.features in CAPTURED and plan.wanted is None",
        "return plan.features in CAPTURED",
        "Samples inside the graph for who wants log-probabilities.",
    ),
    Bug(
        "small-graphs-first",
        PLANS,
        "for size, features in product(reversed(self.sizes), KINDS):",
        "for size, features in product(self.sizes, KINDS):",
        "Captures the smallest graph first: none of the others fits into its memory.",
    ),
    Bug(
        "cap-forgotten",
        DECODE,
        "logits = narrow_logits(on.model, self.hidden)",
        "logits = on.model.lm_head(self.hidden)",
        "Leaves out the soft cap of the logits inside graphs.",
    ),
    Bug(
        "token-not-written",
        DECODE,
        "        scatter_tokens(self.rows, self.at, self.tokens, on.rows.tokens)\n",
        "",
        "Leaves a sampled token where the next step does not look for it.",
    ),
    Bug(
        "token-lands-on-its-parent",
        DECODE,
        "sample_positions=at[own] + 1,",
        "sample_positions=at[own],",
        "Writes an eagerly sampled token over the one that it was computed from.",
    ),
    Bug(
        "bucket-one-too-large",
        BUCKETS,
        "at = bisect_left(sizes, wanted)",
        "at = bisect_left(sizes, wanted + 1)",
        "Runs a batch that fills its graph in the next one, and the largest in none.",
    ),
    Bug(
        "no-graph-for-the-most",
        BUCKETS,
        "return [*small, *range(16, most, 16), most]",
        "return [*small, *range(16, most, 16)] or [most]",
        "Captures no graph for a full batch.",
    ),
    Bug(
        "buffer-written-too-early",
        STAGING,
        "            copied.synchronize()\n",
        "            pass\n",
        "Writes into a buffer whose last copy may still be waiting.",
    ),
    Bug(
        "event-before-the-copy",
        STAGING,
        "        self.device[:size].copy_(self._host[turn][:size], non_blocking=True)\n"
        "        if copied is not None:\n"
        "            copied.record()\n",
        "        if copied is not None:\n"
        "            copied.record()\n"
        "        self.device[:size].copy_(self._host[turn][:size], non_blocking=True)\n",
        "Notes that a buffer is free before it is copied.",
    ),
    Bug(
        "one-buffer",
        STAGING,
        "turn, self._turn = self._turn, (self._turn + 1) % BUFFERS",
        "turn = self._turn",
        "Takes the same buffer every time, so that the host waits for the device.",
    ),
    Bug(
        "idle-while-a-step-flies",
        LOOP,
        "return self.flying is None",
        "return True",
        "Calls itself idle while a step is on its way.",
    ),
    Bug(
        "time-counted-twice",
        ENGINE,
        "now - max(pending.started, self._landed)",
        "now - pending.started",
        "Counts the time that a step waits behind the one before.",
    ),
    Bug(
        "placeholder-not-counted",
        SCHEDULER,
        "            taker.placeholders += len(drafts) + 1 if certain else 1\n",
        "            taker.placeholders += 0\n",
        "Does not count the token that is on its way, so the next step has nothing to compute.",
    ),
    Bug(
        "one-token-too-many",
        CHUNKED,
        "if self._decodes_left == 0 or known >= request.limit:",
        "if self._decodes_left == 0 or len(request.tokens) >= request.limit:",
        "Goes on while the last allowed token is on its way.",
    ),
    Bug(
        "admitted-while-in-flight",
        SCHEDULER,
        "if request is None or request.in_flight or not self.admits(request):",
        "if request is None or not self.admits(request):",
        "Admits a preempted request again while a token of it is on its way.",
    ),
    Bug(
        "graphs-around-any-attention",
        FEATURE,
        "        if not _attends(parts.features):\n",
        "        if False:\n",
        "Captures attention that asks for the lengths of its requests.",
    ),
    Bug(
        "graphs-take-no-memory",
        FEATURE,
        "        parts.reserve.append(\n"
        "            lambda whole: graph_bytes(\n"
        "                whole.model,\n"
        '                min(self.graph_rows, whole.size("max_rows")),\n'
        "                self.graph_tokens,\n"
        '                whole.size("step_tokens"),\n'
        "            )\n"
        "        )\n",
        "",
        "Gives the memory that graphs need to the cache.",
    ),
    Bug(
        "half-full-is-full",
        BUCKETS,
        "    return sum(work.count for work in works) >= FULL * full and max(ends, default=0) < longest\n",
        "    return max(ends, default=0) < longest\n",
        "Pads any step up to a full one.",
    ),
    Bug(
        "long-contexts-in-full-steps",
        BUCKETS,
        " and max(ends, default=0) < longest\n",
        "\n",
        "Replays a step whose prompts have another kernel for their attention.",
    ),
    Bug(
        "full-steps-of-any-model",
        BUCKETS,
        " and flop <= LAUNCHED_FLOP",
        "",
        "Captures full steps of models that keep the device busy anyway.",
    ),
    Bug(
        "full-steps-take-no-memory",
        "phases/09_cuda_graphs/cuda_graphs/memory.py",
        "for size in (rows, tokens, full))",
        "for size in (rows, tokens))",
        "Gives the memory that the largest graph needs to the cache.",
    ),
)
