"""Mistakes in phase 10, quantization. The first two are planted on every run of the test suite."""

from tests.planted.planting import Bug

HERE = "phases/10_quant/quant"
LAYOUTS = f"{HERE}/layouts.py"
WEIGHTS = f"{HERE}/weights.py"
GPTQ = f"{HERE}/gptq.py"
METHODS = f"{HERE}/methods.py"
CHECKPOINTS = f"{HERE}/checkpoints.py"
CALIBRATE = f"{HERE}/calibrate.py"
CPU = f"{HERE}/cpu.py"
LINEAR = f"{HERE}/linear.py"
LOADING = f"{HERE}/loading.py"
QUALITY = f"{HERE}/quality.py"
GEMV, GEMV4 = f"{HERE}/kernels/gemv.py", f"{HERE}/kernels/gemv4.py"

CHANGE = "change(name, block, hessians)"
AGAIN = "inputs = [block(x, *rest[place]) for x, (_, rest) in zip(inputs, calls, strict=True)]"

BUGS = (
    Bug(
        "zero-points-as-stored",
        LAYOUTS,
        "zero = (zero + int(self.one_less)) &",
        "zero = zero &",
        "Reads GPTQ's zero points as they are stored, less one.",
    ),
    Bug(
        "awq-in-the-order-of-its-nibbles",
        LAYOUTS,
        "return numbers[..., list(AWQ_ORDER)].flatten(1)",
        "return numbers.flatten(1)",
        "Reads the columns of AWQ's words in the order in which they lie.",
    ),
    Bug(
        "act-order-forgotten",
        WEIGHTS,
        "return torch.empty_like(weight).index_copy_(1, self.order, weight)",
        "return weight",
        "Leaves the columns in the order of their groups.",
    ),
    Bug(
        "errors-stay",
        GPTQ,
        "columns[:, end:].addmm_(errors, inverse[begin:end, end:], alpha=-1)",
        "pass",
        "Passes errors on within a block of columns only.",
    ),
    Bug(
        "a-norm-divided-as-it-is-stored",
        METHODS,
        "divided = (1 + weight.float()) / scales - 1",
        "divided = weight.float() / scales",
        "Divides what Gemma's norms store, not what they multiply by.",
    ),
    Bug(
        "a-group-that-does-not-divide",
        f"{HERE}/formats.py",
        '        if self.scales != "group" or k % self.group == 0:\n',
        "        if True:\n",
        "Takes groups of 128 for rows that they do not divide.",
    ),
    Bug(
        "nothing-by-nothing",
        f"{HERE}/rtn.py",
        "return scale.masked_fill(scale == 0, 1)",
        "return scale",
        "Divides a row of zeros by its largest weight.",
    ),
    Bug(
        "nibbles-without-a-middle",
        f"{HERE}/rtn.py",
        ".round() + middle).clamp(0, 15)",
        ".round()).clamp(0, 15)",
        "Rounds to unsigned nibbles without moving 0 to the middle: all negative weights are lost.",
    ),
    Bug(
        "the-odd-input-first",
        WEIGHTS,
        "return numbers[:, ::2] | (numbers[:, 1::2] << 4)",
        "return numbers[:, 1::2] | (numbers[:, ::2] << 4)",
        "Puts the odd input into the low nibble.",
    ),
    Bug(
        "half-a-block",
        WEIGHTS,
        'whole = a.scheme.scales != "block" or a.shape[0] % BLOCK == 0',
        "whole = True",
        "Joins weights where a block of scales would reach over the seam.",
    ),
    Bug(
        "some-nan-is-fine",
        WEIGHTS,
        "    if not bool(torch.isfinite(scale).all()):\n",
        "    if bool(torch.isnan(scale).all()):\n",
        "Refuses scales only if all of them are NaN.",
    ),
    Bug(
        "one-scale-for-all-tokens",
        f"{HERE}/activations.py",
        "scale = x.abs().amax(dim=-1, keepdim=True) * (1.0 / LARGEST[kind])",
        "scale = (x.abs().amax() * (1.0 / LARGEST[kind])).expand(*x.shape[:-1], 1)",
        "Rounds all tokens of a step with the scale of the loudest.",
    ),
    Bug(
        "all-layers-before-named-ones",
        CHECKPOINTS,
        '    rules.sort(key=lambda rule: "Linear" in rule.targets)\n',
        "",
        "Lets a rule for all layers win over one that names a layer.",
    ),
    Bug(
        "a-name-within-a-name",
        CHECKPOINTS,
        "return pattern in names or (",
        "return any(pattern in each for each in names) or (",
        "Takes a part of a layer's name for its name.",
    ),
    Bug(
        "zero-points-unread",
        CHECKPOINTS,
        '        zeros=not Field("symmetric", bool, default=True).read(weights),\n',
        "        zeros=False,\n",
        "Reads weights with zero points as if there were none.",
    ),
    Bug(
        "static-inputs-as-dynamic",
        CHECKPOINTS,
        'if given.get("dynamic") is not True or _BITS',
        "if _BITS",
        "Rounds inputs by the token where the file says that its scales are fixed.",
    ),
    Bug(
        "the-head-like-a-layer",
        LOADING,
        "return self.head(device) if callable(self.head) else self.head",
        "return self.scheme",
        "Gives the head the layers' scheme, whatever was asked for it.",
    ),
    Bug(
        "two-copies",
        LOADING,
        '        if scheme is None or leaf != "weight" or not isinstance(layer, nn.Linear):\n',
        "        if True:\n",
        "Reads all weights first and quantizes afterwards.",
    ),
    Bug(
        "the-coarse-half",
        CPU,
        "sums[: len(x)].add_(sums[len(x) :], alpha=1 / _LOWER)",
        "sums[: len(x)]",
        "Multiplies by the first eight bits of the input and forgets the rest.",
    ),
    Bug(
        "exponents-one-off",
        CPU,
        "mul_(2.0**120)",
        "mul_(2.0**119)",
        "Takes the distance of the two exponents' zeros for 119.",
    ),
    Bug(
        "offsets-the-other-way",
        CPU,
        "(MIDDLE - zero.float()) * scale.float()",
        "(zero.float() - MIDDLE) * scale.float()",
        "Moves groups with zero points away from 0 instead of towards it.",
    ),
    Bug(
        "tiles-beside-the-numbers",
        LINEAR,
        "            self.data = self.data.new_empty((self.shape[0], 0))\n",
        "",
        "Keeps the numbers beside the tiles that were made of them.",
    ),
    Bug(
        "inputs-out-of-order",
        LINEAR,
        "x = x if self.order is None else x.index_select(-1, self.order)",
        "x = x",
        "Multiplies columns in the order of their groups with inputs in their own.",
    ),
    Bug(
        "unseen-inputs-keep-their-weights",
        GPTQ,
        "    weight[:, unseen] = 0\n",
        "",
        "Keeps weights of inputs that were always 0, on a scale that others need.",
    ),
    Bug(
        "errors-as-they-are",
        GPTQ,
        "errors[:, at] = (column - rounded) / own[at, at]",
        "errors[:, at] = column - rounded",
        "Passes errors on without dividing by the diagonal of the factor.",
    ),
    Bug(
        "never-divided-again",
        f"{HERE}/awq.py",
        "rounded = rtn.quantize(together * scales, scheme).dequantize() / scales",
        "rounded = rtn.quantize(together * scales, scheme).dequantize()",
        "Compares weights that were multiplied with weights that were not.",
    ),
    Bug(
        "a-projection-multiplied-twice",
        METHODS,
        "        divided = weight.float() / scales[:, None]\n",
        "        divided = weight.float() * scales[:, None]\n",
        "Makes inputs larger as well as their weights.",
    ),
    Bug(
        "blocks-that-see-plain-inputs",
        CALIBRATE,
        f"        {CHANGE}\n        {AGAIN}\n",
        f"        {AGAIN}\n        {CHANGE}\n",
        "Calibrates a block on what the blocks below made before they were quantized.",
    ),
    Bug(
        "calibrated-on-the-beginning",
        CALIBRATE,
        "return pieces[-count:]",
        "return pieces[:count]",
        "Calibrates on the part of the text that is measured.",
    ),
    Bug(
        "values-on-the-scale-of-keys",
        f"{HERE}/kv.py",
        "for side, x in enumerate((k, v)):",
        "for side, x in enumerate((k, k)):",
        "Takes the values' scales from the keys.",
    ),
    Bug(
        "the-first-heads-scale",
        f"{HERE}/export.py",
        "pair[place].amax().reshape(1)",
        "pair[place][:1]",
        "Writes the first head's scale for all heads of a layer, not the largest.",
    ),
    Bug(
        "predictions-one-late",
        QUALITY,
        "attention)[:, :-1].flatten(0, 1)",
        "attention)[:, 1:].flatten(0, 1)",
        "Holds every prediction against the token it was made with.",
    ),
    Bug(
        "divergence-the-other-way",
        QUALITY,
        "(true.exp() * (true - found))",
        "(found.exp() * (found - true))",
        "Weighs differences with the wrong model's probabilities.",
    ),
    Bug(
        "awq-leaves-the-bias",
        "phases/10_quant/quant/methods.py",
        "            bias = maker.bias.float() / scales\n",
        "            bias = maker.bias.float()\n",
        "Makes what a layer computes smaller, but not what it adds.",
    ),
    Bug(
        "keys-that-are-all-zero",
        "phases/10_quant/quant/kv.py",
        "    if not scale.all():\n",
        "    if False:\n",
        "Takes a scale of 0 for keys, which makes all of them equal.",
    ),
    Bug(
        "version-by-one-name",
        "phases/10_quant/quant/checkpoints.py",
        'Field("checkpoint_format format", str',
        'Field("checkpoint_format", str',
        "Overlooks GPTQ's second version, whose zero points are stored as they are, in a file's other field.",
    ),
)
