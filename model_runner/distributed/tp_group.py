"""`TPGroup`: the ranks that share one model, with the collective operations that combine their results.

Layers call it and do not depend on the number of ranks: `SingleRank` does nothing. With several ranks every rank
executes the same `StepPlan`s in the same order, and so makes the same calls with the same shapes. A sum is the same,
bit for bit, on all ranks: each element is reduced on one rank and then distributed.

Ranks rendezvous through a file in the engine's private directory, or, on several machines, through a TCP store of rank
0. Then gloo (CPU) or NCCL (CUDA) connects them through the interface that `network_interface` chooses.
"""

from __future__ import annotations

import atexit
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime.errors import RankLostError
from ...runtime.transport.cluster_ipc import is_loopback, listening_socket
from .network_interface import INTERFACE_VARIABLES, use_interface_towards, use_loopback

c10d: Any = dist  # torch does not export its store classes for type checkers

_MEETING_POLL_S: Final = 0.02
_SOURCE_PLACE: Final = re.compile(r"^\[\S+:\d+\] ")


class TPGroup(Protocol):
    """The ranks that share one model; see the module.

    Attributes:
        rank, size: this rank and the number of ranks, 0 <= rank < size.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def wait_for_others(self) -> AbstractContextManager[None]:
        """Context around a wait for other ranks outside the group's operations, such as for results of a GPU."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on all ranks; may overwrite `x`, so use the returned tensor."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors, concatenated along the last axis: [n, k] -> [n, size * k], contiguous."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """The tensor of rank 0, on all ranks; on the others `x` gives shape and dtype and is overwritten."""
        ...

    def min_over_ranks(self, value: int) -> int:
        """The smallest value of all ranks; for decisions at start that must be the same on all ranks."""
        ...

    def meet(self, place: str) -> None:
        """A named barrier: wait until all ranks have called it with this name as often as this rank has.

        For work that may take minutes and differs between ranks, like loading weights: the timeouts of the operations
        above are for steps.

        Raises:
            RankLostError: a rank has not come in time (the message names it), or rank 0 with the store is gone.
        """
        ...


