"""`/v1/files` (OpenAI's Files): inputs and results of batches. A file of another owner is a 404 everywhere."""

from __future__ import annotations

import sqlite3
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.errors import RequestError
from ...state.files import StoredFiles
from ...state.tables import FILES, Row
from ..batch_runner.wire import KEPT_S, ExpiresAfter, live_user
from ..exchange import Exchange
from ..schema.values import is_newest_first, number_of, one_of, refused, show
from ..services import Services
from .upload import FORM_BYTES, Upload

FILES_PATH: Final = "/v1/files"
MAX_LISTED: Final = 10_000
PURPOSES: Final = ("batch", "batch_output")
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
    files = services.required_state.files
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
    files = services.required_state.files
    owner, query = exchange.caller.owner, exchange.query
    where = {name: one_of(query[name], PURPOSES, name) for name in ("purpose",) if name in query}
    limit = number_of(query, "limit", 1, MAX_LISTED, MAX_LISTED)
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


async def get_file(exchange: Exchange, services: Services) -> None:
    """One file."""
    await exchange.send_json(file_body(await _found(exchange, services.required_state.files)))


async def delete_file(exchange: Exchange, services: Services) -> None:
    """Delete a file."""
    files = services.required_state.files
    file_id = exchange.id_after(FILES_PATH)

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
    files = services.required_state.files
    row = await _found(exchange, files)
    with files.path(row["id"]).open("rb") as opened:
        async with exchange.abort_on_disconnect():
            await exchange.send_file(opened, row["num_bytes"], b"application/octet-stream")


async def _found(exchange: Exchange, files: StoredFiles) -> Row:
    file_id = exchange.id_after(FILES_PATH)
    if (row := await files.find(exchange.caller.owner, file_id)) is None:
        raise no_such_file(file_id)
    return row


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
