"""`GraphSizes`: the steps that are recorded as CUDA graphs: numbers of rows of decodes, numbers of tokens of others.

The sizes of decodes grow slowly, because padding reads keys and values. The other steps, mostly prompts, are recorded
without attention. Up to some 256 tokens the device reads weights for as long as it computes, so padding costs nothing
and few sizes suffice.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from ....launch.resolve.resolve import MAX_AUTO_GRAPH_BATCH
from ....models.weight_files.weight_memory import multiplied_parameters
from ....runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from ...kernels.avoided import AVOIDED, NOTHING_AVOIDED, AvoidedKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ....models.spec.model_spec import ModelSpec
    from ....runtime.config.device_config import KernelConfig
    from ..graph_device import GraphDevice

logger = logging.getLogger(__name__)

_ALL_SIZES_UP_TO: Final = 8
_STEPS_PER_DOUBLING: Final = 4

_LEAST_TOKENS: Final = 16
_DOUBLED_UP_TO: Final = 256
_MOST_TOKENS: Final = 2048
_TOKENS_UNIT: Final = 64
_PRODUCTS_PER_LAUNCHED_LAYER: Final = 45e9
"""Weights times tokens that an H100 multiplies while the host launches a layer: 150 us at 600 TFLOP/s (estimates)."""


class GraphSizes(NamedTuple):
    """Sizes to record, ascending; empty: none.

    Attributes:
        decodes: numbers of rows.
        prompts: numbers of tokens of steps that are recorded without attention: prompts, mixed steps, larger decodes.
    """

    decodes: Sequence[int] = ()
    prompts: Sequence[int] = ()

    @property
    def largest(self) -> GraphSizes:
        """The two largest sizes of each kind, from which the memory of all is estimated."""
        return GraphSizes(self.decodes[-2:], self.prompts[-2:])

    @property
    def text(self) -> str:
        """For messages."""
        kinds = [f"decodes of {self.decodes[-1]} requests"] if self.decodes else []
        kinds += [f"prompts of {self.prompts[-1]} tokens"] if self.prompts else []
        return f"recorded {' and '.join(kinds)}" if kinds else ""


def batch_sizes(max_batch_size: int) -> list[int]:
    """The sizes of decodes: 1 to 8, then four per doubling, so at most a fifth of a step is padding."""
    sizes = list(range(1, min(_ALL_SIZES_UP_TO, max_batch_size) + 1))
    while sizes[-1] < max_batch_size:
        sizes.append(min(sizes[-1] + _part_of_doubling(sizes[-1]), max_batch_size))
    return sizes


def token_sizes(max_tokens: int) -> list[int]:
    """The sizes of other steps: powers of two up to 256, then four per doubling."""
    sizes = [min(_LEAST_TOKENS, max_tokens)]
    while sizes[-1] < max_tokens:
        last = sizes[-1]
        sizes.append(min(last + (last if last < _DOUBLED_UP_TO else _part_of_doubling(last)), max_tokens))
    return sizes


def _part_of_doubling(size: int) -> int:
    return (1 << (size.bit_length() - 1)) // _STEPS_PER_DOUBLING


def sizes_to_record(
    kernels: KernelConfig,
    num_rows: int,
    device: torch.device,
    *,
    spec: ModelSpec,
    step_tokens: Callable[[], int],
    max_drafts: int = 0,
    avoid: AvoidedKernels = NOTHING_AVOIDED,
    reason_against: str = "",
) -> GraphSizes:
    """The steps to record as CUDA graphs by the configuration; none on other devices.

    Args:
        num_rows: requests that may run.
        spec: the model, with the heads and widths of this rank.
        step_tokens: gives the tokens of the largest step.
        max_drafts: of one request in a step, whose tokens are rows, too; 0: steps have no drafts, or are not replayed.
        avoid: the components to do without.
        reason_against: why no step can be recorded; empty: they can.
    """
    if kernels.record_steps is False or device.type != "cuda":
        return GraphSizes()
    if not spec.causal:
        logger.info("prompt_graphs=0: steps of an encoder are launched kernel by kernel")
        return GraphSizes()
    if reason_against:  # not an error, because "on" is also what a resolved configuration says by itself
        logger.warning("decode_graphs=0 prompt_graphs=0: %s", reason_against)
        return GraphSizes()
    asked, most = kernels.max_recorded_bs, min(num_rows, MAX_AUTO_GRAPH_BATCH)
    largest = most if asked == "auto" else min(num_rows, asked)
    if max_drafts and largest >= most:  # else the user wants smaller recordings
        largest = max(largest, min(num_rows * (1 + max_drafts), MAX_DRAFT_STEP_TOKENS))
    decodes, prompts = batch_sizes(largest), _prompt_sizes(spec, step_tokens)
    for name, sizes in (("decode_graphs", decodes), ("prompt_graphs", prompts)):
        if sizes and avoid.reasons(name):
            logger.info("%s=0: %s", name, AVOIDED)
            sizes.clear()
    return GraphSizes(decodes, prompts)


def _prompt_sizes(spec: ModelSpec, step_tokens: Callable[[], int]) -> list[int]:
    """Up to the number of tokens from which a step takes the device longer than the host would need to launch it.

    A larger step gains nothing by a recording, and would pay for its padding.
    """
    if spec.state is not None:
        logger.info("prompt_graphs=0: the state layers of %s depend on each step's requests", spec.model_type)
        return []
    worthwhile = _PRODUCTS_PER_LAUNCHED_LAYER * spec.num_layers / multiplied_parameters(spec)
    rounded = -(-int(worthwhile) // _TOKENS_UNIT) * _TOKENS_UNIT
    return token_sizes(min(max(rounded, _TOKENS_UNIT), _MOST_TOKENS, step_tokens()))


class RecordingCosts:
    """The device memory and the time that recordings take, measured from the construction on.

    Attributes:
        num_bytes: device memory of each size so far.
    """

    def __init__(self, device: GraphDevice) -> None:
        self.num_bytes: list[int] = []
        self._device = device
        self._free_bytes = device.free_bytes()
        self._started_s = time.perf_counter()

    def end_size(self) -> None:
        """All recordings of a size are made."""
        before, self._free_bytes = self._free_bytes, self._device.free_bytes()
        self.num_bytes.append(before - self._free_bytes)

    def __str__(self) -> str:
        """For the log."""
        seconds = time.perf_counter() - self._started_s
        return f"record_s={seconds:.1f} graphs_mib={sum(self.num_bytes) / (1 << 20):.0f}"
