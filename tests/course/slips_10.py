"""Mistakes in the exercises of phase 10."""

from tests.course.slips import Slip

SLIPS = {
    "10.1": (
        Slip(
            "odd-first",
            "numbers[:, ::2] | (numbers[:, 1::2] << 4)",
            "numbers[:, 1::2] | (numbers[:, ::2] << 4)",
            "Puts the even number into the high nibble.",
        ),
        Slip(
            "high-first",
            "[data & 15, data >> 4]",
            "[data >> 4, data & 15]",
            "Takes the high nibble for the even number.",
        ),
        Slip(
            "halves",
            "torch.stack([data & 15, data >> 4], dim=-1)",
            "torch.stack([data & 15, data >> 4], dim=1)",
            "Puts all low nibbles before all high ones.",
        ),
        Slip(
            "signed", "data >> 4]", "data.view(torch.int8) >> 4]", "Reads the high nibble as a signed number."
        ),
        Slip("three-bits", "<< 4)", "<< 3)", "Shifts by one bit too few."),
    ),
    "10.2": (
        Slip("eight-steps", "(MIDDLE - 0.5)", "MIDDLE", "Lets a positive largest weight lose a whole step."),
        Slip(
            "sixteen-steps", "(high - low) / 15", "(high - low) / 16", "Counts 16 steps between 16 numbers."
        ),
        Slip(
            "zero-outside",
            "groups.amin(dim=-1).clamp_max(0)",
            "groups.amin(dim=-1)",
            "Cuts 0 off the range of a group of positive weights.",
        ),
        Slip(
            "zero-point-cut",
            "(-low / scale.float()).round().clamp",
            "(-low / scale.float()).clamp",
            "Cuts a zero point off instead of rounding it.",
        ),
        Slip(
            "rounds-to-zero",
            ".round() + middle",
            ".trunc() + middle",
            "Cuts numbers off instead of rounding them.",
        ),
        Slip(
            "scale-of-nothing",
            "_nonzero(scale.to(dtype))",
            "scale.to(dtype)",
            "Divides a group of zeros by a scale of 0.",
        ),
        Slip(
            "middle-seven",
            "float(MIDDLE) if zero is None",
            "float(MIDDLE - 1) if zero is None",
            "Takes 7 for the middle.",
        ),
    ),
    "10.3": (
        "act-order-forgotten",
        Slip(
            "zero-ignored",
            "zero = float(MIDDLE) if self.zero is None else self.zero.float()[..., None]",
            "zero = float(MIDDLE)",
            "Takes 8 for everybody's zero.",
        ),
        Slip(
            "scaled-before-the-zero",
            "((numbers - zero) * scale[..., None])",
            "(numbers * scale[..., None] - zero)",
            "Scales before it takes the zero away.",
        ),
        Slip(
            "order-the-other-way",
            "torch.empty_like(weight).index_copy_(1, self.order, weight)",
            "weight.index_select(1, self.order)",
            "Takes the order for its inverse.",
        ),
        Slip(
            "scale-of-the-column",
            "self.data.float() * scale[:, None]",
            "self.data.float() * scale[None, :1]",
            "Gives all rows the first row's scale.",
        ),
        Slip(
            "blocks-turned",
            "scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]",
            "scale[:1].repeat_interleave(BLOCK, 1)[:, :k]",
            "Gives all rows of blocks the first row's scales.",
        ),
    ),
    "10.4": (
        "errors-stay",
        Slip(
            "errors-the-wrong-way",
            "own[at, at:], alpha=-1)",
            "own[at, at:], alpha=1)",
            "Adds an error where it is to be taken away.",
        ),
        Slip(
            "error-not-divided",
            "(column - rounded) / own[at, at]",
            "(column - rounded)",
            "Does not divide by the factor's diagonal.",
        ),
        Slip(
            "order-is-kept",
            "numbers[:, order.argsort()]",
            "numbers[:, order]",
            "Takes the order for its inverse.",
        ),
        Slip(
            "unseen-inputs-count",
            "    weight[:, unseen] = 0\n",
            "",
            "Lets the weights of inputs that nobody has seen be.",
        ),
        Slip(
            "group-of-the-place",
            "groups = order // (",
            "groups = torch.arange(len(order)) // (",
            "Takes the scale of the group that stands there in the new order.",
        ),
    ),
    "10.5": (
        Slip(
            "one-scale-for-all",
            "x.abs().amax(dim=-1, keepdim=True)",
            "x.abs().amax().expand(*x.shape[:-1], 1)",
            "Gives all tokens one scale.",
        ),
        Slip(
            "nothing-by-nothing",
            "    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a token of zeros stays one\n",
            "",
            "Divides a token of zeros by 0.",
        ),
        Slip(
            "largest-is-one-more",
            "(1.0 / LARGEST[kind])",
            "(1.0 / (LARGEST[kind] + 1))",
            "Counts one number more than there are.",
        ),
        Slip("largest-of-the-positive", "x.abs().amax(", "x.amax(", "Forgets that numbers may be negative."),
        Slip("multiplies", "x * scale.reciprocal()", "x * scale", "Multiplies where it is to divide."),
    ),
    "10.6": (
        Slip(
            "order-forgotten",
            "x = x if self.order is None else x.index_select(-1, self.order)",
            "x = x",
            "Feeds inputs in their own order to columns in another.",
        ),
        Slip(
            "ordered-twice",
            "plain = replace(self.weight, order=None)",
            "plain = self.weight",
            "Puts columns in order that inputs have followed already.",
        ),
        Slip(
            "bias-forgotten",
            "return out if self.bias is None else out + self.bias",
            "return out",
            "Forgets the bias.",
        ),
        Slip(
            "shape-lost",
            "                out = out.view(*x.shape[:-1], self.shape[0])\n",
            "",
            "Gives back a flat result.",
        ),
        Slip(
            "exact-rounds-nothing",
            "F.linear(rounded(x.float(), self.scheme.activations), self.weight",
            "F.linear(x.float(), self.weight",
            "Does not round the inputs.",
        ),
        Slip(
            "exact-without-bias",
            "self.weight.dequantize(), bias)",
            "self.weight.dequantize(), None)",
            "Forgets the bias.",
        ),
    ),
}
