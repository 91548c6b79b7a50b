"""Everything between the QKV projection and attention in one launch: head norms, rotary, and the store to the KV pool.

A program takes a few neighboring heads of one token, of q, k or v; the head index alone decides.
Each head is loaded as two tiles, the two halves that rotate into each other, and a third tile for the unrotated rest.

    head   [ first half | second half | rest ]      q -> a new tensor, k and v -> their slots of the pool
              0 .. R/2     R/2 .. R     R .. D

Interleaved heads have the elements with even numbers in the first tile, and those with odd numbers in the second one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, Hq query heads, H KV heads, D head dim, R rotated values of a head.

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.rotation import HeadNorms, RotaryStore
from .kernel_variant import KernelVariant
from .norm import norm_rows_in_place

# Heads per program and its warps: few heads as long as the programs do not fill a GPU.
_FEW_HEADS: Final = (2, 1)
_MANY_HEADS: Final = (8, 4)
_MANY_PROGRAMS: Final = 1024  # programs with `_MANY_HEADS` each; below that latency matters, not throughput


@triton.jit
def e4m3_bits(x):
    """float32 -> the bits of float8_e4m3fn, rounded to nearest, ties to even; above 448 saturates, NaN stays NaN.

    Integer arithmetic, because only sm_89 and later have instructions for this conversion.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Round to 3 mantissa bits, with the carry into the exponent; the exponent bias changes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the spacing is 2^-9, as for float32 between 2^14 and 2^15: adding 2^14 rounds.
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, tiny, normal)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def _to_pool(x, E4M3: tl.constexpr, LIMIT: tl.constexpr, dtype: tl.constexpr):
    if E4M3:
        return e4m3_bits(x.to(tl.float32))
    if LIMIT > 0:
        x = x.to(tl.float32)
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    return x.to(dtype)


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    factor_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_stride,
    qkv_head_stride,
    cos_stride,
    sin_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NUM_V: tl.constexpr,  # heads of v in qkv; others of NUM_KV are those of k
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FACTORS: tl.constexpr,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_q = head < NUM_Q
    is_k = (head >= NUM_Q) & (head < NUM_Q + NUM_KV)
    is_v = (head >= NUM_Q + NUM_KV) & (head < NUM_Q + 2 * NUM_KV)
    exists = head < NUM_Q + 2 * NUM_KV
    number = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = number < HALF
    first_number = 2 * number if INTERLEAVED else number
    second_number = first_number + 1 if INTERLEAVED else HALF + number
    model_dtype: tl.constexpr = qkv_ptr.dtype.element_ty

    stored_head = head if NUM_V == NUM_KV else tl.where(is_v, head - NUM_KV, head)
    head_at = qkv_ptr + token * qkv_stride + stored_head * qkv_head_stride
    first = tl.load(head_at + first_number, mask=exists & in_half, other=0.0).to(tl.float32)
    second = tl.load(head_at + second_number, mask=exists & in_half, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        rest_number = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        in_rest = rest_number < HEAD_DIM
        rest = tl.load(head_at + rest_number, mask=exists & in_rest, other=0.0).to(tl.float32)

    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1)
        # Heads of v have the weight 1; without a norm of their own they pass through.
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        if not NORM_VALUES:
            scale = tl.where(is_v, 1.0, scale)
        first *= scale * _head_weight(q_weight_ptr, k_weight_ptr, first_number, in_half, is_q, is_v)
        second *= scale * _head_weight(q_weight_ptr, k_weight_ptr, second_number, in_half, is_q, is_v)
        if REST_BLOCK > 0:
            rest *= scale * _head_weight(q_weight_ptr, k_weight_ptr, rest_number, in_rest, is_q, is_v)

    new_first, new_second = first.to(model_dtype), second.to(model_dtype)
    if ROTATE:
        # Both halves of cos are equal; those of sin differ in sign, and the second half has the right sign for both.
        cos = tl.load(cos_ptr + token * cos_stride + HALF + number, mask=in_half, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * sin_stride + HALF + number, mask=in_half, other=0.0).to(tl.float32)
        new_first = tl.where(is_v, first, first * cos - second * sin).to(model_dtype)
        new_second = tl.where(is_v, second, second * cos + first * sin).to(model_dtype)

    slot = tl.load(slot_ptr + token)
    q_at = q_ptr + (token * NUM_Q + head) * HEAD_DIM
    k_at = k_ptr + slot * k_stride + (head - NUM_Q) * k_head_stride
    v_at = v_ptr + slot * v_stride + (head - NUM_Q - NUM_KV) * v_head_stride
    pool_dtype: tl.constexpr = k_ptr.dtype.element_ty
    q_first, q_second = new_first, new_second
    if FACTORS:
        factor = tl.load(factor_ptr + token)
        q_first = (new_first.to(tl.float32) * factor).to(model_dtype)
        q_second = (new_second.to(tl.float32) * factor).to(model_dtype)
    tl.store(q_at + first_number, q_first, mask=is_q & in_half)
    tl.store(q_at + second_number, q_second, mask=is_q & in_half)
    stored = _to_pool(new_first, E4M3, LIMIT, pool_dtype)
    tl.store(k_at + first_number, stored, mask=is_k & in_half)
    tl.store(v_at + first_number, stored, mask=is_v & in_half)
    stored = _to_pool(new_second, E4M3, LIMIT, pool_dtype)
    tl.store(k_at + second_number, stored, mask=is_k & in_half)
    tl.store(v_at + second_number, stored, mask=is_v & in_half)
    if REST_BLOCK > 0:
        new_rest = rest.to(model_dtype)
        q_rest = new_rest
        if FACTORS:
            q_rest = (new_rest.to(tl.float32) * factor).to(model_dtype)
        tl.store(q_at + rest_number, q_rest, mask=is_q & in_rest)
        stored = _to_pool(new_rest, E4M3, LIMIT, pool_dtype)
        tl.store(k_at + rest_number, stored, mask=is_k & in_rest)
        tl.store(v_at + rest_number, stored, mask=is_v & in_rest)


