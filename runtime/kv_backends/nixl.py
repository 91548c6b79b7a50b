"""`--transfer-backend nixl`: NVIDIA's transfer library, which writes into the other engine's memory (UCX).

Calls as in nixl 1.5.1. Its progress thread spins on a core, so it is off, and both sides make progress by polling while
claims are open. Posting is asynchronous over TCP; over shared memory it copies at once, in the thread of the link.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..transport.cluster_ipc import is_loopback
from ..transport.message_base import Record
from .base import Pages, PoolMemory, TransferError

_MODULES: Final = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_INITIATOR: Final = "NIXL_INIT_AGENT"


class _Target(Record, frozen=True):
    """Description of the other side for a writer.

    Attributes:
        metadata: of its agent.
        regions: (address, bytes of a page, pages) of each tensor.
        device_id: as in `PoolMemory`.
    """

    metadata: bytes
    regions: tuple[tuple[int, int, int], ...]
    device_id: int | None


class _Agent:
    """An agent with the registered pool."""

    def __init__(self, memory: PoolMemory, host: str) -> None:
        api = _import()
        if is_loopback(host):  # UCX's own choice includes the address of the machine
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self.memory = memory
        self.mem_type = mem_type_of(memory.device_id)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self.agent = api.nixl_agent(f"engine-{os.getpid()}-{uuid.uuid4().hex}", config)
            device = memory.device_id or 0
            whole = [
                (address, page_bytes * num_pages, device, "")
                for address, page_bytes, num_pages in memory.regions
            ]
            self.registered = self.agent.register_memory(whole, mem_type=self.mem_type)
        except Exception as error:
            raise ConfigError(
                f"transfer_backend is nixl, but NIXL cannot use this machine: {error}; try --transfer-backend local"
            ) from error

    def close(self) -> None:
        self.agent.deregister_memory(self.registered)


class _Write:
    """Pages that NIXL writes."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def is_done(self) -> bool:
        try:
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
            if self._state == "PROC":
                return False
            self._handle.release()
        except Exception as error:
            raise TransferError(f"nixl: {error}") from error
        if self._state != "DONE":
            raise TransferError(f"nixl: the transfer ended as {self._state}")
        return True


class NixlWriter:
    """See `PageWriter`."""

    def __init__(self, memory: PoolMemory, host: str) -> None:
        """Register the pool.

        Raises:
            ConfigError: NIXL is missing, or cannot use this machine.
        """
        self._own = _Agent(memory, host)
        self._agent = self._own.agent
        table = page_table(memory.regions, memory.device_id)
        self._sources = self._agent.prep_xfer_dlist(_INITIATOR, table, mem_type=self._own.mem_type)
        _, _, self._num_pages = memory.regions[0]
        self._peers: dict[str, tuple[str, Any, int]] = {}  # peer -> its agent, prepared pages, their number

    def add_peer(self, peer: str, target: bytes) -> None:
        self.drop_peer(peer)
        try:
            theirs = msgspec.msgpack.decode(target, type=_Target)
            name = self._agent.add_remote_agent(theirs.metadata)
            table = page_table(theirs.regions, theirs.device_id)
            pages = self._agent.prep_xfer_dlist(name, table, mem_type=mem_type_of(theirs.device_id))
        except Exception as error:
            raise TransferError(f"nixl: {error}") from error
        self._peers[peer] = name, pages, theirs.regions[0][2]

    def drop_peer(self, peer: str) -> None:
        if peer in self._peers:
            name, pages, _ = self._peers.pop(peer)
            try:
                pages.release()
                self._agent.remove_remote_agent(name)
            except Exception:
                pass

    def write(self, peer: str, sources: Pages, targets: Pages) -> _Write:
        if peer not in self._peers:
            raise TransferError(f"nixl: {peer} is not known")
        _, pages, num_pages = self._peers[peer]
        num_regions = len(self._own.memory.regions)
        here = rows_of(sources, self._num_pages, num_regions)
        there = rows_of(targets, num_pages, num_regions)
        try:
            handle = self._agent.make_prepped_xfer("WRITE", self._sources, here, pages, there)
            return _Write(self._agent, handle, self._agent.transfer(handle))
        except Exception as error:
            raise TransferError(f"nixl: {error}") from error

    def close(self) -> None:
        for peer in list(self._peers):
            self.drop_peer(peer)
        self._sources.release()
        self._own.close()


class NixlTarget:
    """See `PageTarget`."""

    polls = True

    def __init__(self, memory: PoolMemory, host: str) -> None:
        """Register the pool.

        Raises:
            ConfigError: NIXL is missing, or cannot use this machine.
        """
        self._own = _Agent(memory, host)

    def target(self) -> bytes:
        memory = self._own.memory
        metadata = self._own.agent.get_agent_metadata()
        regions = tuple((address, size, count) for address, size, count in memory.regions)
        own = _Target(metadata, regions, memory.device_id)
        return msgspec.msgpack.encode(own)

    def progress(self) -> None:
        self._own.agent.get_new_notifs()

    def close(self) -> None:
        self._own.close()


def page_table(regions: Sequence[tuple[int, int, int]], device_id: int | None) -> npt.NDArray[np.uint64]:
    """[regions * pages, 3] address, length and device of each page of each tensor; pages vary fastest."""
    parts = []
    for address, page_bytes, num_pages in regions:
        part = np.empty((num_pages, 3), dtype=np.uint64)
        part[:, 0] = address + np.arange(num_pages, dtype=np.uint64) * np.uint64(page_bytes)
        part[:, 1] = page_bytes
        part[:, 2] = device_id or 0
        parts.append(part)
    return np.concatenate(parts)


def rows_of(pages: Pages, num_pages: int, num_regions: int) -> npt.NDArray[np.int32]:
    """[regions * n] rows of `page_table` of these pages, in all tensors."""
    begins = np.arange(num_regions, dtype=np.int64)[:, None] * num_pages
    return (begins + pages[None, :]).astype(np.int32).ravel()


def mem_type_of(device_id: int | None) -> str:
    """NIXL's word for the memory of a device."""
    return "DRAM" if device_id is None else "VRAM"


def _import() -> Any:
    reasons = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise ConfigError(
        f"transfer_backend is nixl, but it cannot be imported ({reasons[0]}); pip install nixl-cu12 (or nixl-cu13), or "
        "use --transfer-backend local"
    )
