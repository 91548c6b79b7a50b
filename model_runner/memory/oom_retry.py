"""`retry_after_oom`: one retry, after the allocator returned its cached memory, of work that later steps depend on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

logger = logging.getLogger(__name__)


def retry_after_oom(device: torch.device, call: Callable[[], T]) -> T:
    """Make a call; if memory runs out, free the allocator's cached memory and make it once more.

    Args:
        device: of the memory.
        call: a call that may be made twice.
    """
    try:
        return call()
    except torch.OutOfMemoryError as error:
        logger.warning("out of memory: retry after freeing the allocator's cached memory: %s", error)
    # Outside the `except` block: the error's traceback holds the tensors of the call.
    free_cached_memory(device)
    return call()


def free_cached_memory(device: torch.device) -> None:
    """Return the allocator's unused memory to the device, so that other sizes fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
