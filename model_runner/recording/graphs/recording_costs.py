"""`RecordingCosts`: the device memory and the time that recordings take, measured while they are made."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..graph_device import GraphDevice


class RecordingCosts:
    """Begins when it is made.

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
