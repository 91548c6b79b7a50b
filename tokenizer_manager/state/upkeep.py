"""Upkeep of a folder of `--state-dir` that no server uses: `engine state` lists, purges and checks it.

Besides `tables.py` only the checks here have SQL about rows of users; they read owners and ids.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ...runtime.errors import ConfigError
from .responses import delete_chain
from .store import check_version, lock_folder
from .tables import (
    BATCH_LINES,
    BATCHES,
    CHAINS,
    EVENTS,
    FILES,
    FINAL,
    MIGRATIONS,
    RESPONSES,
    UNFINISHED_BATCH,
    UNFINISHED_RESPONSE,
    OwnedTable,
)

KINDS: Final[Mapping[str, tuple[OwnedTable, ...]]] = {
    "files": (FILES,),
    "batches": (BATCHES, BATCH_LINES),
    "responses": (RESPONSES, EVENTS),
}
"""A kind of state -> the table that counts it, and others of which the bytes are its own, too."""
_UNFINISHED: Final = {"batches": UNFINISHED_BATCH, "responses": UNFINISHED_RESPONSE}
_READS_INPUT: Final = "status IN ('validating', 'in_progress')"
_STATUSES: Final = ("validating", "in_progress", "finalizing", "cancelling", *FINAL)
_IMPOSSIBLE: Final = {
    f"SELECT id FROM batches WHERE status NOT IN {_STATUSES}": "batch {} has a status that does not exist",
    f"SELECT id FROM batches b WHERE {_READS_INPUT} AND NOT EXISTS "
    "(SELECT 1 FROM files f WHERE f.owner = b.owner AND f.id = b.input_file_id)": "batch {} has lost its input",
    "SELECT id FROM batches b WHERE status = 'in_progress' AND NOT EXISTS "
    "(SELECT 1 FROM batch_lines l WHERE l.owner = b.owner AND l.id = b.id)": "batch {} runs, and has no line",
    "SELECT DISTINCT l.id FROM batch_lines l LEFT JOIN batches b ON b.owner = l.owner AND b.id = l.id "
    f"WHERE b.id IS NULL OR b.status IN {FINAL}": "batch {} has lines, but is finished or not there",
    "SELECT id FROM responses r WHERE NOT EXISTS "
    "(SELECT 1 FROM response_chains c WHERE c.owner = r.owner AND c.id = r.root)": "response {} is in no chain",
    "SELECT id FROM response_chains c WHERE num_live != (SELECT count(*) FROM responses r "
    f"WHERE r.owner = c.owner AND r.root = c.id AND {UNFINISHED_RESPONSE})": (
        "the chain of response {} counts others than its running responses"
    ),
    "SELECT DISTINCT e.id FROM response_events e LEFT JOIN responses r ON r.owner = e.owner AND r.id = e.id "
    "WHERE r.id IS NULL": "response {} has events, but is not there",
}
"""Queries that find nothing in a sound database -> what they find."""


class Holding(NamedTuple):
    """The state of one kind that an owner has.

    Attributes:
        owner: the digest of an API key; "" without keys.
        kind: of `KINDS`.
        num_entries: rows that users know by an id.
        num_unfinished: of these; the next server goes on with them.
        num_bytes: that they take of `--state-max-gb`.
        oldest_s, newest_s: Unix times of creation.
    """

    owner: str
    kind: str
    num_entries: int
    num_unfinished: int
    num_bytes: int
    oldest_s: int
    newest_s: int


class Selection(NamedTuple):
    """A choice of the state to purge.

    Attributes:
        kinds: of `KINDS`.
        owners: None: all.
        until_s: what was created, or for a chain of responses last used, until this Unix time.
        unfinished: also what the next server would go on with.
    """

    kinds: Collection[str]
    owners: Collection[str] | None
    until_s: float
    unfinished: bool


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database of a folder, which is locked: no server can start with it meanwhile. Nothing is migrated.

    Raises:
        ConfigError: it has no state, a server uses it, or another version has written it.
        sqlite3.Error: the database is damaged.
    """
    database = folder / "state.sqlite"
    if not database.is_file():
        raise ConfigError(
            f"{folder} has no state.sqlite; name a folder that a server was given with --state-dir"
        )
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock_folder(folder))
        db = stack.enter_context(contextlib.closing(sqlite3.connect(database, isolation_level=None)))
        if (version := check_version(db, folder)) < len(MIGRATIONS):
            raise ConfigError(
                f"{folder} was written by an older version of engine (version {version}, this one has "
                f"{len(MIGRATIONS)}); start a server with it once, which brings it up to date"
            )
        yield db


