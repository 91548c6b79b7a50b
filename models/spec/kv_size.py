"""Bytes of one token's keys and values, from the model's shape and the KV dtype; and the units of memory sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .model_spec import ModelSpec

MIB: Final = 1 << 20
GIB: Final = 1 << 30
BYTES_OF_DTYPE: Final = {"bfloat16": 2, "float32": 4, "fp8": 1, "int8": 1}
KV_SCALE_BYTES: Final = 4
"""Per token and head in an int8 pool."""


def kv_dtype_of(kv_cache_dtype: str, dtype: str) -> str:
    """The KV pool's dtype, from the setting and the model's dtype."""
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def kv_token_bytes(spec: ModelSpec, kv_dtype: str) -> int:
    """Memory of one token's keys and values, with their scales if the dtype has any."""
    scale_bytes = KV_SCALE_BYTES if kv_dtype == "int8" else 0
    return spec.kv_bytes_per_token(BYTES_OF_DTYPE[kv_dtype], scale_bytes)
