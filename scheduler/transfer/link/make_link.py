"""`make_link`: the `KVTransfer` of a scheduler's process, as `--disaggregation-mode` and `--transfer-backend` say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import ConfigError
from ....runtime.transport.cluster_ipc import is_loopback
from ....runtime.transport.cluster_key import ClusterKey, load_cluster_key
from ....runtime.transport.kv_transfer import KVLayout, TransferCommand

if TYPE_CHECKING:
    from .backends.base import PageTarget, PageWriter, PoolMemory

logger = logging.getLogger(__name__)


class KVTransfer(Protocol):
    """Does what the scheduler orders, beside its loop; news come to the scheduler's inbox."""

    def send(self, commands: Sequence[TransferCommand]) -> None:
        """Never blocks."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class NoKVTransfer:
    """`--disaggregation-mode null`."""

    def send(self, commands: Sequence[TransferCommand]) -> None:
        pass

    def close(self) -> None:
        pass


def make_link(
    config: EngineConfig, memory: PoolMemory, layout: KVLayout, scheduler: str, *, vocab_size: int
) -> KVTransfer:
    """Make that of a disaggregated engine, listening or ready to connect.

    Args:
        memory: of the pool with the pages to exchange.
        layout: of the pool.
        vocab_size: of the model.
        scheduler: endpoint of the scheduler's inbox.

    Raises:
        ConfigError: the port cannot be listened at, the backend's library is missing or unusable, or the key of the
            connections is missing.
    """
    backend, key = config.server.transfer_backend, link_key(config)
    if config.scheduler.disaggregation_mode == "prefill":
        from .prefill_link import PrefillLink

        server = config.server
        link = PrefillLink(
            host=server.host,
            port=server.bootstrap_port,
            key=key,
            layout=layout,
            backend=backend,
            writer=_writer(backend, memory, server.host),
            scheduler=scheduler,
        )
        logger.info(
            "decode engines may connect at %s:%d backend=%s", server.host, server.bootstrap_port, backend
        )
        return link
    from .decode_link import DecodeLink

    return DecodeLink(
        key=key,
        layout=layout,
        backend=backend,
        target=_target(backend, memory, config.server.host),
        vocab_size=vocab_size,
        scheduler=scheduler,
    )


def link_key(config: EngineConfig) -> ClusterKey | None:
    """The key of the connections; None on a loopback address without one.

    Raises:
        ConfigError: other machines can connect, and there is no key; or its file is wrong.
    """
    path = config.parallel.cluster_key_file
    if path is not None:
        return load_cluster_key(path)
    if not is_loopback(config.server.host):
        raise ConfigError(
            f"host is {config.server.host} with --disaggregation-mode, so that KV crosses a network, but no key "
            "protects it; name a file with --cluster-key-file on all engines, or listen on 127.0.0.1"
        )
    return None


def _writer(backend: str, memory: PoolMemory, host: str) -> PageWriter:
    match backend:
        case "nixl":
            from .backends.nixl import NixlWriter

            return NixlWriter(memory, host)
        case "mooncake":
            from .backends.mooncake import MooncakeWriter

            return MooncakeWriter(memory, host)
        case _:
            from .backends.local import LocalWriter

            return LocalWriter(memory)


def _target(backend: str, memory: PoolMemory, host: str) -> PageTarget:
    match backend:
        case "nixl":
            from .backends.nixl import NixlTarget

            return NixlTarget(memory, host)
        case "mooncake":
            from .backends.mooncake import MooncakeTarget

            return MooncakeTarget(memory, host)
        case _:
            from .backends.local import LocalTarget

            return LocalTarget(memory)
