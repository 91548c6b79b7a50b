"""`OwnedTable`: the tables of the state, and the only place that writes SQL about rows of users.

Every statement of an `OwnedTable` has `WHERE owner = ?`, so a row of another owner cannot be seen, changed or deleted
by its id; only `of_all_owners` is for the server's own work (restart, expiry). `owner` is `Caller.owner`: a digest of
the API key, the same on every start, and "" without keys.

A table is declared here once, with its own columns, and `MIGRATIONS` lists the scripts that make a database: to add or
change a table, append one. All tables have these columns:

    owner, id, part   the key; `part` numbers the rows of one id (lines of a batch, events of a response), else 0
    seq               the order of creation
    created_s         Unix time
    expires_s         Unix time at which the row is deleted by the server; NULL: never
    num_bytes         what it takes of `--state-max-gb`, its file included; triggers keep the sum per owner in `usage`
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final, NamedTuple

Row = sqlite3.Row


class OwnedTable:
    """One table. Its methods run in the functions that `StateStore` is given, which also makes them atomic."""

    def __init__(self, name: str, columns: str) -> None:
        """Describe a table.

        Args:
            name: of the table.
            columns: SQL of its own columns, beyond those of every table.
        """
        self.name = name
        self._columns = columns

    @property
    def creation(self) -> str:
        """The script that makes the table. Part of a migration: a released table changes by a further script."""
        name = self.name
        change = "ON CONFLICT (owner) DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes"
        return f"""
            CREATE TABLE {name} (
                seq INTEGER PRIMARY KEY AUTOINCREMENT,
                owner TEXT NOT NULL, id TEXT NOT NULL, part INTEGER NOT NULL DEFAULT 0,
                created_s INTEGER NOT NULL, expires_s INTEGER, num_bytes INTEGER NOT NULL DEFAULT 0,
                {self._columns},
                UNIQUE (owner, id, part)
            );
            CREATE INDEX {name}_in_order ON {name} (owner, seq);
            CREATE INDEX {name}_by_expiry ON {name} (expires_s) WHERE expires_s IS NOT NULL;
            CREATE TRIGGER {name}_added AFTER INSERT ON {name} WHEN NEW.num_bytes != 0 BEGIN
                INSERT INTO usage VALUES (NEW.owner, NEW.num_bytes) {change};
            END;
            CREATE TRIGGER {name}_changed AFTER UPDATE OF num_bytes ON {name} BEGIN
                INSERT INTO usage VALUES (NEW.owner, NEW.num_bytes - OLD.num_bytes) {change};
            END;
            CREATE TRIGGER {name}_removed AFTER DELETE ON {name} WHEN OLD.num_bytes != 0 BEGIN
                INSERT INTO usage VALUES (OLD.owner, -OLD.num_bytes) {change};
            END;
        """

    def insert(self, db: sqlite3.Connection, owner: str, row_id: str, created_s: int, **values: Any) -> None:
        """Add a row; a column without a value has its default."""
        row = {"owner": owner, "id": row_id, "created_s": created_s, **values}
        marks = ", ".join("?" * len(row))
        db.execute(f"INSERT INTO {self.name} ({', '.join(row)}) VALUES ({marks})", list(row.values()))

    def get(self, db: sqlite3.Connection, owner: str, row_id: str, part: int = 0) -> Row | None:
        """The row; None if this owner has none of this id."""
        query = f"SELECT * FROM {self.name} WHERE owner = ? AND id = ? AND part = ?"
        row: Row | None = db.execute(query, (owner, row_id, part)).fetchone()
        return row

    def parts(
        self, db: sqlite3.Connection, owner: str, row_id: str, first: int = 0, limit: int = -1
    ) -> list[Row]:
        """The rows of an id from part `first`, in order; at most `limit`, -1 for all."""
        query = f"SELECT * FROM {self.name} WHERE owner = ? AND id = ? AND part >= ? ORDER BY part LIMIT ?"
        return db.execute(query, (owner, row_id, first, limit)).fetchall()

    def created_after(
        self, db: sqlite3.Connection, owner: str, row_id: str, after_seq: int, limit: int
    ) -> list[Row]:
        """The rows of an id in the order of their creation, from the first with a larger `seq`; at most `limit`."""
        # With the plus SQLite reads in order from `after_seq`, and does not sort all rows of the id for each page.
        query = f"SELECT * FROM {self.name} WHERE owner = ? AND +id = ? AND seq > ? ORDER BY seq LIMIT ?"
        return db.execute(query, (owner, row_id, after_seq, limit)).fetchall()

    def page(
        self,
        db: sqlite3.Connection,
        owner: str,
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
        prefix: str = "",
        **where: Any,
    ) -> list[Row] | None:
        """The owner's rows in the order of their creation.

        Args:
            limit: the most rows.
            after: the id of the row before the first; None: from the beginning.
            newest_first: the last created is the first.
            prefix: that ids begin with.
            where: values that columns must have.

        Returns:
            None if the owner has no row `after`.
        """
        conditions, values = ["owner = ?", "part = 0"], [owner]
        if after is not None:
            if (row := self.get(db, owner, after)) is None:
                return None
            conditions.append("seq < ?" if newest_first else "seq > ?")
            values.append(row["seq"])
        for column, value in where.items():
            conditions.append(f"{column} = ?")
            values.append(value)
        if prefix:
            conditions.append("substr(id, 1, length(?)) = ?")
            values += [prefix, prefix]
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT * FROM {self.name} WHERE {' AND '.join(conditions)} ORDER BY seq {order} LIMIT ?"
        return db.execute(query, (*values, limit)).fetchall()

    def update(self, db: sqlite3.Connection, owner: str, row_id: str, part: int = 0, **values: Any) -> bool:
        """Set columns; False if this owner has no such row."""
        columns = ", ".join(f"{column} = ?" for column in values)
        query = f"UPDATE {self.name} SET {columns} WHERE owner = ? AND id = ? AND part = ?"
        return db.execute(query, (*values.values(), owner, row_id, part)).rowcount > 0

    def delete(self, db: sqlite3.Connection, owner: str, row_id: str) -> bool:
        """Delete all parts of an id; False if this owner has none."""
        return db.execute(f"DELETE FROM {self.name} WHERE owner = ? AND id = ?", (owner, row_id)).rowcount > 0

    def delete_where(self, db: sqlite3.Connection, owner: str, **where: Any) -> int:
        """Delete the owner's rows that have these values in their columns; the number of them."""
        conditions = " AND ".join(f"{column} = ?" for column in where)
        query = f"DELETE FROM {self.name} WHERE owner = ? AND {conditions}"
        return db.execute(query, (owner, *where.values())).rowcount

    def of_all_owners(
        self, db: sqlite3.Connection, condition: str, *values: Any, limit: int = -1
    ) -> list[Row]:
        """Rows of every owner, in the order of their creation: for restarts and expiry, never for an answer.

        Args:
            condition: SQL with a `?` for each of `values`.
        """
        query = f"SELECT * FROM {self.name} WHERE {condition} ORDER BY seq LIMIT ?"
        return db.execute(query, (*values, limit)).fetchall()

    def totals(self, db: sqlite3.Connection, condition: str = "TRUE") -> list[Totals]:
        """The rows of every owner with a condition, which is SQL: for the operator of the server."""
        columns = "owner, count(DISTINCT id), sum(num_bytes), min(created_s), max(created_s)"
        query = f"SELECT {columns} FROM {self.name} WHERE {condition} GROUP BY owner ORDER BY owner"
        return [Totals(*row) for row in db.execute(query)]


