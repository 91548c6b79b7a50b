"""The limits of the machine: the speed of each workload if only weights, keys and matmuls took time.

Bounds from the measured ceilings (`ceilings.py`), with the best figure of each over the run:

    W1  a token reads its weights once                        bandwidth / bytes of these weights
    W2  a prompt multiplies by every layer's weights and by   matmul rate at 512 tokens / operations of a token
        its own keys and values (the causal half)
    W3  all prompts as in W2, then step by step: a step       sum over the steps
        reads the weights once or multiplies by them, what
        takes longer, and reads the keys and values of all
        requests

With a mixture of experts, a token reads and multiplies by its chosen experts; a step reads every expert that one of its
tokens has chosen, assuming evenly spread choices. The bandwidth is that at the size of all weights.

In this bound the prompts and decodes of W3 follow each other. It ignores that a mixed step could overlap them, so more
than 100 % is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.ceilings import FEW_TOKENS, MANY_TOKENS, Ceiling
from engine.models.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LimitTarget:
    """A target: a share of the limit."""

    workload: str
    side: str
    share: float


LIMIT_TARGETS: Final = (
    LimitTarget("W1", "engine-bf16", 0.80),
    LimitTarget("W1", "engine-4bit", 0.60),
    LimitTarget("W2", "engine-bf16", 0.65),
    LimitTarget("W3", "engine-bf16", 0.70),
)


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a model's tokens.

    Attributes:
        dense_parameters: weights of the layers that every token is multiplied by.
        expert_parameters: of all experts of all layers; 0: the model has none.
        active_share: of the experts that are chosen for one token.
        head_parameters: of the output head, which only sampled tokens need.
        kv_token_bytes: keys and values of one token, bf16.
        attention_width: operations per token and token of context.
    """

    dense_parameters: int
    expert_parameters: int = 0
    active_share: float = 1.0
    head_parameters: int
    kv_token_bytes: int
    attention_width: int

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelCosts:
        """The costs of an architecture."""
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        dense = spec.num_layers * spec.hidden_size * (2 * heads + 2 * kv_heads)
        num_sparse, in_experts, active_share = 0, 0, 1.0
        if (experts := spec.experts) is not None:
            num_sparse = spec.num_layers - len(experts.dense_layers)
            dense += num_sparse * spec.hidden_size * experts.num_experts  # routers
            in_experts = num_sparse * experts.num_experts * 3 * spec.hidden_size * experts.intermediate_size
            active_share = experts.num_active / experts.num_experts
        dense += (spec.num_layers - num_sparse) * 3 * spec.hidden_size * spec.intermediate_size
        return cls(
            dense_parameters=dense,
            expert_parameters=in_experts,
            active_share=active_share,
            head_parameters=spec.vocab_size * spec.hidden_size,
            kv_token_bytes=2 * 2 * spec.num_layers * kv_heads,
            attention_width=4 * spec.num_layers * heads,
        )

    @property
    def layer_parameters(self) -> float:
        """Weights of the layers that one token is multiplied by."""
        return self.dense_parameters + self.active_share * self.expert_parameters

    @property
    def all_parameters(self) -> int:
        """Weights that any token may be multiplied by; a separate embedding, of which one row is read, is excluded."""
        return self.dense_parameters + self.expert_parameters + self.head_parameters

    @property
    def bf16_megabytes(self) -> int:
        """Megabytes of these weights in bf16."""
        return round(2 * self.all_parameters / 1e6)

    def read_parameters(self, num_tokens: int) -> float:
        """Weights that a step of so many tokens reads, if all are sampled; for experts the expected number."""
        chosen = 1.0 - (1.0 - self.active_share) ** num_tokens
        return self.dense_parameters + self.head_parameters + chosen * self.expert_parameters

    def prompt_operations(self, num_tokens: int) -> float:
        """Operations of a prompt; its attention is causal, so half of the square."""
        return 2.0 * self.layer_parameters * num_tokens + self.attention_width * num_tokens**2 / 2


class ServedModel(msgspec.Struct, frozen=True):
    """The model of a run.

    Attributes:
        gguf_megabytes: weights of the GGUF file that any token may read; None: no side serves it.
    """

    costs: ModelCosts
    gguf_megabytes: int | None = None

    @property
    def footprints(self) -> list[int]:
        """Megabytes that a step may read, for every form of the model."""
        sizes = (self.costs.bf16_megabytes, self.gguf_megabytes)
        return [size for size in sizes if size is not None]


@dataclass(frozen=True, slots=True)
class Machine:
    """Ceilings for a number of threads, in bytes and operations per second."""

    ceilings: tuple[Ceiling, ...]
    num_threads: int

    def product_rate(self, num_tokens: int) -> float:
        """The rate of bfloat16 matmuls: computed in bf16, or in fp32 if that is faster."""
        return self.rate("bf16", num_tokens, "fp32")

    def rate(self, what: str, size: int, *others: str) -> float:
        """The best measured figure of one kind, or of `others` that can replace it.

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


def decode_limit(machine: Machine, costs: ModelCosts, megabytes: int) -> float:
    """W1: tokens per second of one stream, given the bytes of all weights that any token may read."""
    token_bytes = megabytes * 1e6 * costs.read_parameters(1) / costs.all_parameters
    return machine.rate("read", megabytes) / token_bytes


def prefill_limit(machine: Machine, costs: ModelCosts, prompt_len: int) -> float:
    """W2: prompt tokens per second."""
    return machine.product_rate(MANY_TOKENS) * prompt_len / costs.prompt_operations(prompt_len)


def batch_limit(machine: Machine, costs: ModelCosts, lens: Sequence[tuple[int, int]]) -> float:
    """W3: output tokens per second of requests (prompt tokens, output tokens) that all arrive at once."""
    taken_s = sum(costs.prompt_operations(prompt) for prompt, _ in lens) / machine.product_rate(MANY_TOKENS)
    bandwidth = machine.rate("read", costs.bf16_megabytes)
    products = machine.product_rate(FEW_TOKENS)
    for contexts in _decode_steps(lens):
        weights_s = 2 * costs.read_parameters(len(contexts)) / bandwidth
        products_s = 2 * (costs.layer_parameters + costs.head_parameters) * len(contexts) / products
        taken_s += max(weights_s, products_s) + sum(contexts) * costs.kv_token_bytes / bandwidth
    return sum(output for _, output in lens) / taken_s


def _decode_steps(lens: Sequence[tuple[int, int]]) -> Iterable[list[int]]:
    """The contexts of each step's requests. A prompt's last token gives the first of the output."""
    for step in range(1, max(output for _, output in lens)):
        yield [prompt + step for prompt, output in lens if output > step]
