"""Cost of a drafter in the runner: of one draft, and of decodes without drafts; both to a plain step.

    python benchmarks/draft_cost.py [--methods mtp eagle3 draft] [--rounds 12] [--output-len 64]

The model is a random one of SmolLM2-135M's layers in bfloat16 with a vocabulary of 8,192 (for `mtp` a Qwen3.5 of the
same sizes); the drafter is one such layer, an EAGLE-3 head or a draft model, of 4 to 7 % of its weights. One stream,
one thread, CPU time, which other programs on the machine disturb less than the time of a clock.

`idle` is the rate of answers with `speculative: false`, which have no drafts while the drafter computes their tokens,
by that of a model without a drafter; both take turns, each is the first in every other round, and the lowest times of
the rounds are compared. `draft` is the time of one draft, of several in a step, by that of a plain decode: d of the
arithmetic of drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.draft_gain import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, PROMPT, VOCAB, write_model
from engine import LLM, SamplingParams
from engine.model_runner.drafting.drafter import Drafter
from engine.scheduler.speculation.runner_drafts import RunnerDrafts
from engine.scheduler.speculation.step_costs import StepCosts

METHODS: Final = ("mtp", "eagle3", "draft")


def write_head(folder: Path) -> Path:
    """An EAGLE-3 head with the target's embedding and head."""
    folder.mkdir()
    size = HIDDEN // HEADS
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KV_HEADS * size, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KV_HEADS * size, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj": (INNER, HIDDEN),
        "midlayer.mlp.up_proj": (INNER, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {f"{name}.weight": torch.randn(*shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    for name in (
        "midlayer.input_layernorm",
        "midlayer.hidden_norm",
        "midlayer.post_attention_layernorm",
        "norm",
    ):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN)
    save_file(
        {name: value.to(torch.bfloat16) for name, value in tensors.items()}, folder / "model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_qwen(folder: Path, model: Path) -> Path:
    """A Qwen3.5 without weights, which are random then; every fourth layer attends."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = json.loads((model / "config.json").read_text()) | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": (kinds * LAYERS)[:LAYERS],
        "head_dim": HIDDEN // HEADS,
        "linear_num_key_heads": KV_HEADS,
        "linear_num_value_heads": HEADS,
        "linear_key_head_dim": HIDDEN // HEADS,
        "linear_value_head_dim": HIDDEN // HEADS,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def drafts_timed() -> Iterator[list[float]]:
    """All requests get as many drafts as they may; collects CPU seconds per draft of each step."""
    draft, found = Drafter.draft, list[float]()

    def timed(self: Drafter, asked: Any) -> Any:
        begin_s = time.process_time()
        drafts = draft(self, asked)
        found.append((time.process_time() - begin_s) / int(asked.counts.max()))
        return drafts

    def chances(self: RunnerDrafts, req: Any, count: int) -> list[float]:
        return [0.95**n for n in range(1, count + 1)]

    with (
        mock.patch.object(Drafter, "draft", timed),
        mock.patch.object(RunnerDrafts, "chances", chances),
        mock.patch.object(RunnerDrafts, "limit", lambda self, reqs, counts, *_: counts),
        mock.patch.object(StepCosts, "knows_plain", return_value=True),
        mock.patch.object(StepCosts, "intervals", lambda self, num_reqs, last: np.ones(last - num_reqs + 1)),
    ):
        yield found


def answer_s(llm: LLM, seed: int, output_len: int, *, speculative: bool) -> float:
    """CPU seconds per token of one answer."""
    sampling = SamplingParams(
        temperature=1.0, seed=seed, max_new_tokens=output_len, ignore_eos=True, speculative=speculative
    )
    begin_s = time.process_time()
    llm.generate([PROMPT], sampling)
    return (time.process_time() - begin_s) / output_len


def measured(
    model: Path, settings: dict[str, Any], drafter: dict[str, Any], rounds: int, output_len: int
) -> tuple[float, float, float]:
    """Seconds of a plain token, of one with an idle drafter, and of a draft."""
    plain, idle, drafts = list[float](), list[float](), list[float]()
    with LLM(str(model), **settings) as without, LLM(str(model), **settings, **drafter) as having:
        for seed in range(rounds + 1):
            turns = [(without, plain), (having, idle)]
            for llm, times in turns if seed % 2 else turns[::-1]:
                times.append(answer_s(llm, seed, output_len, speculative=False))
            with drafts_timed() as found:
                answer_s(having, seed, output_len, speculative=True)
            if found:  # a machine that is slow for a moment gets none
                drafts.append(statistics.median(found))
    return min(plain[1:]), min(idle[1:]), min(drafts)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output-len", type=int, default=64)
    options = parser.parse_args()
    print("| method | ms a plain token | idle (1 = plain) | ms a draft | draft (1 = a plain token) |")
    print("|---|---|---|---|---|")
    for method in options.methods:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = write_model(folder / "model", LAYERS, 0.2, 1)
            settings: dict[str, Any] = {"num_threads": 1, "max_total_tokens": 4096, "dtype": "bfloat16"}
            drafter: dict[str, Any] = {"speculative": method}
            if method == "mtp":
                model, settings["load_format"] = write_qwen(folder / "qwen", model), "dummy"
            elif method == "eagle3":
                drafter["speculative_model"] = str(write_head(folder / "head"))
            else:
                drafter["speculative_model"] = str(write_model(folder / "draft", 1, 0.2, 1))
            plain, idle, draft = measured(model, settings, drafter, options.rounds, options.output_len)
        print(
            f"| `{method}` | {1e3 * plain:.2f} | {plain / idle:.3f} | {1e3 * draft:.2f} | {draft / plain:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
