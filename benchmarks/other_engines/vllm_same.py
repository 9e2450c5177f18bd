"""vLLM on the very requests of benchmarks/workloads.py: tokens, lengths and temperature come from requests.json.

python vllm_same.py MODEL [MORE]     MORE: more arguments of `vllm.LLM`, as JSON
"""
import json, os, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__":
    name = sys.argv[1]
    from vllm import LLM, SamplingParams
    llm = LLM(model=os.path.join(HERE, "cfg", name), load_format="dummy", skip_tokenizer_init=True, max_model_len=4096 + 64, gpu_memory_utilization=0.85, max_num_seqs=256, max_num_batched_tokens=16384, enable_prefix_caching=False, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    works = json.load(open(os.path.join(HERE, "requests.json")))
    def run(work, first, tag):
        prompts = [dict(prompt_token_ids=p) for p in work["prompts"][:first]]
        params = [SamplingParams(temperature=work["temperature"], ignore_eos=True, max_tokens=o, detokenize=False) for o in work["outputs"][:first]]
        t = time.time(); llm.generate(prompts, params, use_tqdm=False); dt = time.time() - t
        made = sum(work["outputs"][:first])
        print(f"VLLM {name} {tag}: {made} tok {dt:.2f}s {made/dt:.1f} tok/s", flush=True)
    run(works["single-512"], 1, "warm")
    for again in ("", " again", " again"): run(works["single-512"], 1, "b1" + again)
    for again in ("", " again"): run(works["offline-256"], 256, "256" + again)
    for again in ("", " again", " again"): run(works["prefill-64x1024"], 64, "prefill 64x1024" + again)
