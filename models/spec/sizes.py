"""Sizes that follow from a model's shape: of a token in the KV pool, and of state slots and checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ...runtime.config.engine_config import SchedulerConfig
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


_LEAST_SHARE: Final = 0.1
"""Memory of all checkpoints, by that of the KV pool; at least."""
_MOST_SHARE: Final = 0.5
_TOKENS_PER_CHECKPOINT: Final = 4096
"""Slots of the KV pool that get a checkpoint, if a slot of states is so large that the least share has fewer."""
_ROWS_SHARE: Final = 0.25
"""Memory of the states of running requests, by what remains after the weights, if their number is not given."""
_INTERVAL_SHARE: Final = 0.05
"""Memory of the checkpoints within a prompt or an answer, by that of its keys and values."""
_OTHER_SLOTS: Final = 2  # that of zeros, and that of padding


def slot_bytes(spec: ModelSpec, dtype: str) -> int:
    """Memory of one state slot; 0 without state layers."""
    return 0 if spec.state is None else spec.state.slot_bytes(BYTES_OF_DTYPE[dtype])


def max_drafts_of(scheduler: SchedulerConfig) -> int:
    """Drafts of one request in a step: the state after each may be the one to go on with."""
    return 0 if scheduler.speculative == "off" else scheduler.speculative_num_draft_tokens


def row_states_bytes(spec: ModelSpec, dtype: str, max_running_requests: int, max_drafts: int) -> int:
    """Memory of the slots of running requests, and of their drafts."""
    return slot_bytes(spec, dtype) * (max_running_requests * (1 + max_drafts) + _OTHER_SLOTS)


def most_rows(spec: ModelSpec, dtype: str, left_bytes: int, max_drafts: int) -> int | None:
    """How many requests may run at once, by the memory that remains after the weights; None: states are no limit."""
    if spec.state is None:
        return None
    return max(1, int(_ROWS_SHARE * max(0, left_bytes)) // (slot_bytes(spec, dtype) * (1 + max_drafts)))


def checkpoint_share(spec: ModelSpec, dtype: str, token_bytes: int) -> float:
    """Memory of all checkpoints, by that of a KV pool with tokens of `token_bytes`; 0 without state layers."""
    if spec.state is None:
        return 0.0
    wanted = slot_bytes(spec, dtype) / (_TOKENS_PER_CHECKPOINT * token_bytes)
    return min(_MOST_SHARE, max(_LEAST_SHARE, wanted))


def num_checkpoints(spec: ModelSpec, dtype: str, token_bytes: int, num_pages: int, page_size: int) -> int:
    """Checkpoints beside a KV pool with tokens of `token_bytes`: at most one for each page, at least one."""
    if spec.state is None:
        return 0
    room = checkpoint_share(spec, dtype, token_bytes) * num_pages * page_size * token_bytes
    return max(1, min(num_pages, int(room / slot_bytes(spec, dtype))))


def checkpoint_pages(spec: ModelSpec, dtype: str, token_bytes: int, page_size: int) -> int:
    """Pages from one checkpoint within a prompt or an answer to the next; 0 without state layers."""
    if spec.state is None:
        return 0
    return max(1, math.ceil(slot_bytes(spec, dtype) / (_INTERVAL_SHARE * page_size * token_bytes)))
