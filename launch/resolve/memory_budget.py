"""`MemoryBudget`: the size of the KV pool: free memory, minus weights, minus working memory of a step; `capacity_of`.

Computed from the model's shape alone, before anything is loaded, so that a start that cannot work fails within
milliseconds and with its arithmetic in the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...models.spec.sizes import (
    BYTES_OF_DTYPE,
    GIB,
    MIB,
    checkpoint_pages,
    kv_dtype_of,
    kv_token_bytes,
    num_checkpoints,
)
from ...runtime.feasibility import Capacity
from .rank_spec import rank_spec
from .stages import WHOLE_MODEL, stage_weight_bytes

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.engine_config import EngineConfig
    from .stages import Stage

RUNTIME_BYTES: Final = 512 * MIB
"""torch, four processes, allocator slack: 350 MiB measured on CPU after the first requests."""
MOST_OF_LEFT: Final = 0.95
"""Share that a pool size set by the user may take: the allocator cannot use every last byte."""
_LOGITS_COPIES: Final = 3  # logits in float32, their sorted copy, probabilities
_SCORES_COPIES: Final = 2  # scores, and their softmax
_STATE_COPIES: Final = 8  # of a state layer's channels; those of a delta net in plain torch
_QUERY_BLOCK: Final = 256  # of `ExtendAttention`; for bfloat16 matmuls on the CPU it is 64
_CPU_BF16_QUERY_BLOCK: Final = 64
_MASK_HEADS: Final = 2  # a mask buffer is up to twice as wide as the context, and replaces one half as wide
GATHERED_COPIES: Final = 2  # rows that attention gathers from the pool, and a kernel's packed copy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes, on the device that the model runs on.

    Attributes:
        usable_bytes: free now.
        weights_bytes: all weights in the form in which they are stored.
        workspace_bytes: the largest step's activations, attention scores and logits, and the runtime itself.
        kv_token_bytes: keys and values of one token, all layers.
        gather_token_bytes: what attention copies per token: its keys and values in one layer.
        fraction: share of the remaining memory that the KV pool and those copies may take.
        swap_bytes: reserved for swapped KV, if it uses the same memory.
        checkpoint_token_bytes: a token's share of the checkpoints of state layers.
    """

    usable_bytes: int
    weights_bytes: int
    workspace_bytes: int
    kv_token_bytes: int
    gather_token_bytes: int
    fraction: float
    swap_bytes: int = 0
    checkpoint_token_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Memory that remains after weights, workspace and swapped KV; negative if those alone do not fit."""
        return self.usable_bytes - self.weights_bytes - self.workspace_bytes - self.swap_bytes

    @property
    def token_bytes(self) -> int:
        """The cost of one slot: its KV, and its share of what grows with the pool: attention's copies, checkpoints."""
        return self.kv_token_bytes + self.gather_token_bytes + self.checkpoint_token_bytes

    @property
    def tokens(self) -> int:
        """KV slots that fit into the fraction."""
        return max(0, int(self.left_bytes * self.fraction)) // self.token_bytes

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
        return f"{self.left_sums} x {self.fraction:g} / {size_text(self.token_bytes)} per token"


