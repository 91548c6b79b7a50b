"""`InputBuffers`: the way of a step's host arrays to the device.

Everything a step uploads goes through `put`, so that one place decides how: without a copy on the CPU, through pinned
memory and without waiting on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class InputBuffers:
    """Uploads to one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """The array on the device, in its dtype. On the CPU the tensor shares the array's memory: hand it over."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
