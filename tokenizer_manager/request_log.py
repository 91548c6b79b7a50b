"""`RequestLog`: the live requests, with the input, the stream and the delivered tokens of each.

An entry is enough to submit its request again after a process died: prompt, delivered tokens, seed and counts. Tokens
that were generated and not delivered are generated again with the same values: sampling noise is a function of seed
and position.

The log sends nothing: `TokenizerManager` sends a new request, `Recovery` sends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from ..runtime.grammar_use import ReasoningBlock
from ..runtime.messages import Delivered, GenerateRequest, Usage, attempt_rid
from .generation import Choice, Generation

_TOKEN_ID_BYTES: Final = 4


class LoggedRequest:
    """One live request.

    Attributes:
        generation, choice: the stream and the choice that receive its rows.
        message: as sent last, or as it will be sent.
        delivered_ids: [n] int32, the tokens of the rows that have arrived here.
        usage: as of the last row; None before the first.
        is_sent: whether a running scheduler has it.
        replica: the number of the replica that has it; None if none does. The `Dispatcher` writes it.
        num_crashes: consecutive losses of a process while it ran without progress; see `PoisonDetector`.
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
        "num_crashes",
        "replica",
        "usage",
    )

    def __init__(self, message: GenerateRequest, generation: Generation, choice: Choice) -> None:
        self.generation = generation
        self.choice = choice
        self.message = message
        delivered = message.delivered  # before this process
        self.delivered_ids = bytearray() if delivered is None else bytearray(delivered.output_ids)
        choice.answer_ids = self.delivered_ids
        self.usage: Usage | None = None if delivered is None else delivered.usage
        self.is_sent = False
        self.num_crashes = 0
        self.replica: int | None = None
        self._num_sent = 0
        self._num_bytes_before = 0
        self._num_names = 0

    @property
    def rid(self) -> str:
        """Its current id; it changes when the request is submitted again."""
        return self.message.rid

    @property
    def was_sent(self) -> bool:
        """Whether it was ever sent to a scheduler."""
        return self._num_sent > 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens delivered since it was last sent."""
        return (len(self.delivered_ids) - self._num_bytes_before) // _TOKEN_ID_BYTES

    def send(self) -> GenerateRequest:
        """Mark it as sent, and return the message to send. Call `RequestLog.resubmit` if it was sent before.

        A request that was sent before gets a new id: messages still in transit from or to a lost process then carry
        an id that is not in the log.
        """
        if self._num_sent:
            sampling, delivered = self.message.sampling, None
            if self.usage is not None and self.delivered_ids:
                delivered = Delivered(bytes(self.delivered_ids), self.usage)
                sampling = replace(sampling, prompt_logprobs=None)  # delivered with the first token
            self.message = replace(self.message, sampling=sampling, delivered=delivered)
            self.rename()
        self._num_sent += 1
        self._num_bytes_before = len(self.delivered_ids)
        self.is_sent = True
        return self.message

    @property
    def reasoning(self) -> ReasoningBlock | None:
        """Its reasoning block; None if no matcher follows it."""
        return None if self.message.grammar is None else self.message.grammar.reasoning

    def end_reasoning(self) -> None:
        """Let its reasoning end when it is submitted again, too."""
        grammar = self.message.grammar
        if grammar is not None and grammar.reasoning is not None:
            ended = replace(grammar, reasoning=replace(grammar.reasoning, ends=True))
            self.message = replace(self.message, grammar=ended)

    def rename(self) -> None:
        """Give it an id under which it was never sent."""
        self._num_names += 1
        self.choice.rid = attempt_rid(self.message.rid, self._num_names)
        self.message = replace(self.message, rid=self.choice.rid)


class RequestLog:
    """The live requests in order of arrival, and the generations that they belong to."""

    def __init__(self, on_end: Callable[[LoggedRequest, float], None] | None = None) -> None:
        """Start without requests.

        Args:
            on_end: called with each request that has just left the log, and the time.
        """
        self._on_end = on_end
        self._requests: dict[str, LoggedRequest] = {}
        self._generations: dict[str, Generation] = {}
        self._num_live: dict[str, int] = {}  # generation id -> its live requests
        self._empty = asyncio.Event()
        self._empty.set()
        self._next_end = asyncio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LoggedRequest]:
        return iter(list(self._requests.values()))

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def get(self, rid: str) -> LoggedRequest | None:
        """The live request with this current id."""
        return self._requests.get(rid)

    def ttft_s(self, rid: str) -> float | None:
        """Seconds from the arrival of a live request to its first token; None before that."""
        logged = self._requests.get(rid)
        if logged is None or logged.choice.first_token_s is None:
            return None
        return logged.choice.first_token_s - logged.generation.arrival_s

    @property
    def generations(self) -> Collection[Generation]:
        """The generations with a live request, in order of arrival. A view: copy it to end some of them in a loop."""
        return self._generations.values()

    def choices_of(self, request_id: str) -> list[Choice]:
        """The choices of a live generation, or the one with the client's id `<generation>-<index>`; [] if unknown."""
        if (generation := self._generations.get(request_id)) is not None:
            return generation.choices
        generation_id, _, index = request_id.rpartition("-")
        generation = self._generations.get(generation_id)
        return [] if generation is None else [c for c in generation.choices if str(c.index) == index]

    def live(self, request_id: str) -> list[LoggedRequest]:
        """The live requests of a generation, or of one choice; see `choices_of`."""
        choices = self.choices_of(request_id)
        return [logged for choice in choices if (logged := self._requests.get(choice.rid)) is not None]

    async def wait_empty(self) -> None:
        """Return when no request is live."""
        await self._empty.wait()

    async def wait_ended(self) -> None:
        """Return when a request has ended."""
        await self._next_end.wait()

    def opened(self, logged: LoggedRequest) -> None:
        """Add a request that is about to be sent."""
        assert logged.rid not in self._requests, logged.rid
        self._requests[logged.rid] = logged
        generation = logged.generation
        self._generations[generation.id] = generation
        self._num_live[generation.id] = self._num_live.get(generation.id, 0) + 1
        self._empty.clear()

    def ended(self, logged: LoggedRequest, now_s: float) -> None:
        """Remove a request that was answered or aborted."""
        del self._requests[logged.rid]
        generation_id = logged.generation.id
        self._num_live[generation_id] -= 1
        if self._num_live[generation_id] == 0:
            del self._num_live[generation_id], self._generations[generation_id]
        if not self._requests:
            self._empty.set()
        ended, self._next_end = self._next_end, asyncio.Event()
        ended.set()
        if self._on_end is not None:
            self._on_end(logged, now_s)

    def resubmit(self, requests: Iterable[LoggedRequest]) -> list[tuple[LoggedRequest, str | None]]:
        """Prepare requests for a new process.

        Returns:
            each with its id at the lost process; None if it was never sent.
        """
        lost_rids = [(logged, logged.rid if logged.was_sent else None) for logged in requests]
        for logged, _ in lost_rids:
            logged.send()
        self._reindex()
        return lost_rids

    def hold_back(self, requests: Iterable[LoggedRequest]) -> list[str]:
        """Give new ids to requests that do not run for now.

        Returns:
            the ids that a surviving process may know them by.
        """
        sent = [logged for logged in requests if logged.was_sent]
        lost_rids = [logged.rid for logged in sent]
        for logged in sent:
            logged.rename()
        self._reindex()
        return lost_rids

    def _reindex(self) -> None:
        self._requests = {logged.rid: logged for logged in self._requests.values()}
