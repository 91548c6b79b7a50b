"""`OutputBuffers`: the way of a step's results to the host; the counterpart of `InputBuffers`.

What is fetched is only queued, so that a launch never waits. Whoever launched the step knows when the copies are done:
they lie between the events of its `DeviceTimer`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OutputBuffers:
    """Downloads from one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_host = device.type == "cpu"

    def fetch(self, tensor: Tensor) -> Tensor:
        """A host tensor that holds `tensor` once the device has done all that is queued by now.

        On the CPU it is the tensor itself. On a GPU its memory is pinned; torch reuses it only after the copy is done,
        so nobody has to keep it for that.
        """
        if self._is_host:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
