"""As much of Ray as the engine uses: what it is asked is noted, what it answers is set by the test."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

HERE, THERE = "10.0.0.1", "10.0.0.2"


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::RayNode.run()\n{cause}")
        self.cause = cause


class FakeGroup:
    def __init__(self, bundles: Sequence[dict[str, float]], strategy: str, granted: bool) -> None:
        self.bundles, self.strategy, self.granted = bundles, strategy, granted
        self.waits: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.granted


class FakeRay:
    """A cluster of two machines, of which this is the first.

    Attributes:
        clusters: addresses that `init` can join; "local" always works.
        granted: whether placement groups are.
        ended: what runs that have ended came to, by their reference.
        events: what happened, in order.
    """

    __version__ = "2.0"
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.clusters: dict[str, Exception | None] = {}
        self.granted = True
        self.ended: dict[Any, Any] = {"devices": "3"}
        self.events: list[Any] = []
        self.groups: list[FakeGroup] = []
        self.util = SimpleNamespace(
            placement_group=self._placement_group,
            remove_placement_group=lambda group: self.events.append("group removed"),
            placement_group_table=lambda group: {
                "bundles_to_node_id": {
                    rank: "b" if rank and group.strategy == "PACK" else "a"
                    for rank in range(len(group.bundles))
                }
            },
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda **fields: fields["placement_group_bundle_index"]
            ),
        )

    def init(self, address: str, **options: Any) -> None:
        self.events.append(f"init {address}")
        if address == "local":
            return
        error = self.clusters.get(address, ConnectionError("Could not find any running Ray instance."))
        if error is not None:
            raise error

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": "a", "Alive": True, "NodeManagerAddress": HERE, "Resources": {"CPU": 4.0, "GPU": 1.0}},
            {"NodeID": "b", "Alive": True, "NodeManagerAddress": THERE, "Resources": {"CPU": 8.0}},
            {"NodeID": "c", "Alive": False, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 16.0}},
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 2.5, "GPU": 1.0}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "a")

    def remote(self, what: Any) -> Any:
        return SimpleNamespace(options=lambda **options: _Maker(self, what.__name__, options))

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        result = self.ended[ref]
        if isinstance(result, Exception):
            raise result
        return result

    def wait(
        self, refs: list[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        self.events.append(f"waited {timeout:g}" if timeout else "looked")
        return [ref for ref in refs if ref in self.ended][:num_returns], []

    def kill(self, actor: Any) -> None:
        self.events.append(f"killed {actor.name}")

    def _placement_group(self, bundles: Sequence[dict[str, float]], strategy: str) -> FakeGroup:
        self.groups.append(FakeGroup(bundles, strategy, self.granted))
        return self.groups[-1]


class _Maker:
    def __init__(self, ray: FakeRay, name: str, options: dict[str, Any]) -> None:
        self._ray, self._name, self._options = ray, name, options

    def remote(self) -> Any:
        rank = self._options["scheduling_strategy"]
        self._ray.events.append((self._name, rank, self._options["num_cpus"], self._options["num_gpus"]))
        if self._name == "visible_devices":
            return "devices"
        return FakeActor(rank)


class FakeActor:
    """`run.remote(config, key)` gives `run of rank N`."""

    def __init__(self, rank: int) -> None:
        self.name = f"actor {rank}"
        self.orders: list[tuple[bytes, bytes]] = []
        self.run = SimpleNamespace(remote=self._run)
        self._rank = rank

    def _run(self, config: bytes, key: bytes) -> str:
        self.orders.append((config, key))
        return f"run of rank {self._rank}"


class ServerActorStub:
    """A `ServerActor` whose answers the test sets by `ActorRay.answers`."""

    def __init__(self, ray: ActorRay, options: dict[str, Any]) -> None:
        self.name, self.options = f"actor {len(ray.actors)}", options
        self.made: tuple[Any, ...] = ()
        self.calls: list[str] = []
        for name in ("status", "drain", "kill"):
            setattr(self, name, SimpleNamespace(remote=lambda name=name: self._call(name)))

    def remote(self, *args: Any) -> ServerActorStub:
        self.made = args
        return self

    def _call(self, name: str) -> str:
        self.calls.append(name)
        return f"{self.name} {name}"


class ActorRay(FakeRay):
    """Makes actors of a fleet."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[ServerActorStub] = []

    def remote(self, what: Any) -> Any:
        def make(**options: Any) -> ServerActorStub:
            self.actors.append(ServerActorStub(self, options))
            return self.actors[-1]

        return SimpleNamespace(options=make)

    def answers(self, actor: ServerActorStub, status: object) -> None:
        """What every call of the actor comes to from now on."""
        for name in ("status", "drain", "kill"):
            self.ended[f"{actor.name} {name}"] = status