class Totals(NamedTuple):
    """Rows of one owner in one table.

    Attributes:
        num_entries: ids.
        num_bytes: that they take of `--state-max-gb`.
        oldest_s, newest_s: Unix times of creation.
    """

    owner: str
    num_entries: int
    num_bytes: int
    oldest_s: int
    newest_s: int


def used_bytes(db: sqlite3.Connection, owner: str | None = None) -> int:
    """The bytes that an owner's rows and files take; None: those of all owners."""
    query = "SELECT coalesce(sum(num_bytes), 0) FROM usage WHERE owner = coalesce(?, owner)"
    [total] = db.execute(query, (owner,)).fetchone()
    return int(total)


FILES: Final = OwnedTable("files", "filename TEXT NOT NULL, purpose TEXT NOT NULL")
"""Uploads and the results of batches; `num_bytes` is the size of the file in the folder."""

BATCHES: Final = OwnedTable(
    "batches", "status TEXT NOT NULL, input_file_id TEXT NOT NULL, body BLOB NOT NULL"
)
"""`body` is the batch as clients see it, in JSON."""
FINAL: Final = ("completed", "failed", "expired", "cancelled")
"""Statuses of finished batches."""
UNFINISHED_BATCH: Final = f"status NOT IN {FINAL}"
UNFINISHED_RESPONSE: Final = "status IN ('queued', 'in_progress')"
"""Conditions: the next server goes on with these."""
BATCH_LINES: Final = OwnedTable(
    "batch_lines",
    """custom_id TEXT NOT NULL, place INTEGER NOT NULL, length INTEGER NOT NULL, runs INTEGER NOT NULL DEFAULT 0,
    status INTEGER NOT NULL DEFAULT 0, result BLOB, input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0""",
)
"""The lines of unfinished batches: `id` is the batch, `part` the line, `seq` the order in which lines are answered,
`place` and `length` its bytes in the input;
`runs` counts how often it was begun; `status` is that of its HTTP answer, 0 before, and `result` its line of output."""
_BATCHES: Final = f"""
    {BATCHES.creation}
    {BATCH_LINES.creation}
    CREATE INDEX batches_by_file ON batches (owner, input_file_id);
"""

_USAGE: Final = "CREATE TABLE usage (owner TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;"

RESPONSES: Final = OwnedTable(
    "responses",
    """parent TEXT NOT NULL, root TEXT NOT NULL, depth INTEGER NOT NULL, chain_bytes INTEGER NOT NULL,
    status TEXT NOT NULL, num_losses INTEGER NOT NULL, output BLOB NOT NULL, input BLOB NOT NULL, body BLOB NOT NULL,
    resume BLOB NOT NULL""",
)
EVENTS: Final = OwnedTable(
    "response_events", "root TEXT NOT NULL, events BLOB NOT NULL, outputs BLOB NOT NULL"
)
CHAINS: Final = OwnedTable("response_chains", "num_live INTEGER NOT NULL")
_RESPONSES: Final = f"""
    {RESPONSES.creation}
    {EVENTS.creation}
    {CHAINS.creation}
    CREATE INDEX responses_by_root ON responses (owner, root);
    CREATE INDEX response_events_by_root ON response_events (owner, root);
    CREATE INDEX responses_unfinished ON responses (status) WHERE {UNFINISHED_RESPONSE};
"""

_TOKENS: Final = "ALTER TABLE responses ADD COLUMN tokens BLOB NOT NULL DEFAULT x'';"

MIGRATIONS: Final[tuple[str, ...]] = (_USAGE, _RESPONSES, FILES.creation, _BATCHES, _TOKENS)
"""Scripts in the order in which they are run; `user_version` of a database is the number that it has had."""