class SingleRank:
    """The group of a model on one device; its operations do nothing."""

    rank: Final = 0
    size: Final = 1

    def wait_for_others(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def min_over_ranks(self, value: int) -> int:
        return value

    def meet(self, place: str) -> None:
        pass


SINGLE_RANK: Final = SingleRank()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Connection of the ranks of a group.

    Attributes:
        rank, size: this rank, and the number of ranks.
        device: device of this rank.
        file: a path in a private directory, for ranks of one machine; it need not exist.
        address: host and port of the store that rank 0 opens, for ranks of several machines.
        step_timeout_s: longest wait of an operation for the other ranks.
        start_timeout_s: longest wait for the other ranks before and after loading.
        sends_host_memory: ranks on GPUs also send tensors of the host.
    """

    rank: int
    size: int
    device: torch.device
    file: Path | None = None
    address: tuple[str, int] | None = None
    step_timeout_s: float
    start_timeout_s: float
    sends_host_memory: bool = False


class TorchGroup:
    """A group over torch.distributed; one per process.

    Attributes:
        waiting: whether this rank is waiting for the others. Operations on a GPU are queued and do not wait; code that
            waits for the GPU's results does so inside `wait_for_others`.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Wait for all ranks and connect to them.

        Raises:
            RankLostError: a rank has not come in time.
            ConfigError: rank 0 cannot listen for the ranks of other machines.
        """
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.device = rendezvous.device
        self._step_timeout_s = rendezvous.step_timeout_s
        self._start_timeout_s = rendezvous.start_timeout_s
        self._num_met: Counter[str] = Counter()
        self.waiting = False
        # The second name is deprecated since torch 2.13; the first does not exist in 2.11.
        self._gather: Any = getattr(dist, "all_gather_single", None) or c10d.all_gather_into_tensor
        self._interface_advice = ""
        if rendezvous.address is None or is_loopback(rendezvous.address[0]):
            use_loopback()
        else:
            use_interface_towards(*rendezvous.address)
            variable = INTERFACE_VARIABLES[self.device.type == "cuda"]
            self._interface_advice = (
                f"; the ranks connect through {os.environ.get(variable, 'an unknown interface')}: if that is not one "
                f"that reaches the other machines, set {variable}"
            )
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        try:
            self._store = _open_store(rendezvous)
            # The operations' timeout also bounds how long ranks wait for each other while they connect.
            self.meet("start")
            dist.init_process_group(
                "cpu:gloo,cuda:nccl"
                if on_gpu and rendezvous.sends_host_memory
                else "nccl"
                if on_gpu
                else "gloo",
                store=c10d.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=rendezvous.step_timeout_s),
                device_id=self.device if on_gpu else None,
            )
            if not on_gpu:
                # gloo's threads must end before the interpreter, or they abort the process at exit.
                atexit.register(dist.destroy_process_group)
        except RuntimeError as error:
            raise RankLostError(
                f"{self._name} has not found the other ranks: {_cause(error)}{self._interface_advice}"
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TPGroup`.

        Raises:
            RankLostError: another rank is gone, or silent for longer than the group's timeout.
        """
        self.run(dist.all_reduce, x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `TPGroup`.

        Raises:
            RankLostError: as `all_reduce`.
        """
        return self.gather(x, self.size)

    def gather(self, x: Tensor, size: int, **options: Any) -> Tensor:
        """`all_gather` of a part of the ranks, `size` of them; `options`: of torch's operation."""
        num_rows, width = x.shape
        gathered = x.new_empty((size * num_rows, width))
        self.run(self._gather, gathered, x.contiguous(), **options)
        return gathered.view(size, num_rows, width).transpose(0, 1).reshape(num_rows, size * width)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `TPGroup`.

        Raises:
            RankLostError: as `all_reduce`.
        """
        self.run(dist.broadcast, x, 0)
        return x

    def divide(self, size: int) -> Any:
        """Divide the ranks into groups of `size` neighbors; returns torch's group with this rank. All ranks call it.

        Raises:
            RankLostError: as `all_reduce`.
        """
        timeout = timedelta(seconds=self._step_timeout_s)
        own = None
        for start in range(0, self.size, size):
            group = self.run(dist.new_group, list(range(start, start + size)), timeout=timeout)
            if start <= self.rank < start + size:
                own = group
        return own

    def min_over_ranks(self, value: int) -> int:
        """See `TPGroup`.

        Raises:
            RankLostError: as `all_reduce`.
        """
        values = torch.tensor([value], dtype=torch.int64, device=self.device)
        self.run(dist.all_reduce, values, dist.ReduceOp.MIN)
        return int(values.item())

    def meet(self, place: str) -> None:
        self._num_met[place] += 1
        name = place if self._num_met[place] == 1 else f"{place}/again{self._num_met[place]}"
        missing = [f"{name}/{rank}" for rank in range(self.size)]
        deadline_s = time.monotonic() + self._start_timeout_s
        self._ask_store("set", missing[self.rank], "here")
        while missing := [key for key in missing if not self._ask_store("check", [key])]:
            if time.monotonic() > deadline_s:
                ranks = " and ".join(key.rpartition("/")[2] for key in missing)
                raise RankLostError(
                    f"{self._name} has waited {self._start_timeout_s:g} s at {place!r} for rank {ranks}"
                )
            time.sleep(_MEETING_POLL_S)  # the file store's own wait polls only once a second

    def differing(self, what: str, value: str) -> list[int]:
        """The ranks with another value of `what` than rank 0; waits like `meet`, and each name can be used once."""
        self._ask_store("set", f"{what}={self.rank}", value)
        self.meet(what)
        said = [self._ask_store("get", f"{what}={rank}") for rank in range(self.size)]
        return [rank for rank in range(self.size) if said[rank] != said[0]]

    @contextmanager
    def wait_for_others(self) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    @property
    def torch_group(self) -> Any:
        """torch's group of all ranks."""
        return dist.group.WORLD

    @property
    def _name(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def _ask_store(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except RuntimeError as error:
            raise RankLostError(f"{self._name} lost the store of rank 0: {_cause(error)}") from error

    def run(self, operation: Any, *arguments: Any, **options: Any) -> Any:
        """Call an operation of torch that may wait for other ranks.

        Raises:
            RankLostError: as `all_reduce`.
        """
        self.waiting = True
        try:
            return operation(*arguments, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name = operation.__name__
            raise RankLostError(f"{self._name} lost the others in {name}: {_cause(error)}") from error
        finally:
            self.waiting = False


def _open_store(rendezvous: Rendezvous) -> Any:
    if rendezvous.address is None:
        return c10d.FileStore(str(rendezvous.file), rendezvous.size)
    host, port = rendezvous.address
    # The store's own socket would listen on all interfaces, and it has no authentication.
    listening = listening_socket(host, port).detach() if rendezvous.rank == 0 else None
    return c10d.TCPStore(
        host,
        port,
        rendezvous.size,
        is_master=rendezvous.rank == 0,
        timeout=timedelta(seconds=rendezvous.start_timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _cause(error: Exception) -> str:
    """The cause in a message of gloo or NCCL, without source location and advice."""
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return _SOURCE_PLACE.sub("", first_line).partition(". ")[0]
