"""Common parts of the attention kernels: tile sizes, and how keys and values are loaded from the pool."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: D head dim, N keys of a tile.

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.rotation import LayerKV

MIN_DOT: Final = 16  # the smallest side of a `tl.dot`

PLAIN, FP8, FP8_BY_HAND = 0, 1, 2  # how values of the pool are converted to the compute dtype


class Scores(NamedTuple):
    """Scores from products of queries and keys, see `AttentionForm`.

    Attributes:
        scale: factor of the products.
        cap: scores become cap * tanh(score / cap); 0: they are not capped.
    """

    scale: float
    cap: float = 0.0

    @property
    def arguments(self) -> dict[str, float]:
        """The arguments of both kernels; scores are base-2 exponents."""
        return {"scale": self.scale * math.log2(math.e), "CAP": self.cap * math.log2(math.e)}


class HeadShape(NamedTuple):
    """The shapes that the kernels are compiled for.

    Attributes:
        num_kv_heads: KV heads of this rank.
        group: query heads per KV head.
        head_dim: for the limits on `group` and `head_dim` see `attention.triton_paged`.
        page_size: contiguous slots of a page.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group

    @property
    def padded_dim(self) -> int:
        """Values of a head in a tile, padded."""
        return max(MIN_DOT, next_power_of_2(self.head_dim))

    def constants(self, keys: int, kv_dtype: torch.dtype, by_hand: bool) -> dict[str, Any]:
        """The constexpr arguments of both kernels, for tiles of `keys` keys."""
        fp8 = FP8_BY_HAND if by_hand else FP8
        return {
            "NUM_KV": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.padded_dim,
            "BLOCK_N": keys,
            # The slots of such a tile are contiguous: one load from the slot table locates all of them.
            "WHOLE_PAGES": self.page_size % keys == 0,
            "KV": fp8 if kv_dtype == torch.float8_e4m3fn else PLAIN,
        }


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def pools(kv: LayerKV, by_hand: bool) -> tuple[Tensor, Tensor]:
    """Keys and values in the dtype that the kernels take."""
    if by_hand and kv.k.dtype == torch.float8_e4m3fn:
        return kv.k.view(torch.uint8), kv.v.view(torch.uint8)
    return kv.k, kv.v


def converts_by_hand(device: torch.device) -> bool:
    """Whether the device lacks instructions for float8_e4m3fn (before compute capability 8.9)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)


@triton.jit
def slots_of(table_ptr, start, end, BLOCK_N: tl.constexpr, WHOLE_PAGES: tl.constexpr):
    """Slots of N positions from `start`, a multiple of N: [N] int64; positions past `end` get any valid slot."""
    n = tl.arange(0, BLOCK_N)
    if WHOLE_PAGES:
        return tl.load(table_ptr + start).to(tl.int64) + n
    return tl.load(table_ptr + start + n, mask=start + n < end, other=0).to(tl.int64)


@triton.jit
def from_pool(x, KV: tl.constexpr, dtype: tl.constexpr):
    """Convert values of the pool to the compute dtype; float8_e4m3fn becomes float16, which represents all its values.

    By hand: exponent and mantissa bits are shifted into place, and a multiplication corrects the exponent bias (7
    instead of 15); subnormals are converted correctly, too.
    """
    if KV == 2:
        code = x.to(tl.uint16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        number = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
    return x.to(dtype)


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP), for scores that are base-2 exponents; CAP 0: the scores.

    tanh(x) = 1 - 2 / (e^2x + 1): an overflow gives 1.
    """
    if CAP > 0.0:
        return CAP - 2.0 * CAP / (tl.exp2(scores * (2.0 * 1.4426950408889634 / CAP)) + 1.0)
    return scores


@triton.jit
def scores_of(q, k_ptr, at, inside, scale, CAP: tl.constexpr, KV: tl.constexpr):
    """Scores [rows, N] of the keys at `at`; keys that are not `inside` are not loaded, and their scores are arbitrary.

    Uninitialized memory can hold NaN, and 0 * NaN is NaN.
    """
    k = from_pool(tl.load(k_ptr + at, mask=inside, other=0.0), KV, q.dtype)
    return capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, CAP)


@triton.jit
def mixed_in(
    scores, v_ptr, at, inside, highest, total, mixed, dtype, MAY_BE_EMPTY: tl.constexpr, KV: tl.constexpr
):
    """The softmax so far (highest score, sum of the weights, weighted values), continued with the values at `at`.

    MAY_BE_EMPTY: a row may have seen no key yet.
    """
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    shift = new_highest
    if MAY_BE_EMPTY:
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    fading = tl.exp2(highest - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * fading + tl.sum(weights, axis=1)
    v = from_pool(tl.load(v_ptr + at, mask=inside, other=0.0), KV, dtype)
    mixed = tl.dot(weights.to(dtype), v, mixed * fading[:, None], input_precision="ieee")
    return new_highest, total, mixed


@triton.jit
def finished(mixed, highest, total, sinks_ptr, head, is_head, HAS_SINKS: tl.constexpr):
    """Weighted values over the sum of the weights, which includes the sink of each row's head if there are sinks.

    mixed [rows, D] and total [rows] are relative to the score `highest` [rows].
    """
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=float("-inf")) * 1.4426950408889634
        top = tl.maximum(highest, sink)
        kept = tl.exp2(highest - top)
        return mixed * (kept / (total * kept + tl.exp2(sink - top)))[:, None]
    return mixed / total[:, None]


