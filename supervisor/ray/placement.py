"""`RayPlaces`: a place on Ray for each rank: one placement group with one bundle per rank, and an actor in each but 0.

Bundle 0 is pinned to this machine by the resource `node:<address>` that every machine of a cluster has: rank 0 runs
with the server, not in an actor. On CUDA a short task in bundle 0 reports which GPU is rank 0's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ...launch.resolve.model_resolution import find_model, read_model
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from ...runtime.logs import configure_logging
from ...runtime.transport.cluster_ipc import is_loopback, key_in_memory, parse_address
from ..node_supervisor import NodeSupervisor
from .cluster import RayCluster, why_it_died


class RayNode:
    """One machine; its method runs in the main thread of the actor's process, which `NodeSupervisor` needs."""

    def run(self, config: bytes, key: bytes) -> tuple[int, str]:
        """Run this machine's ranks until the engine ends.

        Args:
            config: an encoded `EngineConfig`, resolved, with this machine's `node_rank`.
            key: the text of the secret that the machines share.

        Returns:
            Exit code and cause, as from `NodeSupervisor`.
        """
        own = msgspec.msgpack.decode(config, type=EngineConfig)
        configure_logging(own.log, "supervisor")
        try:
            source = find_model(own.model)
            spec = read_model(own.model, source).spec
            with key_in_memory(key) as key_file:
                parallel = dataclasses.replace(own.parallel, cluster_key_file=key_file)
                outcome = NodeSupervisor(dataclasses.replace(own, parallel=parallel), source, spec).run()
        except ConfigError as error:
            return 2, str(error)
        return outcome.exit_code, outcome.message


def visible_devices() -> str | None:
    """The GPUs that Ray has assigned to the current task, in CUDA's notation."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


_HERE: Final = 0.001  # share of a machine's `node:<address>`, of which it has 1
_OWN_PLACEMENT_S: Final = 10.0  # a Ray that was started here gets no more machines
_POLL_S: Final = 1.0
_DEVICE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RayPlaces:
    """The places that Ray has granted.

    Attributes:
        address: of this machine.
        machines: rank -> address of its machine; 0 is this one.
        actors: rank -> Ray's handle; none for 0.
        devices: of rank 0, in CUDA's notation; None on the CPU.
    """

    address: str
    machines: dict[int, str]
    actors: dict[int, Any]
    devices: str | None


@contextmanager
def ray_places(cluster: RayCluster, config: EngineConfig, go_on: Callable[[], bool]) -> Iterator[RayPlaces]:
    """Reserve the places and start the actors; at the end, kill them and release the places.

    Args:
        config: resolved.
        go_on: called once a second: whether to keep waiting.

    Raises:
        ConfigError: the cluster did not grant them within the startup timeout, or the supervisor has ended.
    """
    ray = cluster.ray
    with ExitStack() as stack:
        group = stack.enter_context(_placement_group(cluster, config, go_on))
        machines = _machines(cluster, group)
        devices = _devices(ray, group) if config.model.device == "cuda" else None
        actors = {}
        for rank in range(1, config.parallel.tp):
            actors[rank] = _start_actor(ray, group, config, rank)
            stack.callback(_kill, ray, actors[rank])
        yield RayPlaces(cluster.address, machines, actors, devices)


def bundles(config: EngineConfig, own_address: str) -> list[dict[str, float]]:
    """The resources of each rank in Ray's units; the first bundle is on this machine."""
    each = _needs(config)
    first = {**each, f"node:{own_address}": _HERE}
    return [first, *(dict(each) for _ in range(1, config.parallel.tp))]


def _needs(config: EngineConfig) -> dict[str, float]:
    if config.model.device == "cuda":
        return {"CPU": 1, "GPU": 1}
    assert config.model.num_threads != "auto", "the configuration is not resolved"
    return {"CPU": config.model.num_threads}


@contextmanager
def _placement_group(cluster: RayCluster, config: EngineConfig, go_on: Callable[[], bool]) -> Iterator[Any]:
    ray, timeout_s, strategy = cluster.ray, config.server.startup_timeout, _strategy(cluster, config)
    if cluster.is_own:
        timeout_s = min(timeout_s, _OWN_PLACEMENT_S)
    group = ray.util.placement_group(bundles(config, cluster.address), strategy=strategy)
    try:
        waited_s = 0.0
        while not group.wait(min(_POLL_S, timeout_s)):
            waited_s += _POLL_S
            if waited_s >= timeout_s or not go_on():
                raise ConfigError(_no_place(cluster, config, strategy, timeout_s))
        yield group
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(group)


def _strategy(cluster: RayCluster, config: EngineConfig) -> str:
    address = config.parallel.dist_init_addr
    only_here = cluster.is_own or (address is not None and is_loopback(parse_address(address)[0]))
    return "STRICT_PACK" if only_here else "PACK"


def _no_place(cluster: RayCluster, config: EngineConfig, strategy: str, timeout_s: float) -> str:
    each = " and ".join(f"{name} {amount:g}" for name, amount in _needs(config).items())
    here = "all of them" if strategy == "STRICT_PACK" else "the first"
    fixes = ["lower --tp"]
    if config.model.device == "cpu":
        fixes.append("lower --num-threads")
    if cluster.is_own:
        fixes.append("make a cluster of several machines with `ray start`")
    else:
        fixes += ["stop what uses the rest", "raise --startup-timeout for a cluster that grows"]
    return (
        f"tp is {config.parallel.tp}, so Ray was asked for {config.parallel.tp} bundles of {each}, {here} on this "
        f"machine ({cluster.address}), and did not grant them within {timeout_s:g} s; the cluster has "
        f"{cluster.describe()}; {', '.join(fixes[:-1])}, or {fixes[-1]}"
    )


def _machines(cluster: RayCluster, group: Any) -> dict[int, str]:
    table = cluster.ray.util.placement_group_table(group)
    addresses = cluster.addresses()
    return {rank: addresses.get(node, node) for rank, node in sorted(table["bundles_to_node_id"].items())}


def _devices(ray: Any, group: Any) -> str | None:
    task = ray.remote(visible_devices).options(
        num_cpus=0, num_gpus=1, scheduling_strategy=_in_bundle(ray, group, 0)
    )
    try:
        devices: str | None = ray.get(task.remote(), timeout=_DEVICE_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise ConfigError(f"Ray does not say which GPU is rank 0's: {why_it_died(error)}") from error
    return devices


def _start_actor(ray: Any, group: Any, config: EngineConfig, rank: int) -> Any:
    needs = _needs(config)
    actor = ray.remote(RayNode).options(
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        scheduling_strategy=_in_bundle(ray, group, rank),
    )
    return actor.remote()


def _in_bundle(ray: Any, group: Any, rank: int) -> Any:
    return ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank
    )


def _kill(ray: Any, actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)
