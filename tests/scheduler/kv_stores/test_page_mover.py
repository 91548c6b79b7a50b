"""The thread that moves pages to a store and back: its answers, what it moves, and that each command has an answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.model_runner.memory.kv_pool import KVPool
from engine.model_runner.memory.page_memory import PageMemory
from engine.model_runner.memory.state_pool import StatePool
from engine.model_runner.states.state_runs import StateLayout
from engine.models.spec.state_spec import Mamba2Spec, StateSpec
from engine.runtime.errors import ConfigError
from engine.runtime.kv_backends.base import TransferError
from engine.runtime.transport.ipc import Inbox, Outbox
from engine.runtime.transport.kv_tiers import (
    CancelLoad,
    Forget,
    Forgotten,
    Found,
    Loaded,
    LoadPages,
    LookUp,
    Stored,
    StorePages,
    TierCommand,
    TierNews,
)
from engine.scheduler.kv_stores import page_mover, segment_store
from engine.scheduler.kv_stores.page_mover import PageMover
from engine.scheduler.kv_stores.segment_file import record_bytes
from engine.scheduler.kv_stores.segment_store import SegmentStore, check_folder
from engine.scheduler.prefix_cache.base import namespace_of

PAGE_SIZE = 4
NUM_PAGES = 40
LIMIT = 8 << 20
PATIENCE_S = 60.0


def make_pool(seed: int, dtype: torch.dtype = torch.bfloat16) -> KVPool:
    """A pool with random contents."""
    pool = KVPool(
        num_layers=3,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=2,
        head_dim=8,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(seed)
    for view in (*pool.page_views, *pool.scale_views):
        view.copy_(torch.randint(0, 100, view.shape, generator=generator).to(view.dtype))
    return pool


NUMBERS = itertools.count()


class Engine:
    """A pool and its disk."""

    def __init__(
        self, root: Path, seed: int = 1, *, weights: Callable[[], str] = lambda: "w", **more: Any
    ) -> None:
        self.pool = make_pool(seed, more.pop("dtype", torch.bfloat16))
        self.memory = PageMemory(self.pool.views)
        self._news: list[TierNews] = []
        endpoint = f"inproc://kv disk {next(NUMBERS)}"
        self._inbox = Inbox(endpoint, msgspec.msgpack.Decoder(TierNews))
        check_folder(root, LIMIT)
        open_store = more.pop(
            "open_store", lambda identity, facts: SegmentStore(root, identity, facts, LIMIT)
        )
        self.disk = PageMover(
            str(root),
            open_store,
            {"format": 1},
            weights,
            more.pop("memory", self.memory),
            page_size=PAGE_SIZE,
            open_outbox=lambda: Outbox(endpoint),
            **more,
        )
        self._job = 0

    def ask(self, make: Callable[..., TierCommand], *arguments: Any) -> TierNews:
        """Submit a command with the next job number, and wait for its answer."""
        return self.answer(self.submit(make, *arguments))

    def submit(self, make: Callable[..., TierCommand], *arguments: Any) -> int:
        self._job += 1
        self.disk.send([make(self._job, *arguments)])
        return self._job

    def answer(self, job: int) -> TierNews:
        while True:
            for found in self._news:
                if found.job == job:
                    self._news.remove(found)
                    return found
            news = self._inbox.poll(PATIENCE_S)
            assert news, "no answer"
            self._news += news

    def close_inbox(self) -> None:
        self._inbox.close()

    def found(self, tokens: bytes, namespace: str = "") -> int:
        found = self.ask(LookUp, namespace, tokens)
        assert isinstance(found, Found)
        return found.num_pages

    def wait_until_open(self) -> None:
        """A store waits until the disk is in use; this one stores nothing."""
        self.ask(StorePages, "", b"", 0, b"")

    def page(self, page: int) -> bytes:
        return b"".join(bytes(frame) for frame in self.memory.read(np.array([page], np.int32)))


@pytest.fixture
def engine_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines, which are closed at the end."""
    monkeypatch.setattr(segment_store, "_allowed_bytes", lambda _root, limit_bytes, _used_bytes: limit_bytes)
    engines: list[Engine] = []

    def make(*arguments: Any, **more: Any) -> Engine:
        engines.append(Engine(*arguments, **more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.disk.close(PATIENCE_S)
        engine.close_inbox()


def prompt(num_pages: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, num_pages * PAGE_SIZE, dtype=np.int32).tobytes()


def ids(*pages: int) -> bytes:
    return np.array(pages, np.int32).tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_stored_pages_come_back_bit_for_bit_in_another_process(tmp_path, engine_at, dtype):
    tokens, sources, targets = prompt(5), [7, 3, 9, 1, 2], [30, 5, 12, 11, 40]
    old = engine_at(tmp_path, 1, dtype=dtype)
    stored = old.ask(StorePages, "", tokens, 0, ids(*sources))
    assert isinstance(stored, Stored) and (stored.num_pages, stored.error) == (5, "")
    old.disk.close(PATIENCE_S)

    new = engine_at(tmp_path, 2, dtype=dtype)
    new.wait_until_open()
    others = [new.page(page) for page in range(NUM_PAGES + 1) if page not in targets]
    found = new.ask(LookUp, "", tokens + prompt(3, seed=9))
    used = 5 * record_bytes(new.memory.page_bytes)
    assert found == Found(1 + 1, 5, 5 * new.memory.page_bytes, used_bytes=used)
    loaded = new.ask(LoadPages, "", tokens, 0, ids(*targets))

    assert isinstance(loaded, Loaded) and (loaded.num_pages, loaded.error) == (5, "")
    assert [new.page(page) for page in targets] == [old.page(page) for page in sources]
    assert others == [new.page(page) for page in range(NUM_PAGES + 1) if page not in targets]


def test_a_load_may_begin_inside_of_the_prompt(tmp_path, engine_at):
    tokens = prompt(6)
    engine = engine_at(tmp_path)
    engine.ask(StorePages, "", tokens[: 2 * PAGE_SIZE * 4], 0, ids(1, 2))
    engine.ask(StorePages, "", tokens, 2, ids(3, 4, 5, 6))
    kept = [engine.page(page) for page in (4, 5)]

    loaded = engine.ask(LoadPages, "", tokens[: 5 * PAGE_SIZE * 4], 3, ids(20, 21))

    assert isinstance(loaded, Loaded) and loaded.num_pages == 2
    assert [engine.page(page) for page in (20, 21)] == kept


def test_other_tokens_namespaces_and_weights_find_nothing(tmp_path, engine_at):
    tokens, lora = prompt(4), namespace_of("", "adapter")
    engine = engine_at(tmp_path)
    engine.ask(StorePages, "", tokens, 0, ids(1, 2, 3, 4))
    engine.ask(StorePages, lora, tokens[: 4 * PAGE_SIZE], 0, ids(5))

    assert engine.found(tokens) == 4
    assert engine.found(tokens, lora) == 1
    assert engine.found(tokens, namespace_of("", "another")) == 0
    assert engine.found(prompt(4, seed=1)) == 0
    assert engine.found(b"\1" + tokens[1:]) == 0
    other = engine_at(tmp_path, weights=lambda: "other weights")
    other.wait_until_open()
    assert other.found(tokens) == 0


def test_salted_prompts_are_stored_only_on_request(tmp_path, engine_at):
    tokens, salted = prompt(2), namespace_of("salt", "adapter")
    engine = engine_at(tmp_path / "a")
    refused = engine.ask(StorePages, salted, tokens, 0, ids(1, 2))
    assert isinstance(refused, Stored) and refused.num_pages == 0 and "salt" in refused.error
    assert engine.found(tokens, salted) == 0

    engine = engine_at(tmp_path / "b", persist_salted=True)
    engine.ask(StorePages, salted, tokens, 0, ids(1, 2))

    assert (engine.found(tokens, salted), engine.found(tokens, namespace_of("other", "adapter"))) == (2, 0)


def test_until_the_weights_are_read_nothing_is_found_and_stores_wait(tmp_path, engine_at):
    is_read = threading.Event()

    def weights() -> str:
        assert is_read.wait(PATIENCE_S)
        return "w"

    engine = engine_at(tmp_path, weights=weights)
    store = engine.submit(StorePages, "", prompt(1), 0, ids(1))
    assert engine.found(prompt(1)) == 0
    early = engine.ask(LoadPages, "", prompt(1), 0, ids(2))
    assert isinstance(early, Loaded) and early.num_pages == 0 and early.error
    is_read.set()

    stored = engine.answer(store)
    assert isinstance(stored, Stored) and (stored.num_pages, stored.error) == (1, "")
    assert engine.found(prompt(1)) == 1


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), ConfigError("no file"), KeyError("a bug")]
)
def test_weights_that_cannot_be_read_turn_the_disk_off(tmp_path, engine_at, caplog, error):
    def weights() -> str:
        raise error

    engine = engine_at(tmp_path, weights=weights)

    stored = engine.ask(StorePages, "", prompt(1), 0, ids(1))
    loaded = engine.ask(LoadPages, "", prompt(1), 0, ids(1))

    assert isinstance(stored, Stored) and stored.num_pages == 0 and stored.error
    assert isinstance(loaded, Loaded) and loaded.num_pages == 0 and loaded.error
    assert engine.found(prompt(1)) == 0
    assert "the weights cannot be read" in caplog.text


