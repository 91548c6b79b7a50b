"""`fit_pool`: the number of KV pages on a device from measured memory, which replaces the estimate.

Before the weights are loaded the pool is an estimate (`pool_size`), for any kernels. On a GPU, once they are loaded,
the largest step runs once as a test, and the pool takes its share of the remaining memory. A value that the user has
set is kept, or refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...runtime.errors import ConfigError
from ...runtime.feasibility import Capacity, pages_for
from .memory_budget import MOST_OF_LEFT, size_text
from .pool_size import MIN_USEFUL_LEN

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes, on one device.

    Attributes:
        free_bytes: with only the weights loaded.
        step_bytes: what the largest step needs besides weights and KV pool, including the tables of all requests.
        graph_bytes: what recorded steps need.
        gathered_token_bytes: what attention needs per token in the pool, if one step may attend to all of them; the
            measured step had prompts only.
    """

    free_bytes: int
    step_bytes: int
    graph_bytes: int
    gathered_token_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Memory for the pool and for everything that was not measured."""
        return self.free_bytes - self.step_bytes - self.graph_bytes

    @property
    def sums(self) -> str:
        """The arithmetic of `left_bytes`, in words."""
        return (
            f"({size_text(self.free_bytes)} free after the weights - {size_text(self.step_bytes)} largest step - "
            f"{size_text(self.graph_bytes)} recordings)"
        )


def graphs_estimate(recorded_bytes: Sequence[int], num_graphs: int) -> int:
    """Memory of `num_graphs` recordings together, estimated from the largest and the one after it.

    The largest includes the memory that the recordings share; what each further one adds is its own.

    Args:
        recorded_bytes: of up to two recordings, the largest first.
    """
    if not recorded_bytes or not num_graphs:
        return 0
    first, *others = recorded_bytes
    return first + (num_graphs - 1) * max(0, *others) if others else first * num_graphs


def fit_pool(
    capacity: Capacity,
    measured: Measured,
    fraction: float,
    *,
    page_bytes: int,
    is_estimate: bool,
    len_is_estimate: bool = False,
) -> Capacity:
    """The capacity with the pages that the device holds, and a context length that fits into them.

    Args:
        capacity: as planned before the measurement.
        fraction: share of the remaining memory that the pool may take.
        page_bytes: of one page, on this device.
        is_estimate: the planned pool was not set by the user, so it may become smaller or larger.
        len_is_estimate: the context length was not set by the user either, so it may become smaller.

    Raises:
        ConfigError: the pool that the user has set does not fit, or the device cannot hold one context.
    """
    page_bytes += capacity.page_size * measured.gathered_token_bytes
    asked_bytes = (capacity.num_pages + 1) * page_bytes  # the dummy page is one more
    if not is_estimate:
        share = max(fraction, MOST_OF_LEFT)
        if asked_bytes > measured.left_bytes * share:
            raise ConfigError(
                f"max_total_tokens is {capacity.max_total_tokens}, which takes {size_text(asked_bytes)}, but the "
                f"device has {measured.sums} x {share:g}; lower --max-total-tokens, --chunked-prefill-size or "
                "--max-running-requests"
            )
        return capacity
    num_pages = max(0, int(measured.left_bytes * fraction)) // page_bytes - 1
    longest = pages_for(capacity.max_model_len, capacity.page_size)
    if num_pages < longest:
        num_tokens, sums = max(0, num_pages) * capacity.page_size, f"{measured.sums} x {fraction:g}"
        if not len_is_estimate or num_tokens < min(MIN_USEFUL_LEN, capacity.max_model_len):
            raise ConfigError(
                f"max_model_len is {capacity.max_model_len}, but the device holds {num_tokens} tokens: {sums}; lower "
                "--max-model-len, --chunked-prefill-size or --max-running-requests, or raise --mem-fraction"
            )
        logger.info("max_model_len=%d, not %d as planned: %s", num_tokens, capacity.max_model_len, sums)
        capacity, longest = replace(capacity, max_model_len=num_tokens), num_pages
    return replace(capacity, num_pages=min(num_pages, capacity.max_running_requests * longest))
