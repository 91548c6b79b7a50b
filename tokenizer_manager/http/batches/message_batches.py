"""`/v1/messages/batches` (Anthropic's Message Batches): another form of the batches of the same runner and store.

The requests become a stored file with a line for each, and the results are a line for each in one file. A request that
the Messages API would refuse is an error of its own: the others run.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
import sqlite3
import uuid
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET

from ....runtime.errors import RequestError
from ...state.files import NewFile
from ...state.tables import BATCHES, FILES, FINAL, Row
from ..batch_runner.lines import MAX_LINES
from ..batch_runner.wire import DAY_S, KEPT_S, MESSAGES, BatchBody, batch_of
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.values import Body, convert, number_of, refused, show
from ..services import Services
from .batches import check_num_live

MESSAGE_BATCHES_PATH: Final = "/v1/messages/batches"
PREFIX: Final = "msgbatch_"
_MAX_LISTED: Final = 1000
_USUAL_LISTED: Final = 20
_CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_JSON_LINES: Final = b"application/x-jsonl"
_PART_LINES: Final = 256


class MessageBatchRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages/batches`."""

    requests: list[dict[str, Any]]


class MessageBatchCounts(msgspec.Struct, kw_only=True):
    """Requests by their outcome; all are processing until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatchBody(msgspec.Struct, kw_only=True):
    """A message batch."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    ended_at: str | None
    created_at: str
    expires_at: str
    archived_at: None = None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchListBody(msgspec.Struct, kw_only=True):
    """A part of the list of message batches."""

    data: list[MessageBatchBody]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeletedBody(msgspec.Struct, kw_only=True):
    """A deleted message batch."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


_POLICY: Final = FieldPolicy(MessageBatchRequest, {}, no_effect=())


async def create_message_batch(exchange: Exchange, services: Services) -> None:
    """Begin to answer requests."""
    runner, owner = services.required_state.batches, exchange.caller.owner
    files = runner.files
    requests = await services.read(exchange, _read)
    now_s = files.now_s()
    with files.new() as file:
        await asyncio.to_thread(_write, file, requests)
        expires_s = now_s + KEPT_S
        row = await files.add(
            owner, file, filename="message_batch.jsonl", purpose="batch", expires_s=expires_s
        )
    batch = BatchBody(
        id=f"{PREFIX}{uuid.uuid4().hex}",
        endpoint=MESSAGES,
        input_file_id=row["id"],
        created_at=now_s,
        expires_at=now_s + DAY_S,
    )
    batch.request_counts.total = len(requests)
    try:
        await runner.create(owner, batch, lambda db: check_num_live(db, owner))
    except BaseException:
        with contextlib.suppress(RequestError):
            await files.delete(owner, row["id"], lambda _db: None)
        raise
    await exchange.send_json(_shown(batch, exchange))


def _read(body: Body) -> list[dict[str, Any]]:
    _POLICY.check(body, strict=True)
    requests = convert(body, MessageBatchRequest).requests
    if not 1 <= len(requests) <= MAX_LINES:
        raise refused("requests", f"has {len(requests)} entries, but it must have 1 to {MAX_LINES}")
    places: dict[str, int] = {}
    for number, request in enumerate(requests):
        at = f"requests[{number}]"
        if unknown := sorted(request.keys() - {"custom_id", "params"}):
            raise refused(f"{at}.{unknown[0]}", "is no field of a request; use custom_id and params")
        custom_id, params = request.get("custom_id"), request.get("params")
        if not isinstance(custom_id, str) or not _CUSTOM_ID.fullmatch(custom_id):
            raise refused(
                f"{at}.custom_id",
                f"is {show(custom_id)}, but it must have 1 to 64 letters, digits, hyphens and underscores",
            )
        if custom_id in places:
            raise refused(
                f"{at}.custom_id",
                f"is {show(custom_id)}, as that of requests[{places[custom_id]}]; change one",
            )
        if not isinstance(params, dict):
            raise refused(f"{at}.params", f"is {show(params)}, but it must be a body of {MESSAGES}")
        if params.get("stream"):
            raise refused(
                f"{at}.params.stream", "is true, but the answers of a batch are whole; leave it out"
            )
        places[custom_id] = number
    return requests


def _write(file: NewFile, requests: list[dict[str, Any]]) -> None:
    """Write the lines of the runner; blocks."""
    for first in range(0, len(requests), _PART_LINES):
        lines = [
            {"custom_id": each["custom_id"], "method": "POST", "url": MESSAGES, "body": each["params"]}
            for each in requests[first : first + _PART_LINES]
        ]
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
    file.sync()


async def get_message_batch(exchange: Exchange, services: Services) -> None:
    """One message batch."""
    await exchange.send_json(_shown(await _found(exchange, services), exchange))


async def list_message_batches(exchange: Exchange, services: Services) -> None:
    """The owner's message batches, the newest first."""
    runner, owner, query = services.required_state.batches, exchange.caller.owner, exchange.query
    limit = number_of(query, "limit", 1, _MAX_LISTED, _USUAL_LISTED)
    before = query.get("before_id")
    after = before or query.get("after_id")

    def page(db: sqlite3.Connection) -> list[Row] | None:
        return BATCHES.page(
            db, owner, limit=limit + 1, after=after, newest_first=before is None, prefix=PREFIX
        )

    rows = await runner.files.store.read(page)
    if rows is None:
        name = "after_id" if before is None else "before_id"
        raise refused(name, f"is {show(after)}, but there is no such batch; use an id of the list")
    has_more, rows = len(rows) > limit, rows[:limit]
    data = [_shown(runner.current(batch_of(row)), exchange) for row in rows]
    if before is not None:
        data.reverse()
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    await exchange.send_json(
        MessageBatchListBody(data=data, has_more=has_more, first_id=first_id, last_id=last_id)
    )


