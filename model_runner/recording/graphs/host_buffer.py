"""`HostBuffer`: memory for the inputs of a recorded step on the host, from which the device copies.

The host does not wait for the device: it writes the inputs of a step before the copy of the step before may have begun.
So each user has two buffers that take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..graph_device import GraphDevice


class HostBuffer:
    """See the module.

    Attributes:
        memory: [bytes] uint8.
    """

    def __init__(self, device: GraphDevice, num_bytes: int) -> None:
        self.memory = device.staging(num_bytes)
        self._device = device
        self._wait: Callable[[], None] = lambda: None

    def wait_until_read(self) -> None:
        """Wait for the last upload. With two buffers it has ended, unless more than two steps are in flight."""
        self._wait()

    def upload(self, target: Tensor) -> None:
        """Queue a copy of as many of the first bytes as `target` has, to it."""
        staged = self.memory[: target.nbytes].view(target.dtype).view(target.shape)
        self._wait = self._device.upload(target, staged)
