"""Gain of drafts by the share of them that is right, with models that have any such share, and number of streams.

    python benchmarks/draft_gain.py [--quantization int4] [--noise 0 0.1 0.2 0.4] [--streams 1 8 64] [--rounds 3]
    python benchmarks/draft_gain.py --methods draft suffix --noise 0.3 --streams 64

The model is a random Llama of SmolLM2-135M's layers and a vocabulary of 8,192; the draft model is its first layers
with the same embedding and head. The other layers add `--noise` times what they would to the residual stream: with 0
both models say the same and all drafts are right, with more of it fewer are. Answers are sampled at temperature 1, so
no text repeats itself; one thread. `--streams` answers are generated at once, and twice as many in all; they have half
to one and a half of `--output-len` tokens (of several streams fewer), so they end one by one, without drafts as well.

A row has the share of right drafts, tokens per step of a stream, and CPU time per token without drafts and with them,
which other programs on the machine disturb less than the time of a clock; the scheduler chooses the number of drafts by
CPU time as well. The ratio is that of the lowest times of the rounds, in which all methods take turns and another one
is the first each time. The method `off` compares decodes without drafts with themselves: the error of the ratios.
`own work` is the share of the CPU time within calls of speculation and of the drafter, which says more about a percent
than the ratio: looking for drafts, making them, and computing tokens for a draft model; not verifying them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine import LLM, SamplingParams
from engine.model_runner.drafting.drafter import Drafter
from engine.model_runner.kernels.cpu import compiler
from engine.scheduler.speculation.speculation import NgramSpeculation

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 576, 1536, 9, 3, 30, 8192
PROMPT: Final = "A prompt of a few words, so that nearly all tokens are those of the answer."


_OWN_WORK: Final = {
    NgramSpeculation: ("plan", "measured", "checked", "answered", "stopped"),
    Drafter: ("start", "leave", "draft", "absorb"),
}


class OwnWork:
    """CPU seconds within the calls of `_OWN_WORK`, each counted once though they call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def patches(self) -> Iterator[Any]:
        """A context in which the calls are counted."""
        for part, names in _OWN_WORK.items():
            for name in names:
                yield mock.patch.object(part, name, self._timed(getattr(part, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s, self._depth = time.process_time(), self._depth + 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - begin_s

        return timed


class Timed(NamedTuple):
    """One answer: CPU seconds per token, those of own work, drafts, and accepted ones."""

    token_s: float
    own_s: float
    num_drafts: int
    num_accepted: int


def write_model(folder: Path, num_layers: int, noise: float, num_own: int) -> Path:
    """A model of which the layers from `num_own` on add `noise` times their outputs."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    size = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * size, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * size, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator) * 0.1}
    for layer in range(num_layers):
        for name, shape in shapes.items():
            value = torch.randn(*shape, generator=generator) / shape[1] ** 0.5
            if layer >= num_own and name.endswith(("o_proj", "down_proj")):
                value *= noise
            tensors[f"model.layers.{layer}.{name}.weight"] = value
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    save_file(
        {name: value.to(torch.bfloat16) for name, value in tensors.items()}, folder / "model.safetensors"
    )
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: idx for idx, char in enumerate(alphabet)} | {f"<{idx}>": idx for idx in range(256, VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def answer_lens(num_streams: int, output_len: int) -> list[int]:
    """The lengths of two answers per stream: half to one and a half of `output_len`, in no order."""
    return [int(output_len * (0.5 + 0.618 * idx % 1)) for idx in range(2 * num_streams)]


def timed(llm: LLM, seed: int, num_streams: int, output_len: int) -> Timed:
    """Generate the answers."""
    work = OwnWork()
    lens = answer_lens(num_streams, output_len)
    samplings = [
        SamplingParams(temperature=1.0, seed=len(lens) * seed + idx, max_new_tokens=each, ignore_eos=True)
        for idx, each in enumerate(lens)
    ]
    with ExitStack() as stack:
        for patch in work.patches():
            stack.enter_context(patch)
        begin_s = time.process_time()
        outputs = llm.generate([PROMPT] * len(lens), samplings)
        seconds = time.process_time() - begin_s
    return Timed(
        seconds / sum(lens),
        work.seconds / sum(lens),
        sum(output.usage.draft_tokens for output in outputs),
        sum(output.usage.accepted_draft_tokens for output in outputs),
    )


def in_turn(engines: list[LLM], seed: int, num_streams: int, output_len: int) -> list[Timed]:
    """The same answers of each engine; each round begins with another one, so that none is always the first."""
    order = [(seed + idx) % len(engines) for idx in range(len(engines))]
    found = {idx: timed(engines[idx], seed, num_streams, output_len) for idx in order}
    return [found[idx] for idx in range(len(engines))]


def rows(options: argparse.Namespace, noise: float, num_streams: int) -> list[str]:
    """Rows of the table, one for each method."""
    output_len = max(32, int(options.output_len / num_streams**0.5))
    methods = ["off", *options.methods]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_model(Path(folder) / "model", LAYERS, noise, options.draft_layers)
        draft = write_model(Path(folder) / "draft", options.draft_layers, noise, options.draft_layers)
        settings: dict[str, Any] = {
            "num_threads": 1,
            "dtype": "bfloat16",
            "quantization": options.quantization,
        }
        settings |= {
            "max_total_tokens": 4096 + num_streams * 2 * (output_len + len(PROMPT)),
            "max_running_requests": num_streams,
        }
        own = [
            {"speculative": method} | ({"speculative_model": str(draft)} if method == "draft" else {})
            for method in methods
        ]
        engines = [stack.enter_context(LLM(str(model), **(settings | each))) for each in own]
        found = [in_turn(engines, seed, num_streams, output_len) for seed in range(options.rounds + 1)][1:]
    lowest = [min(each[idx].token_s for each in found) for idx in range(len(methods))]
    lines = []
    for idx, method in enumerate(methods[1:], 1):
        tried = sum(each[idx].num_drafts for each in found)
        right = sum(each[idx].num_accepted for each in found)
        share = sum(each[idx].own_s for each in found) / sum(each[idx].token_s for each in found)
        tokens = options.rounds * sum(answer_lens(num_streams, output_len))
        lines.append(
            f"| {method} | {num_streams} | {noise:g} | {right / max(tried, 1):.0%} of {tried} "
            f"| {tokens / (tokens - right):.2f} | {1e3 * lowest[0]:.2f} | {1e3 * lowest[idx]:.2f} "
            f"| {lowest[0] / lowest[idx]:.2f} | {share:.1%} |"
        )
    return lines


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of the model (default: bfloat16)")
    parser.add_argument("--avx2", action="store_true", help="hide AVX-512, AVX-VNNI and AMX")
    parser.add_argument(
        "--methods", nargs="+", default=["draft"], choices=["off", "ngram", "suffix", "draft"]
    )
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0, 0.1, 0.2, 0.4])
    parser.add_argument("--streams", nargs="+", type=int, default=[1])
    parser.add_argument("--draft-layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=256)
    options = parser.parse_args()
    print(
        "| method | streams | noise | right drafts | tokens a step | ms a token without | with | ratio | own work |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    flags = compiler.cpu_flags()
    if options.avx2:
        flags = frozenset(flag for flag in flags if not flag.startswith(("avx512", "avx_vnni", "amx")))
    with (
        mock.patch("time.perf_counter", time.process_time),
        mock.patch("time.monotonic", time.process_time),
        mock.patch.object(compiler, "cpu_flags", return_value=flags),
    ):
        for num_streams in options.streams:
            for noise in options.noise:
                print("\n".join(rows(options, noise, num_streams)), flush=True)


if __name__ == "__main__":
    main()