async def cancel_message_batch(exchange: Exchange, services: Services) -> None:
    """End a message batch; what is answered stays."""
    batch = await _found(exchange, services)
    cancelled = await services.required_state.batches.cancel(batch.id)
    if cancelled is None and batch.status != "cancelled":
        raise RequestError(f"the batch has ended, too late to cancel it: its results are at {_path(batch)}")
    await exchange.send_json(_shown(cancelled or batch, exchange))


async def message_batch_results(exchange: Exchange, services: Services) -> None:
    """The results, a JSON object on each line, in the order of the requests."""
    batch, files = await _found(exchange, services), services.required_state.files
    if batch.status not in FINAL:
        raise RequestError(
            f"the batch has not ended; retry when processing_status of {show(batch.id)} is ended"
        )
    if batch.output_file_id is UNSET:
        raise _no_results(batch)
    row = await files.find(exchange.caller.owner, batch.output_file_id)
    if row is None:
        raise _no_results(batch)
    with files.path(row["id"]).open("rb") as opened:
        async with exchange.abort_on_disconnect():
            await exchange.send_file(opened, row["num_bytes"], _JSON_LINES)


async def delete_message_batch(exchange: Exchange, services: Services) -> None:
    """Delete a message batch that has ended, with its requests and results."""
    batch, files = await _found(exchange, services), services.required_state.files
    owner = exchange.caller.owner
    if batch.status not in FINAL:
        raise RequestError("the batch has not ended; cancel it, or wait")
    ids = [each for each in (batch.input_file_id, batch.output_file_id) if each is not UNSET]

    def delete(db: sqlite3.Connection) -> None:
        BATCHES.delete(db, owner, batch.id)
        for file_id in ids:
            FILES.delete(db, owner, file_id)

    await files.store.write(delete, durable=True)
    for file_id in ids:
        files.path(file_id).unlink(missing_ok=True)
    await exchange.send_json(MessageBatchDeletedBody(id=batch.id))


async def _found(exchange: Exchange, services: Services) -> BatchBody:
    runner, owner = services.required_state.batches, exchange.caller.owner
    batch_id = exchange.id_after(MESSAGE_BATCHES_PATH)
    row = await runner.files.store.read(lambda db: BATCHES.get(db, owner, batch_id))
    if row is None or not batch_id.startswith(PREFIX):
        raise RequestError(
            f"there is no message batch {show(batch_id[:100])}; GET {MESSAGE_BATCHES_PATH} lists yours",
            code="not_found",
            status=404,
        )
    return runner.current(batch_of(row))


def _no_results(batch: BatchBody) -> RequestError:
    return RequestError(
        f"the results of {batch.id} are not there any more; send its requests again",
        code="not_found",
        status=404,
    )


def _path(batch: BatchBody) -> str:
    return f"{MESSAGE_BATCHES_PATH}/{batch.id}/results"


def _shown(batch: BatchBody, exchange: Exchange) -> MessageBatchBody:
    """A batch in Anthropic's form."""
    has_ended = batch.status in FINAL
    counts = batch.request_counts
    shown = MessageBatchCounts(processing=counts.total)
    if has_ended:
        missing = counts.unanswered or 0
        shown = MessageBatchCounts(succeeded=counts.completed, errored=counts.failed - missing)
        if batch.status == "cancelled":
            shown.canceled = missing
        else:
            shown.expired = missing
    ended_s = next((at for name in FINAL if (at := getattr(batch, f"{name}_at")) is not UNSET), None)
    cancelling_s = None if batch.cancelling_at is UNSET else batch.cancelling_at
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    if has_ended:
        status = "ended"
    elif cancelling_s is not None:
        status = "canceling"
    host = exchange.headers.get(b"host", b"").decode("latin-1")
    return MessageBatchBody(
        id=batch.id,
        processing_status=status,
        request_counts=shown,
        ended_at=_time(ended_s),
        created_at=str(_time(batch.created_at)),
        expires_at=str(_time(batch.expires_at)),
        cancel_initiated_at=_time(cancelling_s),
        results_url=f"{exchange.scheme}://{host}{_path(batch)}" if has_ended else None,
    )


def _time(unix_s: int | None) -> str | None:
    """A Unix time as RFC 3339 has it."""
    if unix_s is None:
        return None
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat().replace("+00:00", "Z")
