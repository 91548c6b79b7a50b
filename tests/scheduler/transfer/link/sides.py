"""`Side`: one engine's link with the pools of its ranks and the inbox of its scheduler; two of them are connected."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from engine.model_runner.distributed.transfer_worker import ComputedSteps, TransferWorker
from engine.model_runner.memory.kv_pool import KVPool
from engine.model_runner.memory.page_memory import PageMemory
from engine.runtime.kv_backends.base import PageTarget, PageWriter
from engine.runtime.messages import SchedulerInput
from engine.runtime.transport.cluster_ipc import ClusterKey
from engine.runtime.transport.ipc import Inbox
from engine.runtime.transport.kv_transfer import Claim, KVLayout, ToPeer, digest_of
from engine.runtime.transport.message_base import ProcessIdentity, own_identity
from engine.runtime.transport.rank_transfer import worker_name
from engine.scheduler.transfer.link.decode_link import DecodeLink
from engine.scheduler.transfer.link.local_pages import LocalReceiver, LocalSender
from engine.scheduler.transfer.link.pages import PageReceiver, PageSender
from engine.scheduler.transfer.link.prefill_link import PrefillLink
from engine.scheduler.transfer.link.ranks import Ranks

WAIT_S = 30.0
NUM_PAGES = 8

MakeSides = Callable[..., "tuple[Side, Side, str]"]
MakeBackend = Callable[[PageMemory], Any]


def make_pool() -> KVPool:
    return KVPool(
        num_layers=2,
        num_pages=NUM_PAGES,
        page_size=4,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


class LaterTime:
    """The `time` of a link, which a test can put forward."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.added_s


class Side:
    """One engine.

    Attributes:
        pools, memories: of its ranks.
        workers: of the ranks 1, 2, ...
        link: once it is made.
    """

    def __init__(self, folder: Path, num_ranks: int = 1) -> None:
        self.endpoint = f"ipc://{folder}/{secrets.token_hex(4)}"
        decoder: msgspec.msgpack.Decoder[SchedulerInput] = msgspec.msgpack.Decoder(SchedulerInput)
        self.inbox = Inbox(self.endpoint, decoder)
        self.pools = [make_pool() for _ in range(num_ranks)]
        self.memories = [PageMemory(pool.views) for pool in self.pools]
        self._rank_endpoint = f"ipc://{folder}/{secrets.token_hex(4)}"
        self.workers: list[TransferWorker] = []
        self.link: Any = None
        self._news: list[SchedulerInput] = []

    @property
    def pool(self) -> KVPool:
        return self.pools[0]

    @property
    def memory(self) -> PageMemory:
        return self.memories[0]

    def ranks(self, writer: MakeBackend | None = None, target: MakeBackend | None = None) -> Ranks:
        """Start the workers of the other ranks; `writer`, `target`: make their backends."""
        ranks = Ranks(self._rank_endpoint, len(self.pools), life=0)
        for rank, memory in enumerate(self.memories[1:], 1):
            own_writer: PageWriter | None = writer and writer(memory)
            own_target: PageTarget | None = target and target(memory)
            computed = ComputedSteps(torch.device("cpu"))
            name = worker_name(rank, 0)
            worker = TransferWorker(
                self._rank_endpoint, name, memory, writer=own_writer, target=own_target, computed=computed
            )
            self.workers.append(worker)
        ranks.wait(WAIT_S)
        return ranks

    def layout(self) -> KVLayout:
        others = tuple(digest_of(memory.tensors) for memory in self.memories[1:])
        return KVLayout("1", "w", 4, self.memory.tensors, tp=len(self.pools), others=others)

    def fill(self) -> None:
        """With values that are different in each page of each rank."""
        for pool in self.pools:
            for view in pool.page_views:
                view.normal_()

    def next(self) -> SchedulerInput:
        """The next news of the link."""
        if not self._news:
            self._news = self.inbox.poll(WAIT_S)
        assert self._news, "no news"
        return self._news.pop(0)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None
        for worker in self.workers:
            worker.close()
            worker.check()
        self.workers = []
        self.inbox.close()


def make_prefill_link(
    side: Side,
    port: int,
    key: ClusterKey | None = None,
    make_sender: Callable[[PageMemory, Ranks], PageSender] = LocalSender,
    processes: Sequence[ProcessIdentity] = (),
    writer: MakeBackend | None = None,
) -> PrefillLink:
    return PrefillLink(
        host="127.0.0.1",
        port=port,
        key=key,
        layout=side.layout(),
        backend="local",
        sender=make_sender(side.memory, side.ranks(writer=writer)),
        processes=processes or [own_identity()],
        scheduler=side.endpoint,
    )


def make_decode_link(
    side: Side,
    *,
    key: ClusterKey | None = None,
    layout: KVLayout | None = None,
    backend: str = "local",
    make_receiver: Callable[[PageMemory, Ranks], PageReceiver] = LocalReceiver,
    target: MakeBackend | None = None,
) -> DecodeLink:
    return DecodeLink(
        key=key,
        layout=layout or side.layout(),
        backend=backend,
        receiver=make_receiver(side.memory, side.ranks(target=target)),
        vocab_size=97,
        scheduler=side.endpoint,
    )


@contextmanager
def connected_sides() -> Iterator[MakeSides]:
    """A function that makes a prefill and a decode side, and returns both and the address of the first one."""
    folder = Path("/tmp") / f"link-{secrets.token_hex(6)}"  # the path of a Unix socket must be short
    folder.mkdir(mode=0o700)
    with ExitStack() as stack:

        def make(num_ranks: int = 1, **changes: Any) -> tuple[Side, Side, str]:
            prefill, decode = sides = [Side(folder, num_ranks) for _ in range(2)]
            for side in sides:
                stack.callback(side.close)
            port = free_port()
            prefill.link = make_prefill_link(
                prefill,
                port,
                changes.get("prefill_key"),
                changes.get("sender", LocalSender),
                changes.get("processes", ()),
                changes.get("writer"),
            )
            decode.link = make_decode_link(
                decode,
                key=changes.get("decode_key"),
                layout=changes.get("layout"),
                backend=changes.get("backend", "local"),
                make_receiver=changes.get("receiver", LocalReceiver),
                target=changes.get("target"),
            )
            return prefill, decode, f"127.0.0.1:{port}"

        yield make
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.PULL) as probe:
        port: int = probe.bind_to_random_port("tcp://127.0.0.1")
        return port


def ids(*pages: int) -> bytes:
    return np.array(pages, dtype=np.int32).tobytes()


def claim(decode: Side, peer: str, *, bootstrap_room: str = "a", attempt: int = 1) -> Claim:
    """Send a claim for pages 5 and 6 of the decode side."""
    message = Claim(bootstrap_room, attempt, 0, ids(5, 6), 7)
    decode.link.send([ToPeer(peer, message)])
    return message
