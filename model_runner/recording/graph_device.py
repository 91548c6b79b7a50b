"""`GraphDevice`: what recording steps and replaying them needs of a device; CUDA's is `CudaGraphDevice`.

A recording holds kernels with their arguments: addresses, shapes and whatever numbers the host put in. So everything
that differs from step to step has to lie in device memory that stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

Replay = Callable[[], None]

_WARM_UP_RUNS: Final = 2
"""Runs before a recording: kernels are compiled, tuned and loaded, and libraries make their workspaces, in the first;
the second would show an allocation that only the first one should need."""


class GraphDevice(Protocol):
    """One device, its current stream, and one memory pool that all recordings share."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Record what `run` queues on the device; it is really run, too, before or meanwhile.

        Recordings are replayed one after the other, never at the same time, so they use the same memory for what they
        do not hand out. The largest should come first: the others then find enough of it.

        Returns:
            what queues all of it again.
        """
        ...

    def staging(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, from which the device can copy while the host goes on."""
        ...

    def upload(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        """Queue a copy from staging memory to the device; returns what waits until it is done."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that nobody has."""
        ...


class CudaGraphDevice:
    """CUDA graphs by torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], None]) -> Replay:
        """See `GraphDevice`. The warm-up uses the stream of the recording, because workspaces belong to streams."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are forbidden meanwhile: NCCL's watchdog asks for its events at any time.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def staging(self, num_bytes: int) -> Tensor:
        """See `GraphDevice`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        """See `GraphDevice`."""
        target.copy_(staged, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def free_bytes(self) -> int:
        """See `GraphDevice`; what torch keeps for itself counts as taken."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]
