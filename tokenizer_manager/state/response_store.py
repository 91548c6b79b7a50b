"""`ResponseStore`: the stored responses, and those that run now.

Its users are the handlers of `/v1/responses`. What a client names by its id is looked up among the responses of its
owner only; those of others, deleted and expired ones are the same 404.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from ...runtime.errors import RequestError
from . import responses
from .responses import MAX_DEPTH, Group, Response, Retention
from .store import StateStore

_CHAIN_PARAM: Final = "previous_response_id"


class LiveResponse:
    """A response that runs.

    Attributes:
        body: its object as of now, as JSON.
        cancel: ends it; None: it is not in the background.
        unsaved: events that the disk has not taken.
        disk_fails: these are not merely on their way.
        has_ended: it is still here because the disk has not taken its end yet.
        task: generates it in the background; held here.
    """

    def __init__(self, body: Callable[[], bytes], cancel: Callable[[], None] | None = None) -> None:
        self.body = body
        self.cancel = cancel
        self.unsaved: list[Group] = []
        self.disk_fails = False
        self.has_ended = False
        self.task: asyncio.Task[None] | None = None
        self._next_change = asyncio.Event()

    def changed(self) -> None:
        """Wake all that wait: it has new events, or has ended."""
        waiting, self._next_change = self._next_change, asyncio.Event()
        waiting.set()

    def next_change(self) -> asyncio.Event:
        """Set at the next change."""
        return self._next_change


class ResponseStore:
    """See the module.

    Attributes:
        live: the responses that run, by owner and id.
    """

    def __init__(
        self,
        state: StateStore,
        *,
        keep_s: float,
        max_chain_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take the database.

        Args:
            keep_s: seconds after the last use of a chain.
            max_chain_bytes: of the input and output of a chain.
            clock: Unix time.
        """
        self.live: dict[tuple[str, str], LiveResponse] = {}
        self._state = state
        self._retention = Retention(keep_s, state.max_bytes)
        self._max_chain_bytes = max_chain_bytes
        self._clock = clock

    @contextlib.contextmanager
    def running(self, owner: str, response_id: str, live: LiveResponse) -> Iterator[None]:
        """Keep a response among those that run."""
        self.live[owner, response_id] = live
        try:
            yield
        finally:
            del self.live[owner, response_id]
            live.changed()

    # ------------------------------------------------------------ reading

    async def find(self, owner: str, response_id: str) -> Response:
        """A stored response.

        Raises:
            RequestError: 404.
        """
        found = await self._state.read(lambda db: responses.find(db, owner, response_id))
        if found is None:
            raise _not_found(response_id)
        return found

    async def context(self, owner: str, response_id: str) -> list[Response]:
        """A stored response after those that it continues, but for deleted ones and what these continue.

        Raises:
            RequestError: 404.
        """
        chain = await self._state.read(lambda db: responses.chain_of(db, owner, response_id))
        if not chain:
            raise _not_found(response_id)
        return chain

    async def continued(self, owner: str, response_id: str) -> list[Response]:
        """The chain of a response that a new one continues, the root first.

        Raises:
            RequestError: it is not there, runs, or is too long.
        """

        def query(db: Any) -> list[Response]:
            found = responses.find(db, owner, response_id)
            if found is not None and found.is_running:
                raise _runs(response_id)
            if found is not None and found.depth >= MAX_DEPTH:
                raise _too_long(f"{found.depth} responses", f"{MAX_DEPTH}")
            if found is not None and found.chain_bytes > self._max_chain_bytes:
                limit = f"{self._max_chain_bytes} bytes (--max-body-mb)"
                raise _too_long(f"{found.chain_bytes} bytes of items", limit)
            return [] if found is None else responses.chain_of(db, owner, response_id)

        if (owner, response_id) in self.live:
            raise _runs(response_id)
        chain = await self._state.read(query)
        if not chain:
            raise _not_found(response_id, _CHAIN_PARAM)
        if len(chain) < chain[-1].depth:
            raise _not_found(chain[0].parent, _CHAIN_PARAM, f"; {response_id} continues it")
        return chain

    async def groups(self, owner: str, response_id: str, first: int, limit: int) -> list[Group]:
        """Stored groups of events; see `groups_of`."""
        return await self._state.read(lambda db: responses.groups_of(db, owner, response_id, first, limit))

    async def unfinished(self) -> list[Response]:
        """The responses that ran when the server ended."""
        return await self._state.read(responses.unfinished)

    # ------------------------------------------------------------ writing

    async def add(self, response: Response, groups: Sequence[Group] = ()) -> None:
        """Store a response; it survives a power cut.

        Raises:
            StateError: the disk fails.
        """
        now_s, retention = self._clock(), self._retention
        await self._state.write(
            lambda db: responses.add(db, response, now_s, retention, groups), durable=True
        )

    async def advance(self, response: Response, groups: Sequence[Group], **columns: Any) -> None:
        """Store events of a running response; they survive the end of the process.

        Raises:
            StateError: the disk fails.
        """
        now_s = self._clock()
        await self._state.write(lambda db: responses.advance(db, response, now_s, groups, **columns))

    async def finish(self, response: Response, groups: Iterable[Group] = ()) -> None:
        """Store the end of a running response.

        Raises:
            StateError: the disk fails.
        """
        now_s, last = self._clock(), list(groups)
        await self._state.write(lambda db: responses.finish(db, response, now_s, last), durable=True)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response.

        Raises:
            RequestError: there is none, it runs, or the disk fails.
        """

        def change(db: Any) -> bool:
            found = responses.find(db, owner, response_id)
            if found is not None and found.is_running:
                raise _runs(response_id, "cancel it first")
            return responses.delete(db, owner, response_id)

        if (live := self.live.get((owner, response_id))) is not None:
            raise _runs(
                response_id, "cancel it first" if live.cancel else "it cannot be deleted before its end"
            )
        if not await self._state.write(change, durable=True):
            raise _not_found(response_id)

    async def expire(self) -> int:
        """Delete some chains whose time is over; the number of them."""
        now_s = self._clock()
        return await self._state.write(lambda db: responses.expire(db, now_s))


def _not_found(response_id: str, param: str | None = None, more: str = "") -> RequestError:
    code = "response_not_found" if param is None else "previous_response_not_found"
    return RequestError(
        f"there is no response {shown_id(response_id)} of yours here (any more){more}",
        param=param,
        code=code,
        status=404,
    )


def _runs(response_id: str, fix: str = "") -> RequestError:
    return RequestError(
        f"the response {shown_id(response_id)} still runs; {fix or 'retry when it has ended'}",
        param=None if fix else _CHAIN_PARAM,
        code="response_in_progress",
        status=409,
    )


def _too_long(what: str, limit: str) -> RequestError:
    return RequestError(
        f"{_CHAIN_PARAM} has a chain of {what}, the limit is {limit}; begin a new chain with the items that matter",
        param=_CHAIN_PARAM,
        code="chain_too_long",
    )


def shown_id(response_id: str) -> str:
    """An id of a client for a message."""
    return repr(response_id if len(response_id) <= _MAX_SHOWN else f"{response_id[:_MAX_SHOWN]}…")


_MAX_SHOWN: Final = 80
