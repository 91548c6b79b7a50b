"""`GraphDevice`: the device operations for recording and replaying steps; `CudaGraphDevice` is the one for CUDA.

A recording holds kernels with their arguments: addresses, shapes and values from the host. So all inputs that differ
between steps must be in device memory with fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Protocol

import torch
from torch import Tensor

Replay = Callable[[], None]
Cut = Callable[[], None]

_WARM_UP_RUNS: Final = 2
"""Runs before a recording. In the first one kernels are compiled, tuned and loaded, and libraries allocate workspaces.
The second one shows allocations that are needed in every run."""


class GraphDevice(Protocol):
    """One device, its current stream, and one memory pool that all recordings share."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Record the work that `run` queues on the device; it is also done, before, during or after the recording.

        Recordings are replayed one after the other, never at the same time, so they share the memory of their
        intermediate tensors. The largest should be recorded first; the others then fit into its memory.

        Returns:
            a call that queues all of the work again.
        """
        ...

    def capture_pieces(self, run: Callable[[Cut], None]) -> list[Replay]:
        """The same in several recordings: `run` calls its argument where one ends and the next begins.

        Tensors that are made in one piece may be used in the next ones. What is done between two pieces when they are
        replayed is not part of either, and is not done here.
        """
        ...

    def staging(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, from which the device can copy while the host continues."""
        ...

    def upload(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        """Queue a copy from staging memory to the device; returns a call that waits until it is done."""
        ...

    def free_bytes(self) -> int:
        """Free memory of the device."""
        ...


class CudaGraphDevice:
    """CUDA graphs through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], None]) -> Replay:
        (replay,) = self.capture_pieces(lambda _cut: run())
        return replay

    def capture_pieces(self, run: Callable[[Cut], None]) -> list[Replay]:
        """The warm-up uses the stream of the recording, because workspaces belong to streams.

        A tensor that lives from one piece to a later one keeps its place in the pool, as it does within a piece; the
        places of others are used again. This is right because the pieces are replayed in the order of the recording.

        The first replay of a graph brings it to the device, which takes memory and time, so it is done at once.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                run(_no_cut)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graphs: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as piece:

            def cut() -> None:
                piece.close()
                graphs.append(torch.cuda.CUDAGraph())
                # Only calls of this thread are forbidden during the capture: NCCL's watchdog queries its events at any
                # time.
                capture = torch.cuda.graph(
                    graphs[-1], pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                )
                piece.enter_context(capture)

            cut()
            run(cut)
        replays = [graph.replay for graph in graphs]
        for replay in replays:
            replay()
        return replays

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        target.copy_(staged, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def free_bytes(self) -> int:
        """Memory cached by torch counts as taken."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]


def _no_cut() -> None:
    """In a warm-up."""
