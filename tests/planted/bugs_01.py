"""Mistakes in phase 01, the forward pass. The first two are planted on every run of the test suite."""

from tests.planted.planting import Bug

FORWARD = "phases/01_forward/forward"
ATTENTION = f"{FORWARD}/attention.py"
GENERATOR = f"{FORWARD}/generator.py"
LAYERS = f"{FORWARD}/layers.py"
MODEL = f"{FORWARD}/model.py"
ROPE = f"{FORWARD}/rope.py"
SCALING = f"{FORWARD}/rope_scaling.py"
GEMMA3 = f"{FORWARD}/models/gemma3.py"
GPT2 = f"{FORWARD}/models/gpt2.py"
LLAMA = f"{FORWARD}/models/llama.py"

BUGS = (
    Bug(
        "rope-pairs-neighbours",
        ROPE,
        "torch.cat((cos, cos), -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2)",
        "cos.repeat_interleave(2, -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2)",
        "Gives neighbours one angle, where these checkpoints pair the halves of a head.",
    ),
    Bug(
        "sees-the-next-token",
        ATTENTION,
        "mask = distance >= 0",
        "mask = distance >= -1",
        "Lets each token see the one after it.",
    ),
    Bug(
        "does-not-see-itself",
        ATTENTION,
        "mask = distance >= 0",
        "mask = distance > 0",
        "Hides each token from itself, and leaves the first one nothing to see.",
    ),
    Bug(
        "window-one-too-long",
        ATTENTION,
        "mask & (distance < window)",
        "mask & (distance <= window)",
        "Takes a window of w for w tokens besides the query's own.",
    ),
    Bug(
        "mask-from-the-corner",
        ATTENTION,
        "    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)  # [..., S, L]\n",
        "    query_positions = query_positions - query_positions[..., :1]\n"
        "    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)\n",
        "Takes the lower triangle for the mask, also when there are more keys than queries.",
    ),
    Bug(
        "heads-dealt-out-in-turn",
        ATTENTION,
        "grouped = q.reshape(*q.shape[:-3], layer.num_kv_heads, groups * length, layer.head_dim)",
        "grouped = q.unflatten(-3, (groups, layer.num_kv_heads)).transpose(-4, -3).flatten(-3, -2)",
        "Gives query head h the key/value head h mod KH instead of h div (H / KH).",
    ),
    Bug(
        "cap-after-the-mask",
        ATTENTION,
        """    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-3), float("-inf"))
""",
        """    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-3), float("-inf"))
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
""",
        "Caps the scores after masking, which turns minus infinity into minus the cap.",
    ),
    Bug(
        "softmax-in-half-precision",
        ATTENTION,
        "groups, length, k.shape[-2]).float()",
        "groups, length, k.shape[-2])",
        "Takes the softmax in the model's dtype.",
    ),
    Bug(
        "scale-of-the-head-size",
        MODEL,
        "scale=config.attention_scale *",
        "scale=config.head_dim**-0.5 *",
        "Scales by the head size, where the configuration names another number.",
    ),
    Bug(
        "layer-scale-from-zero",
        MODEL,
        "(i + 1 if config.scale_by_layer else 1)",
        "(max(i, 1) if config.scale_by_layer else 1)",
        "Counts layers from 0 in GPT-2's scaling by layer.",
    ),
    Bug(
        "cap-of-the-logits-forgotten",
        MODEL,
        "return logits if cap is None else cap * torch.tanh(logits / cap)",
        "return logits",
        "Leaves out the soft cap of the logits.",
    ),
    Bug(
        "head-not-tied",
        MODEL,
        "if self.config.tie_word_embeddings:",
        "if False:",
        "Gives a model with tied embeddings a head of its own.",
    ),
    Bug(
        "rope-turns-back",
        ROPE,
        "torch.cat((-sin, sin), -1)",
        "torch.cat((sin, -sin), -1)",
        "Rotates the other way.",
    ),
    Bug(
        "rope-exponents-twice-as-large",
        ROPE,
        "dtype=torch.float32) / head_dim",
        "dtype=torch.float32) / (head_dim // 2)",
        "Divides the exponents by the number of pairs.",
    ),
    Bug(
        "positions-in-half-precision",
        ROPE,
        "positions.unsqueeze(-1).float()",
        "positions.unsqueeze(-1).half()",
        "Computes angles from positions in half precision, where 4097 is 4096.",
    ),
    Bug(
        "rotates-in-half-precision",
        ROPE,
        "    cos, sin = cos_sin\n",
        "    cos, sin = (table.to(x.dtype) for table in cos_sin)\n",
        "Rounds cosines and sines to the model's dtype before it rotates.",
    ),
    Bug(
        "llama3-ramp-upside-down",
        SCALING,
        "return (1 - ramp) * frequencies / rope.factor + ramp * frequencies",
        "return ramp * frequencies / rope.factor + (1 - ramp) * frequencies",
        "Stretches the fast pairs and keeps the slow ones.",
    ),
    Bug(
        "eps-beside-the-root",
        LAYERS,
        "return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)",
        "root = x.float().pow(2).mean(-1, keepdim=True).sqrt()\n"
        "        return (x.float() / (root + self.eps) * self.weight.float()).to(x.dtype)",
        "Adds the norm's epsilon to the root instead of under it.",
    ),
    Bug(
        "norm-in-half-precision",
        LAYERS,
        "return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)",
        "root = (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()\n        return x / root * self.weight",
        "Squares and sums in the model's dtype.",
    ),
    Bug(
        "wrong-gate",
        LAYERS,
        "self.act(self.gate_proj(x)) * self.up_proj(x)",
        "self.gate_proj(x) * self.act(self.up_proj(x))",
        "Puts the activation on the wrong one of the two projections.",
    ),
    Bug(
        "exact-gelu",
        LAYERS,
        '"gelu_new": lambda x: F.gelu(x, approximate="tanh"),',
        '"gelu_new": F.gelu,',
        "Uses the exact GELU, where GPT-2 was trained with its approximation.",
    ),
    Bug(
        "residual-of-the-normalized",
        LLAMA,
        "x = x + self.self_attn(self.input_layernorm(x), cos_sin, attention)",
        "x = self.input_layernorm(x)\n        x = x + self.self_attn(x, cos_sin, attention)",
        "Adds attention's output to the normalized hidden state.",
    ),
    Bug(
        "square-matrices-not-turned",
        GPT2,
        "return tensor.t() if name.endswith(matrices) and tensor.dim() == 2 else tensor",
        "return tensor.t() if name.endswith(matrices) and len(set(tensor.shape)) == 2 else tensor",
        "Transposes GPT-2's matrices where their shapes ask for it, and not the square one.",
    ),
    Bug(
        "gemma-norm-from-zero",
        GEMMA3,
        "1.0 + self.weight.float()",
        "self.weight.float()",
        "Multiplies by Gemma's stored norm weight instead of 1 more.",
    ),
    Bug(
        "gemma-embeddings-unscaled",
        GEMMA3,
        "torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)",
        "torch.tensor(1.0, dtype=x.dtype)",
        "Forgets to scale Gemma's embeddings.",
    ),
    Bug(
        "gemma-one-rope",
        GEMMA3,
        "everywhere if spec.sliding_window is None else nearby",
        "everywhere",
        "Turns all layers of Gemma alike, windows or none.",
    ),
    Bug(
        "first-token-decides",
        GENERATOR,
        "RecomputeAttention())[-1:]",
        "RecomputeAttention())[:1]",
        "Samples after the first token instead of the last.",
    ),
    Bug(
        "prompt-without-its-last-token",
        GENERATOR,
        "sampled = self._next(tokens, len(tokens) - len(prompt))",
        "sampled = self._next(tokens[:-1] or tokens, len(tokens) - len(prompt))",
        "Leaves the newest token out of the pass that is to follow it.",
    ),
    Bug(
        "eos-not-told",
        GENERATOR,
        "self.sampler.set_row(0, params, prompt, eos_ids=eos, sample=sample)",
        "self.sampler.set_row(0, params, prompt, sample=sample)",
        "Does not tell the sampler which tokens end a text, so that `min_tokens` cannot hold them back.",
    ),
    Bug(
        "samples-alike",
        GENERATOR,
        "self.sampler.set_row(0, params, prompt, eos_ids=eos, sample=sample)",
        "self.sampler.set_row(0, params, prompt, eos_ids=eos)",
        "Gives all n samples of a request one random stream.",
    ),
    Bug(
        "checks-when-it-is-too-late",
        GENERATOR,
        "        return self._stream(prompts, each)",
        "        yield from self._stream(prompts, each)",
        "Makes `stream` a generator, so that a bad request is refused only once somebody reads.",
    ),
)
