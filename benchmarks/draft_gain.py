"""Gain of a draft model by the share of its drafts that are right, with models that have any such share.

    python benchmarks/draft_gain.py [--quantization int4] [--noise 0 0.1 0.2 0.4] [--draft-layers 1] [--rounds 3]

The model is a random Llama of SmolLM2-135M's layers and a vocabulary of 8,192; the draft model is its first layers
with the same embedding and head. The other layers add `--noise` times what they would to the residual stream: with 0
both models say the same and all drafts are right, with more of it fewer are. Answers are sampled at temperature 1, so
no text repeats itself; one stream, one thread.

A row has the share of right drafts, tokens per step, and CPU time per token without drafts and with them, which other
programs on the machine disturb less than the time of a clock; the ratio is that of the lowest times of the rounds, in
which both take turns. The scheduler chooses the number of drafts as in a server, by times of a clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine import LLM, SamplingParams

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 576, 1536, 9, 3, 30, 8192
PROMPT: Final = "A prompt of a few words, so that nearly all tokens are those of the answer."


class Timed(NamedTuple):
    """One answer: CPU seconds per token, drafts, and accepted ones."""

    token_s: float
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


def timed(llm: LLM, seed: int, output_len: int) -> Timed:
    """Generate one answer."""
    sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=output_len, ignore_eos=True)
    begin_s = time.process_time()
    [output] = llm.generate([PROMPT], sampling)
    seconds = time.process_time() - begin_s
    usage = output.usage
    return Timed(seconds / len(output.token_ids), usage.draft_tokens, usage.accepted_draft_tokens)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of the model (default: bfloat16)")
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0, 0.1, 0.2, 0.4])
    parser.add_argument("--draft-layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=256)
    options = parser.parse_args()
    print(
        "| noise | right drafts | tokens a step | ms a token without | with | ratio |\n|---|---|---|---|---|---|"
    )
    for noise in options.noise:
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder) / "model", LAYERS, noise, options.draft_layers)
            draft = write_model(Path(folder) / "draft", options.draft_layers, noise, options.draft_layers)
            settings: dict[str, Any] = {"num_threads": 1, "max_total_tokens": 4096, "dtype": "bfloat16"}
            if options.quantization:
                settings["quantization"] = options.quantization
            drafting: dict[str, Any] = {"speculative": "draft", "speculative_model": str(draft)}
            with LLM(str(model), **settings) as plain, LLM(str(model), **settings, **drafting) as drafted:
                found = [
                    [timed(llm, seed, options.output_len) for llm in (plain, drafted)]
                    for seed in range(options.rounds + 1)
                ][1:]
            before, after = (min(each[idx].token_s for each in found) for idx in (0, 1))
            tried = sum(each[1].num_drafts for each in found)
            right = sum(each[1].num_accepted for each in found)
            tokens = options.rounds * options.output_len
            print(
                f"| {noise:g} | {right / max(tried, 1):.0%} of {tried} | {tokens / (tokens - right):.2f} "
                f"| {1e3 * before:.1f} | {1e3 * after:.1f} | {before / after:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
