"""Decode of a W4A16 folder beside the same shape in GGUF (Q4_0), in turn, in CPU time of one thread.

    python3 -m benchmarks.four_bits --shape llama-3.2-1b --layers 4

Both have 4 bits in groups of 32 in the linear layers, and embeddings and head in bf16. The weights are random; the
kernels take as long for any. Each round generates the same number of tokens with each model, the first one in turn; the
result is the median of the rounds' ratios, and the bytes of the weights in memory and in the files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Final

from benchmarks.random_models import SHAPES, spec_of, write_folder, write_gguf
from engine import LLM, SamplingParams
from engine.models.source import resolve_source
from engine.models.weight_files.weight_memory import weight_bytes

TARGET: Final = 1.05
"""Largest ratio of the folder's CPU time to the file's, and of its memory to its files."""


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b", help="the model's shape")
    parser.add_argument("--layers", type=int, default=4, help="its number of layers")
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a round")
    parser.add_argument("--folder", type=Path, default=Path("build/four-bits"), help="for the models")
    args = parser.parse_args()
    shape, name = SHAPES[args.shape].with_layers(args.layers), f"{args.shape}-{args.layers}"
    tokenizer = Path(resolve_source("default").path)
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = write_folder(shape, args.folder / f"{name}-w4a16", tokenizer, four_bits=True)
    gguf = write_gguf(shape, args.folder / f"{name}-w4a16.gguf", tokenizer, "W4A16")
    models = [
        LLM(
            path,
            num_threads=1,
            max_model_len=512,
            dtype="bfloat16",
            max_total_tokens=2048,
            show_progress=False,
        )
        for path in (folder, gguf)
    ]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=args.tokens, ignore_eos=True)

    def cpu_s(model: LLM) -> float:
        start = time.process_time()
        model.generate(["The quick brown fox"], sampling)
        return (time.process_time() - start) / int(args.tokens)

    for model in models:
        cpu_s(model)
    rounds = []
    for number in range(args.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        taken = {which: cpu_s(models[which]) for which in order}
        rounds.append((taken[0], taken[1]))
    ratio = statistics.median(of_folder / of_gguf for of_folder, of_gguf in rounds)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    held = weight_bytes(spec_of(folder), 2, on_cpu=True)
    result = {
        "ms_per_token": [round(1e3 * statistics.median(times), 2) for times in zip(*rounds, strict=True)],
        "folder_to_gguf": round(ratio, 3),
        "memory_to_file": round(held / stored, 3),
        "target": TARGET,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
