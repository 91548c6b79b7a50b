"""`RequestLog`: for every live request its input and the token ids delivered so far.

What it holds is enough to submit a request again after the scheduler died, as prompt + delivered tokens with the
original seed and counts, so that the client sees a pause and not an error. Written by the manager only.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.messages import GenerateRequest


class LoggedRequest:
    """One live request.

    Attributes:
        message: as it was sent to the scheduler.
        delivered_ids: [n] int32, the tokens whose rows have arrived here.
    """

    __slots__ = ("delivered_ids", "message")

    def __init__(self, message: GenerateRequest) -> None:
        self.message = message
        self.delivered_ids = bytearray()


class RequestLog:
    """The live requests, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[str, LoggedRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LoggedRequest]:
        return iter(list(self._requests.values()))

    def add(self, message: GenerateRequest) -> None:
        """Log a request that is about to be sent."""
        assert message.rid not in self._requests, message.rid
        self._requests[message.rid] = LoggedRequest(message)

    def deliver(self, rid: str, token_ids: bytes) -> None:
        """Append tokens that have arrived for a live request."""
        self._requests[rid].delivered_ids += token_ids

    def remove(self, rid: str) -> None:
        """Forget a request that is answered or aborted."""
        del self._requests[rid]