def holdings(db: sqlite3.Connection) -> list[Holding]:
    """The state of all owners."""
    found: list[Holding] = []
    for kind, (table, *others) in KINDS.items():
        unfinished: dict[str, int] = {}
        if (condition := _UNFINISHED.get(kind)) is not None:
            unfinished = {each.owner: each.num_entries for each in table.totals(db, condition)}
        more_bytes = dict[str, int]()
        for other in others:
            for each in other.totals(db):
                more_bytes[each.owner] = more_bytes.get(each.owner, 0) + each.num_bytes
        for owner, count, num_bytes, oldest_s, newest_s in table.totals(db):
            num_bytes += more_bytes.get(owner, 0)
            found.append(Holding(owner, kind, count, unfinished.get(owner, 0), num_bytes, oldest_s, newest_s))
    return sorted(found, key=lambda each: each.owner)


def purge(db: sqlite3.Connection, what: Selection) -> list[str]:
    """Delete rows, in the caller's transaction; the ids of files to be deleted when it is committed.

    The input of an unfinished batch stays as long as the batch does.
    """

    def chosen(table: OwnedTable, condition: str) -> list[sqlite3.Row]:
        rows = table.of_all_owners(db, f"created_s <= ? AND ({condition})", int(what.until_s))
        return [row for row in rows if what.owners is None or row["owner"] in what.owners]

    if "batches" in what.kinds:
        for row in chosen(BATCHES, "TRUE" if what.unfinished else f"NOT ({UNFINISHED_BATCH})"):
            BATCH_LINES.delete(db, row["owner"], row["id"])
            BATCHES.delete(db, row["owner"], row["id"])
    if "responses" in what.kinds:
        for row in chosen(CHAINS, "TRUE" if what.unfinished else "num_live = 0"):
            delete_chain(db, row)
    if "files" not in what.kinds:
        return []
    unfinished = BATCHES.of_all_owners(db, UNFINISHED_BATCH)
    read = {(row["owner"], row["input_file_id"]) for row in unfinished}
    files = [row for row in chosen(FILES, "TRUE") if (row["owner"], row["id"]) not in read]
    for row in files:
        FILES.delete(db, row["owner"], row["id"])
    return [row["id"] for row in files]


def compact(db: sqlite3.Connection) -> None:
    """Give the space of deleted rows back to the file system, if it has room for a copy of the database."""
    with contextlib.suppress(sqlite3.OperationalError):  # the next rows use the space
        db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def faults(db: sqlite3.Connection, folder: Path) -> list[str]:
    """Describe everything that is wrong with a state; a sentence for each.

    Raises:
        sqlite3.Error: the database is too damaged to be read.
    """
    wrong = [
        f"state.sqlite: {row[0]}" for row in db.execute("PRAGMA integrity_check").fetchall() if row[0] != "ok"
    ]
    rows = {row["id"]: row["num_bytes"] for row in FILES.of_all_owners(db, "TRUE")}
    places = folder / "files"
    sizes = {path.name: path.stat().st_size for path in places.iterdir()} if places.is_dir() else {}
    wrong += [f"file {name} has a row, but is not in files/" for name in sorted(rows.keys() - sizes.keys())]
    wrong += [
        f"files/{name} has no row; a server deletes what a crash has left when it starts"
        for name in sorted(sizes.keys() - rows.keys())
    ]
    wrong += [
        f"file {name} has {sizes[name]} bytes, but its row says {rows[name]}"
        for name in sorted(rows.keys() & sizes.keys())
        if sizes[name] != rows[name]
    ]
    for query, text in _IMPOSSIBLE.items():
        wrong += [text.format(row[0]) for row in db.execute(query)]
    used = dict(db.execute("SELECT owner, num_bytes FROM usage WHERE num_bytes != 0").fetchall())
    taken = dict[str, int]()
    for table in (*(each for tables in KINDS.values() for each in tables), CHAINS):
        for each in table.totals(db):
            taken[each.owner] = taken.get(each.owner, 0) + each.num_bytes
    for owner in sorted(used.keys() | taken.keys()):
        if used.get(owner, 0) != taken.get(owner, 0):
            wrong.append(
                f"owner {owner or '-'} is charged for {used.get(owner, 0)} bytes, but has {taken.get(owner, 0)}"
            )
    return wrong
