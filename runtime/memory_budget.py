"""`MemoryBudget`: the sums behind the size of the KV pool: what is free, less weights, less working memory of a step.

Computed from the model's shape alone, before anything is loaded, so that a start that cannot work fails in
milliseconds and with its arithmetic in the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .model_files.model_spec import ModelSpec

MIB: Final = 1 << 20
GIB: Final = 1 << 30
BYTES_OF_DTYPE: Final = {"bfloat16": 2, "float32": 4}
RUNTIME_BYTES: Final = 512 * MIB
"""torch, four processes, allocator slack: 350 MiB measured on CPU after the first requests."""
_LOGITS_COPIES: Final = 3  # logits in float32, their sorted copy, probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes, on the device the model runs on.

    Attributes:
        usable_bytes: free now.
        weights_bytes: all weights in the serving dtype.
        workspace_bytes: the largest step's activations, attention scores and logits, and the runtime itself.
        kv_token_bytes: keys and values of one token, all layers.
        fraction: share of what is left that the KV pool may take.
        swap_bytes: kept for swapped KV, where that is the same memory.
    """

    usable_bytes: int
    weights_bytes: int
    workspace_bytes: int
    kv_token_bytes: int
    fraction: float
    swap_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """What remains beside weights, workspace and swapped KV; negative when those alone do not fit."""
        return self.usable_bytes - self.weights_bytes - self.workspace_bytes - self.swap_bytes

    @property
    def tokens(self) -> int:
        """KV slots that the fraction pays for."""
        return max(0, int(self.left_bytes * self.fraction)) // self.kv_token_bytes

    @property
    def left_sums(self) -> str:
        """The arithmetic of `left_bytes`, in words."""
        swap = f" - {size_text(self.swap_bytes)} swap space" if self.swap_bytes else ""
        return (
            f"({size_text(self.usable_bytes)} free - {size_text(self.weights_bytes)} weights - "
            f"{size_text(self.workspace_bytes)} workspace{swap})"
        )

    @property
    def sums(self) -> str:
        """The arithmetic of `tokens`, in words."""
        return f"{self.left_sums} x {self.fraction:g} / {size_text(self.kv_token_bytes)} per token"


def plan_memory(
    spec: ModelSpec,
    *,
    usable_bytes: int,
    dtype: str,
    fraction: float,
    step_tokens: int,
    max_model_len: int,
    max_running_requests: int,
    copies_tied_head: bool,
) -> MemoryBudget:
    """The sums for one model.

    Args:
        copies_tied_head: the output head is packed for its kernel (on the CPU), also where it is tied to the embedding.
        step_tokens: new tokens of the largest step.
        max_model_len: positions that attention of one token may look back on.
        max_running_requests: rows of logits that may be sampled in one step.
    """
    width = BYTES_OF_DTYPE[dtype]
    packed_head = spec.vocab_size * spec.hidden_size * width
    activations = step_tokens * (6 * spec.hidden_size + 3 * spec.intermediate_size) * 4
    scores = step_tokens * spec.num_heads * max_model_len * 4
    logits = max_running_requests * spec.vocab_size * 4 * _LOGITS_COPIES
    return MemoryBudget(
        usable_bytes=usable_bytes,
        weights_bytes=spec.weight_bytes(width)
        + (packed_head if copies_tied_head and spec.tie_word_embeddings else 0),
        workspace_bytes=activations + scores + logits + RUNTIME_BYTES,
        kv_token_bytes=spec.kv_bytes_per_token(width),
        fraction=fraction,
    )


def size_text(num_bytes: int) -> str:
    """For people: `1.5 GiB`."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    if abs(num_bytes) >= MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / 1024:.1f} KiB"
