"""`StateStore` and `OwnedTable`: one folder, groups of changes, failing disks, and rows that only their owner sees."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.errors import ConfigError, RequestError
from engine.tokenizer_manager.state import store as store_module
from engine.tokenizer_manager.state.store import StateError, StateStore
from engine.tokenizer_manager.state.tables import MIGRATIONS, OwnedTable, used_bytes

NOTES = OwnedTable("notes", "text TEXT NOT NULL DEFAULT ''")
MAX_BYTES = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    """An open store with the table of notes."""
    opened = StateStore.open(tmp_path / "state", MAX_BYTES)
    opened.submit(lambda db: db.executescript(NOTES.creation), writes=False).result()
    yield opened
    opened.close()


def put(store: StateStore, owner: str, note: str, **values: Any) -> None:
    store.submit(lambda db: NOTES.insert(db, owner, note, 7, **values), durable=True).result()


def ids(store: StateStore, owner: str, **how: Any) -> list[str] | None:
    rows = store.submit(lambda db: NOTES.page(db, owner, **({"limit": 9} | how)), writes=False).result()
    return None if rows is None else [row["id"] for row in rows]


def test_changes_survive_the_store(store):
    put(store, "a", "n1", text="kept")
    store.close()

    again = StateStore.open(store.folder, MAX_BYTES)
    row = again.submit(lambda db: NOTES.get(db, "a", "n1"), writes=False).result()
    again.close()

    assert row is not None and row["text"] == "kept"


def test_a_folder_is_private_and_belongs_to_one_server(store):
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.folder.glob("state.sqlite*")} == {0o600}
    with pytest.raises(ConfigError, match="another server uses it"):
        StateStore.open(store.folder, MAX_BYTES)
    store.close()
    StateStore.open(store.folder, MAX_BYTES).close()


def test_the_lock_ends_with_the_process_that_holds_it(store, tmp_path):
    folder = tmp_path / "other"
    code = (
        "import os, sys\nfrom engine.tokenizer_manager.state.store import StateStore\n"
        "StateStore.open(sys.argv[1], 1 << 30)\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False)

    StateStore.open(folder, MAX_BYTES).close()


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"has other files, such as 'thesis\.tex'"):
        StateStore.open(tmp_path, MAX_BYTES)
    (tmp_path / "home" / "files").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has other files, such as 'files'"):
        StateStore.open(tmp_path / "home", MAX_BYTES)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        StateStore.open(tmp_path / "file", MAX_BYTES)


def test_a_database_of_a_newer_version_or_of_another_program_is_refused(store):
    store.close()
    with contextlib.closing(sqlite3.connect(store.folder / "state.sqlite", isolation_level=None)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(ConfigError, match="a newer version of engine"):
        StateStore.open(store.folder, MAX_BYTES)
    with contextlib.closing(sqlite3.connect(store.folder / "state.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA application_id = 1")
    with pytest.raises(ConfigError, match="belongs to another program"):
        StateStore.open(store.folder, MAX_BYTES)
    (store.folder / "state.sqlite").write_bytes(b"no database at all" * 99)
    with pytest.raises(ConfigError, match="its database cannot be used"):
        StateStore.open(store.folder, MAX_BYTES)


def test_a_database_that_another_program_has_locked_is_refused(store, monkeypatch):
    store.close()
    monkeypatch.setattr(store_module, "_BUSY_S", 0.01)
    with contextlib.closing(sqlite3.connect(store.folder / "state.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ConfigError, match="locked"):
            StateStore.open(store.folder, MAX_BYTES)


def test_changes_that_wait_share_a_commit_and_the_failure_of_one_leaves_the_others(store):
    go = threading.Event()
    statements: list[str] = []
    first = store.submit(lambda db: (db.set_trace_callback(statements.append), go.wait()), writes=False)

    def fail(db: sqlite3.Connection) -> None:
        NOTES.insert(db, "a", "half", 7)
        raise RequestError("no such note", status=404)

    good = [store.submit(lambda db, i=i: NOTES.insert(db, "a", f"n{i}", 7), durable=i == 1) for i in range(3)]
    bad = store.submit(fail)
    go.set()
    first.result()
    for each in good:
        each.result()

    with pytest.raises(RequestError, match="no such note"):
        bad.result()
    assert ids(store, "a") == ["n2", "n1", "n0"]
    assert statements.count("COMMIT") == 1
    assert "PRAGMA synchronous = FULL" in statements


def test_a_group_without_a_durable_change_does_not_wait_for_the_disk(store):
    statements: list[str] = []
    store.submit(lambda db: db.set_trace_callback(statements.append), writes=False).result()

    store.submit(lambda db: NOTES.insert(db, "a", "n", 7)).result()

    assert "PRAGMA synchronous = NORMAL" in statements


def test_a_full_disk_is_an_error_and_no_end(store):
    store.submit(lambda db: db.execute("PRAGMA max_page_count = 40").fetchall(), writes=False).result()
    with pytest.raises(StateError, match="the disk is full, or --state-max-gb") as full:
        put(store, "a", "large", text="x" * 400_000)
    assert full.value.status == 507

    put(store, "a", "small")

    assert ids(store, "a") == ["small"]


def test_a_read_only_disk_is_an_error_and_reading_goes_on(store):
    put(store, "a", "n")
    store.submit(lambda db: db.execute("PRAGMA query_only = ON").fetchall(), writes=False).result()

    with pytest.raises(StateError, match="read-only") as refused:
        put(store, "a", "m")

    assert refused.value.status == 503
    assert ids(store, "a") == ["n"]


def test_a_slow_disk_is_an_error_and_not_a_hang(store, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_WAIT_S", 0.01)
    go = threading.Event()
    with pytest.raises(StateError, match="its disk is slow"):
        asyncio.run(store.read(lambda _: go.wait()))
    monkeypatch.setattr(store_module, "_MAX_WAITING", 0)
    with pytest.raises(StateError, match="0 calls wait for its disk"):
        store.submit(lambda _: None)
    go.set()
    monkeypatch.setattr(store_module, "MAX_WAIT_S", 30.0)
    store.close()
    with pytest.raises(StateError, match="it is closed"):
        store.submit(lambda _: None)


def test_deleted_text_is_in_no_file(store, monkeypatch):
    put(store, "a", "n", text="very private text " * 999)
    store.submit(lambda db: NOTES.delete(db, "a", "n")).result()
    store.close()

    files = [path for path in store.folder.rglob("*") if path.is_file()]

    assert not [path for path in files if b"very private text" in path.read_bytes()]


def test_an_owner_may_have_half_of_the_space(store):
    store.max_bytes = 1000
    put(store, "a", "n", num_bytes=400)

    def check(owner: str, size: int) -> None:
        store.submit(lambda db: store.check_room(db, owner, size)).result()

    check("a", 100)
    with pytest.raises(StateError, match=r"take 400 \(yours\) of 500 bytes"):
        check("a", 101)
    put(store, "b", "n", num_bytes=500)
    with pytest.raises(StateError, match=r"take 900 \(all\) of 1,000 bytes"):
        check("c", 101)


def test_pages_begin_after_an_id_and_a_foreign_id_is_none(store):
    for i in range(4):
        put(store, "a", f"n{i}", text="even" if i % 2 == 0 else "odd")
    put(store, "b", "other")

    assert ids(store, "a", limit=2) == ["n3", "n2"]
    assert ids(store, "a", limit=2, after="n2") == ["n1", "n0"]
    assert ids(store, "a", after="n1", newest_first=False) == ["n2", "n3"]
    assert ids(store, "a", text="odd") == ["n3", "n1"]
    assert ids(store, "a", after="other") is None


OWNERS = st.sampled_from(["", "a", "b"])
IDS = st.sampled_from(["x", "y", "z"])
ACTIONS = st.one_of(
    st.tuples(st.just("insert"), OWNERS, IDS, st.integers(0, 2), st.integers(0, 99)),
    st.tuples(st.just("update"), OWNERS, IDS, st.integers(0, 2), st.integers(0, 99)),
    st.tuples(st.just("delete"), OWNERS, IDS, st.just(0), st.just(0)),
)


@settings(max_examples=30, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=20))
def test_a_table_is_a_dict_per_owner(actions):
    db = sqlite3.connect(":memory:")
    db.row_factory = sqlite3.Row
    db.executescript("".join(MIGRATIONS) + NOTES.creation)
    model: dict[tuple[str, str, int], int] = {}
    for action, owner, note, part, size in actions:
        key = (owner, note, part)
        if action == "insert":
            try:
                NOTES.insert(db, owner, note, 7, part=part, num_bytes=size)
                assert key not in model
                model[key] = size
            except sqlite3.IntegrityError:
                assert key in model
        elif action == "update":
            assert NOTES.update(db, owner, note, part, num_bytes=size) == (key in model)
            if key in model:
                model[key] = size
        else:
            found = [each for each in model if each[:2] == (owner, note)]
            assert NOTES.delete(db, owner, note) == bool(found)
            for each in found:
                del model[each]
    for owner in ("", "a", "b"):
        mine = {key: size for key, size in model.items() if key[0] == owner}
        assert used_bytes(db, owner) == sum(mine.values())
        for note in "xyz":
            parts = {row["part"]: row["num_bytes"] for row in NOTES.parts(db, owner, note)}
            assert parts == {key[2]: size for key, size in mine.items() if key[1] == note}
            assert (NOTES.get(db, owner, note) is None) == ((owner, note, 0) not in mine)
    assert used_bytes(db) == sum(model.values())
    assert len(NOTES.of_all_owners(db, "num_bytes >= ?", 0)) == len(model)
    db.close()
