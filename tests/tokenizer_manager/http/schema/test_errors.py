"""`reply_to`: statuses and headers of errors."""

from __future__ import annotations

import pytest

from engine.runtime.errors import QueueFullError, RequestError
from engine.tokenizer_manager.http.schema.errors import POSITION_HEADER, reply_to


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (RequestError("busy", status=429), []),
        (RequestError("busy", status=429, retry_after_s=7), [(b"retry-after", b"7")]),
        (QueueFullError("full", 3), [(b"retry-after", b"3")]),
        (QueueFullError("full", 3, 12), [(b"retry-after", b"3"), (POSITION_HEADER, b"12")]),
    ],
)
def test_a_429_says_when_to_come_again(error: RequestError, headers: list[tuple[bytes, bytes]]):
    reply = reply_to(error, "req")

    assert (reply.status, reply.headers) == (429, headers)
