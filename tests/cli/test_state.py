"""`engine state list`, `purge`, `check`: what owners have, what is kept, and each fault that can be found."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main as cli
from engine.tokenizer_manager.state import responses
from engine.tokenizer_manager.state.files import StoredFiles
from engine.tokenizer_manager.state.responses import Response, Retention
from engine.tokenizer_manager.state.store import StateStore
from engine.tokenizer_manager.state.tables import BATCH_LINES, BATCHES, FILES, MIGRATIONS

ONE, OTHER = "aaaa1111aaaa1111", "bbbb2222bbbb2222"
DAY_S = 86_400
LINE = {"place": 0, "length": 2, "num_bytes": 100}


def fill(store: StateStore) -> None:
    """An owner with an old finished batch and a new one that runs, another one with a chain of two responses."""
    files, now_s = StoredFiles(store), int(time.time())
    for name, age_s in (("file-old", 40 * DAY_S), ("file-new", 60)):
        files.path(name).write_bytes(b"{}" * 500)

        def insert(db: sqlite3.Connection, name: str = name, age_s: int = age_s) -> None:
            FILES.insert(db, ONE, name, now_s - age_s, num_bytes=1000, filename="f", purpose="batch")

        store.submit(insert).result()

    def batches(db: sqlite3.Connection) -> None:
        for name, status, file, age_s in (
            ("batch_old", "completed", "file-old", 40 * DAY_S),
            ("batch_new", "in_progress", "file-new", 60),
        ):
            BATCHES.insert(
                db, ONE, name, now_s - age_s, num_bytes=2, status=status, input_file_id=file, body=b"{}"
            )
        BATCH_LINES.insert(db, ONE, "batch_new", now_s, custom_id="a", **LINE)
        for depth, (name, parent) in enumerate((("resp_1", ""), ("resp_2", "resp_1")), 1):
            response = Response(OTHER, name, parent, "resp_1", depth, 9, "completed", output=b"[1]")
            responses.add(db, response, now_s - 10 * DAY_S, Retention(1e9, 1 << 30))

    store.submit(batches, durable=True).result()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a server that has stopped."""
    store = StateStore.open(tmp_path / "state", 1 << 30)
    fill(store)
    store.close()
    return store.folder


def rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict[str, Any]]:
    capsys.readouterr()
    assert cli.run(["state", "list", str(folder), "--json"]) == 0
    return {(each["owner"], each["kind"]): each for each in json.loads(capsys.readouterr().out)}


def counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    return {kind: each["count"] for (_, kind), each in rows(folder, capsys).items()}


