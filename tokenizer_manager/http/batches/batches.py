"""`/v1/batches` (OpenAI's Batches): create, look at, list and cancel. A batch of another owner is a 404 everywhere."""

from __future__ import annotations

import sqlite3
import uuid
from typing import Final

from msgspec import UNSET

from ....runtime.errors import QueueFullError, RequestError
from ...state.tables import BATCHES, FILES, FINAL
from ..batch_runner.wire import (
    DAY_S,
    ENDPOINTS,
    BatchBody,
    BatchListBody,
    BatchRequest,
    ExpiresAfter,
    batch_of,
)
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.values import Body, convert, number_of, refused, show
from ..services import Services
from .files import checked_expiry, no_such_file

BATCHES_PATH: Final = "/v1/batches"
_POLICY: Final = FieldPolicy(
    BatchRequest,
    {},
    no_effect=(),
    nested={"output_expires_after": FieldPolicy(ExpiresAfter, {}, no_effect=())},
)
_MAX_LISTED: Final = 100
_USUAL_LISTED: Final = 20
_MAX_PAIRS: Final = 16
_MAX_KEY_CHARS: Final = 64
_MAX_VALUE_CHARS: Final = 512
_MAX_LIVE: Final = 64
"""Unfinished batches of one owner."""
_RETRY_AFTER_S: Final = 60


async def create_batch(exchange: Exchange, services: Services) -> None:
    """Begin to answer the requests of a file."""
    runner, owner = services.required_state.batches, exchange.caller.owner

    def build(body: Body) -> BatchRequest:
        _POLICY.check(body, strict=True)
        return convert(body, BatchRequest)

    request = await services.read(exchange, build)
    if request.endpoint not in ENDPOINTS:
        raise refused(
            "endpoint", f"is {show(request.endpoint)}, but it must be one of {', '.join(ENDPOINTS)}"
        )
    if (after := request.output_expires_after) is not None:
        checked_expiry(after.anchor, after.seconds, "output_expires_after")
    _check_metadata(request.metadata or {})
    now_s = runner.files.now_s()
    batch = BatchBody(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        created_at=now_s,
        expires_at=now_s + DAY_S,
        metadata=request.metadata or UNSET,
        output_expires_after=after or UNSET,
    )

    def check(db: sqlite3.Connection) -> None:
        file = FILES.get(db, owner, request.input_file_id)
        if file is None or (file["expires_s"] is not None and file["expires_s"] <= now_s):
            raise no_such_file(request.input_file_id)
        if file["purpose"] != "batch":
            raise refused("input_file_id", "is a result of a batch; upload the requests with purpose batch")
        check_num_live(db, owner)

    await exchange.send_json(await runner.create(owner, batch, check))


def check_num_live(db: sqlite3.Connection, owner: str) -> None:
    """Check that an owner may have one more unfinished batch.

    Raises:
        QueueFullError: there are too many.
    """
    rows = BATCHES.page(db, owner, limit=-1) or []
    if sum(row["status"] not in FINAL for row in rows) >= _MAX_LIVE:
        raise QueueFullError(
            f"{_MAX_LIVE} of your batches are not finished, which is the limit; retry later",
            _RETRY_AFTER_S,
        )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_PAIRS:
        raise refused("metadata", f"has {len(metadata)} keys, the limit is {_MAX_PAIRS}; send fewer")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            raise refused(
                "metadata",
                f"has {show(key)}, but a key has at most {_MAX_KEY_CHARS} characters and a value {_MAX_VALUE_CHARS}",
            )


async def get_batch(exchange: Exchange, services: Services) -> None:
    """One batch."""
    await exchange.send_json(await _found(exchange, services))


async def cancel_batch(exchange: Exchange, services: Services) -> None:
    """End a batch; what is answered stays."""
    batch = await _found(exchange, services)
    cancelled = await services.required_state.batches.cancel(batch.id)
    if cancelled is None and batch.status != "cancelled":
        raise RequestError(
            f"the batch is {batch.status}, too late to cancel it; its results are kept",
            code="invalid_state",
            status=409,
        )
    await exchange.send_json(cancelled or batch)


async def list_batches(exchange: Exchange, services: Services) -> None:
    """The owner's batches, the newest first."""
    runner, owner, query = services.required_state.batches, exchange.caller.owner, exchange.query
    limit, after = number_of(query, "limit", 1, _MAX_LISTED, _USUAL_LISTED), query.get("after")
    rows = await runner.files.store.read(
        lambda db: BATCHES.page(db, owner, limit=limit + 1, after=after, prefix="batch_")
    )
    if rows is None:
        raise refused("after", f"is {show(after)}, but there is no such batch; use the id of the last one")
    data = [runner.current(batch_of(row)) for row in rows[:limit]]
    first_id, last_id = (data[0].id, data[-1].id) if data else (UNSET, UNSET)
    await exchange.send_json(
        BatchListBody(data=data, first_id=first_id, last_id=last_id, has_more=len(rows) > limit)
    )


async def _found(exchange: Exchange, services: Services) -> BatchBody:
    runner, owner = services.required_state.batches, exchange.caller.owner
    batch_id = exchange.id_after(BATCHES_PATH)
    row = await runner.files.store.read(lambda db: BATCHES.get(db, owner, batch_id))
    if row is None:
        raise RequestError(
            f"there is no batch {show(batch_id[:100])}; GET {BATCHES_PATH} lists yours",
            code="not_found",
            status=404,
        )
    return runner.current(batch_of(row))