class AttentionInputs(NamedTuple):
    """The arguments of a layer's attention that decodes and prefills share.

    Attributes:
        q: [T, Hq, D]; the values of a head are contiguous.
        kv: the layer's pool.
        req_to_token: [rows, max_model_len] int32.
        out: [T, Hq * D], contiguous; the rows of the planned tokens are written.
        by_hand: float8_e4m3fn is converted without hardware instructions; see `converts_by_hand`.
        sinks: [Hq] float32, see `AttentionForm`.
    """

    shape: HeadShape
    q: Tensor
    kv: LayerKV
    req_to_token: Tensor
    out: Tensor
    scores: Scores
    by_hand: bool
    sinks: Tensor | None = None

    def launch(
        self, kernel: Any, programs: Tensor, partial: Tensor, lse: Tensor, keys: int, **more: Any
    ) -> None:
        """Launch `kernel` for each row of `programs` and each KV head.

        Args:
            partial, lse: partial results, see `attention_combine`.
            keys: keys per tile.
            more: arguments that only this kernel has.
        """
        q, kv, table, sinks = self.q, self.kv, self.req_to_token, self.sinks
        kernel[(self.shape.num_kv_heads, len(programs))](
            q,
            *pools(kv, self.by_hand),
            table,
            programs,
            self.out,
            partial,
            lse,
            lse if sinks is None else sinks,
            q.stride(0),
            q.stride(1),
            table.stride(0),
            **self.scores.arguments,
            HAS_SINKS=sinks is not None,
            **self.shape.constants(keys, kv.k.dtype, self.by_hand),
            **more,
        )


# ---------------------------------------------------------------- compiled ahead of time, see `kernel_variant`

_TRITON_NAMES: Final = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*u8",  # by hand; natively "*fp8e4nv"
}


class Variant(NamedTuple):
    """A model's attention that is compiled ahead of time; `by_hand`: see `converts_by_hand`."""

    shape: HeadShape
    dtype: torch.dtype
    kv_dtype: torch.dtype
    cap: float = 0.0
    has_sinks: bool = False
    by_hand: bool = True

    @property
    def name(self) -> str:
        """Name in the report."""
        own, pool = (name.removeprefix("*") for name in (_TRITON_NAMES[self.dtype], self._pool))
        shape = f"dim {self.shape.head_dim} group {self.shape.group} page {self.shape.page_size}"
        more = (" capped" if self.cap else "") + (" sinks" if self.has_sinks else "")
        return f"{own} pool {pool} {shape}{more}"

    @property
    def min_arch(self) -> int:
        is_native = self.kv_dtype == torch.float8_e4m3fn and not self.by_hand
        return FIRST_WITH_FP8 if is_native else 0

    @property
    def _pool(self) -> str:
        return _TRITON_NAMES[self.kv_dtype] if self.by_hand or not self.min_arch else "*fp8e4nv"

    @property
    def pointers(self) -> dict[str, str]:
        """The pointer arguments that both kernels have."""
        own, pool = _TRITON_NAMES[self.dtype], self._pool
        partial = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "sinks_ptr": "*fp32"}
        return {"q_ptr": own, "k_ptr": pool, "v_ptr": pool, "table_ptr": "*i32", "out_ptr": own} | partial

    def constants(self, keys: int) -> dict[str, Any]:
        """The constexpr arguments of both kernels, for tiles of `keys` keys."""
        form = {"CAP": self.cap, "HAS_SINKS": self.has_sinks}
        return form | self.shape.constants(keys, self.kv_dtype, self.by_hand)


FIRST_WITH_FP8: Final = 89
"""The first compute capability, without the dot, with instructions for float8_e4m3fn."""

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
VARIANTS: Final = (
    Variant(HeadShape(8, 4, 128, 16), _BF16, _BF16),  # Llama-3.1-8B, Qwen3-8B
    Variant(HeadShape(8, 2, 128, 64), _BF16, _BF16),  # Qwen3-0.6B
    Variant(HeadShape(3, 3, 64, 16), _BF16, _BF16),  # SmolLM2-135M
    Variant(HeadShape(1, 4, 256, 16), _BF16, _BF16),  # Gemma 3
    Variant(HeadShape(32, 1, 96, 16), _BF16, _BF16),  # Phi-3
    Variant(HeadShape(8, 4, 128, 64), _BF16, _BF16),  # whole tiles of a page
    Variant(HeadShape(32, 1, 64, 16), _BF16, _BF16),  # SmolLM2-1.7B
    Variant(HeadShape(32, 1, 80, 16), _BF16, _BF16),
    Variant(HeadShape(8, 8, 128, 16), _BF16, _BF16),  # Llama-3.1-70B
    Variant(HeadShape(4, 16, 128, 16), _BF16, _BF16),
    Variant(HeadShape(8, 4, 128, 16), _BF16, _FP8),
    Variant(HeadShape(8, 4, 128, 16), _BF16, _FP8, by_hand=False),
    Variant(HeadShape(1, 4, 256, 16), _BF16, _FP8, by_hand=False),
    Variant(HeadShape(8, 4, 64, 16), torch.float32, torch.float32),
    Variant(HeadShape(8, 4, 128, 16), torch.float32, torch.float32),
    Variant(HeadShape(1, 4, 256, 16), torch.float32, torch.float32),
    Variant(HeadShape(8, 2, 256, 16), _BF16, _BF16, cap=50.0),  # Gemma 2
    Variant(HeadShape(8, 8, 64, 16), _BF16, _BF16, has_sinks=True),  # gpt-oss
    Variant(HeadShape(1, 8, 512, 16), _BF16, _BF16),  # Gemma 4, layers without a window
)
STRIDES: Final = {"q_stride": "i32:16", "q_head_stride": "i32:16", "table_stride": "i32:16", "scale": "fp32"}
