"""`RequestLog`: for every live request its input, who reads its answer, and what was delivered of that so far.

What it holds is enough to submit a request again after a process died: its prompt, the tokens that arrived here, its
seed and its counts. What was generated and never arrived is generated again, and is the same: sampling noise is a
function of seed and position. Written by the manager only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from ..runtime.messages import Delivered, GenerateRequest, Usage, rid_of_life
from .generation import Choice, Generation

_TOKEN_ID_BYTES: Final = 4


class LoggedRequest:
    """One live request.

    Attributes:
        generation, choice: who reads its rows.
        message: as it was sent last, or will be.
        delivered_ids: [n] int32, the tokens whose rows have arrived here.
        usage: as of the last row; None before the first.
        is_sent: whether the scheduler that lives now has it.
        num_strikes: how often in a row a process was lost while it ran and had not got on; see `Suspects`.
    """

    __slots__ = (
        "_num_bytes_before",
        "_num_names",
        "_num_sent",
        "choice",
        "delivered_ids",
        "generation",
        "is_sent",
        "message",
        "num_strikes",
        "usage",
    )

    def __init__(self, message: GenerateRequest, generation: Generation, choice: Choice) -> None:
        self.generation = generation
        self.choice = choice
        self.message = message
        self.delivered_ids = bytearray()
        self.usage: Usage | None = None
        self.is_sent = False
        self.num_strikes = 0
        self._num_sent = 0
        self._num_bytes_before = 0
        self._num_names = 0

    @property
    def rid(self) -> str:
        """Its id at present."""
        return self.message.rid

    @property
    def was_sent(self) -> bool:
        """Whether any scheduler has ever had it."""
        return self._num_sent > 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens that were delivered since it was last sent."""
        return (len(self.delivered_ids) - self._num_bytes_before) // _TOKEN_ID_BYTES

    def send(self) -> GenerateRequest:
        """The message to send now; through the log if it was sent before.

        Under a new id if it was sent before: whatever is still on its way from or to a lost process then belongs to a
        request that nobody knows.
        """
        if self._num_sent:
            sampling, delivered = self.message.sampling, None
            if self.usage is not None and self.delivered_ids:
                delivered = Delivered(bytes(self.delivered_ids), self.usage)
                sampling = replace(sampling, prompt_logprobs=None)  # they came with the first token
            self.message = replace(self.message, sampling=sampling, delivered=delivered)
            self.rename()
        self._num_sent += 1
        self._num_bytes_before = len(self.delivered_ids)
        self.is_sent = True
        return self.message

    def rename(self) -> None:
        """Another id from now on: nobody knows the one under which it was sent."""
        self._num_names += 1
        self.choice.rid = rid_of_life(self.message.rid, self._num_names)
        self.message = replace(self.message, rid=self.choice.rid)


class RequestLog:
    """The live requests, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[str, LoggedRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LoggedRequest]:
        return iter(list(self._requests.values()))

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def get(self, rid: str) -> LoggedRequest | None:
        """The live request that has this id at present."""
        return self._requests.get(rid)

    def add(self, logged: LoggedRequest) -> None:
        """Log a request that is about to be sent."""
        assert logged.rid not in self._requests, logged.rid
        self._requests[logged.rid] = logged

    def remove(self, rid: str) -> LoggedRequest:
        """Forget a request that is answered or aborted."""
        return self._requests.pop(rid)

    def send_again(self, requests: Iterable[LoggedRequest]) -> list[tuple[LoggedRequest, str | None]]:
        """Prepare these requests for a new process; with the id under which a lost one had them, if it had."""
        lost_rids = [(logged, logged.rid if logged.was_sent else None) for logged in requests]
        for logged, _ in lost_rids:
            logged.send()
        self._take_in_names()
        return lost_rids

    def take_back(self, requests: Iterable[LoggedRequest]) -> list[str]:
        """These are not to run for now: the ids under which a process may have them that has outlived the other."""
        sent = [logged for logged in requests if logged.was_sent]
        lost_rids = [logged.rid for logged in sent]
        for logged in sent:
            logged.rename()
        self._take_in_names()
        return lost_rids

    def _take_in_names(self) -> None:
        self._requests = {logged.rid: logged for logged in self._requests.values()}
