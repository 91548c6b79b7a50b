"""`--transfer-backend mooncake`: Mooncake's transfer engine, which writes into the other engine's memory (TCP, RDMA).

Calls as in mooncake-transfer-engine 0.3.13. A write blocks, so it is made by a thread. More than 2,048 pieces in one
call fail at once over TCP.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec
import numpy as np

from ..errors import ConfigError
from ..transport.message_base import Record
from .base import Pages, PoolMemory, TransferError

Regions = Sequence[tuple[int, int, int]]

_MAX_PIECES: Final = 2048


class _Target(Record, frozen=True):
    """Description of the other side: its session, and (address, bytes of a page, pages) of each tensor."""

    session: str
    regions: tuple[tuple[int, int, int], ...]


class _Engine:
    """Mooncake's engine with the registered pool."""

    def __init__(self, memory: PoolMemory, host: str) -> None:
        # A write to a frozen engine fails after 10 s instead of 30.
        os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "10")
        os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", "10")
        self.memory = memory
        self.engine = _import().TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", os.environ.get("MOONCAKE_PROTOCOL", "tcp"), ""):
            raise ConfigError(f"transfer_backend is mooncake, but its engine does not start at {host}")
        for address, page_bytes, num_pages in memory.regions:
            if self.engine.register_memory(address, page_bytes * num_pages):
                raise ConfigError(
                    "transfer_backend is mooncake, but it cannot register the KV pool; see its log"
                )
        self.session = f"{host}:{self.engine.get_rpc_port()}"

    def close(self) -> None:
        for address, _, _ in self.memory.regions:
            self.engine.unregister_memory(address)


class _Write:
    """Pages that the thread writes."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def is_done(self) -> bool:
        if not self._future.done():
            return False
        if self._future.cancelled():
            raise TransferError("mooncake: the peer was lost before the write began")
        if self._future.result():
            raise TransferError("mooncake: the write failed; its log has the reason")
        return True


class MooncakeWriter:
    """See `PageWriter`."""

    def __init__(self, memory: PoolMemory, host: str) -> None:
        """Register the pool.

        Raises:
            ConfigError: Mooncake is missing, or cannot use this machine.
        """
        self._own = _Engine(memory, host)
        self._peers: dict[str, tuple[str, Regions]] = {}
        # One thread for each peer: a slow one delays no other.
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def add_peer(self, peer: str, target: bytes) -> None:
        try:
            theirs = msgspec.msgpack.decode(target, type=_Target)
        except msgspec.MsgspecError as error:
            raise TransferError(f"mooncake: {error}") from error
        if [size for _, size, _ in theirs.regions] != [size for _, size, _ in self._own.memory.regions]:
            # `_write` reads as many bytes as the other pool has.
            raise TransferError("mooncake: its pool has other tensors")
        self.drop_peer(peer)
        self._peers[peer] = theirs.session, theirs.regions
        self._threads[peer] = ThreadPoolExecutor(1, thread_name_prefix="mooncake")

    def drop_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)
        if (threads := self._threads.pop(peer, None)) is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def write(self, peer: str, sources: Pages, targets: Pages) -> _Write:
        if peer not in self._peers:
            raise TransferError(f"mooncake: {peer} is not known")
        session, regions = self._peers[peer]
        return _Write(
            self._threads[peer].submit(self._write, session, regions, sources.copy(), targets.copy())
        )

    def close(self) -> None:
        for peer in list(self._peers):
            self.drop_peer(peer)
        self._own.close()

    def _write(self, session: str, regions: Regions, sources: Pages, targets: Pages) -> int:
        here = np.concatenate([_addresses(each, sources) for each in self._own.memory.regions])
        there = np.concatenate([_addresses(each, targets) for each in regions])
        sizes = np.repeat([page_bytes for _, page_bytes, _ in regions], len(targets))
        for begin in range(0, len(here), _MAX_PIECES):
            piece = slice(begin, begin + _MAX_PIECES)
            failed = self._own.engine.batch_transfer_sync_write(
                session, here[piece].tolist(), there[piece].tolist(), sizes[piece].tolist()
            )
            if failed:
                return int(failed)
        return 0


class MooncakeTarget:
    """See `PageTarget`. Mooncake's own threads take the pages."""

    polls = False

    def __init__(self, memory: PoolMemory, host: str) -> None:
        """Register the pool.

        Raises:
            ConfigError: Mooncake is missing, or cannot use this machine.
        """
        self._own = _Engine(memory, host)

    def target(self) -> bytes:
        regions = tuple((address, size, count) for address, size, count in self._own.memory.regions)
        return msgspec.msgpack.encode(_Target(self._own.session, regions))

    def progress(self) -> None:
        pass

    def close(self) -> None:
        self._own.close()


def _addresses(region: tuple[int, int, int], pages: Pages) -> np.ndarray[Any, np.dtype[np.int64]]:
    address, page_bytes, _ = region
    return address + pages.astype(np.int64) * page_bytes


def _import() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(
            f"transfer_backend is mooncake, but it cannot be imported ({error}); pip install "
            "mooncake-transfer-engine-non-cuda (on GPUs mooncake-transfer-engine) and, on Debian, apt install "
            "libibverbs1; or use --transfer-backend local"
        ) from None
