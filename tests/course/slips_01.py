"""Mistakes in the exercises of phase 01."""

from tests.course.slips import Slip

SLIPS = {
    "01.1": (
        "sees-the-next-token",
        "does-not-see-itself",
        "window-one-too-long",
        "mask-from-the-corner",
        Slip(
            "window-forgotten",
            "return mask if window is None else mask & (distance < window)",
            "return mask",
            "Leaves the window out.",
        ),
    ),
    "01.2": (
        "heads-dealt-out-in-turn",
        "cap-after-the-mask",
        "softmax-in-half-precision",
        Slip("scale-forgotten", "(grouped * layer.scale) @", "grouped @", "Does not scale the scores."),
        Slip("mask-upside-down", "masked_fill(~mask", "masked_fill(mask", "Shows what the mask hides."),
        Slip(
            "softmax-over-queries",
            "softmax(scores, dim=-1)",
            "softmax(scores, dim=-2)",
            "Lets a key's weights sum to 1.",
        ),
    ),
    "01.3": (
        "rope-pairs-neighbours",
        "rope-turns-back",
        "rope-exponents-twice-as-large",
        "positions-in-half-precision",
        "rotates-in-half-precision",
        Slip(
            "linear-the-wrong-way",
            "return frequencies / rope.factor",
            "return frequencies * rope.factor",
            "Squeezes positions where they are to be stretched.",
        ),
    ),
    "01.4": (
        "eps-beside-the-root",
        "norm-in-half-precision",
        "wrong-gate",
        Slip(
            "mean-taken-away",
            "F.rms_norm(x.float(),",
            "F.rms_norm(x.float() - x.float().mean(-1, keepdim=True),",
            "Takes the mean away, as LayerNorm does.",
        ),
        Slip(
            "norm-without-weight",
            "self.weight.shape, self.weight.float(), self.eps",
            "self.weight.shape, None, self.eps",
            "Forgets the norm's weight.",
        ),
        Slip("up-is-added", "* self.up_proj(x)", "+ self.up_proj(x)", "Adds what is to be gated."),
    ),
    "01.5": (
        "first-token-decides",
        "prompt-without-its-last-token",
        "eos-not-told",
        "samples-alike",
        Slip(
            "one-token-too-many",
            "finish_reason(token, len(tokens) - len(prompt),",
            "finish_reason(token, len(tokens) - len(prompt) - 1,",
            "Counts one token less than there are.",
        ),
        Slip(
            "nothing-for-nothing",
            '            yield TokenEvent(index, None, "length", time.perf_counter(), sample=sample)\n',
            "",
            "Says nothing when no token is asked for.",
        ),
    ),
}
