"""Mistakes in phase 02, the KV cache. The first two are planted on every run of the test suite."""

from tests.planted.planting import Bug

CACHE = "phases/02_kv_cache/kv_cache/cache.py"
ATTENTION = "phases/02_kv_cache/kv_cache/attention.py"
GENERATOR = "phases/02_kv_cache/kv_cache/generator.py"

BUGS = (
    Bug(
        "position-zero",
        GENERATOR,
        "positions = torch.arange(start, len(tokens), device=device)",
        "positions = torch.arange(len(tokens) - start, device=device)",
        "Counts positions from the step's first token, so that every decode is at position 0.",
    ),
    Bug(
        "masks-every-layer",
        ATTENTION,
        "if kind not in self._masks:",
        "if True:",
        "Makes the mask in every layer instead of once a step.",
    ),
    Bug(
        "masks-of-the-last-step",
        ATTENTION,
        "        self._masks.clear()\n",
        "",
        "Keeps the masks of the step before.",
    ),
    Bug(
        "one-mask-for-all-windows",
        ATTENTION,
        "kind = (cache.capacity, layer.sliding_window)",
        "kind = (0, None if layer.sliding_window is None else 0)",
        "Takes all window layers for one kind, though their windows may differ.",
    ),
    Bug(
        "square-mask",
        ATTENTION,
        "return causal_mask(self.columns, key_columns, window)",
        "return causal_mask(self.columns - self.columns[0], key_columns, window)",
        "Aligns a chunk's queries with the first keys, as if there were no past.",
    ),
    Bug(
        "chunk-without-window",
        ATTENTION,
        "return causal_mask(self.columns, key_columns, window)",
        "return causal_mask(self.columns, key_columns)",
        "Trusts the ring to forget, and masks no window inside a chunk.",
    ),
    Bug(
        "write-before-read",
        ATTENTION,
        "if layer.sliding_window is None or count == 1:",
        "if layer.sliding_window is None or count < cache.capacity:",
        "Writes a chunk into the ring before its first query has read what it pushes out.",
    ),
    Bug(
        "ring-in-order",
        CACHE,
        'return slots + (end - 1 - slots).div(self.capacity, rounding_mode="floor") * self.capacity',
        "return slots + max(0, end - self.capacity)",
        "Takes the ring's slots to be in the order of their columns.",
    ),
    Bug(
        "layer-advances",
        ATTENTION,
        "        return attend(layer, q, keys, values, mask).transpose(1, 2)",
        "        if layer.index == 0:\n            self.cache.advance(count)\n"
        "        return attend(layer, q, keys, values, mask).transpose(1, 2)",
        "Advances the length in a layer, so that the next one sees a token too many.",
    ),
    Bug(
        "chunk-written-uncut",
        CACHE,
        """        skip = max(0, k.shape[2] - self.capacity)
        k, v, first = k[:, :, skip:], v[:, :, skip:], (start + skip) % self.capacity
        head = min(k.shape[2], self.capacity - first)  # columns that fit before the ring wraps
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[:, :, first : first + head] = new[:, :, :head]
            if head < new.shape[2]:
                cache[:, :, : new.shape[2] - head] = new[:, :, head:]
""",
        """        slots = torch.arange(start, start + k.shape[2], device=k.device) % self.capacity
        self.keys[:, :, slots] = k
        self.values[:, :, slots] = v
""",
        "Writes a chunk longer than the window whole: which of two writes to a slot wins is chance.",
    ),
    Bug(
        "first-columns-stay",
        CACHE,
        "k, v, first = k[:, :, skip:], v[:, :, skip:], (start + skip) % self.capacity",
        "first = (start + skip) % self.capacity\n"
        "        k, v = k[:, :, : self.capacity], v[:, :, : self.capacity]",
        "Cuts a chunk longer than the window at the wrong end.",
    ),
    Bug(
        "start-of-the-cut-chunk",
        CACHE,
        "(start + skip) % self.capacity",
        "start % self.capacity",
        "Forgets that a chunk that was cut begins at a later column.",
    ),
    Bug(
        "values-in-keys-place",
        CACHE,
        "cache[:, :, : new.shape[2] - head] = new[:, :, head:]",
        "self.keys[:, :, : new.shape[2] - head] = new[:, :, head:]",
        "Writes what wraps round into the keys both times.",
    ),
    Bug(
        "reads-the-unwritten",
        CACHE,
        "        count = min(end, self.capacity)\n",
        "        count = self.capacity\n",
        "Reads the whole allocation, of which a part was never written.",
    ),
    Bug(
        "reads-a-copy",
        CACHE,
        "return self.keys[:, :, :count], self.values[:, :, :count]",
        "return self.keys[:, :, :count].clone(), self.values[:, :, :count].clone()",
        "Copies the whole past in every layer of every step.",
    ),
    Bug(
        "grows-by-copying",
        CACHE,
        "        skip = max(0, k.shape[2] - self.capacity)\n",
        "        self.keys, self.values = self.keys.clone(), self.values.clone()\n"
        "        skip = max(0, k.shape[2] - self.capacity)\n",
        "Makes a new cache for each token instead of writing into the one there is.",
    ),
    Bug(
        "window-beyond-the-context",
        CACHE,
        "capacity = max_len if window is None else min(window, max_len)",
        "capacity = max_len if window is None else window",
        "Allocates a window that is larger than the context.",
    ),
    Bug(
        "bytes-beyond-the-context",
        CACHE,
        "columns = sum(max_len if w is None else min(w, max_len) for w in config.sliding_windows)",
        "columns = sum(max_len if w is None else w for w in config.sliding_windows)",
        "Counts the bytes of a window that is larger than the context.",
    ),
    Bug(
        "bytes-of-query-heads",
        CACHE,
        "return 2 * batch * columns * config.num_kv_heads * config.head_dim * dtype.itemsize",
        "return 2 * batch * columns * config.hidden_size * dtype.itemsize",
        "Counts bytes for the query heads, as if no key were shared.",
    ),
    Bug(
        "bytes-of-keys-only",
        CACHE,
        "return 2 * batch * columns",
        "return batch * columns",
        "Forgets the values when it counts bytes.",
    ),
    Bug(
        "keeps-old-values",
        CACHE,
        "layer.keys, layer.values = layer.keys[rows], layer.values[rows]",
        "layer.keys = layer.keys[rows]",
        "Moves the keys of the rows that stay, and leaves the values where they were.",
    ),
    Bug(
        "keeps-the-first-rows",
        CACHE,
        "layer.keys, layer.values = layer.keys[rows], layer.values[rows]",
        "layer.keys, layer.values = layer.keys[: len(rows)], layer.values[: len(rows)]",
        "Keeps as many rows as asked for, but not those that were asked for.",
    ),
    Bug(
        "full-one-too-early",
        CACHE,
        "if self.length + count > self.max_len:",
        "if self.length + count >= self.max_len:",
        "Calls a cache full that has room for the last token.",
    ),
    Bug(
        "full-is-not-noticed",
        ATTENTION,
        "        self.cache.reserve(count)\n",
        "",
        "Begins a step without asking whether its tokens fit.",
    ),
    Bug(
        "a-column-for-the-last-token",
        GENERATOR,
        "max_len=prompt_len + limit - 1,",
        "max_len=prompt_len + limit,",
        "Allocates a column for the last token, which is never computed.",
    ),
    Bug(
        "cache-as-long-as-the-context",
        GENERATOR,
        "max_len=prompt_len + limit - 1,",
        "max_len=self.model.max_len,",
        "Allocates the whole context for a request that can say a few tokens.",
    ),
    Bug(
        "always-float32",
        GENERATOR,
        "dtype=self.model.dtype,",
        "dtype=torch.float32,",
        "Keeps the cache in float32 under a half-precision model: twice the memory.",
    ),
    Bug(
        "first-token-decides",
        GENERATOR,
        "return hidden[:, -1]",
        "return hidden[:, 0]",
        "Samples after the prompt's first token instead of its last.",
    ),
    Bug(
        "computes-the-prompt-again",
        GENERATOR,
        "        start, device = self.cache.length, self.model.device\n",
        "        self.cache.length = 0\n        start, device = self.cache.length, self.model.device\n",
        "Has a cache and computes the whole sequence all the same.",
    ),
    Bug(
        "one-cache-for-all-requests",
        GENERATOR,
        "        self.cache = KVCache(\n",
        '        if hasattr(self, "cache") and self.cache.max_len >= prompt_len + limit - 1:\n'
        "            return\n"
        "        self.cache = KVCache(\n",
        "Lets a request begin in the cache of the one before it.",
    ),
)
