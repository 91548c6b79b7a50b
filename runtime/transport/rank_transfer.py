"""Messages between rank 0's link of KV transfers, or its disk tier, and the `TransferWorker`s of the other ranks.

Rank 0 gives orders, each with a number that it never uses twice. A worker answers each with one `OrderDone`, in any
order; rank 0 ignores answers to orders that it does not wait for any more. Orders are taken in the order in which they
were sent, so a peer is known before pages are written to it.
"""

from __future__ import annotations

from .message_base import Message, ProcessIdentity

# ---------------------------------------------------------------- rank 0 -> worker


class AddPeer(Message, frozen=True):
    """A decode engine has come; `target`: of its rank with the worker's number."""

    order: int
    peer: str
    target: bytes


class DropPeer(Message, frozen=True):
    """A decode engine has left; nothing is under way to it. Not answered."""

    peer: str


class WriteOwnPages(Message, frozen=True):
    """Write pages of the worker's pool into that of its counterpart.

    Attributes:
        sources, targets: [n] int32 each.
        step_id: not before the worker's rank has computed this step.
    """

    order: int
    peer: str
    sources: bytes
    targets: bytes
    step_id: int


class ReadOwnPages(Message, frozen=True):
    """Answer with the bytes of pages ([n] int32): a frame for each tensor of the pool. `step_id`: as above."""

    order: int
    pages: bytes
    step_id: int


class StoreOwnPages(Message, frozen=True):
    """Write the frames that follow, one for each tensor of the pool, into pages ([n] int32)."""

    order: int
    pages: bytes


class ReadRows(Message, frozen=True):
    """Answer with pages ([n] int32) in one frame, [n, page bytes]; for a disk. Of `states`, the slots are the pages.

    Attributes:
        step_id: as above.
    """

    order: int
    pages: bytes
    step_id: int
    states: bool = False


class WriteRows(Message, frozen=True):
    """Write the frame that follows into pages; the fields are those of `ReadRows`."""

    order: int
    pages: bytes
    step_id: int
    states: bool = False


class MakeProgress(Message, frozen=True):
    """Claims are open: let the backend make progress for `PROGRESS_S`. Not answered."""


PROGRESS_S = 1.0

Order = AddPeer | WriteOwnPages | ReadOwnPages | StoreOwnPages | ReadRows | WriteRows
ToWorker = Order | DropPeer | MakeProgress

# ---------------------------------------------------------------- worker -> rank 0


class WorkerReady(Message, frozen=True):
    """The first message of a worker.

    Attributes:
        process: of its rank.
        tensors: (dtype, bytes of a page) of each tensor of its pool.
        target: of its backend, on the decode side; b"" if there is none.
        states: (dtype, bytes of a slot) of each part of its checkpoints; none without state layers.
    """

    process: ProcessIdentity
    tensors: tuple[tuple[str, int], ...]
    target: bytes = b""
    states: tuple[tuple[str, int], ...] = ()


class OrderDone(Message, frozen=True):
    """An order has ended. `error`: why it failed; nothing of it reaches the other engine any more."""

    order: int
    error: str = ""


FromWorker = WorkerReady | OrderDone


def worker_name(rank: int, life: int) -> str:
    """The name of a worker on its connection; `life`: of the group of ranks, so that no earlier one is taken for it."""
    return f"rank {rank} of life {life}"
