"""`TPGroup`: the ranks that share one model, and how they add up and put together what each has computed.

Layers call it and do not know how many ranks there are: `SingleRank` does nothing. With more, every rank executes the
same `StepPlan`s in the same order, and so makes the same calls with the same shapes. The sum is the same, bit for bit,
on all ranks: each number is added up at one place and handed out.

Ranks find each other through a file in the engine's private directory, or, on several machines, through a TCP store
that rank 0 holds; then gloo (CPU) or NCCL (CUDA) connects them, through the interface that `network_interface` chooses.
"""

from __future__ import annotations

import atexit
import os
import re
import time
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

c10d: Any = dist  # its classes of stores are not exported as the type checker wants it

_MEETING_POLL_S: Final = 0.02
_SOURCE_PLACE: Final = re.compile(r"^\[\S+:\d+\] ")


class TPGroup(Protocol):
    """See the module.

    Attributes:
        rank, size: this rank, 0 <= rank < size.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def wait_for_others(self) -> AbstractContextManager[None]:
        """Around what waits for other ranks without being an operation of the group: for results of a GPU."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on all of them; may overwrite `x`, use what comes back."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors, one behind the other along the last axis: [n, k] -> [n, size * k], contiguous."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """The tensor of rank 0, on all ranks; `x` of the others gives shape and dtype and is overwritten."""
        ...

    def min_over_ranks(self, value: int) -> int:
        """The smallest of all ranks' numbers; for decisions at start that must be the same everywhere."""
        ...

    def meet(self, place: str) -> None:
        """Wait until all ranks have come to a place of this name; each name serves once.

        For what may take minutes and differs between ranks, like loading weights: time-outs of the operations above
        are for steps.

        Raises:
            RankLostError: somebody has not come in time, which names who; or rank 0, who knows who came, is gone.
        """
        ...


class SingleRank:
    """The group of a model that has one device to itself."""

    rank: Final = 0
    size: Final = 1

    def wait_for_others(self) -> AbstractContextManager[None]:
        """See `TPGroup`."""
        return nullcontext()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TPGroup`."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `TPGroup`."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """See `TPGroup`."""
        return x

    def min_over_ranks(self, value: int) -> int:
        """See `TPGroup`."""
        return value

    def meet(self, place: str) -> None:
        """See `TPGroup`."""


SINGLE_RANK: Final = SingleRank()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a group find each other.

    Attributes:
        rank, size: this rank, and how many there are.
        device: of this rank.
        file: a path in a private directory, for ranks of one machine; it need not exist.
        address: host and port of the store that rank 0 opens, for ranks of several machines.
        step_timeout_s: how long an operation waits for the others.
        start_timeout_s: how long a rank waits for the others before and after it loads.
    """

    rank: int
    size: int
    device: torch.device
    file: Path | None = None
    address: tuple[str, int] | None = None
    step_timeout_s: float
    start_timeout_s: float


class TorchGroup:
    """A group over torch.distributed; one in a process.

    Attributes:
        waiting: whether it waits for the others at this moment. Operations on a GPU do not wait: they are queued, and
            whoever asks the GPU for results waits, and says so with `wait_for_others`.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        """Wait for all ranks and connect to them.

        Raises:
            RankLostError: not all have come.
            ConfigError: rank 0 cannot listen for those of other machines.
        """
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.device = rendezvous.device
        self._start_timeout_s = rendezvous.start_timeout_s
        self.waiting = False
        # The second name is deprecated since torch 2.13, the first does not exist in 2.11.
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
            # The operations' time-out also bounds how long ranks wait for each other while they connect.
            self.meet("start")
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=c10d.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=rendezvous.step_timeout_s),
                device_id=self.device if on_gpu else None,
            )
            if not on_gpu:
                # gloo's threads must end before the interpreter does, or they abort the process at its end.
                atexit.register(dist.destroy_process_group)
        except RuntimeError as error:
            raise RankLostError(
                f"{self._name} has not found the other ranks: {_cause(error)}{self._interface_advice}"
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TPGroup`.

        Raises:
            RankLostError: another rank is gone, or silent for the group's time-out.
        """
        self._run(dist.all_reduce, x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `TPGroup`.

        Raises:
            RankLostError: as `all_reduce`.
        """
        num_rows, width = x.shape
        gathered = x.new_empty((self.size * num_rows, width))
        self._run(self._gather, gathered, x.contiguous())
        return gathered.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, self.size * width)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `TPGroup`.

        Raises:
            RankLostError: as `all_reduce`.
        """
        self._run(dist.broadcast, x, 0)
        return x

    def min_over_ranks(self, value: int) -> int:
        """See `TPGroup`.

        Raises:
            RankLostError: as `all_reduce`.
        """
        values = torch.tensor([value], dtype=torch.int64, device=self.device)
        self._run(dist.all_reduce, values, dist.ReduceOp.MIN)
        return int(values.item())

    def meet(self, place: str) -> None:
        """See `TPGroup`."""
        missing = [f"{place}/{rank}" for rank in range(self.size)]
        deadline_s = time.monotonic() + self._start_timeout_s
        self._ask_store("set", missing[self.rank], "here")
        while missing := [key for key in missing if not self._ask_store("check", [key])]:
            if time.monotonic() > deadline_s:
                ranks = " and ".join(key.rpartition("/")[2] for key in missing)
                raise RankLostError(
                    f"{self._name} has waited {self._start_timeout_s:g} s at {place!r} for rank {ranks}"
                )
            time.sleep(_MEETING_POLL_S)  # the file store's own wait looks once a second

    def differing(self, what: str, value: str) -> list[int]:
        """The ranks that say something else about `what` than rank 0; waits as `meet`, and each name serves once."""
        self._ask_store("set", f"{what}={self.rank}", value)
        self.meet(what)
        said = [self._ask_store("get", f"{what}={rank}") for rank in range(self.size)]
        return [rank for rank in range(self.size) if said[rank] != said[0]]

    @contextmanager
    def wait_for_others(self) -> Iterator[None]:
        """See `TPGroup`."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    @property
    def _name(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def _ask_store(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except RuntimeError as error:
            raise RankLostError(f"{self._name} lost the store of rank 0: {_cause(error)}") from error

    def _run(self, operation: Any, *arguments: Any) -> None:
        self.waiting = True
        try:
            operation(*arguments)
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
    # The store's own socket would listen on all interfaces, and it asks nobody who he is.
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
    """What happened, of a message of gloo's or NCCL's: without the place in their sources, and advice."""
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return _SOURCE_PLACE.sub("", first_line).partition(". ")[0]
