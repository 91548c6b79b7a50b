"""Responses in the background: they are generated whether a client waits or not, and survive the end of the server.

A response is stored when it is accepted, and its events in groups, before a client gets them: streams read them from
the store. A group has the rows that it was made from, too. After a restart the response is submitted with its seed and
the tokens of these rows, so that the answer continues what was streamed; ids of items and calls follow from the
response's. A server that ends twice while a response makes no progress is taken to end by it: the response fails.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import MutableMapping
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from ....runtime.errors import EngineDeadError, QueueFullError, RequestError
from ....runtime.messages import Delivered, TextOutput
from ...generation import Generation
from ...scheduling_options import Scheduling
from ...state.response_store import LiveResponse, ResponseStore
from ...state.responses import Group, Response
from ...state.store import StateError
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.errors import reply_to
from ..services import Engine
from .convert import namespaces_of
from .items import derived_id, event_texts
from .reading import ReadRequest, body_at_beginning, read_body
from .stream import ResponseStream
from .wire import ResponseBody, ResponseError
from .writer import ResponseWriter, error_of, tokens_of, with_answer

logger = logging.getLogger(__name__)

MAX_LIVE: Final = 1024
"""Responses in the background that wait or run."""
MAX_LOSSES: Final = 2
_MAX_RETRY_S: Final = 5.0
_GROUPS_AT_ONCE: Final = 64
_EXPIRY_S: Final = 60.0
_AGAIN_S: Final = 10.0
"""Between two trials to store the end of a response."""
_NUM_QUEUED_EVENTS: Final = 2
_LOST: Final = RequestError(
    "the server ended twice while it worked on this response, which is not tried again; change the request before "
    "you send it again, and report it to the operator",
    code="poison_request",
    status=500,
)
_CHANGED: Final = RequestError(
    "the server was replaced by one that streams this response differently; send the request again",
    code="server_changed",
    status=500,
)


class Resume(msgspec.Struct, frozen=True):
    """The facts with which a running response goes on, beside its rows.

    Attributes:
        request: the body, without its input.
    """

    request: dict[str, Any]
    scheduling: Scheduling
    seed: int


async def answer_in_background(exchange: Exchange, engine: Engine, read: ReadRequest) -> None:
    """Store a response, begin it, and answer that it is queued, or with the stream of its events.

    Raises:
        RequestError: too many of them run, or the disk fails.
    """
    store = engine.required_state.responses
    if sum(live.cancel is not None for live in store.live.values()) >= MAX_LIVE:
        raise QueueFullError(f"{MAX_LIVE} responses run in the background; retry later", retry_after_s=10)
    digits = uuid.uuid4().hex
    response_id = f"resp_{digits}"
    seed = read.generation.sampling.seed
    seed = engine.manager.draw_seed() if seed is None else seed
    body = replace(body_at_beginning(engine, read.generation, read, response_id), status="queued")
    resume = Resume(read.body, read.generation.scheduling, seed)
    response = read.response(response_id, body=msgspec.json.encode(body), resume=msgspec.json.encode(resume))
    run = _Run(engine, store, response, read)
    await store.add(response, [Group(0, run.opening())])
    run.begin()
    if read.request.stream:
        async with exchange.abort_on_disconnect():
            await follow(exchange, store, response.owner, response_id, 0)
    else:
        await exchange.send_json(body)


async def keep_responses(engine: Engine, store: ResponseStore) -> None:
    """Go on with the responses that ran when the server ended, then delete those whose time is over, for ever."""
    try:
        for response in await store.unfinished():
            try:
                run = _Run(engine, store, response)
            except msgspec.MsgspecError as error:  # of another version
                logger.error("a response cannot be read response=%s: %s", response.id, error)
                await store.finish(_unreadable(response))
            else:
                run.begin()
    except StateError as error:
        logger.warning("responses in the background do not go on: %s", error)
    while True:
        try:
            while await store.expire():
                pass
        except StateError as error:
            logger.warning("responses were not deleted in time: %s", error)
        await asyncio.sleep(_EXPIRY_S)


def _unreadable(response: Response) -> Response:
    """A response that has failed, since this version of the server cannot go on with it."""
    error = ResponseError("server_error", _CHANGED.message)
    body = msgspec.json.decode(response.body) | {"status": "failed", "error": error}
    return response._replace(status="failed", body=msgspec.json.encode(body), resume=b"")


async def follow(exchange: Exchange, store: ResponseStore, owner: str, response_id: str, first: int) -> None:
    """Stream the events of a response from the one with number `first` on, until its end."""
    await exchange.start_events()
    at = 0
    while True:
        live = store.live.get((owner, response_id))
        change = None if live is None else live.next_change()
        groups = await store.groups(owner, response_id, at, _GROUPS_AT_ONCE)
        if not groups and live is not None and live.disk_fails:
            groups = [group for group in live.unsaved if group.first >= at]
        for group in groups:
            events = list(event_texts(group.events))
            at = group.first + 1
            if fresh := events[max(first - group.first, 0) :]:
                await exchange.send_events(b"".join(fresh))
        if groups:
            continue
        if live is None or change is None or live.has_ended:
            break
        await change.wait()
    await exchange.end_events()


class _Run:
    """One response that is generated in the background."""

    def __init__(
        self, engine: Engine, store: ResponseStore, response: Response, read: ReadRequest | None = None
    ) -> None:
        """Take a new response with its request, or one that an earlier server has begun."""
        self._engine = engine
        self._store = store
        self._response = response
        self._read = read
        self._resume = msgspec.json.decode(response.resume, type=Resume)
        self._num_ids = 0
        self._num_losses = response.num_losses
        self._stored: list[TextOutput] = []
        self._num_stored = 0  # events
        self._waiting: list[TextOutput] = []  # rows without events
        self._generation: Generation | None = None
        self._is_canceled = False
        self._live = LiveResponse(lambda: msgspec.json.encode(self._stream.snapshot()), self._cancel)
        body = msgspec.json.decode(response.body, type=ResponseBody)
        self._stream = ResponseStream(body, self._next_id)
        if read is not None:
            self._set_namespaces(read)

    def opening(self) -> bytes:
        """The events of a response that is queued."""
        return self._stream.opening("response.created") + self._stream.opening("response.queued")

    def begin(self) -> None:
        """Generate it, in a task."""
        self._store.live[self._response.owner, self._response.id] = self._live
        self._live.task = asyncio.create_task(self._run(), name=self._response.id)

    # ------------------------------------------------------------ its task

    async def _run(self) -> None:
        try:
            await self._work()
        finally:
            del self._store.live[self._response.owner, self._response.id]
            self._live.changed()

    async def _work(self) -> None:
        try:
            await self._generate()
        except asyncio.CancelledError:
            if not self._is_canceled or self._live.has_ended:
                raise  # the server ends
            await self._break_off("cancelled", None)
        except Exception as error:
            if isinstance(error, EngineDeadError) or getattr(error, "code", "") == "shutting_down":
                await self._save(None, status="queued")  # the next server goes on with it
                return
            await self._break_off("failed", error_of(reply_to(error, self._response.id)))

    async def _generate(self) -> None:
        stream, read = self._stream, self._read or await self._read_again()
        if stream.num_events == _NUM_QUEUED_EVENTS:
            stream.body.status = "in_progress"
            opening = Group(stream.num_events, stream.opening("response.in_progress"))
            await self._save(opening, status="in_progress")
        elif self._response.status == "queued":  # the server before has left it
            await self._save(None, status="in_progress")
        with await self._started(read) as generation:
            self._generation = generation
            if self._is_canceled:
                self._engine.manager.abort(generation.id, "canceled")
            writer = ResponseWriter(self._engine, generation, read, stream)
            stream.body.warnings = generation.request.warnings or msgspec.UNSET
            [choice] = generation.choices
            for output in self._stored:
                stream.events(choice.read(output))
            if stream.num_events < self._num_stored:
                raise _CHANGED
            first, events = stream.num_events, b""
            async for rows in generation:
                first = stream.num_events
                events = b"".join([stream.events(row.choice.read(row.output)) for row in rows])
                self._waiting += [row.output for row in rows]
                if choice.finish_reason is None and events:
                    columns: dict[str, Any] = {}
                    if self._num_losses:  # it ends no server at this place: the rows before are stored
                        self._num_losses = columns["num_losses"] = 0
                    outputs, self._waiting = self._waiting, []
                    await self._save(Group(first, events, msgspec.msgpack.encode(outputs)), **columns)
            last = Group(first, events + writer.complete(canceled=self._is_canceled))
            self._response = self._response._replace(tokens=tokens_of(generation))
            await self._end(last)

    async def _started(self, read: ReadRequest) -> Generation:
        """Submit it, as soon as the queue has room."""
        exchange = Exchange({"method": "POST", "path": "/v1/responses", "headers": []}, _nothing, _nowhere)
        token_ids = b"".join(output.token_ids for output in self._stored)
        usages = [output.usage for output in self._stored if output.token_ids]
        # A scheduler that has outlived the manager may still send rows of the life before.
        life = "" if self._read is not None else f".{secrets.token_hex(4)}"
        request = replace(
            read.generation,
            scheduling=self._resume.scheduling,
            sampling=replace(read.generation.sampling, seed=self._resume.seed),
            generation_id=self._response.id.replace("_", "-", 1) + life,
            delivered=Delivered(token_ids, usages[-1]) if token_ids else None,
        )
        while True:
            try:
                return await self._engine.start(exchange, request)
            except QueueFullError as error:
                if self._is_canceled:
                    raise asyncio.CancelledError from None
                await asyncio.sleep(min(error.retry_after_s, _MAX_RETRY_S))

    async def _read_again(self) -> ReadRequest:
        """The request of an earlier server, with its stored events counted and its rows at hand.

        Raises:
            RequestError: it has ended the server before, or cannot be read any more.
        """
        response, store = self._response, self._store
        groups = await store.groups(response.owner, response.id, 0, -1)
        self._num_stored = sum(len(list(event_texts(group.events))) for group in groups)
        self.opening()
        if self._num_stored > _NUM_QUEUED_EVENTS:
            self._stream.body.status = "in_progress"
            self._stream.opening("response.in_progress")
        if response.status == "in_progress":
            self._num_losses += 1
            await self._save(None, num_losses=self._num_losses)
        if self._num_losses >= MAX_LOSSES:
            raise _LOST
        for group in groups:
            if group.outputs:
                self._stored += msgspec.msgpack.decode(group.outputs, type=list[TextOutput])
        chain = await store.continued(response.owner, response.parent) if response.parent else []
        body = self._resume.request | {"input": msgspec.json.decode(response.input)}
        read = read_body(body, self._engine, Caller(owner=response.owner), chain)
        self._set_namespaces(read)
        return read

    # ------------------------------------------------------------ storing

    async def _save(self, group: Group | None, **columns: Any) -> None:
        """Store events, then wake their readers. With a disk that fails they wait in memory."""
        if group is not None:
            self._live.unsaved.append(group)
        groups = list(self._live.unsaved)
        try:
            await self._store.advance(self._response, groups, **columns)
            del self._live.unsaved[: len(groups)]
            self._live.disk_fails = False
        except StateError as error:
            if not self._live.disk_fails:
                logger.warning("events are not stored response=%s: %s", self._response.id, error)
            self._live.disk_fails = True
        self._live.changed()

    async def _break_off(self, status: Literal["failed", "cancelled"], error: ResponseError | None) -> None:
        self._stream.num_events = first = max(self._stream.num_events, self._num_stored)
        await self._end(Group(first, self._stream.break_off(status, error, None)))

    async def _end(self, group: Group) -> None:
        """Store the end of the response with its last events; the very last is added.

        Until the disk takes them, clients get them from memory.
        """
        self._live.unsaved.append(group._replace(events=group.events + self._stream.last_event()))
        while True:
            try:
                await self._store.finish(with_answer(self._response, self._stream.body), self._live.unsaved)
                return
            except StateError as error:
                if not self._live.has_ended:
                    logger.warning("a response is not stored response=%s: %s", self._response.id, error)
            self._live.disk_fails = self._live.has_ended = True
            self._live.changed()
            await asyncio.sleep(_AGAIN_S)

    def _cancel(self) -> None:
        if self._is_canceled or self._live.has_ended:
            return
        self._is_canceled = True
        if self._generation is not None:
            self._engine.manager.abort(self._generation.id, "canceled")
        elif self._live.task is not None and self._read is not None:
            # Soon: a task that has not begun would end without a word. One of an earlier server ends when it goes on,
            # because only then its body has what was streamed.
            asyncio.get_running_loop().call_soon(self._live.task.cancel)

    def _set_namespaces(self, read: ReadRequest) -> None:
        assert read.generation.conversation is not None
        self._stream.namespaces = namespaces_of(read.generation.conversation)

    def _next_id(self, prefix: str) -> str:
        self._num_ids += 1
        return f"{prefix}_{derived_id(self._response.id, -self._num_ids)}"


async def _nothing() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    return {}


async def _nowhere(message: MutableMapping[str, Any]) -> None:
    pass