def test_a_damaged_record_ends_the_load_before_it(tmp_path, engine_at):
    tokens = prompt(4)
    engine = engine_at(tmp_path)
    engine.ask(StorePages, "", tokens, 0, ids(1, 2, 3, 4))
    (path,) = tmp_path.glob("*/*.open")
    size = path.stat().st_size // 4
    with path.open("r+b") as file:
        file.seek(2 * size + 100)
        file.write(b"\xff\xff")
    kept = engine.page(22)

    loaded = engine.ask(LoadPages, "", tokens, 0, ids(20, 21, 22, 23))

    assert isinstance(loaded, Loaded) and loaded.num_pages == 2
    assert [engine.page(page) for page in (20, 21)] == [engine.page(page) for page in (1, 2)]
    assert engine.page(22) == kept
    assert engine.found(tokens) == 2
    engine.ask(StorePages, "", tokens, 0, ids(1, 2, 3, 4))
    assert engine.found(tokens) == 4


def make_states(seed: int) -> StatePool:
    """Checkpoints 1 to 6 with random contents: of convolutions, and of recurrences in another dtype."""
    spec = StateSpec(
        layers=(True, False, True),
        conv_size=8,
        conv_taps=4,
        mamba=Mamba2Spec(num_heads=2, head_dim=4, state_dim=8, num_groups=1),
    )
    layout = StateLayout(3, 6, 2)
    pool = StatePool(spec, layout=layout, dtype=torch.bfloat16, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for layer in pool.layers:
        for part in layer:
            assert part is not None
            part.copy_(torch.randn(part.shape, generator=generator).to(part.dtype))
    return pool


def state_of(pool: StatePool, checkpoint: int) -> list[torch.Tensor]:
    slot = pool.layout.of_checkpoint(checkpoint)
    return [part[slot].clone() for layer in pool.layers for part in layer if part is not None]


@pytest.fixture
def hybrid_at(engine_at: Any) -> Callable[..., tuple[Engine, StatePool]]:
    """Makes engines with states, and gives their states, too."""

    def make(root: Path, seed: int = 1, **more: Any) -> tuple[Engine, StatePool]:
        pool = make_states(seed)
        return engine_at(root, seed, states=PageMemory(pool.checkpoint_views), **more), pool

    return make


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_state_comes_back_bit_for_bit_with_its_pages(tmp_path, hybrid_at):
    tokens = prompt(5)
    old, old_states = hybrid_at(tmp_path, 1)
    stored = old.ask(StorePages, "", tokens, 0, ids(7, 3, 9, 1, 2), 4)
    assert isinstance(stored, Stored) and (stored.num_pages, stored.error) == (5, "")
    old.disk.close(PATIENCE_S)

    new, states = hybrid_at(tmp_path, 2)
    new.wait_until_open()
    others = [part.clone() for layer in states.layers for part in layer if part is not None]
    page_bytes, state_bytes = new.memory.page_bytes, PageMemory(states.checkpoint_views).page_bytes
    found = new.ask(LookUp, "", tokens + prompt(3, seed=9))
    used = 5 * record_bytes(page_bytes) + record_bytes(state_bytes)
    assert found == Found(1 + 1, 5, 5 * page_bytes, 0.0, state_bytes, used_bytes=used)
    loaded = new.ask(LoadPages, "", tokens, 2, ids(30, 5, 12), 6)

    assert isinstance(loaded, Loaded) and (loaded.num_pages, loaded.error) == (3, "")
    assert [new.page(page) for page in (30, 5, 12)] == [old.page(page) for page in (9, 1, 2)]
    assert equal(state_of(states, 6), state_of(old_states, 4))
    slot = states.layout.of_checkpoint(6)
    parts = [part for layer in states.layers for part in layer if part is not None]
    for part, other in zip(parts, others, strict=True):
        changed = (part != other).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [slot], "the slots of rows, of drafts and of other checkpoints are as they were"


def test_answers_count_the_bytes_that_were_moved(tmp_path, hybrid_at):
    """Pages that the disk has already are not written, so they do not count."""
    tokens, page = prompt(4), PAGE_SIZE * 4
    engine, states = hybrid_at(tmp_path)
    page_bytes, state_bytes = engine.memory.page_bytes, PageMemory(states.checkpoint_views).page_bytes
    stores = [
        engine.ask(StorePages, "", tokens[: count * page], 0, ids(*range(1, count + 1)), checkpoint)
        for count, checkpoint in ((2, 1), (4, 2), (4, 2), (2, 1))
    ]
    assert [each.num_bytes for each in stores] == [2 * page_bytes + state_bytes] * 2 + [0, 0]
    assert [(each.num_pages, each.error) for each in stores] == [(2, ""), (4, ""), (4, ""), (2, "")]

    load = engine.ask(LoadPages, "", tokens, 1, ids(20, 21, 22), 3)
    assert load.num_bytes == 3 * page_bytes + state_bytes


def test_the_longest_prefix_with_a_state_is_found(tmp_path, hybrid_at):
    tokens, page = prompt(6), PAGE_SIZE * 4
    engine, _ = hybrid_at(tmp_path)
    engine.ask(StorePages, "", tokens[: 2 * page], 0, ids(1, 2), 1)
    engine.ask(StorePages, "", tokens[: 4 * page], 0, ids(1, 2, 3, 4), 2)
    engine.ask(StorePages, "", tokens, 0, ids(1, 2, 3, 4, 5, 6))

    assert [engine.found(tokens[: n * page]) for n in range(1, 7)] == [0, 2, 2, 4, 4, 4]
    assert engine.found(tokens, namespace_of("", "adapter")) == 0


@pytest.mark.parametrize("damaged", ["page", "state"])
def test_a_damaged_part_of_a_prefix_with_a_state_is_a_miss(tmp_path, hybrid_at, damaged):
    tokens, page = prompt(4), PAGE_SIZE * 4
    engine, states = hybrid_at(tmp_path)
    engine.ask(StorePages, "", tokens[: 2 * page], 0, ids(1, 2), 1)
    engine.ask(StorePages, "", tokens, 0, ids(1, 2, 3, 4), 2)
    (path,) = tmp_path.glob("*/*.open")  # two pages, a state, two pages, a state
    record = {"page": 4, "state": 5}[damaged]
    before = state_of(states, 3)
    with path.open("r+b") as file:
        file.seek(record * record_bytes(engine.memory.page_bytes) + 100)
        file.write(b"\xff\xff")

    loaded = engine.ask(LoadPages, "", tokens, 0, ids(20, 21, 22, 23), 3)

    assert isinstance(loaded, Loaded) and loaded.num_pages == 0
    assert equal(state_of(states, 3), before)
    assert engine.found(tokens) == 2
    engine.ask(StorePages, "", tokens, 0, ids(1, 2, 3, 4), 2)
    assert engine.found(tokens) == 4
    assert engine.ask(LoadPages, "", tokens, 0, ids(20, 21, 22, 23), 3).num_pages == 4
    assert equal(state_of(states, 3), state_of(states, 2))


def test_a_state_that_was_forgotten_while_its_pages_were_stored_is_not_stored(
    tmp_path, hybrid_at, monkeypatch
):
    monkeypatch.setattr(page_mover, "_PIECE_BYTES", 1)
    memory = SlowMemory(PageMemory(make_pool(1).views))
    engine, _ = hybrid_at(tmp_path, memory=memory)
    store = engine.submit(StorePages, "", prompt(1), 0, ids(5), 1)
    memory.began.acquire()
    engine.disk.send([Forget()])
    memory.permits.release()

    stored = engine.answer(store)

    assert isinstance(stored, Stored) and stored.error == "forgotten"
    engine.disk.close(PATIENCE_S)
    assert not any(path.stat().st_size for path in tmp_path.glob("*/*.open"))


class SlowMemory:
    """A pool whose copies wait for a permission."""

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self.page_bytes = memory.page_bytes
        self.permits = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.fails = False

    def read_rows(self, page_ids: Any, rows: Any) -> None:
        self._wait()
        self._memory.read_rows(page_ids, rows)

    def write_rows(self, page_ids: Any, rows: Any) -> None:
        self._wait()
        self._memory.write_rows(page_ids, rows)

    def _wait(self) -> None:
        self.began.release()
        assert self.permits.acquire(timeout=PATIENCE_S)
        if self.fails:
            raise ZeroDivisionError


@pytest.fixture
def slow(tmp_path: Path, engine_at: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, SlowMemory]:
    """An engine that moves a page at a time when it may; the pages 1 to 4 of `prompt(4)` are stored."""
    monkeypatch.setattr(page_mover, "_PIECE_BYTES", 1)
    memory = SlowMemory(PageMemory(make_pool(1).views))
    engine = engine_at(tmp_path, memory=memory)
    for _ in range(4):
        memory.permits.release()
    engine.ask(StorePages, "", prompt(4), 0, ids(1, 2, 3, 4))
    for _ in range(4):
        memory.began.acquire()
    return engine, memory


def test_loads_and_questions_do_not_wait_for_a_store(slow):
    engine, memory = slow
    store = engine.submit(StorePages, "", prompt(3, seed=1), 0, ids(5, 6, 7))
    memory.began.acquire()
    load = engine.submit(LoadPages, "", prompt(4), 0, ids(10, 11, 12, 13))
    question = engine.submit(LookUp, "", prompt(4))
    memory.permits.release()

    assert engine.answer(question).job == question
    for _ in range(4):
        memory.permits.release()
    loaded = engine.answer(load)
    assert isinstance(loaded, Loaded) and loaded.num_pages == 4
    for _ in range(2):
        memory.permits.release()
    stored = engine.answer(store)
    assert isinstance(stored, Stored) and stored.num_pages == 3


def test_a_cancelled_load_ends_after_its_piece(slow):
    engine, memory = slow
    first = engine.submit(LoadPages, "", prompt(4), 0, ids(10, 11, 12, 13))
    second = engine.submit(LoadPages, "", prompt(4), 0, ids(20, 21, 22, 23))
    memory.began.acquire()
    for job in (first, second, 99):
        engine.disk.send([CancelLoad(job)])
    memory.permits.release()

    ends = [engine.answer(first), engine.answer(second)]

    assert [end.num_pages for end in ends if isinstance(end, Loaded)] == [1, 0]


def test_forgetting_ends_stores_and_leaves_nothing(slow):
    engine, memory = slow
    store = engine.submit(StorePages, "", prompt(3, seed=1), 0, ids(5, 6, 7))
    memory.began.acquire()
    queued = engine.submit(StorePages, "", prompt(2, seed=2), 0, ids(8, 9))
    engine.disk.send([Forget()])
    memory.permits.release()

    stored = engine.answer(store)

    assert isinstance(stored, Stored) and (stored.num_pages, stored.error) == (1, "forgotten")
    later = engine.answer(queued)
    assert isinstance(later, Stored) and (later.num_pages, later.error) == (0, "forgotten")
    assert engine.found(prompt(4)) == engine.found(prompt(3, seed=1)) == engine.found(prompt(2, seed=2)) == 0


def test_a_bug_in_the_thread_turns_the_disk_off_and_answers_all(slow, caplog, monkeypatch):
    engine, memory = slow
    memory.fails = True

    def fail(_: SegmentStore) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(SegmentStore, "close", fail)
    jobs = [
        engine.submit(LoadPages, "", prompt(4), 0, ids(10, 11, 12, 13)),
        engine.submit(LoadPages, "", prompt(4), 0, ids(20, 21, 22, 23)),
        engine.submit(StorePages, "", prompt(1, seed=2), 0, ids(5)),
    ]
    memory.permits.release()

    assert [engine.answer(job).num_pages for job in jobs] == [0, 0, 0]
    assert engine.found(prompt(4)) == 0
    assert caplog.text.count("not used any more") == 1
    assert engine.ask(StorePages, "", prompt(1, seed=3), 0, ids(5)).error


class StuckStore(SegmentStore):
    """A store with calls that never return, of the kind that a test says, until it is let go."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stuck = ""
        self.began, self.returns = threading.Semaphore(0), threading.Event()

    def _wait(self, kind: str) -> None:
        if kind == self.stuck:
            self.began.release()
            assert self.returns.wait(PATIENCE_S)

    def find(self, keys: Any) -> int:
        self._wait("find")
        return super().find(keys)

    def read(self, keys: Any, buffer: Any) -> int:
        done = super().read(keys, buffer)
        self._wait("read")
        return done

    def write(self, keys: Any, buffer: Any) -> int:
        self._wait("write")
        return super().write(keys, buffer)

    def forget(self) -> None:
        self._wait("forget")
        super().forget()


@pytest.fixture
def stuck(
    tmp_path: Path, engine_at: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, StuckStore]]:
    """An engine with the pages 1 to 4 of `prompt(4)` in its store."""
    stores: list[StuckStore] = []

    def open_store(identity: bytes, facts: Any) -> StuckStore:
        stores.append(StuckStore(tmp_path, identity, facts, LIMIT))
        return stores[-1]

    engine = engine_at(tmp_path, open_store=open_store)
    engine.ask(StorePages, "", prompt(4), 0, ids(1, 2, 3, 4))
    monkeypatch.setattr(page_mover, "_TICK_S", 0.001)
    yield engine, stores[0]
    stores[0].returns.set()


def test_a_canceled_load_of_a_store_that_never_answers_gives_its_pages_back(stuck):
    """Nothing is written to them when the read returns at last."""
    engine, store = stuck
    store.stuck = "read"
    load = engine.submit(LoadPages, "", prompt(4), 0, ids(10, 11, 12, 13))
    store.began.acquire()
    engine.disk.send([CancelLoad(load)])

    loaded = engine.answer(load)

    assert isinstance(loaded, Loaded) and (loaded.num_pages, loaded.error) == (0, "")
    kept = [engine.page(page) for page in (10, 11, 12, 13)]
    store.stuck = ""
    store.returns.set()
    again = engine.ask(LoadPages, "", prompt(4), 0, ids(20, 21, 22, 23))
    assert isinstance(again, Loaded) and again.num_pages == 4
    assert [engine.page(page) for page in (10, 11, 12, 13)] == kept


@pytest.mark.parametrize("kind", ["find", "read", "write", "forget"])
def test_a_store_that_never_answers_keeps_nothing_waiting(stuck, monkeypatch, caplog, kind):
    engine, store = stuck
    store.stuck = kind
    if kind == "find":
        jobs = [engine.submit(LookUp, "", prompt(4))]
    elif kind == "read":
        jobs = [engine.submit(LoadPages, "", prompt(4), 0, ids(10, 11, 12, 13))]
    elif kind == "write":
        jobs = [engine.submit(StorePages, "", prompt(2, seed=1), 0, ids(5, 6))]
    else:
        jobs = [99]
        engine.disk.send([Forget(99)])
    store.began.acquire()
    jobs.append(engine.submit(LoadPages, "", prompt(4), 0, ids(20, 21, 22, 23)))
    jobs.append(engine.submit(StorePages, "", prompt(2, seed=3), 0, ids(5, 6)))
    jobs.append(engine.submit(LookUp, "", prompt(4)))
    engine.disk.send([Forget(100)])
    monkeypatch.setattr(page_mover, "SLOW_S", 0.0)
    monkeypatch.setattr(page_mover, "ANSWER_LIMIT_S", 0.0)

    answers = [engine.answer(job) for job in (*jobs, 100)]

    assert [answer.error for answer in answers] == ["the store does not answer"] * 5
    assert caplog.text.count("does not answer, and is not used until it does") == 1
    monkeypatch.setattr(page_mover, "SLOW_S", PATIENCE_S)
    monkeypatch.setattr(page_mover, "ANSWER_LIMIT_S", PATIENCE_S)
    store.stuck = ""
    store.returns.set()
    engine.wait_until_open()
    assert engine.found(prompt(4)) == 0, "what a client wanted to be forgotten was forgotten first"
    engine.ask(StorePages, "", prompt(2, seed=2), 0, ids(5, 6))
    assert engine.found(prompt(2, seed=2)) == 2


def test_closing_does_not_wait_for_a_store_that_never_answers(stuck):
    engine, store = stuck
    store.stuck = "write"
    engine.submit(StorePages, "", prompt(3, seed=3), 0, ids(1, 2, 3))
    store.began.acquire()

    engine.disk.close(0.0)

    assert not engine.disk._thread.is_alive()


def test_a_flush_is_answered_when_it_is_durable(tmp_path, engine_at, monkeypatch):
    engine = engine_at(tmp_path)
    engine.ask(StorePages, "", prompt(2), 0, ids(1, 2))
    synced: list[list[Path]] = []
    monkeypatch.setattr(
        segment_store,
        "sync_folder",
        lambda folder: synced.append([*folder.glob("*.open"), *folder.glob("*.kv")]),
    )
    engine.disk.send([Forget(7)])
    assert engine.answer(7) == Forgotten(7)
    assert synced == [[]]

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(segment_store, "sync_folder", fail)
    engine.disk.send([Forget(8)])
    assert "Input/output error" in engine.answer(8).error


def test_a_look_up_that_ends_in_a_bug_is_answered(tmp_path, engine_at, monkeypatch, caplog):
    engine = engine_at(tmp_path)
    engine.ask(StorePages, "", prompt(2), 0, ids(1, 2))
    monkeypatch.setattr(SegmentStore, "find", lambda *_: 1 // 0)

    found = engine.ask(LookUp, "", prompt(2))

    assert isinstance(found, Found) and (found.num_pages, found.error) == (0, "the store is not in use")
    assert engine.ask(StorePages, "", prompt(2, seed=1), 0, ids(3, 4)).error
    assert caplog.text.count("not used any more") == 1


def test_the_rate_of_loads_gives_an_estimate(slow):
    engine, memory = slow
    for _ in range(8):
        memory.permits.release()
    loaded = engine.ask(LoadPages, "", prompt(4), 0, ids(10, 11, 12, 13))
    assert isinstance(loaded, Loaded)

    found = engine.ask(LookUp, "", prompt(4))

    assert isinstance(found, Found)
    assert found.seconds_estimate == pytest.approx(loaded.seconds)
    assert found.num_bytes == 4 * memory.page_bytes


def test_closing_ends_what_is_queued_but_waits_no_longer_than_it_may(tmp_path, engine_at):
    engine = engine_at(tmp_path)
    engine.wait_until_open()
    jobs = [engine.submit(StorePages, "", prompt(3, seed=seed), 0, ids(1, 2, 3)) for seed in range(20)]
    engine.disk.close(PATIENCE_S)
    assert [engine.answer(job).num_pages for job in jobs] == [3] * 20

    never = threading.Event()
    engine = engine_at(tmp_path, weights=lambda: str(never.wait(PATIENCE_S)))
    engine.submit(StorePages, "", prompt(3), 0, ids(1, 2, 3))
    started_s = time.monotonic()
    engine.disk.close(PATIENCE_S)
    assert time.monotonic() - started_s < PATIENCE_S / 2
    never.set()


def test_a_rank_that_fails_ends_its_job_and_no_other(tmp_path, engine_at, monkeypatch):
    tokens = prompt(4)
    engine = engine_at(tmp_path)

    def fail(*_: Any) -> None:
        raise TransferError("rank 1: no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.memory, "read_rows", fail)
        stored = engine.ask(StorePages, "", tokens, 0, ids(1, 2, 3, 4))
        assert isinstance(stored, Stored) and (stored.num_pages, stored.error) == (0, "rank 1: no memory")
    engine.ask(StorePages, "", tokens, 0, ids(1, 2, 3, 4))
    with monkeypatch.context() as patch:
        patch.setattr(engine.memory, "write_rows", fail)
        failed = engine.ask(LoadPages, "", tokens, 0, ids(5, 6, 7, 8))
        assert isinstance(failed, Loaded) and (failed.num_pages, failed.error) == (0, "rank 1: no memory")

    loaded = engine.ask(LoadPages, "", tokens, 0, ids(5, 6, 7, 8))
    assert isinstance(loaded, Loaded) and (loaded.num_pages, loaded.error) == (4, "")
