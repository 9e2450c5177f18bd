"""Mistakes in phase 06, kernels in Triton. The first two are planted on every run of the test suite.

They run in the interpreter, so none of them may write outside of a tensor.
"""

from tests.planted.planting import Bug

HOME = "phases/06_triton_paged_attention/triton_paged_attention/"
V1 = HOME + "versions/decode_v1.py"
V2 = HOME + "versions/decode_v2.py"
V3 = HOME + "versions/decode_v3.py"
TILES = HOME + "tiles.py"
DECODE = HOME + "decode.py"
PREFILL = HOME + "prefill.py"
ATTENTION = HOME + "attention.py"
STORE = HOME + "kernels/kv_store.py"
NORMS = HOME + "kernels/norms.py"
ROPE = HOME + "kernels/rope.py"
ACTIVATION = HOME + "kernels/activation.py"
SAMPLING = HOME + "kernels/sampling.py"
SAMPLER = HOME + "sampler.py"
LAYERS = HOME + "layers.py"
LINEAR = HOME + "linear.py"
SURGERY = HOME + "surgery.py"
FEATURE = HOME + "feature.py"
REHEARSAL = HOME + "rehearsal.py"
WINNERS = HOME + "tuning/winners.py"

BUGS = (
    Bug(
        "head-of-the-wrong-group",
        DECODE,
        "at_q = ((first_token + token) * H + kv_head * GROUP + row % GROUP)[:, None]",
        "at_q = ((first_token + token) * H + kv_head + row % GROUP * (H // GROUP))[:, None]",
        "Deals the query heads out in turn, where neighbours share a key/value head.",
    ),
    Bug(
        "causal-mask-hides-itself",
        TILES,
        "visible = key[None, :] <= position[:, None] if CAUSAL",
        "visible = key[None, :] < position[:, None] if CAUSAL",
        "Hides a query's own key from it.",
    ),
    Bug(
        "v1-no-running-maximum",
        V1,
        "new_m = tl.maximum(m, tl.max(score, axis=0))",
        "new_m = 0.0",
        "Exponentiates the scores as they are, which overflows when they are large.",
    ),
    Bug(
        "v1-sum-does-not-shrink",
        V1,
        "acc = acc * shrink + tl.sum(p[:, None] * values, axis=0)",
        "acc = acc + tl.sum(p[:, None] * values, axis=0)",
        "Lets what was summed so far stay as it is when a larger score appears.",
    ),
    Bug(
        "v1-window-by-blocks",
        V1,
        "visible = (slot < P) & (key < context) & (key >= first_key)",
        "visible = (slot < P) & (key < context)",
        "Begins at the block in which the window begins, and shows all of it.",
    ),
    Bug(
        "v1-block-of-a-power-of-two",
        V1,
        "visible = (slot < P) & (key < context) & (key >= first_key)",
        "visible = (key < context) & (key >= first_key)",
        "Takes the padding of a block for its tokens: each block then reads into the next one in memory.",
    ),
    Bug(
        "v1-cap-without-its-height",
        V1,
        "score = soft_cap * (2 * tl.sigmoid(2 * score / soft_cap) - 1)",
        "score = 2 * tl.sigmoid(2 * score / soft_cap) - 1",
        "Caps the scores at 1.",
    ),
    Bug(
        "v2-one-block-a-tile",
        V2,
        "block = tl.load(block_tables + request * table_stride + key // P, mask=visible, other=0)",
        "block = tl.load(block_tables + request * table_stride + start // P + 0 * n, mask=visible, other=0)",
        "Looks up one block for a tile that crosses into the next.",
    ),
    Bug(
        "v3-first-split-does-all",
        V3,
        "tl.cdiv(tl.cdiv(context - begin, BLOCK_N), SPLITS) * BLOCK_N",
        "tl.cdiv(context - begin, BLOCK_N) * BLOCK_N",
        "Gives all keys to the first split: the result is right, and nothing is gained.",
    ),
    Bug(
        "v3-splits-overlap",
        V3,
        "high = tl.minimum(low + keys_per_split, context)",
        "high = context",
        "Lets every split read to the end.",
    ),
    Bug(
        "v3-lse-without-the-maximum",
        V3,
        "tl.store(lse + at_split, m + tl.log2(weight_sum), mask=row < GROUP)",
        "tl.store(lse + at_split, tl.log2(weight_sum), mask=row < GROUP)",
        "Weighs the splits by sums that are relative to different maxima.",
    ),
    Bug(
        "lse-of-another-base",
        DECODE,
        "tl.store(lse + at_split, m + tl.log2(weight_sum), mask=token < count)",
        "tl.store(lse + at_split, m + tl.log(weight_sum), mask=token < count)",
        "Adds a natural logarithm to one of base 2.",
    ),
    Bug(
        "natural-exponent",
        TILES,
        "return (soft_cap if SOFT_CAP else scale) * LOG2_E",
        "return soft_cap if SOFT_CAP else scale",
        "Takes 2**x for e**x.",
    ),
    Bug(
        "cap-of-unscaled-scores",
        TILES,
        "s = 2.0 * tl.sigmoid(2.0 * (scale / soft_cap) * s) - 1.0",
        "s = 2.0 * tl.sigmoid(2.0 / soft_cap * s) - 1.0",
        "Caps the scores before they are scaled.",
    ),
    Bug(
        "total-does-not-shrink",
        TILES,
        "total = total * shrink + tl.sum(p, axis=1)",
        "total = total + tl.sum(p, axis=1)",
        "Shrinks the weighted sum and forgets the sum of weights.",
    ),
    Bug(
        "window-one-too-long",
        TILES,
        "visible = visible & (key[None, :] > position[:, None] - WINDOW)",
        "visible = visible & (key[None, :] >= position[:, None] - WINDOW)",
        "Takes a window of w for w tokens besides the query's own.",
    ),
    Bug(
        "first-block-for-all",
        TILES,
        "        block = next_block\n",
        "",
        "Looks the next block up, and goes on with the first.",
    ),
    Bug(
        "reads-behind-the-last-key",
        TILES,
        "tile = tl.load(cache + at, mask=(key < high)[:, None] & (d < D)[None, :], other=0.0)",
        "tile = tl.load(cache + at, mask=(d < D)[None, :], other=0.0)",
        "Masks the scores behind the last key, not the values: 0 times NaN is NaN.",
    ),
    Bug(
        "combine-reads-idle-splits",
        TILES,
        "logs = tl.load(lse + at, mask=filled, other=-1.0e30,",
        "logs = tl.load(lse + at, mask=d[0] >= 0, other=-1.0e30,",
        "Combines splits that had no work, which have written nothing.",
    ),
    Bug(
        "combine-reads-the-padding",
        TILES,
        "mask=filled[:, :, None] & (d < D)[None, None, :], other=0.0,",
        "mask=filled[:, :, None] & (d >= 0)[None, None, :], other=0.0,",
        "Reads the lanes behind a head whose size is no power of two.",
        unseen="the lanes are summed apart and never stored; only time is lost",
    ),
    Bug(
        "counter-not-reset",
        DECODE,
        "            tl.store(arrived + slot, 0)  # ready for the next launch\n",
        "",
        "Leaves the counter of the splits as it is, so that nobody is the last one in the next layer.",
    ),
    Bug(
        "drafts-at-one-position",
        DECODE,
        "first_position = context - count",
        "first_position = context - 1",
        "Puts all queries of a request behind its newest token.",
    ),
    Bug(
        "window-of-the-last-query",
        DECODE,
        "first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0",
        "first_key = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0",
        "Begins where the window of a request's last query begins, which the first one sees beyond.",
    ),
    Bug(
        "subset-by-its-own-count",
        DECODE,
        "request = tl.load(requests + item) if SUBSET else item",
        "request = item",
        "Takes the first requests of the batch for the listed ones.",
    ),
    Bug(
        "padding-divides-by-zero",
        DECODE,
        "weight_sum = tl.where(total > 0, total, 1.0)",
        "weight_sum = total",
        "Divides by the sum of no weights in a padding row.",
    ),
    Bug(
        "values-keep-their-scale",
        DECODE,
        "        acc = acc * tl.load(v_scale + kv_head)\n",
        "        acc = acc * 1.0\n",
        "Folds the keys' scale in and forgets that of the values.",
    ),
    Bug(
        "diagonal-unmasked",
        PREFILL,
        "whole = (first_position + 1) // BLOCK_N * BLOCK_N",
        "whole = (first_position + tokens) // BLOCK_N * BLOCK_N",
        "Takes a tile of keys for visible to every row that is so to the last one only.",
    ),
    Bug(
        "prefill-window-of-the-last-query",
        PREFILL,
        "begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N",
        "begin = tl.maximum(end - WINDOW, 0) // BLOCK_N * BLOCK_N",
        "Begins a tile of queries where the window of its last one begins.",
    ),
    Bug(
        "chunks-begin-at-zero",
        PREFILL,
        "[request] - lens[request] + first\n",
        "[request] * 0 + first\n",
        "Forgets that a chunk has a past.",
    ),
    Bug(
        "short-tiles-first",
        PREFILL,
        "tiles[np.argsort(-(position + count), kind=",
        "tiles[np.argsort(position + count, kind=",
        "Starts the longest tile last: the GPU waits for it alone.",
    ),
    Bug(
        "prefill-without-window",
        ATTENTION,
        "                sliding_window=layer.sliding_window,\n"
        "                soft_cap=layer.soft_cap,\n"
        "                out=out,\n",
        "                soft_cap=layer.soft_cap,\n                out=out,\n",
        "Gives the prefill kernel no window.",
    ),
    Bug(
        "slots-off-by-one",
        STORE,
        "at = (slot // P) * block_stride + (slot % P) * slot_stride + i",
        "at = (slot // P) * block_stride + ((slot + 1) % P) * slot_stride + i",
        "Stores a token one slot behind its own.",
    ),
    Bug(
        "padding-is-stored",
        STORE,
        "    slot = tl.load(slots + token)\n",
        "    slot = tl.maximum(tl.load(slots + token), 0)\n",
        "Stores padding in slot 0.",
    ),
    Bug(
        "rounds-down",
        STORE,
        "x = tl.floor(x + 0.5)",
        "x = tl.floor(x)",
        "Rounds down what is stored in 8 bits.",
    ),
    Bug(
        "gemma-norm-from-zero",
        NORMS,
        "    if ONE_PLUS:\n        w += 1.0\n",
        "",
        "Multiplies by Gemma's stored norm weight instead of 1 more.",
    ),
    Bug(
        "eps-beside-the-root",
        NORMS,
        "tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps) * w",
        "tl.rsqrt(tl.sum(value * value, axis=0) / SIZE) * w + eps",
        "Adds the norm's epsilon to the result instead of under the root.",
    ),
    Bug(
        "mean-of-the-padded-row",
        NORMS,
        "tl.sum(value * value, axis=0) / SIZE + eps",
        "tl.sum(value * value, axis=0) / SIZE_PAD + eps",
        "Divides by the padded size of a row.",
    ),
    Bug(
        "sum-is-not-rounded",
        NORMS,
        "            value.dtype\n        )\n        tl.store(total + row + i, value, mask=mask)\n",
        "            tl.float32\n        )\n        tl.store(total + row + i, value, mask=mask)\n",
        "Normalizes the sum as it is in registers, not as the next layer reads it.",
    ),
    Bug(
        "head-norm-from-zero",
        ROPE,
        "    if ONE_PLUS:\n        weight += 1.0\n",
        "",
        "Multiplies heads by Gemma's stored norm weight instead of 1 more.",
    ),
    Bug(
        "rope-turns-back",
        ROPE,
        "turned_x, turned_y = turn(x, y, c, -s), turn(y, x, c, s)",
        "turned_x, turned_y = turn(x, y, c, s), turn(y, x, c, -s)",
        "Rotates the other way.",
    ),
    Bug(
        "rope-pairs-neighbours",
        ROPE,
        "    x = tl.load(first + at, mask=mask, other=0.0)\n"
        "    y = tl.load(first + at + HALF, mask=mask, other=0.0)\n",
        "    x = tl.load(first + at + i[None, :], mask=mask, other=0.0)\n"
        "    y = tl.load(first + at + i[None, :] + 1, mask=mask, other=0.0)\n",
        "Pairs neighbours, where these checkpoints pair the halves of a head.",
    ),
    Bug(
        "rotates-before-the-norm",
        LAYERS,
        "        if self.q_norm is not None and self.k_norm is not None:\n"
        "            q, k = self.q_norm(q), self.k_norm(k)\n"
        "        return attention(spec, apply_rope(q, cos_sin), apply_rope(k, cos_sin), v)\n",
        "        q, k = apply_rope(q, cos_sin), apply_rope(k, cos_sin)\n"
        "        if self.q_norm is not None and self.k_norm is not None:\n"
        "            q, k = self.q_norm(q), self.k_norm(k)\n"
        "        return attention(spec, q, k, v)\n",
        "Normalizes heads after it has rotated them, where the kernel is switched off.",
    ),
    Bug(
        "gate-and-up-swapped",
        ACTIVATION,
        "    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)\n"
        "    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=mask, other=0.0).to(tl.float32)\n",
        "    up = tl.load(gate_up + row * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)\n"
        "    gate = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=mask, other=0.0).to(tl.float32)\n",
        "Puts the activation on the wrong one of the two halves.",
    ),
    Bug(
        "exact-gelu",
        ACTIVATION,
        '"gelu_pytorch_tanh": 1,',
        '"gelu_pytorch_tanh": 2,',
        "Uses the exact GELU, where the model was trained with its approximation.",
    ),
    Bug(
        "always-silu",
        ACTIVATION,
        "SIZE=size, KIND=KINDS[kind], BLOCK=block",
        "SIZE=size, KIND=0, BLOCK=block",
        "Takes SiLU for every model.",
    ),
    Bug(
        "last-of-equals",
        SAMPLING,
        "    at = tl.min(tl.where(tl.where(any_nan, nan, x == largest), ids, _LAST))\n",
        "    at = tl.max(tl.where(tl.where(any_nan, nan, x == largest), ids, -1))\n",
        "Takes the last of equal logits, where torch takes the first.",
    ),
    Bug(
        "chunks-compared-as-they-are",
        SAMPLING,
        "_, token = first_best(race * tl.exp2((largest - x) * (_LOG2_E / hot)), at)",
        "_, token = first_best(race, at)",
        "Compares the winners of chunks whose weights are relative to different maxima.",
    ),
    Bug(
        "noise-of-the-place",
        SAMPLING,
        "    settings = tl.load(rows + row)\n",
        "    settings = row\n",
        "Draws by the settings of a row's place in the batch, not by its request's.",
    ),
    Bug(
        "truncation-forgotten",
        SAMPLER,
        "        if plan.features & TRUNCATION:\n"
        "            return super().choose(sampler, logits, rows, steps, plan, allowed)\n",
        "",
        "Draws from all tokens, also where top-k or top-p asks for some.",
    ),
    Bug(
        "residual-of-the-normalized",
        LAYERS,
        "            total, normed = x, self.input_layernorm(x)\n",
        "            total = normed = self.input_layernorm(x)\n",
        "Adds the first layer's attention to the normalized hidden state.",
    ),
    Bug(
        "values-before-keys",
        LAYERS,
        "(old.q_proj, old.k_proj, old.v_proj)",
        "(old.q_proj, old.v_proj, old.k_proj)",
        "Joins the projections in another order than they are cut.",
    ),
    Bug(
        "residual-is-gated",
        LINEAR,
        "        out = out if gate is None else gated(out, gate)\n"
        "        return out if residual is None else out + residual\n",
        "        out = out if residual is None else out + residual\n"
        "        return out if gate is None else gated(out, gate)\n",
        "Adds the residual before the gate.",
    ),
    Bug(
        "old-layers-stay-alive",
        SURGERY,
        "    found = [name for name, module in model.named_modules() if isinstance(module, kind)]\n",
        "    old = [module for module in model.modules() if isinstance(module, kind)]\n"
        "    found = [name for name, module in model.named_modules() if module in old]\n",
        "Holds all old layers until the last is replaced, and with them every weight twice.",
    ),
    Bug(
        "any-backend-will-do",
        FEATURE,
        "            check_backend(name, getattr(self, name))\n",
        "            getattr(self, name)\n",
        "Takes any word for a backend.",
    ),
    Bug(
        "rehearsal-is-counted",
        REHEARSAL,
        "    engine.stats = Stats()\n",
        "",
        "Counts the steps of the rehearsal among the real ones.",
    ),
    Bug(
        "rehearsal-is-remembered",
        REHEARSAL,
        "    engine.cache.forget()\n",
        "",
        "Leaves the blocks of the rehearsal in the cache.",
    ),
    Bug(
        "a-scene-knows-anothers-prompts",
        REHEARSAL,
        'salt=f"rehearsal: {scene.title}"',
        'salt="rehearsal"',
        "Finds most of a long prompt in the prefix cache, so that its step is a small one with a graph.",
    ),
    Bug(
        "few-decodes-are-rehearsed",
        REHEARSAL,
        "for power in range(40)",
        "for power in range(9)",
        "Leaves out the numbers of splits that more than 26 decodes of few key/value heads have.",
    ),
    Bug(
        "winners-of-another-triton",
        WINNERS,
        '        if found["triton"] != triton.__version__:\n            return {}\n',
        "",
        "Uses what was found with another compiler.",
    ),
    Bug(
        "winners-forget-the-others",
        WINNERS,
        '[entry for entry in kept.get(kind, []) if entry["at"] != dict(at)]',
        "[]",
        "Keeps one winner of a kind, the newest.",
    ),
)
