"""`/v1/files` (OpenAI's Files): inputs and results of batches. A file of another owner is a 404 everywhere."""

from __future__ import annotations

import sqlite3
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.errors import RequestError
from ...state.files import StoredFiles
from ...state.tables import FILES, Row
from ..batch_runner.wire import ExpiresAfter, live_user
from ..exchange import Exchange
from ..schema.values import refused, show
from ..services import Services
from .upload import FORM_BYTES, Upload

FILES_PATH: Final = "/v1/files"
MAX_LISTED: Final = 10_000
DAY_S: Final = 86_400
KEPT_S: Final = 30 * DAY_S
"""Time after which a file is deleted that says nothing else, as OpenAI's batch files; also the longest."""
_LEAST_KEPT_S: Final = 3600
_MAX_ID_CHARS: Final = 100
_PART_BYTES: Final = 1 << 20
_FIELDS: Final = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


class FileForm(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/files`, a form."""

    file: str
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileBody(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | UnsetType = UNSET
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileListBody(msgspec.Struct, kw_only=True):
    """A part of the list of files."""

    object: Literal["list"] = "list"
    data: list[FileBody]
    first_id: str | UnsetType = UNSET
    last_id: str | UnsetType = UNSET
    has_more: bool


class FileDeletedBody(msgspec.Struct, kw_only=True):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


async def upload_file(exchange: Exchange, services: Services) -> None:
    """Store the input of a batch."""
    files = services.required_files
    owner = exchange.caller.owner
    max_bytes = int(services.config.server.max_file_mb * 2**20)
    announced = exchange.headers.get(b"content-length", b"0")
    num_bytes = max(int(announced[:20]) - FORM_BYTES, 0) if announced.isdigit() else 0
    await files.store.read(lambda db: files.store.check_room(db, owner, min(num_bytes, max_bytes)))
    with files.new() as file:
        upload = Upload(exchange.headers.get(b"content-type", b""), file)
        await upload.receive(exchange, max_bytes)
        if unknown := sorted(upload.fields.keys() - _FIELDS):
            raise refused(unknown[0], f"is not a field of a file; use {', '.join(sorted(_FIELDS))}")
        if (purpose := upload.fields.get("purpose")) != "batch":
            shown = "missing" if purpose is None else show(purpose)
            raise refused("purpose", f"is {shown}, but it must be batch: only batches use files here")
        assert upload.filename is not None
        row = await files.add(
            owner,
            file,
            filename=upload.filename,
            purpose="batch",
            expires_s=files.now_s() + _seconds_of(upload.fields),
        )
    await exchange.send_json(file_body(row))


def _seconds_of(fields: dict[str, str]) -> int:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return KEPT_S
    return checked_expiry(anchor, int(seconds) if seconds and seconds.isdecimal() else seconds)


def checked_expiry(anchor: object, seconds: object, param: str = "expires_after") -> int:
    """The seconds that a file is kept.

    Raises:
        RequestError: they are out of range, or do not count from the creation.
    """
    if anchor != "created_at":
        raise refused(f"{param}.anchor", f"is {show(anchor)}, but it must be created_at")
    if not isinstance(seconds, int) or not _LEAST_KEPT_S <= seconds <= KEPT_S:
        raise refused(
            f"{param}.seconds", f"is {show(seconds)}, but it must lie in [{_LEAST_KEPT_S}, {KEPT_S}]"
        )
    return seconds


async def list_files(exchange: Exchange, services: Services) -> None:
    """The owner's files."""
    files = services.required_files
    owner, query = exchange.caller.owner, exchange.query
    where = {"purpose": query["purpose"]} if "purpose" in query else {}
    if where and where["purpose"] not in ("batch", "batch_output"):
        raise refused("purpose", f"is {show(where['purpose'])}, but it must be one of batch, batch_output")
    limit = checked_page_limit(query, MAX_LISTED, MAX_LISTED)
    after, newest_first = query.get("after"), is_newest_first(query)
    rows = await files.store.read(
        lambda db: FILES.page(db, owner, limit=limit + 1, after=after, newest_first=newest_first, **where)
    )
    if rows is None:
        raise refused("after", f"is {show(after)}, but there is no such file; use the id of the last one")
    data = [file_body(row) for row in rows[:limit]]
    first_id, last_id = (data[0].id, data[-1].id) if data else (UNSET, UNSET)
    await exchange.send_json(
        FileListBody(data=data, first_id=first_id, last_id=last_id, has_more=len(rows) > limit)
    )


def checked_page_limit(query: dict[str, str], usual: int, most: int) -> int:
    """The number of rows that a list may have, from its parameter `limit`.

    Raises:
        RequestError: it is out of range.
    """
    given = query.get("limit", str(usual))
    if not (given.isdecimal() and len(given) < 10 and 1 <= int(given) <= most):
        raise refused("limit", f"is {show(given)}, but it must lie in [1, {most}]")
    return int(given)


def is_newest_first(query: dict[str, str]) -> bool:
    """The order of a list, from its parameter `order`.

    Raises:
        RequestError: it is neither asc nor desc.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise refused("order", f"is {show(order)}, but it must be asc or desc")
    return order == "desc"


async def get_file(exchange: Exchange, services: Services) -> None:
    """One file."""
    await exchange.send_json(file_body(await _found(exchange, services.required_files)))


async def delete_file(exchange: Exchange, services: Services) -> None:
    """Delete a file."""
    files = services.required_files
    file_id = id_in(exchange.path, FILES_PATH)

    owner = exchange.caller.owner

    def check(db: sqlite3.Connection) -> None:
        if (batch_id := live_user(db, owner, file_id)) is not None:
            raise RequestError(
                f"the file {show(file_id)} is the input of {batch_id}, which is not finished; cancel it, or wait",
                code="file_in_use",
                status=409,
            )

    if not await files.delete(owner, file_id, check):
        raise no_such_file(file_id)
    await exchange.send_json(FileDeletedBody(id=file_id))


async def file_content(exchange: Exchange, services: Services) -> None:
    """The bytes of a file."""
    files = services.required_files
    row = await _found(exchange, files)
    with files.path(row["id"]).open("rb") as opened:
        async with exchange.abort_on_disconnect():
            await exchange.send_file(opened, row["num_bytes"], b"application/octet-stream")


async def _found(exchange: Exchange, files: StoredFiles) -> Row:
    file_id = id_in(exchange.path, FILES_PATH)
    if (row := await files.find(exchange.caller.owner, file_id)) is None:
        raise no_such_file(file_id)
    return row


def id_in(path: str, prefix: str) -> str:
    """The id in a path such as /v1/files/{id}/content."""
    return path.removeprefix(f"{prefix}/").partition("/")[0]


def no_such_file(file_id: str) -> RequestError:
    """The error for a file that is not there, has expired or is another owner's."""
    return RequestError(
        f"there is no file {show(file_id[:_MAX_ID_CHARS])}; GET {FILES_PATH} lists yours",
        code="not_found",
        status=404,
    )


def file_body(row: Row) -> FileBody:
    """A row as clients see it."""
    values: dict[str, Any] = {} if row["expires_s"] is None else {"expires_at": row["expires_s"]}
    return FileBody(
        id=row["id"],
        bytes=row["num_bytes"],
        created_at=row["created_s"],
        filename=row["filename"],
        purpose=row["purpose"],
        **values,
    )