@triton.jit
def _head_weight(q_weight_ptr, k_weight_ptr, number, inside, is_q, is_v):
    q_weight = tl.load(q_weight_ptr + number, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + number, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_v, 1.0, tl.where(is_q, q_weight, k_weight))


def rotate_and_store(qkv: Tensor, norms: HeadNorms | None, store: RotaryStore) -> Tensor:
    """`qkv` is modified only by norms over all heads; the result is contiguous.

    Raises:
        ValueError: shapes disagree, which would cause out-of-bounds writes.
    """
    cos, sin, kv, out_cache_loc, interleaved, query_factors, keys_are_values = store
    num_tokens, num_heads, head_dim = qkv.shape
    k, v = (qkv[:0, :0], qkv[:0, :0]) if kv is None else (kv.k, kv.v)
    num_kv, rotary_dim = k.shape[1], cos.shape[1]
    num_v = 0 if keys_are_values else num_kv
    num_q = num_heads - num_kv - num_v
    num_heads = num_q + 2 * num_kv
    if k.shape[2] != head_dim or v.shape != k.shape or num_q < 1:
        raise ValueError(
            f"qkv is {list(qkv.shape)}, keys {list(k.shape)}, values {list(v.shape)}: these do not fit"
        )
    if (
        rotary_dim > head_dim
        or rotary_dim % 2
        or not len(out_cache_loc) == len(cos) == len(sin) == num_tokens
    ):
        raise ValueError(
            f"qkv is {list(qkv.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}, slots {list(out_cache_loc.shape)}"
        )
    q = torch.empty((num_tokens, num_q, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    e4m3, limit = _conversion(qkv.dtype, k.dtype)
    if e4m3:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    heads, num_warps = _MANY_HEADS
    if num_tokens * triton.cdiv(num_heads, heads) < _MANY_PROGRAMS:
        heads, num_warps = _FEW_HEADS
    if norms is not None and len(norms.q_weight) != head_dim:
        for part, weight in ((slice(num_q), norms.q_weight), (slice(num_q, num_q + num_kv), norms.k_weight)):
            norm_rows_in_place(qkv[:, part].view(num_tokens, -1), weight, norms.eps)
        norms = None
    rotates = rotary_dim > 0
    rotary_dim = rotary_dim or head_dim  # nothing rotates, but there are two tiles
    half_block, rest_block = _blocks(head_dim, rotary_dim)
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        qkv,
        qkv if norms is None else norms.q_weight,
        qkv if norms is None else norms.k_weight,
        cos,
        sin,
        out_cache_loc,
        qkv if query_factors is None else query_factors,
        q,
        k,
        v,
        qkv.stride(0),
        qkv.stride(1),
        cos.stride(0),
        sin.stride(0),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0.0 if norms is None else norms.eps,
        NUM_Q=num_q,
        NUM_KV=num_kv,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        NUM_V=num_v,
        NORM=norms is not None,
        NORM_VALUES=norms is not None and norms.values,
        ROTATE=rotates,
        INTERLEAVED=interleaved,
        FACTORS=query_factors is not None,
        E4M3=e4m3,
        LIMIT=limit,
        HEADS=heads,
        HALF_BLOCK=half_block,
        REST_BLOCK=rest_block,
        num_warps=num_warps,
    )
    return q


def _blocks(head_dim: int, rotary_dim: int) -> tuple[int, int]:
    """Tile widths of a half and of the rest; 0 if there is no rest."""
    rest = head_dim - rotary_dim
    return triton.next_power_of_2(rotary_dim // 2), triton.next_power_of_2(rest) if rest else 0


def _conversion(dtype: torch.dtype, pool_dtype: torch.dtype) -> tuple[bool, float]:
    """(store as e4m3 bits, largest value of the pool dtype if values must be clamped to it, else 0)."""
    if pool_dtype == torch.float8_e4m3fn:
        return True, 0.0
    narrower = torch.finfo(pool_dtype).max < torch.finfo(dtype).max
    return False, torch.finfo(pool_dtype).max if narrower else 0.0


def variants() -> list[KernelVariant]:
    cases = (
        # name, heads of q, of k, head dim, rotary dim, dtype of norm weights, pool
        ("Qwen3-8B", 32, 8, 128, 128, "bf16", "bf16"),
        ("Llama-3.1-8B", 32, 8, 128, 128, None, "bf16"),
        ("Llama-3.1-8B fp8 pool", 32, 8, 128, 128, None, "u8"),
        ("SmolLM2", 9, 3, 64, 64, None, "bf16"),
        ("Gemma 3 fp8 pool", 4, 1, 256, 256, "fp32", "u8"),
        ("Phi, a part rotates", 32, 32, 96, 72, None, "bf16"),
        ("GLM-4, interleaved", 32, 2, 128, 64, None, "bf16"),
        ("SmolLM3, without rotary", 16, 4, 128, 0, None, "bf16"),
        ("Ministral 3, query factors", 32, 8, 128, 128, None, "bf16"),
        ("Gemma 4, k as v", 32, 4, 512, 512, "bf16", "bf16"),
        ("Gemma 4, q alone", 8, 0, 256, 256, "bf16", "bf16"),
    )
    found = []
    for name, num_q, num_kv, head_dim, rotary_dim, weight, pool in cases:
        rotates, rotary_dim = rotary_dim > 0, rotary_dim or head_dim
        half_block, rest_block = _blocks(head_dim, rotary_dim)
        weight_type = f"*{weight or 'bf16'}"
        signature = {"qkv_ptr": "*bf16", "q_weight_ptr": weight_type, "k_weight_ptr": weight_type}
        signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slot_ptr": "*i64"}
        signature |= {"factor_ptr": "*fp32", "q_ptr": "*bf16"}
        signature |= {
            "k_ptr": f"*{pool}",
            "v_ptr": f"*{pool}",
            "cos_stride": "i32:16",
            "sin_stride": "i32:16",
        }
        for tensor in ("qkv", "k", "v"):
            signature |= {f"{tensor}_stride": "i32:16", f"{tensor}_head_stride": "i32:16"}
        signature["eps"] = "fp32"
        constants: dict[str, Any] = {"NUM_Q": num_q, "NUM_KV": num_kv, "HEAD_DIM": head_dim}
        constants |= {"HALF": rotary_dim // 2, "HALF_BLOCK": half_block, "REST_BLOCK": rest_block}
        constants |= {"ROTATE": rotates, "INTERLEAVED": "interleaved" in name, "FACTORS": "factors" in name}
        constants |= {"NUM_V": 0 if "k as v" in name else num_kv, "NORM_VALUES": "Gemma 4" in name}
        constants |= {"NORM": weight is not None, "E4M3": pool == "u8", "LIMIT": 0.0}
        found += [
            KernelVariant(
                f"rotate_and_store {name}, {heads} heads",
                _rotate_and_store_kernel,
                signature,
                constants | {"HEADS": heads},
                num_warps,
            )
            for heads, num_warps in (_FEW_HEADS, _MANY_HEADS)
        ]
    return found
