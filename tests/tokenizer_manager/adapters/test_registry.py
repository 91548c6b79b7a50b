"""`AdapterRegistry`: names and store ids through loads and unloads, also when they fail or are canceled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.launch.child.control import SetAdapters
from engine.runtime.adapter_spec import AdapterSpec
from engine.runtime.config.adapter_config import AdapterConfig
from engine.runtime.errors import EngineDeadError, RequestError
from engine.runtime.messages import AdapterDone
from engine.tokenizer_manager.adapters.adapter_list import AdapterList
from engine.tokenizer_manager.adapters.registry import AdapterRegistry
from tests.adapter_files import loaded, write_adapter

from ..fake_engine import MODEL, SPEC

Run = Callable[..., None]


class World:
    """A registry between a scheduler and requests that the test moves.

    Attributes:
        stored: fingerprint by store id: what the scheduler has.
        events: in order: ("load" | "unload", store id), ("tell", names).
        gate: while cleared, loads do not end.
        error: of loads; raised if it is an exception.
    """

    def __init__(self, root: Path, names: tuple[str, ...] = (), **config: Any) -> None:
        self.root = root
        self.stored: dict[int, str] = {}
        self.events: list[tuple[str, Any]] = []
        self.users: Counter[str] = Counter()
        self.failed: list[tuple[str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: str | EngineDeadError = ""
        self._ended = asyncio.Event()
        settings = {"allow_runtime_lora": True, "lora_root": str(root), "max_lora_rank": 8, **config}
        adapters = [
            loaded(self.write(name, seed), SPEC, seed, name, pinned=True)
            for seed, name in enumerate(names, start=1)
        ]
        self.stored = {each.store_id: each.spec.fingerprint for each in adapters}
        self.registry = AdapterRegistry(
            AdapterList(SPEC, AdapterConfig(**settings), adapters, model_name=MODEL),
            AdapterConfig(**settings),
            calls=self,
            users=self,
            order_all=self.tell,
        )

    def write(self, folder: str, seed: int, **options: Any) -> Path:
        return write_adapter(self.root / folder, SPEC, seed=seed, **options)

    # ---- the scheduler

    async def load_adapter(self, store_id: int, adapter: AdapterSpec) -> AdapterDone:
        self.events.append(("load", store_id))
        assert store_id not in self.stored and adapter.fingerprint not in self.stored.values()
        await self.gate.wait()
        if isinstance(self.error, EngineDeadError):
            raise self.error
        if not self.error:
            self.stored[store_id] = adapter.fingerprint
        return AdapterDone(self.error)

    async def unload_adapter(self, store_id: int) -> AdapterDone:
        self.events.append(("unload", store_id))
        self.stored.pop(store_id, None)
        return AdapterDone()

    def tell(self, order: object) -> bool:
        assert isinstance(order, SetAdapters)
        self.events.append(("tell", [each.spec.name for each in order.adapters]))
        return True

    # ---- the requests

    def start(self, name: str) -> str:
        """A request of this adapter starts; returns its fingerprint."""
        fingerprint = self.registry.required(name, "model").spec.fingerprint
        self.users[fingerprint] += 1
        return fingerprint

    def end(self, fingerprint: str) -> None:
        self.users[fingerprint] -= 1
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()

    async def wait_unused(self, lora_id: str) -> None:
        while self.users[lora_id]:
            await self._ended.wait()

    def num_users(self, lora_id: str) -> int:
        return self.users[lora_id]

    def fail_users(self, lora_id: str, message: str) -> None:
        self.failed.append((lora_id, message))
        while self.users[lora_id]:
            self.end(lora_id)

    # ---- what the test asks

    @property
    def names(self) -> list[str]:
        return [each.spec.name for each in self.registry.adapters]

    def check(self) -> None:
        """When nothing is under way: the scheduler has exactly the named adapters and those with users."""
        named = {each.store_id: each.spec.fingerprint for each in self.registry.adapters}
        assert named.items() <= self.stored.items()
        assert all(self.users[f] for number, f in self.stored.items() if number not in named)

    async def settle(self) -> None:
        """Let all tasks run that can."""
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def run(main: Callable[[World], Coroutine[Any, Any, None]], *names: str, **config: Any) -> None:
        async def whole() -> None:
            world = World(tmp_path, names, **config)
            await main(world)
            await world.settle()
            world.check()

        asyncio.run(whole())

    return run


async def refused(call: Coroutine[Any, Any, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await call
    return caught.value


# ---------------------------------------------------------------- loads


def test_a_load_is_known_to_the_scheduler_first_and_to_the_supervisor_then(run: Run):
    async def main(world: World) -> None:
        world.write("sql", 1)
        added = await world.registry.load("sql", "sql", pinned=True)
        assert world.events == [("load", 1), ("tell", ["sql"])]
        assert (added.store_id, added.spec.rank, added.pinned) == (1, 4, True)
        assert world.registry.find("sql") == world.registry.find(f"{MODEL}:sql") == added
        assert world.registry.find("other:sql") is None
        assert len(world.registry) == 1

    run(main)


def test_names_of_one_file_share_its_weights_until_the_last_is_gone(run: Run):
    async def main(world: World) -> None:
        world.write("sql", 1)
        first = await world.registry.load("a", "sql")
        second = await world.registry.load("b", "sql")
        assert first.store_id == second.store_id
        assert [event for event in world.events if event[0] == "load"] == [("load", 1)]
        world.start("b")
        await world.registry.unload("a")  # does not wait for the request of the other name
        assert world.names == ["b"] and world.stored
        world.end(first.spec.fingerprint)
        await world.registry.unload("b")
        assert world.stored == {}

    run(main)


def test_concurrent_loads_of_one_file_read_it_once(run: Run):
    async def main(world: World) -> None:
        world.write("sql", 1)
        loads = [world.registry.load(f"n{n}", "sql") for n in range(5)]
        added = await asyncio.gather(*loads)
        assert {each.store_id for each in added} == {1}
        assert world.names == [f"n{n}" for n in range(5)]

    run(main)


def test_concurrent_loads_of_one_name_all_but_one_are_refused(run: Run):
    async def main(world: World) -> None:
        for n in range(4):
            world.write(f"f{n}", n)
        results = await asyncio.gather(
            *(world.registry.load("a", f"f{n}") for n in range(4)), return_exceptions=True
        )
        assert sum(isinstance(result, RequestError) for result in results) == 3
        assert world.names == ["a"] and len(world.stored) == 1

    run(main)


@pytest.mark.parametrize(
    ("name", "path", "code", "status", "message"),
    [
        ("", "sql", "invalid_value", 400, "an adapter's name has 0 characters"),
        ("a/b", "sql", "invalid_value", 400, "'a/b' cannot be an adapter's name"),
        ("..", "sql", "invalid_value", 400, "cannot be an adapter's name"),
        ("x" * 300, "sql", "invalid_value", 400, "has 300 characters"),
        (MODEL.replace("/", ""), "nowhere", "invalid_adapter", 400, "nowhere: no such adapter"),
        (
            "one",
            "sql",
            "name_taken",
            409,
            "an adapter has the name 'one' already; choose another one, unload",
        ),
        ("b", "../outside", "invalid_adapter", 400, "outside of"),
        ("b", "/etc", "invalid_adapter", 400, "outside of"),
        ("b", "link", "invalid_adapter", 400, "outside of"),
        ("b", "sql\x00", "invalid_adapter", 400, "null"),
        ("b", "x" * 5000, "invalid_adapter", 400, "no such adapter"),
        ("b", "wide", "invalid_adapter", 400, "has rank 9, the maximum is 8"),
        ("b", "swapped", "invalid_adapter", 400, "has the shape"),
        ("b", "cut", "invalid_adapter", 400, "cut"),
        ("b", "absurd", "invalid_adapter", 400, "absurd"),
        ("b", "empty", "invalid_adapter", 400, "adapter_config.json"),
        ("b", ".", "invalid_adapter", 400, "adapter_config.json"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(
    run: Run, tmp_path: Path, name: str, path: str, code: str, status: int, message: str
):
    async def main(world: World) -> None:
        world.write("sql", 1)
        world.write("wide", 1, rank=9)
        weights = "adapter_model.safetensors"
        cut = world.write("cut", 1) / weights
        cut.write_bytes(cut.read_bytes()[:-9])
        (world.write("absurd", 1) / weights).write_bytes((2**62).to_bytes(8, "little") + b"{}")
        swapped = world.write("swapped", 1) / weights
        data = swapped.read_bytes()
        data = data.replace(b"lora_A", b"lora_X").replace(b"lora_B", b"lora_A").replace(b"lora_X", b"lora_B")
        swapped.write_bytes(data)
        (world.root / "empty").mkdir()
        (tmp_path / "outside").mkdir()
        write_adapter(tmp_path / "outside", SPEC)
        (world.root / "link").symlink_to(tmp_path / "outside")
        before = list(world.events)

        error = await refused(world.registry.load(name, path))

        assert (error.code, error.status) == (code, status)
        assert message in error.message
        assert "\n" not in error.message and len(error.message) < 12_000
        assert world.names == ["one"] and world.events == before
        world.write("good", 2)
        await world.registry.load("good", "good")  # the next one is served

    run_in = tmp_path / "root"
    run_in.mkdir()

    async def whole() -> None:
        world = World(run_in, ("one",))
        await main(world)
        world.check()

    asyncio.run(whole())


def test_the_model_s_own_name_is_taken(tmp_path: Path):
    adapters = AdapterList(SPEC, AdapterConfig(enable_lora=True, max_lora_rank=8), model_name="base")
    with pytest.raises(
        RequestError, match="the model has the name 'base' already; choose another one"
    ) as caught:
        adapters.check_new("base", replace=True, replace_hint="", param="lora_name")
    assert caught.value.status == 409


def test_a_server_that_is_not_set_to_load_says_how(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, allow_runtime_lora=False, lora_root=None, enable_lora=True)
        error = await refused(world.registry.load("a", "a"))
        assert error.status == 403
        assert "--allow-runtime-lora and --lora-root" in error.message

    asyncio.run(main())


def test_more_than_the_limit_are_refused_until_one_is_unloaded(run: Run):
    async def main(world: World) -> None:
        for n in range(3):
            world.write(f"f{n}", n)
        await world.registry.load("a", "f0")
        await world.registry.load("b", "f1")
        error = await refused(world.registry.load("c", "f2"))
        assert error.code == "too_many_adapters"
        assert (
            error.message == "2 adapters are loaded, the limit is 2; unload one, or raise --max-loaded-loras"
        )
        await world.registry.load("b", "f2", replace=True)  # no further one
        await world.registry.unload("a")
        await world.registry.load("c", "f1")

    run(main, max_loaded_loras=2)


def test_what_the_scheduler_cannot_read_has_no_name(run: Run):
    async def main(world: World) -> None:
        world.write("sql", 1)
        world.error = "a number is not finite"
        error = await refused(world.registry.load("a", "sql"))
        assert (error.message, error.param) == ("a number is not finite", "lora_path")
        world.error = EngineDeadError("gone")
        with pytest.raises(EngineDeadError, match="gone"):
            await world.registry.load("a", "sql")
        assert world.names == []
        world.error = ""
        added = await world.registry.load("a", "sql")
        assert added.store_id == 3  # ids of failed loads are not used again

    run(main)


def test_a_load_whose_client_goes_away_leaves_nothing(run: Run):
    async def main(world: World) -> None:
        world.write("sql", 1)
        world.gate.clear()
        load = asyncio.create_task(world.registry.load("a", "sql"))
        while not world.events:
            await asyncio.sleep(0)
        again = asyncio.create_task(world.registry.load("b", "sql"))
        load.cancel()
        world.gate.set()
        await again
        assert world.names == ["b"]
        assert world.events == [("load", 1), ("unload", 1), ("load", 2), ("tell", ["b"])]

    run(main)


# ---------------------------------------------------------------- loads of a name that is taken


def test_running_requests_keep_the_old_weights_until_they_end(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        world.write("v2", 2)
        await world.registry.load("a", "v1")
        old = world.start("a")
        new = await world.registry.load("a", "v2", replace=True)
        assert world.registry.required("a", "model") == new
        await world.settle()
        assert set(world.stored) == {1, 2}
        world.start("a")  # of the new one: the old one does not wait for it
        world.end(old)
        await world.settle()
        assert set(world.stored) == {2}
        world.end(new.spec.fingerprint)

    run(main)


def test_the_same_weights_again_are_not_read_again(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        first = await world.registry.load("a", "v1")
        again = await world.registry.load("a", "v1", replace=True, pinned=True)
        assert again.store_id == first.store_id and again.pinned
        assert world.events.count(("load", 1)) == 1

    run(main)


def test_old_weights_that_get_another_name_meanwhile_stay(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        world.write("v2", 2)
        first = await world.registry.load("a", "v1")
        old = world.start("a")
        await world.registry.load("a", "v2", replace=True)
        kept = await world.registry.load("b", "v1")
        assert kept.store_id == first.store_id
        world.end(old)
        await world.settle()
        assert set(world.stored) == {1, 2}

    run(main)


def test_old_weights_are_dropped_once_although_they_were_replaced_twice(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        world.write("v2", 2)
        for path in ("v1", "v2", "v1", "v2"):
            await world.registry.load("a", path, replace=True)
            await world.settle()
        assert [event for event in world.events if event[0] == "unload"] == [
            ("unload", 1),
            ("unload", 2),
            ("unload", 3),
        ]

    run(main)


# ---------------------------------------------------------------- unloads


def test_an_unload_waits_for_running_requests_and_refuses_new_ones(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        world.write("v2", 2)
        await world.registry.load("a", "v1")
        await world.registry.load("other", "v2")
        used = world.start("a")
        unload = asyncio.create_task(world.registry.unload("a"))
        await world.settle()
        assert not unload.done() and world.names == ["other"]
        missing = await refused(world.registry.unload("a"))
        assert (missing.status, missing.code) == (404, "adapter_not_found")
        assert missing.message == "lora_name is 'a', but there is no such adapter; the adapters are other"
        taken = await refused(world.registry.load("a", "v2"))
        assert "the adapter 'a' is being unloaded" in taken.message
        await world.registry.unload("other")  # others need not wait
        world.end(used)
        await unload
        assert world.stored == {} and world.names == []

    run(main)


def test_the_supervisor_knows_of_an_unload_before_the_scheduler(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        await world.registry.load("a", "v1")
        await world.registry.unload("a")
        assert world.events[-2:] == [("tell", []), ("unload", 1)]

    run(main)


def test_after_the_time_the_adapter_has_its_name_again(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        await world.registry.load("a", "v1")
        used = [world.start("a"), world.start("a")]
        error = await refused(world.registry.unload("a", timeout_s=0.0))
        assert (error.status, error.code) == (409, "adapter_in_use")
        assert error.message == (
            "2 requests still use the adapter 'a' after 0 s, so it stays; try again later, or send force to end them"
        )
        assert world.names == ["a"]
        world.end(used.pop())
        error = await refused(world.registry.unload("a", timeout_s=0.0))
        assert error.message.startswith("1 request still uses the adapter 'a'")
        world.end(used.pop())
        await world.registry.unload("a", timeout_s=0.0)

    run(main)


def test_an_unload_whose_client_goes_away_while_it_waits_is_undone(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        await world.registry.load("a", "v1")
        used = world.start("a")
        unload = asyncio.create_task(world.registry.unload("a"))
        await world.settle()
        unload.cancel()
        await world.settle()
        assert world.names == ["a"] and world.stored
        world.end(used)
        await world.registry.unload("a")

    run(main)


def test_force_ends_the_requests(run: Run):
    async def main(world: World) -> None:
        used = world.start("one")
        error = await refused(world.registry.unload("one"))
        assert (error.status, error.code) == (409, "adapter_pinned")
        assert error.message == "the adapter 'one' is pinned; send force to unload it all the same"
        await world.registry.unload(f"{MODEL}:one", force=True)
        assert world.failed == [(used, "the adapter one was unloaded")]
        assert world.names == ["two"]

    run(main, "one", "two")


def test_an_unload_whose_scheduler_dies_has_been_told_to_the_supervisor(run: Run):
    async def main(world: World) -> None:
        world.write("v1", 1)
        await world.registry.load("a", "v1")

        async def die(store_id: int) -> AdapterDone:
            world.stored.clear()
            raise EngineDeadError("gone")

        world.unload_adapter = die  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError):
            await world.registry.unload("a")
        assert world.names == [] and world.events[-1] == ("tell", [])

    run(main)


# ---------------------------------------------------------------- the rest


def test_an_unknown_name_lists_the_first_names(run: Run):
    async def main(world: World) -> None:
        error = await refused(world.registry.unload("x"))
        assert error.message == "lora_name is 'x', but there is no such adapter; there are none"
        world.write("v1", 1)
        for n in range(23):
            await world.registry.load(f"n{n}", "v1")
        error = await refused(world.registry.unload("x"))
        assert error.message.endswith("n18, n19 and 3 more")
        assert "n20" not in error.message

    run(main)


def test_ids_start_after_those_of_the_manager_before(tmp_path: Path):
    folder = write_adapter(tmp_path / "a", SPEC)
    config = AdapterConfig(enable_lora=True, max_lora_rank=8)
    assert AdapterList(SPEC, config, first_store_id=1 << 16).new_store_id() == (1 << 16) + 1
    known = [loaded(folder, SPEC, 1 << 17, "a")]
    assert AdapterList(SPEC, config, known, first_store_id=1 << 16).new_store_id() == (1 << 17) + 1
    assert AdapterList(SPEC, config).new_store_id() == 1


def test_any_order_of_loads_unloads_and_requests_leaves_nothing(run: Run):
    async def main(world: World) -> None:
        drawn = random.Random(7)
        for n in range(4):
            world.write(f"f{n}", n)
        running: list[str] = []
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(300):
            name, path = drawn.choice("abc"), f"f{drawn.randrange(4)}"
            match drawn.randrange(6):
                case 0 | 1:
                    load = world.registry.load(name, path, replace=drawn.random() < 0.7)
                    tasks.append(asyncio.create_task(load))
                case 2:
                    unload = world.registry.unload(name, force=drawn.random() < 0.3)
                    tasks.append(asyncio.create_task(unload))
                case 3 if world.registry.find(name):
                    running.append(world.start(name))
                case 4 if running:
                    used = running.pop(drawn.randrange(len(running)))
                    if world.users[used]:
                        world.end(used)
                case 5 if tasks and drawn.random() < 0.3:
                    drawn.choice(tasks).cancel()
            for _ in range(drawn.randrange(4)):
                await asyncio.sleep(0)
        for used in list(world.users):
            while world.users[used]:
                world.end(used)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(e) for e in await asyncio.gather(*tasks, return_exceptions=True) if e} <= {
            RequestError,
            asyncio.CancelledError,
            type(world.registry.adapters[0]) if world.registry.adapters else RequestError,
        }
        await world.settle()
        world.check()
        assert len(world.stored) == len({each.store_id for each in world.registry.adapters})

    run(main)
