"""The loss of quality by 8 and 4 bits: perplexity of a model on a fixed text, for each form of its weights and KV.

    python benchmarks/perplexity.py [--model M] [--tokens 6144] [--chunk 512] [--threads N] [--noise]

The text is this project's own documentation, which no model has memorized, in independent chunks. All variants read
the same tokens, so the ratio to the first line, which is the result, is much more exact than the perplexity itself;
`+-` is its standard error, by chunk.

The weights of the default model come from a file of 4 bits: `int4` finds the same grid and seems better than it is.
`--noise` moves the weights of a GGUF file off their grid: it adds random values within half a step of the grid. The
model becomes a little worse, but rounding affects it as it affects weights of any other model.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast
from unittest.mock import patch

from engine import LLM, ConfigError, SamplingParams
from engine.launch.child.process_resources import shorten_spinning
from engine.model_runner import load as loading

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model_runner.kernels.blocks.stored_rows import StoredRows
    from engine.model_runner.weights.reader import Slice, TensorStore

TEXTS: Final = ("scheduling.md", "architecture.md", "api.md")
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {"quantization": "none"},
    "as the file has it": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16, KV int8": {"quantization": "none", "kv_cache_dtype": "int8"},
    "as the file has it, KV int8": {"kv_cache_dtype": "int8"},
    "int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


@dataclass(frozen=True)
class Row:
    """One variant.

    Attributes:
        ratio: of its perplexity to the first variant's.
        ratio_error: standard error of the ratio, from the differences of chunks.
    """

    variant: str
    quantization: str | None
    perplexity: float
    ratio: float
    ratio_error: float


def main() -> None:
    """Measure all variants that this machine can run."""
    parser = argparse.ArgumentParser(description="perplexity by form of weights and KV")
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    threads = {"num_threads": args.threads} if args.threads else {}
    text = fixed_text()
    first: list[float] = []
    with ExitStack() as stack:
        if args.noise:
            stack.enter_context(noisy_weights())
        for variant, settings in VARIANTS.items():
            try:
                llm = LLM(
                    args.model,
                    max_running_requests=2,
                    max_model_len=2 * args.chunk,
                    max_total_tokens=4 * args.chunk,
                    **threads,
                    **settings,
                )
            except ConfigError as error:
                print(f"{variant}: {error}", file=sys.stderr)
                continue
            with llm:
                losses = losses_of(llm, text, args.tokens, args.chunk)
                quantization = llm.config.model.quantization
            first = first or losses
            print(line_of(row_of(variant, quantization, losses, first)), flush=True)


def fixed_text() -> str:
    """The documentation, one file after the other."""
    folder = Path(__file__).resolve().parents[1] / "docs"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in TEXTS)


def losses_of(llm: LLM, text: str, num_tokens: int, chunk: int) -> list[float]:
    """For each chunk, the mean of -log p over its tokens from the second on."""
    tokens = llm.tokenizer.encode(text)[:num_tokens]
    chunks = [tokens[start : start + chunk] for start in range(0, len(tokens) - chunk + 1, chunk)]
    params = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=0)
    losses = []
    for output in llm.generate(chunks, params):
        assert output.prompt_logprobs is not None
        losses.append(-sum(token.logprob for token in output.prompt_logprobs) / (chunk - 1))
    return losses


def row_of(variant: str, quantization: str | None, losses: Sequence[float], first: Sequence[float]) -> Row:
    """One line of the table."""
    differences = [loss - base for loss, base in zip(losses, first, strict=True)]
    mean, count = sum(differences) / len(differences), len(differences)
    variance = sum((difference - mean) ** 2 for difference in differences) / max(1, count - 1)
    return Row(
        variant,
        quantization,
        math.exp(sum(losses) / count),
        math.exp(mean),
        math.exp(mean) * math.sqrt(variance / count),
    )


def line_of(row: Row) -> str:
    """The row as one line of text."""
    change = f"{100 * (row.ratio - 1):+.2f} % +- {100 * row.ratio_error:.2f}"
    return (
        f"{row.variant:<28} quantization={row.quantization!s:<6} perplexity={row.perplexity:8.4f}  {change}"
    )


class NoisyStore:
    """A GGUF file with weights moved off their grid; see the module."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        """All other attributes are the store's."""
        return getattr(self._store, name)

    def blocks(self, name: str, part: Slice | None = None) -> NoReturn:
        """Fail: with noise the weights are no longer in the blocks of the file."""
        raise ConfigError(f"{name} has noise and cannot be kept in the form of the file")

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        import torch

        self._store.read(name, out, part)
        blocks = self._store.blocks(name, part) if out.ndim == 2 else None
        if blocks is None:
            return
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
        noise = torch.rand(out.shape, generator=torch.Generator().manual_seed(seed)).sub_(0.5)
        steps = cast("StoredRows", blocks).unpacked().scales.repeat_interleave(32, dim=1)
        out.copy_(out.to(torch.float32).addcmul_(noise, steps))


def noisy_weights() -> Any:
    """Inside this context GGUF files are read through `NoisyStore`, and kept blocks are refused, as there are none."""
    plain = loading._open_store
    return patch.object(loading, "_open_store", lambda *args: NoisyStore(plain(*args)))


if __name__ == "__main__":
    shorten_spinning()
    main()
