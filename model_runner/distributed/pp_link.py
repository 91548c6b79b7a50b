"""The connections of pipeline stages: what layers return goes to the next stage, results go to rank 0.

    rank 0   plan ──────────────► all ranks (messages, see `ranked_runner`)
    stage 0  embedding, layers ──[2, T, hidden]──► stage 1  layers ──► ... ──► last stage  layers, head, sampler
       ▲                                              │                            │
       └──────────── results (tokens, times, errors) ─┴────────────────────────────┘

`StageLink` is what a `StepExecutor` uses: it has the memory of what arrives. A `StageWire` moves the bytes: `TorchWire`
by torch.distributed (gloo for memory of the host, NCCL for that of GPUs). Ranks with the same number in their stages
are connected with each other. All stages execute the same plans in the same order, so both sides know all shapes.
"""

# Shapes: T new tokens in the batch, K hidden size.

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..forward_batch import StageStates

if TYPE_CHECKING:
    from ...launch.resolve.stages import Stage
    from .tp_group import TorchGroup

GetResults = Callable[[], list[bytes]]
"""Waits for the results of a step; one of each stage after the first, in order."""

_LEN_BYTES: Final = 8
_FIRST_BYTES: Final = 4096
"""A result's first message, with its length; most results fit. It has a fixed size, so rank 0 can wait for it early."""
_FIRST_TAG, _REST_TAG = 1, 2


class StageWire(Protocol):
    """The connections of one rank of a stage.

    Attributes:
        stage: of this rank.
        waited_s: seconds that this rank has waited for the stage before, in total; 0 on devices that wait themselves.
    """

    @property
    def stage(self) -> Stage: ...

    @property
    def waited_s(self) -> float: ...

    def send(self, states: Tensor) -> None:
        """Send to the next stage; does not wait until it has arrived. `states` must not change any more."""
        ...

    def receive(self, out: Tensor) -> None:
        """Fill `out` with what the stage before sends."""
        ...

    def send_result(self, result: bytes) -> None:
        """Send the result of a step to rank 0. Only for the first rank of a stage after the first."""
        ...

    def expect_results(self) -> GetResults:
        """Prepare for the results of the step that is launched; on rank 0, once per step, in order."""
        ...


class StageLink(Protocol):
    """Interface for the begin and end of a stage's steps."""

    def incoming(self, num_tokens: int) -> StageStates | None:
        """The memory that `receive` fills; None on the first stage. It is the same in each call."""
        ...

    def receive(self, num_tokens: int) -> None:
        """Fill this memory with what the stage before has computed of a step; nothing on the first stage."""
        ...

    def send(self, states: StageStates) -> None:
        """Send the result of this stage to the next one; it may be overwritten afterwards."""
        ...


class NoLink:
    """The link of a model that is not divided into stages."""

    def incoming(self, num_tokens: int) -> StageStates | None:
        pass

    def receive(self, num_tokens: int) -> None:
        pass

    def send(self, states: StageStates) -> None:
        raise AssertionError("there is no next stage")


NO_LINK: Final = NoLink()


class WiredLink:
    """The link of one stage of several. A message is [2, T, K]; what arrives is copied to memory with fixed addresses.

    Recordings need them: they read what has arrived, and layers may return the same memory.
    """

    def __init__(
        self, wire: StageWire, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Reserve memory for steps of up to `max_tokens`."""
        self._wire = wire
        num = 0 if wire.stage.is_first else max_tokens
        # Zeros, because recordings also compute rows of padding.
        self._memory = torch.zeros((2, num, hidden_size), dtype=dtype, device=device)

    def incoming(self, num_tokens: int) -> StageStates | None:
        if self._wire.stage.is_first:
            return None
        x, residual = self._memory[:, :num_tokens]
        return StageStates(x, residual)

    def receive(self, num_tokens: int) -> None:
        if not self._wire.stage.is_first:
            memory = self._memory[:, :num_tokens]
            arrived = torch.empty_like(memory, memory_format=torch.contiguous_format)
            self._wire.receive(arrived)
            memory.copy_(arrived)

    def send(self, states: StageStates) -> None:
        self._wire.send(torch.stack((states.x, states.residual)))


class TorchWire:
    """A `StageWire` over torch.distributed."""

    def __init__(self, world: TorchGroup, stage: Stage) -> None:
        """Take the group of all ranks of the model."""
        self.stage = stage
        self.waited_s = 0.0
        self._world = world
        self._stage_size = world.size // stage.count
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def send(self, states: Tensor) -> None:
        self._send_later(states, self._world.rank + self._stage_size)

    def receive(self, out: Tensor) -> None:
        started_s = time.perf_counter()
        self._world.run(dist.recv, out, self._world.rank - self._stage_size)
        if out.device.type == "cpu":
            self.waited_s += time.perf_counter() - started_s

    def send_result(self, result: bytes) -> None:
        data = torch.frombuffer(
            bytearray(len(result).to_bytes(_LEN_BYTES, "little") + result), dtype=torch.uint8
        )
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        first[: len(data)] = data[:_FIRST_BYTES]
        self._send_later(first, 0, _FIRST_TAG)
        if len(data) > _FIRST_BYTES:
            self._send_later(data[_FIRST_BYTES:].clone(), 0, _REST_TAG)

    def expect_results(self) -> GetResults:
        waiting = []
        for stage in range(1, self.stage.count):
            rank = stage * self._stage_size
            first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
            waiting.append((rank, first, self._world.run(dist.irecv, first, rank, tag=_FIRST_TAG)))
        return lambda: [self._take_result(*each) for each in waiting]

    def _take_result(self, rank: int, first: Tensor, work: Any) -> bytes:
        self._world.run(work.wait)
        data = first.numpy().tobytes()
        num_bytes = int.from_bytes(data[:_LEN_BYTES], "little") + _LEN_BYTES
        if num_bytes > len(data):
            rest = torch.empty(num_bytes - len(data), dtype=torch.uint8)
            self._world.run(dist.recv, rest, rank, tag=_REST_TAG)
            data += rest.numpy().tobytes()
        return data[_LEN_BYTES:num_bytes]

    def _send_later(self, data: Tensor, rank: int, tag: int = 0) -> None:
        """Start sending. No more messages are on their way than steps can be in flight."""
        self._sending.append((self._world.run(dist.isend, data, rank, tag=tag), data))
        while len(self._sending) > 2 * self.stage.count:
            work, _ = self._sending.popleft()
            self._world.run(work.wait)