def plan_memory(
    spec: ModelSpec,
    *,
    usable_bytes: int,
    dtype: str,
    fraction: float,
    step_tokens: int,
    max_model_len: int,
    max_running_requests: int,
    on_cpu: bool,
    tp: int = 1,
    kv_cache_dtype: str = "auto",
    stage: Stage = WHOLE_MODEL,
) -> MemoryBudget:
    """The budget for one model, with attention in plain torch: other backends need less.

    Attention computes the scores of a block of queries at a time. Fused kernels do not store even those, but torch
    chooses its kernel only at run time. Too small an estimate ends the engine; too large a one costs a few tokens.

    Args:
        step_tokens: new tokens of the largest step.
        max_model_len: positions that one token may attend to.
        max_running_requests: rows of logits that may be sampled in one step.
        on_cpu: the output head is packed for its kernel, even if it is tied to the embedding.
        tp: ranks that share the model; the budget is that of one rank, which holds all of the logits.
        kv_cache_dtype: of the KV pool; "auto": as the model.
        stage: the pipeline stage; `spec` is that of its layers.
    """
    width, vocab_size = BYTES_OF_DTYPE[dtype], spec.vocab_size
    spec = rank_spec(spec, tp)
    dequantized = spec.quantization is not None and not spec.quantization.is_kept(on_cpu=on_cpu)
    weights = stage_weight_bytes(spec, stage, width, dequantized=dequantized, on_cpu=on_cpu)
    heads = [spec.heads_of(layer_id) for layer_id in range(spec.num_layers)]
    q_size = max(each.num_heads * each.head_dim for each in heads)
    kv_size = max(each.num_kv_heads * each.head_dim for each in heads)
    mixer = max(3 * q_size + 4 * kv_size, _STATE_COPIES * (0 if spec.state is None else spec.state.conv_size))
    activations = step_tokens * (4 * spec.hidden_size + mixer + spec.mlp_width + spec.stream_width) * 4
    block = min(step_tokens, _CPU_BF16_QUERY_BLOCK if on_cpu and dtype == "bfloat16" else _QUERY_BLOCK)
    most_heads = max(each.num_heads for each in heads)
    scores = block * (most_heads + _MASK_HEADS) * max_model_len * 4 * _SCORES_COPIES
    logits = max_running_requests * vocab_size * 4 * _LOGITS_COPIES if spec.causal and stage.is_last else 0
    return MemoryBudget(
        usable_bytes=usable_bytes,
        weights_bytes=weights,
        workspace_bytes=activations + scores + logits + RUNTIME_BYTES,
        kv_token_bytes=kv_token_bytes(spec, kv_dtype_of(kv_cache_dtype, dtype)),
        gather_token_bytes=2 * kv_size * width * GATHERED_COPIES,
        fraction=fraction,
    )


def size_text(num_bytes: int) -> str:
    """A size for messages: `1.5 GiB`."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    if abs(num_bytes) >= MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / 1024:.1f} KiB"


def capacity_of(config: EngineConfig, spec: ModelSpec) -> Capacity:
    """Capacity of a scheduler with this resolved configuration."""
    max_model_len, max_total_tokens = config.model.max_model_len, config.cache.max_total_tokens
    max_running_requests = config.scheduler.max_running_requests
    assert isinstance(max_model_len, int), "the configuration is not resolved"
    assert isinstance(max_total_tokens, int), "the configuration is not resolved"
    assert isinstance(max_running_requests, int), "the configuration is not resolved"
    assert config.cache.swap_space != "auto", "the configuration is not resolved"
    assert config.model.dtype != "auto", "the configuration is not resolved"
    # Each rank reads the pixels from a file that is on the machine of the first one only.
    takes_images = spec.vision is not None and config.parallel.nnodes == 1
    num_encoder_rows = config.cache.mm_encoder_cache_tokens if takes_images else 0
    assert num_encoder_rows != "auto", "the configuration is not resolved"
    dtype, page_size = config.model.dtype, config.cache.page_size
    host_gib = config.cache.swap_space + config.cache.kv_host_size
    token_bytes = kv_token_bytes(spec, kv_dtype_of(config.cache.kv_cache_dtype, config.model.dtype))
    return Capacity(
        max_model_len=max_model_len,
        num_pages=max_total_tokens // config.cache.page_size,
        page_size=config.cache.page_size,
        max_running_requests=max_running_requests,
        vocab_size=spec.vocab_size,
        num_host_pages=int(host_gib * GIB) // (token_bytes * config.cache.page_size),
        kv_token_bytes=token_bytes,
        num_adapter_slots=config.scheduler.max_loras_per_batch if config.adapters.is_enabled else 0,
        num_checkpoints=(
            num_checkpoints(spec, dtype, token_bytes, max_total_tokens // page_size, page_size)
            if config.cache.radix_cache
            else 0
        ),
        checkpoint_pages=checkpoint_pages(spec, dtype, token_bytes, page_size),
        num_stages=config.parallel.pp,
        num_encoder_rows=num_encoder_rows,
        encoder_tile_rows=0 if spec.vision is None else spec.vision.rows_per_tile,
        encoder_tile_parts=1 if spec.vision is None else spec.vision.num_parts,
        encoder_row_pixels=0 if spec.vision is None else spec.vision.row_pixels,
        has_rope_axes=spec.vision is not None and bool(spec.vision.rope_sections),
        images_are_whole=spec.vision is not None and spec.vision.sees_whole,
    )
