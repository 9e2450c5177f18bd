"""Mistakes in phase 10, quantization. The first is planted on every run of the test suite."""

from tests.planted.planting import Bug

LAYOUTS = "phases/10_quant/quant/layouts.py"
WEIGHTS = "phases/10_quant/quant/weights.py"
GPTQ = "phases/10_quant/quant/gptq.py"
METHODS = "phases/10_quant/quant/methods.py"

BUGS = (
    Bug(
        "zero-points-as-stored",
        LAYOUTS,
        "zero = (zero + int(self.one_less)) & 15",
        "zero = zero & 15",
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
)
