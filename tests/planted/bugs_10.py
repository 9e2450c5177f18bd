"""Mistakes in phase 10, quantization. The first two are planted on every run of the test suite."""

from tests.planted.planting import Bug

HERE = "phases/10_quant/quant"
WEIGHTS = f"{HERE}/weights.py"
GPTQ = f"{HERE}/gptq.py"
METHODS = f"{HERE}/methods.py"
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
        "the-first-weights-again",
        GEMV,
        "        weights, scales = later, later_scales\n",
        "        scales = later_scales\n",
        "Multiplies the first rows' weights in every round of a program.",
    ),
    Bug(
        "the-first-words-again",
        GEMV4,
        "        words, scales, zeros = later, later_scales, later_zeros\n",
        "        scales, zeros = later_scales, later_zeros\n",
        "The same in four bits.",
    ),
    Bug(
        "scales-of-the-rows-before",
        GEMV,
        "        weights, scales = later, later_scales\n",
        "        weights = later\n",
        "Multiplies later rows by the first rows' scales.",
    ),
    Bug(
        "one-row-too-few-a-round",
        GEMV,
        "    step = tl.num_programs(0) * ROWS\n",
        "    step = tl.num_programs(0) * (ROWS + 1)\n",
        "Leaves rows out between the rounds of a program.",
    ),
    Bug(
        "residual-of-the-first-rows",
        GEMV4,
        "        added = load_addends(bias, residual, row, N, ROWS, BIAS, ADD)\n",
        "        added = load_addends(bias, residual, first_row + tl.arange(0, ROWS), N, ROWS, BIAS, ADD)\n",
        "Adds the first rows' residual to those of every round.",
    ),
    Bug(
        "awq-leaves-the-bias",
        "phases/10_quant/quant/methods.py",
        "            bias = maker.bias.float() / scales\n",
        "            bias = maker.bias.float()\n",
        "Makes what a layer computes smaller, but not what it adds.",
    ),
    Bug(
        "attention-begins-too-early",
        f"{HERE}/surgery.py",
        "block.qkv_proj.run_ahead = starts_early(block.spec)",
        "block.qkv_proj.run_ahead = True",
        "Lets the first layer's attention begin before what it reads is written: a race, on a GPU only.",
    ),
)
