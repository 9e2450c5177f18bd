"""Mistakes in the exercises of phase 03."""

from tests.course.slips import Slip

SLIPS = {
    "03.1": (
        "padding-visible",
        "first-token-hidden",
        "padding-sees-nothing",
        "itself-for-real-columns-only",
        "window-forgotten",
        "decode-without-mask",
        "padding-of-rows-that-left",
    ),
    "03.2": (
        "positions-ignore-padding",
        "positions-below-zero",
        "positions-beyond-the-context",
        "logits-of-every-position",
        "one-step-for-all-randomness",
        Slip(
            "length-stands-still",
            "        attention.cache.advance(count)\n",
            "",
            "Does not advance the cache.",
        ),
    ),
    "03.3": (
        "stop-strings-ignored",
        "limit-without-context",
        "nothing-for-no-tokens",
        Slip(
            "one-sample",
            "for sample in range(params.n):",
            "for sample in range(1):",
            "Serves one sample of each prompt.",
        ),
        Slip(
            "batches-run-over",
            "rows[first : first + self.batch_size]",
            "rows[first:]",
            "Takes all the rest into every batch.",
        ),
        Slip(
            "counts-the-prompt",
            "token, len(row.output), row.params",
            "token, len(row.prompt), row.params",
            "Takes the prompt's length for the output's.",
        ),
    ),
    "03.4": (
        "runs-to-the-largest-limit",
        "padding-on-the-right",
        "columns-to-spare",
        "columns-for-max-tokens",
        "eos-not-told",
        "samples-alike",
        "prompt-not-told",
        "logprobs-dropped",
        "logprobs-of-a-neighbour",
        "sample-number-dropped",
        "ended-rows-speak-on",
        "sampler-rows-not-moved",
        "compacts-never",
        "waste-of-rows-that-left",
        "waste-without-padding",
    ),
}
