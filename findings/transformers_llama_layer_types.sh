#!/usr/bin/env bash
# Expected: a Llama computes the same tokens with a cache and without one, whatever stands in its config.json. Either
# "layer_types" with "sliding_attention" and a "sliding_window" give its layers windows, or they are refused or ignored.
# Instead: the masks of a Llama ignore both fields, and the cache that generate() makes obeys them: it drops keys that
# are older than the window. So use_cache=True and use_cache=False generate other tokens, and neither warns.
# Known since transformers 5.24.0, 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" 2> /dev/null <<'PYTHON'
import torch
import transformers

print("transformers", transformers.__version__, "torch", torch.__version__)
same = {}
for kind in ("full_attention", "sliding_attention"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=0, eos_token_id=0, layer_types=[kind] * 2, sliding_window=4,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    prompt = torch.randint(1, 97, (1, 24))
    rule = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    kept, anew = (
        model.generate(prompt, use_cache=cached, **rule)[0, 24:].tolist() for cached in (True, False)
    )
    same[kind] = kept == anew
    print(f"{kind}, with a cache:    {kept}")
    print(f"{kind}, without a cache: {anew}")
if same != {"full_attention": True, "sliding_attention": False}:
    raise SystemExit("this has changed: see the head of this script")
PYTHON
