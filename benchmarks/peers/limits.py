"""What the machine allows at most: how fast each workload could run if nothing but weights, keys and products cost.

Bounds by the measured ceilings (`ceilings.py`), with the best figure of each over the run:

    W1  a token reads all weights once                        bandwidth / bytes of the weights
    W2  a prompt multiplies by every layer's weights and by   rate of products of 512 tokens / operations of a token
        its own keys and values (the causal half)
    W3  all prompts as in W2, then step by step: a step       sum over the steps
        reads the weights once or multiplies by them, what
        takes longer, and reads the keys and values of all
        its requests

Prompts and decodes of W3 follow each other in this bound; what a mixture could hide of one behind the other is not
in it, so more than 100 % is thinkable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.ceilings import BF16_MEGABYTES, FEW_TOKENS, MANY_TOKENS, Ceiling
from engine.runtime.model_files.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LimitTarget:
    """A share of the limit to be reached."""

    workload: str
    side: str
    share: float


LIMIT_TARGETS: Final = (
    LimitTarget("W1", "engine-bf16", 0.80),
    LimitTarget("W1", "engine-4bit", 0.60),
    LimitTarget("W2", "engine-bf16", 0.65),
    LimitTarget("W3", "engine-bf16", 0.70),
)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a model's tokens cost.

    Attributes:
        layer_parameters: weights that every token is multiplied by.
        all_parameters: with the output head, which only tokens that are sampled from need.
        kv_token_bytes: keys and values of one token, bf16.
        attention_width: operations per token and token of context.
    """

    layer_parameters: int
    all_parameters: int
    kv_token_bytes: int
    attention_width: int

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelCosts:
        """From the architecture."""
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        layer = spec.hidden_size * (2 * heads + 2 * kv_heads + 3 * spec.intermediate_size)
        layers = spec.num_layers * layer
        return cls(
            layer_parameters=layers,
            all_parameters=layers + spec.vocab_size * spec.hidden_size,
            kv_token_bytes=2 * 2 * spec.num_layers * kv_heads,
            attention_width=4 * spec.num_layers * heads,
        )

    def prompt_operations(self, num_tokens: int) -> float:
        """Of a prompt; its attention is causal, so half of the square."""
        return 2.0 * self.layer_parameters * num_tokens + self.attention_width * num_tokens**2 / 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Ceilings with so many threads, in bytes and operations per second."""

    ceilings: tuple[Ceiling, ...]
    num_threads: int

    def product_rate(self, num_tokens: int) -> float:
        """Of products of bfloat16 numbers: computed as such, or in fp32 where that is faster."""
        return self.rate("bf16", num_tokens, "fp32")

    def rate(self, what: str, size: int, *others: str) -> float:
        """The best figure seen, of one thing or of `others` that may take its place.

        Raises:
            KeyError: it was not measured.
        """
        rates = [
            ceiling.rate
            for ceiling in self.ceilings
            if ceiling.what in (what, *others)
            and (ceiling.size, ceiling.num_threads) == (size, self.num_threads)
        ]
        if not rates:
            raise KeyError(f"no ceiling of {what} {size} with {self.num_threads} threads")
        return max(rates) * 1e9


def decode_limit(machine: Machine, megabytes: int) -> float:
    """W1: tokens per second of one stream whose weights take so much."""
    return machine.rate("read", megabytes) / (megabytes * 1e6)


def prefill_limit(machine: Machine, costs: ModelCosts, prompt_len: int) -> float:
    """W2: prompt tokens per second."""
    return machine.product_rate(MANY_TOKENS) * prompt_len / costs.prompt_operations(prompt_len)


def batch_limit(machine: Machine, costs: ModelCosts, lens: Sequence[tuple[int, int]]) -> float:
    """W3: output tokens per second of requests (prompt tokens, output tokens) that all come at once."""
    taken_s = sum(costs.prompt_operations(prompt) for prompt, _ in lens) / machine.product_rate(MANY_TOKENS)
    bandwidth = machine.rate("read", BF16_MEGABYTES)
    products = machine.product_rate(FEW_TOKENS)
    for contexts in _decode_steps(lens):
        weights_s = 2 * costs.all_parameters / bandwidth
        products_s = 2 * costs.all_parameters * len(contexts) / products
        taken_s += max(weights_s, products_s) + sum(contexts) * costs.kv_token_bytes / bandwidth
    return sum(output for _, output in lens) / taken_s


def _decode_steps(lens: Sequence[tuple[int, int]]) -> Iterable[list[int]]:
    """The contexts of each step's requests. A prompt's last token gives the first of the output."""
    for step in range(1, max(output for _, output in lens)):
        yield [prompt + step for prompt, output in lens if output > step]
