"""Stored responses: `RESPONSES` has a row for each, `EVENTS` the events of background ones, `CHAINS` their retention.

A response has its own input and output and the id of its parent, so a conversation of n turns takes the space of n
turns, and forks share their beginning. All responses with one root are a chain: it is used when a response is added,
and it expires or leaves for newer ones as a whole, but not while one of its responses runs. A row of `CHAINS` is
inserted anew with each use, so that `seq` has the least recently used chain first.

A group of events has as `part` the number of its first event, and the rows of the answer that it was made from: by
these a background response goes on after a crash (`http/responses/background.py`).
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Self

from .tables import CHAINS, EVENTS, RESPONSES, UNFINISHED_RESPONSE, Row, used_bytes

MAX_DEPTH: Final = 1000
"""Responses in a chain."""
_UNFINISHED: Final = ("queued", "in_progress")
_ROW_BYTES: Final = 512  # of the other columns and the indexes, about
_PAGE_BYTES: Final = 4096


class Response(NamedTuple):
    """A stored response.

    Attributes:
        parent: id of the response that it continues; "": none.
        root: id of the first response of its chain.
        depth: number of its chain's responses up to it.
        chain_bytes: input and output of these.
        status: as in the API.
        num_losses: lives of the server that ended while it ran without progress.
        output, input: JSON lists of items, its own only.
        body: JSON of the response object without its output.
        resume: of a running background response, what it goes on with; b"" of others.
        tokens: int32, the number of the parent's tokens with which its own begin, then the others, those of the prompt
            before those of the answer; b"": they are not kept. So a chain takes the space of its longest prompt.
    """

    owner: str
    id: str
    parent: str
    root: str
    depth: int
    chain_bytes: int
    status: str
    num_losses: int = 0
    output: bytes = b"[]"
    input: bytes = b"[]"
    body: bytes = b"{}"
    resume: bytes = b""
    tokens: bytes = b""

    @classmethod
    def of(cls, row: Row) -> Self:
        """The response of a row."""
        return cls(*(row[name] for name in cls._fields))

    @property
    def is_running(self) -> bool:
        """Whether its output is not complete."""
        return self.status in _UNFINISHED


class Group(NamedTuple):
    """Events that are stored together.

    Attributes:
        first: number of the first one.
        events: framed, as they are sent.
        outputs: the rows of the answer that they were made from, encoded.
    """

    first: int
    events: bytes
    outputs: bytes = b""


class Retention(NamedTuple):
    """How long responses are kept.

    Attributes:
        keep_s: seconds after the last use of their chain.
        max_bytes: of the whole state; an owner has half of it.
    """

    keep_s: float
    max_bytes: int


def find(db: sqlite3.Connection, owner: str, response_id: str) -> Response | None:
    """A response of this owner."""
    row = RESPONSES.get(db, owner, response_id)
    return None if row is None else Response.of(row)


def chain_of(db: sqlite3.Connection, owner: str, response_id: str) -> list[Response]:
    """A response after those that it continues, as many as are there (`depth`: all), the first one first."""
    chain: list[Response] = []
    while response_id and (response := find(db, owner, response_id)) is not None:
        chain.append(response)
        response_id = response.parent
    return chain[::-1]


def tokens_of_chain(chain: Iterable[Response]) -> array[int]:
    """The tokens of the prompt and the answer of the last response, the root first; none if they are not kept."""
    ids = array("i")
    for response in chain:
        own = array("i", response.tokens)
        ids = ids[: own[0]] + own[1:] if own else array("i")
    return ids


def own_tokens(ids: array[int], parent_ids: array[int]) -> bytes:
    """`Response.tokens` of a response with these tokens, and of a parent with those; none: it has no parent."""
    num_shared = len(parent_ids)
    if ids[:num_shared] != parent_ids:
        num_shared = next(i for i in range(num_shared) if ids[i : i + 1] != parent_ids[i : i + 1])
    return (array("i", [num_shared]) + ids[num_shared:]).tobytes()


def add(
    db: sqlite3.Connection,
    response: Response,
    now_s: float,
    retention: Retention,
    groups: Iterable[Group] = (),
) -> None:
    """Add a response, complete or not, and delete the least recently used chains for its room.

    Args:
        now_s: Unix time, when its chain is used.
    """
    size = _size_of(response)
    _make_room(db, response, size, retention.max_bytes)
    columns = response._asdict()
    owner, response_id = columns.pop("owner"), columns.pop("id")
    RESPONSES.insert(db, owner, response_id, int(now_s), num_bytes=size, **columns)
    row = CHAINS.get(db, response.owner, response.root)
    num_live = response.is_running + (0 if row is None else row["num_live"])
    CHAINS.delete(db, response.owner, response.root)
    CHAINS.insert(
        db,
        response.owner,
        response.root,
        int(now_s),
        expires_s=int(now_s + retention.keep_s),
        num_live=num_live,
    )
    _add_groups(db, response, now_s, groups)


def advance(
    db: sqlite3.Connection, response: Response, now_s: float, groups: Iterable[Group], **columns: Any
) -> None:
    """Store events of a running response, and new values of its columns."""
    if columns:
        RESPONSES.update(db, response.owner, response.id, **columns)
    _add_groups(db, response, now_s, groups)


def finish(db: sqlite3.Connection, response: Response, now_s: float, groups: Iterable[Group] = ()) -> None:
    """Give a running response its last events, its end and its output; a second call changes nothing."""
    if (found := find(db, response.owner, response.id)) is None or not found.is_running:
        return
    names = ("chain_bytes", "status", "output", "body", "resume", "tokens")
    ended = {name: getattr(response, name) for name in names}
    advance(db, response, now_s, groups, num_bytes=_size_of(response), **ended)
    if (row := CHAINS.get(db, response.owner, response.root)) is not None:
        CHAINS.update(db, response.owner, response.root, num_live=row["num_live"] - 1)


def delete(db: sqlite3.Connection, owner: str, response_id: str) -> bool:
    """Delete a response that does not run; False: there is none. What continues it can then not be continued."""
    if (response := find(db, owner, response_id)) is None:
        return False
    EVENTS.delete(db, owner, response_id)
    RESPONSES.delete(db, owner, response_id)
    if not RESPONSES.page(db, owner, limit=1, root=response.root):
        CHAINS.delete(db, owner, response.root)
    return True


def groups_of(
    db: sqlite3.Connection, owner: str, response_id: str, first: int, limit: int = -1
) -> list[Group]:
    """The groups of events of a response whose first event has at least this number."""
    rows = EVENTS.parts(db, owner, response_id, first, limit)
    return [Group(row["part"], row["events"], row["outputs"]) for row in rows]


def unfinished(db: sqlite3.Connection) -> list[Response]:
    """The responses of all owners that ran when the server ended, in order of arrival."""
    rows = RESPONSES.of_all_owners(db, UNFINISHED_RESPONSE)
    return [Response.of(row) for row in rows]


def expire(db: sqlite3.Connection, now_s: float, limit: int = 64) -> int:
    """Delete at most `limit` chains whose time is over; the number of them."""
    rows = CHAINS.of_all_owners(db, "expires_s <= ? AND num_live = 0", int(now_s), limit=limit)
    for row in rows:
        delete_chain(db, row)
    return len(rows)


def _make_room(db: sqlite3.Connection, response: Response, num_bytes: int, max_bytes: int) -> None:
    """Delete the least recently used chains, of this owner if it has more than its half, but never the response's."""
    for owner, limit in ((response.owner, max_bytes // 2), (None, max_bytes)):
        while used_bytes(db, owner) + num_bytes > limit:
            condition, values = "num_live = 0 AND NOT (owner = ? AND id = ?)", [response.owner, response.root]
            if owner is not None:
                condition, values = f"{condition} AND owner = ?", [*values, owner]
            if not (rows := CHAINS.of_all_owners(db, condition, *values, limit=1)):
                break  # files take the rest; `StateStore` refuses what does not fit
            delete_chain(db, rows[0])


def delete_chain(db: sqlite3.Connection, chain: Row) -> None:
    """Delete a row of `CHAINS` and all responses with this root."""
    for table in (EVENTS, RESPONSES):
        table.delete_where(db, chain["owner"], root=chain["id"])
    CHAINS.delete(db, chain["owner"], chain["id"])


def _add_groups(db: sqlite3.Connection, response: Response, now_s: float, groups: Iterable[Group]) -> None:
    for first, events, outputs in groups:
        if EVENTS.get(db, response.owner, response.id, first) is not None:
            continue  # it was stored after its sender has given up waiting
        EVENTS.insert(
            db,
            response.owner,
            response.id,
            int(now_s),
            part=first,
            root=response.root,
            num_bytes=_size(events, outputs),
            events=events,
            outputs=outputs,
        )


def _size_of(response: Response) -> int:
    return _size(response.output, response.input, response.body, response.resume, response.tokens)


def _size(*contents: bytes) -> int:
    """The bytes of a row; a long one takes whole pages of the file."""
    size = sum(map(len, contents)) + _ROW_BYTES
    return size if size < _PAGE_BYTES else -(-size // _PAGE_BYTES) * _PAGE_BYTES