def change(folder: Path, *statements: str) -> None:
    with sqlite3.connect(folder / "state.sqlite", isolation_level=None) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def test_a_list_has_what_each_owner_has(folder, capsys):
    found = rows(folder, capsys)

    assert found.keys() == {(ONE, "files"), (ONE, "batches"), (OTHER, "responses")}
    assert found[ONE, "files"]["bytes"] == 2000
    assert (found[ONE, "batches"]["count"], found[ONE, "batches"]["unfinished"]) == (2, 1)
    assert found[ONE, "batches"]["bytes"] == 104
    assert found[ONE, "files"]["newest"] - found[ONE, "files"]["oldest"] == 40 * DAY_S - 60
    assert cli.run(["state", "list", str(folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["aaaa1111", "batches", "2", "1", "104", "B", "40", "days", "ago", "1", "minute", "ago"] in lines


def test_a_purge_keeps_what_the_next_server_goes_on_with(folder, capsys):
    assert cli.run(["state", "purge", str(folder), "--yes"]) == 0

    assert counts(folder, capsys) == {"batches": 1, "files": 1}
    assert [path.name for path in (folder / "files").iterdir()] == ["file-new"]
    assert cli.run(["state", "check", str(folder)]) == 0
    assert cli.run(["state", "purge", str(folder), "--yes", "--unfinished"]) == 0
    assert counts(folder, capsys) == {}
    assert not list((folder / "files").iterdir())
    StateStore.open(folder, 1 << 30).close()


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("--older-than 30d", {"files": 1, "batches": 1, "responses": 2}),
        ("--older-than 5d --kind responses", {"files": 2, "batches": 2}),
        ("--older-than 11d --kind responses", {"files": 2, "batches": 2, "responses": 2}),
        ("--kind files", {"files": 1, "batches": 2, "responses": 2}),
        ("--kind files --unfinished", {"files": 1, "batches": 2, "responses": 2}),
        ("--owner bbbb2222", {"files": 2, "batches": 2}),
        ("--owner aaaa --unfinished", {"responses": 2}),
    ],
)
def test_a_purge_of_a_part(folder, capsys, options, left):
    assert cli.run(["state", "purge", str(folder), "--yes", *options.split()]) == 0

    assert counts(folder, capsys) == left
    assert cli.run(["state", "check", str(folder)]) == 0


def test_without_an_answer_nothing_is_purged(folder, capsys, monkeypatch):
    before = counts(folder, capsys)

    assert cli.run(["state", "purge", str(folder)]) == 2
    assert "pass --yes" in capsys.readouterr().err
    monkeypatch.setattr("engine.cli.state._confirmed", lambda: False)
    assert cli.run(["state", "purge", str(folder)]) == 1

    assert counts(folder, capsys) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kind pictures", "--kind is 'pictures', but it must be one of files, batches, responses"),
        ("--older-than soon", "--older-than is 'soon', but it must be a number above 0"),
        ("--owner cccc", "has nothing here"),
        ("--owner -", "has nothing here"),
    ],
)
def test_a_purge_of_what_there_is_not(folder, capsys, options, message):
    assert cli.run(["state", "purge", str(folder), "--yes", *options.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("UPDATE batches SET status = 'lost' WHERE id = 'batch_old'", "batch_old has a status"),
        ("DELETE FROM files WHERE id = 'file-new'", "batch_new has lost its input"),
        ("DELETE FROM batch_lines", "batch_new runs, and has no line"),
        ("UPDATE batches SET status = 'failed'", "batch_new has lines, but is finished"),
        ("DELETE FROM response_chains", "resp_1 is in no chain"),
        ("UPDATE response_chains SET num_live = 1", "the chain of response resp_1 counts others"),
        ("DELETE FROM responses WHERE id = 'resp_2'", ""),
        ("UPDATE usage SET num_bytes = 5", "owner aaaa1111aaaa1111 is charged for 5 bytes, but has 2104"),
        ("UPDATE files SET num_bytes = 9", "file-old has 1000 bytes, but its row says 9"),
        (
            "UPDATE files SET id = 'file-x' WHERE id = 'file-old'",
            "file file-x has a row, but is not in files/",
        ),
        ("UPDATE files SET id = 'file-x' WHERE id = 'file-old'", "files/file-old has no row"),
    ],
)
def test_a_check_finds_states_that_cannot_be(folder, capsys, statement, fault):
    assert cli.run(["state", "check", str(folder)]) == 0
    change(folder, statement)
    capsys.readouterr()

    code = cli.run(["state", "check", str(folder)])

    assert code == bool(fault)
    assert fault in capsys.readouterr().out


def test_a_check_finds_a_damaged_database(folder, capsys):
    path = folder / "state.sqlite"
    path.write_bytes(b"\xff" * 200 + path.read_bytes()[200:])

    assert cli.run(["state", "check", str(folder)]) == 1
    assert "cannot be read" in capsys.readouterr().out
    assert cli.run(["state", "list", str(folder)]) == 2
    assert "`engine state check`" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "purge", "check"])
def test_a_folder_in_use_of_another_version_or_without_state_is_refused(folder, tmp_path, capsys, command):
    store = StateStore.open(folder, 1 << 30)
    assert cli.run(["state", command, str(folder)]) == 2
    assert "another server uses it" in capsys.readouterr().err
    store.close()
    for version, word in ((len(MIGRATIONS) + 1, "newer"), (1, "older")):
        change(folder, f"PRAGMA user_version = {version}")
        assert cli.run(["state", command, str(folder)]) == 2
        assert f"{word} version of engine" in capsys.readouterr().err
    assert cli.run(["state", command, str(tmp_path / "nothing")]) == 2
    assert "has no state.sqlite" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
