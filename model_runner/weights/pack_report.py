"""`PackReport`: counts the weights that packing compresses without loss, for the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..kernels.cpu.library import loaded_isa
from ..kernels.native_linear import CompressedLinear, NativeLinear, reasons_against_compression

if TYPE_CHECKING:
    from torch import Tensor

    from ..ops.linear import LinearWeight, PackLinear

logger = logging.getLogger(__name__)


class PackReport:
    """A `PackLinear` that wraps another one and counts its results."""

    def __init__(self, pack: PackLinear) -> None:
        self._pack = pack
        self._compressed: list[CompressedLinear] = []
        self._plain_bytes = 0  # bytes of the compressed weights before compression
        self._has_plain = False  # whether some native weights keep 16 bits per value

    def __call__(self, weight: Tensor) -> LinearWeight:
        plain_bytes = weight.nbytes
        packed = self._pack(weight)
        if isinstance(packed, CompressedLinear):
            self._compressed.append(packed)
            self._plain_bytes += plain_bytes
        self._has_plain |= isinstance(packed, NativeLinear)
        return packed

    def log(self) -> None:
        """Log how many weights are compressed and the memory saved, or why the native weights are not compressed."""
        if self._compressed:
            logger.info(
                "weights_compressed=%d compressed_mib=%d instead of %d, without loss",
                len(self._compressed),
                sum(packed.num_bytes for packed in self._compressed) >> 20,
                self._plain_bytes >> 20,
            )
        elif self._has_plain and (reasons := reasons_against_compression(loaded_isa())):
            logger.info("weights_compressed=none: %s", "; ".join(reasons))
