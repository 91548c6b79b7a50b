"""What a model costs that runs through transformers' code: CPU time of its steps beside those of the engine's own code.

    python benchmarks/fallback_step.py [--threads 1] [--rounds 20] [--prompt-len 256] [--families llama,qwen3]

Families that the engine can run in both ways (`--model-impl engine` and `--model-impl transformers`), in process, with
random bfloat16 weights in the shape of SmolLM2-135M. Prefill: one prompt in one step; decode: the tokens after it. The
two take turns, and the ratio is the median over the rounds of the CPU time (all threads) of one to that of the other:
the speed of a shared machine changes from minute to minute.

With `--unchanged` transformers' modules stay as they are: this is what the engine's kernels in them gain.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from unittest.mock import patch

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.player import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    MAX_LEN,
    PAGE_SIZE,
    VOCAB,
    Player,
)
from engine.launch.child.process_resources import shorten_spinning
from engine.models.hf.hf_config import read_hf_spec
from engine.models.source import ModelSource
from engine.runtime.config.device_config import KernelConfig
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.runtime.feasibility import Capacity

if TYPE_CHECKING:
    from collections.abc import Sequence

Impl = Literal["engine", "transformers"]
IMPLS: Final[tuple[Impl, ...]] = ("engine", "transformers")
NUM_DECODES: Final = 6
TARGET: Final = 2.0
_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 1e5},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rope_theta": 1e5},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
}
"""What is not common in config.json, by `model_type`."""


class Round(NamedTuple):
    """CPU time of a token in decode and in prefill, in seconds, by implementation."""

    decode_s: dict[Impl, float]
    prefill_s: dict[Impl, float]


class Figures(NamedTuple):
    """A family's figures: medians in seconds a token, and the ratio of transformers' to the engine's."""

    family: str
    decode_s: dict[Impl, float]
    prefill_s: dict[Impl, float]
    decode_ratio: float
    prefill_ratio: float


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description="CPU time of steps by transformers' code and by the engine's own"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--unchanged", action="store_true", help="without the engine's kernels")
    args = parser.parse_args()
    shorten_spinning()
    families = args.families.split(",")
    if unknown := sorted(set(families) - set(FAMILIES)):
        sys.exit(f"--families has {', '.join(unknown)}; known are {', '.join(FAMILIES)}")
    found = []
    for family in families:
        players = make_players(family, args.threads, args.layers, unchanged=args.unchanged)
        found.append(figures(family, list(measure(players, args.rounds, args.prompt_len))))
    print("\n".join(table(found, args.threads)))


def make_players(
    family: str, num_threads: int, layers: int, *, unchanged: bool = False
) -> dict[Impl, Player]:
    """A player of each implementation, with random weights."""
    config = {**_COMMON, **FAMILIES[family], "model_type": family, "num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return {
            impl: Player(_make_runner(Path(folder), impl, num_threads, unchanged=unchanged)) for impl in IMPLS
        }


def measure(players: Mapping[Impl, Player], num_rounds: int, prompt_len: int) -> Iterator[Round]:
    """Rounds of one prompt, and decodes after it, by each implementation."""
    source = random.Random(0)
    for number in range(num_rounds + 1):
        round_ = Round({}, {})
        prompt = [source.randrange(VOCAB) for _ in range(prompt_len)]
        for impl, player in players.items():
            round_.prefill_s[impl] = _cpu_s(player, prompt_len, [prompt], prompt_len) / prompt_len
            decodes = [_cpu_s(player, prompt_len + 1 + n, None, 1) for n in range(NUM_DECODES)]
            round_.decode_s[impl] = statistics.median(decodes[1:])  # the first one finds cold caches
            player.finished = [0]
        if number:  # the first round records decodes and allocates
            yield round_


def _cpu_s(player: Player, length: int, tokens: Sequence[Sequence[int]] | None, new: int) -> float:
    plan = player.plan([length], new, tokens)
    started_s = time.process_time()
    player.runner.launch(plan).wait()
    return time.process_time() - started_s


def _make_runner(folder: Path, impl: Impl, num_threads: int, *, unchanged: bool) -> Any:
    from engine.model_runner import load
    from engine.model_runner.hf_backend.transformers_load import load_transformers_model

    model = ModelConfig(
        dtype="bfloat16",
        device="cpu",
        num_threads=num_threads,
        load_format="dummy",
        model_impl=impl,
        seed=1,
    )
    capacity = Capacity(MAX_LEN, 2 * MAX_LEN // PAGE_SIZE, PAGE_SIZE, 1, VOCAB, 0)
    config = EngineConfig(model=model, cache=CacheConfig(page_size=PAGE_SIZE), kernels=KernelConfig())
    source = ModelSource("hf", str(folder), "benchmark")

    def load_unchanged(*args: Any, **settings: Any) -> Any:
        return load_transformers_model(*args, **{**settings, "ops": None})

    with patch.object(load, "load_transformers_model", load_unchanged) if unchanged else nullcontext():
        return load.load_model_runner(config, source, read_hf_spec(folder), capacity)


def figures(family: str, rounds: Sequence[Round]) -> Figures:
    """Medians over the rounds; a ratio is that within a round."""
    median = statistics.median
    return Figures(
        family,
        {impl: median(each.decode_s[impl] for each in rounds) for impl in IMPLS},
        {impl: median(each.prefill_s[impl] for each in rounds) for impl in IMPLS},
        median(each.decode_s["transformers"] / each.decode_s["engine"] for each in rounds),
        median(each.prefill_s["transformers"] / each.prefill_s["engine"] for each in rounds),
    )


def table(found: Sequence[Figures], num_threads: int) -> list[str]:
    """A Markdown table."""
    lines = [
        f"CPU time, {num_threads} threads, bf16; target: a ratio of at most {TARGET:g}",
        "",
        "| family | decode, ms: engine | transformers | ratio | prefill, us a token: engine | transformers | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, decode_s, prefill_s, decode_ratio, prefill_ratio in found:
        decode = [f"{decode_s[impl] * 1e3:.2f}" for impl in IMPLS]
        prefill = [f"{prefill_s[impl] * 1e6:.1f}" for impl in IMPLS]
        cells = [family, *decode, f"**{decode_ratio:.2f}**", *prefill, f"**{prefill_ratio:.2f}**"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
