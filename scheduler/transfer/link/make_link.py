"""`make_link`: the link of a disaggregated engine, as `--disaggregation-mode` and `--transfer-backend` say."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ....launch.child.control import Endpoints
from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import ConfigError
from ....runtime.kv_backends.make_backend import make_target, make_writer
from ....runtime.transport.cluster_ipc import ClusterKey, is_loopback, load_cluster_key
from ....runtime.transport.kv_transfer import KVLayout
from ....runtime.transport.message_base import own_identity
from .local_pages import LocalReceiver, LocalSender
from .pages import DirectReceiver, DirectSender
from .ranks import Ranks

if TYPE_CHECKING:
    from ....runtime.kv_backends.base import PoolMemory
    from .link_thread import LinkThread

logger = logging.getLogger(__name__)


def make_link(
    config: EngineConfig,
    memory: PoolMemory,
    layout: KVLayout,
    endpoints: Endpoints,
    *,
    life: int,
    vocab_size: int,
) -> LinkThread:
    """Make the link of a disaggregated engine, listening or ready to connect.

    Args:
        memory: of rank 0's pool with the pages to exchange.
        layout: of the pool.
        endpoints: of the engine's processes.
        life: of the group of ranks.
        vocab_size: of the model.

    Raises:
        ConfigError: the port cannot be listened at, the backend's library is missing or unusable, or the key of the
            connections is missing.
        RankLostError: another rank has not come in time.
    """
    key = link_key(config)
    ranks = Ranks(endpoints.kv_transfer, config.parallel.num_ranks, life)
    try:
        if config.scheduler.disaggregation_mode == "prefill":
            return _make_prefill_link(config, memory, layout, endpoints, ranks, key)
        return _make_decode_link(config, memory, layout, endpoints, ranks, key, vocab_size)
    except BaseException:
        ranks.close()
        raise


def _make_prefill_link(
    config: EngineConfig,
    memory: PoolMemory,
    layout: KVLayout,
    endpoints: Endpoints,
    ranks: Ranks,
    key: ClusterKey | None,
) -> LinkThread:
    from .prefill_link import PrefillLink

    server = config.server
    writer = make_writer(server.transfer_backend, memory, server.host)
    ranks.wait(server.startup_timeout)
    link = PrefillLink(
        host=server.host,
        port=server.bootstrap_port,
        key=key,
        layout=ranks.complete(layout),
        backend=server.transfer_backend,
        sender=LocalSender(memory, ranks) if writer is None else DirectSender(writer, ranks),
        processes=[own_identity(), *(worker.process for worker in ranks.workers)],
        scheduler=endpoints.scheduler,
    )
    where = server.host, server.bootstrap_port, server.transfer_backend
    logger.info("decode engines may connect at %s:%d backend=%s", *where)
    return link


def _make_decode_link(
    config: EngineConfig,
    memory: PoolMemory,
    layout: KVLayout,
    endpoints: Endpoints,
    ranks: Ranks,
    key: ClusterKey | None,
    vocab_size: int,
) -> LinkThread:
    from .decode_link import DecodeLink

    server = config.server
    target = make_target(server.transfer_backend, memory, server.host)
    ranks.wait(server.startup_timeout)
    return DecodeLink(
        key=key,
        layout=ranks.complete(layout),
        backend=server.transfer_backend,
        receiver=LocalReceiver(memory, ranks) if target is None else DirectReceiver(target, ranks),
        vocab_size=vocab_size,
        scheduler=endpoints.scheduler,
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
