"""Bodies of `/v1/batches` (OpenAI's Batches)."""

from __future__ import annotations

import sqlite3
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...state.tables import BATCHES, FINAL, Row

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/decisions",
    "/v1/score",
    "/v1/rerank",
)
"""Endpoints of lines; OpenAI's first, then ours."""
MESSAGES: Final = "/v1/messages"
"""Endpoint of the lines of Anthropic's batches, which are made at an endpoint of their own."""

DAY_S: Final = 86_400
"""The window of a batch."""
KEPT_S: Final = 30 * DAY_S
"""Time for which a finished batch is kept, and a file of which the client says nothing else; also the longest."""

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """When a file is deleted: `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class LineError(msgspec.Struct, kw_only=True):
    """Why a line of the input is refused; lines count from 1."""

    code: str
    message: str
    line: int | UnsetType = UNSET
    param: str | UnsetType = UNSET


class LineErrors(msgspec.Struct, kw_only=True):
    """The first of the refused lines."""

    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(msgspec.Struct, kw_only=True):
    """Lines by their outcome; `unanswered` of `failed`, for Anthropic's batches, once they have ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    unanswered: int | UnsetType = UNSET


class InputDetails(msgspec.Struct, kw_only=True):
    """Parts of the input tokens."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Parts of the output tokens."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    """Tokens of all answered lines."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = msgspec.field(default_factory=InputDetails)
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int = 0


class BatchBody(msgspec.Struct, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineErrors | UnsetType = UNSET
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: str | UnsetType = UNSET
    error_file_id: str | UnsetType = UNSET
    created_at: int
    in_progress_at: int | UnsetType = UNSET
    expires_at: int
    finalizing_at: int | UnsetType = UNSET
    completed_at: int | UnsetType = UNSET
    failed_at: int | UnsetType = UNSET
    expired_at: int | UnsetType = UNSET
    cancelling_at: int | UnsetType = UNSET
    cancelled_at: int | UnsetType = UNSET
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | UnsetType = UNSET
    output_expires_after: ExpiresAfter | UnsetType = UNSET

    def enter(self, status: Status, now_s: int) -> None:
        """Begin a state, at a Unix time."""
        self.status = status
        if status != "validating":
            setattr(self, f"{status}_at", now_s)


class BatchListBody(msgspec.Struct, kw_only=True):
    """A part of the list of batches."""

    object: Literal["list"] = "list"
    data: list[BatchBody]
    first_id: str | UnsetType = UNSET
    last_id: str | UnsetType = UNSET
    has_more: bool


def batch_of(row: Row) -> BatchBody:
    """The batch of a row."""
    return msgspec.json.decode(row["body"], type=BatchBody)


def live_user(db: sqlite3.Connection, owner: str, file_id: str) -> str | None:
    """The unfinished batch whose input a file is; None: there is none."""
    rows = BATCHES.page(db, owner, limit=-1, input_file_id=file_id) or []
    return next((row["id"] for row in rows if row["status"] not in FINAL), None)
