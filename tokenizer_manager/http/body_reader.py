"""`BodyReader`: parses and checks request bodies, large ones off the event loop.

Parsing and checking 16 MB (`--max-body-mb`) of numbers takes more than a second, and a JSON Schema takes 3 us for each
of its keys, 200 ms at `--max-schema-kb`. Bodies of more than `IN_PLACE_BYTES` are read on threads; the thread hop costs
less than their parsing. A thread releases the GIL between two values, because `json_body` calls Python for each number
and object, and between two prompts; `template_renderer.share_the_gil` makes it do so soon.

There are two threads, one for bodies of up to `SMALL_BYTES` and one for longer ones, each first in, first out. At most
two bodies share the GIL with the event loop, and many large schemas delay other large bodies only. After a body that
took long, its thread rests, so that a row of such bodies does not take a core from the scheduler: on a small machine
all streams would be slower. A body that has waited `MAX_WAIT_S` is refused with 429, and that of a client that
disconnects leaves the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ...runtime.config.answer_config import RequestLimits
from ...runtime.errors import QueueFullError, RequestError
from .exchange import ClientGone, DisconnectScope
from .schema.json_body import parse_object
from .schema.values import Body

IN_PLACE_BYTES: Final = 8 << 10
SMALL_BYTES: Final = 64 << 10
MAX_WAIT_S: Final = 5.0
LONG_S: Final = 0.02
"""CPU time of a body after which its thread rests."""
_REST: Final = 5.0
"""Rest per CPU time of the body: a series of bodies takes a sixth of a core."""
_MAX_REST_S: Final = 0.2

T = TypeVar("T")


class BodyReader:
    """The threads that read the bodies of a server."""

    def __init__(
        self,
        max_wait_s: float = MAX_WAIT_S,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            max_wait_s: for a thread.
            sleep: seconds, on a thread.
            clock: seconds.
        """
        self._max_wait_s = max_wait_s
        self._small = _Lane("read-small", sleep, clock)
        self._large = _Lane("read-large", sleep, clock)

    async def read(
        self, body: bytes, limits: RequestLimits, build: Callable[[Body], T], scope: DisconnectScope
    ) -> T:
        """Parse the JSON object in a body, and return the result of `build`.

        Args:
            body: the bytes of the request.
            limits: as for `parse_object`.
            build: checks the object; it runs on a thread for a large body, and shares nothing with other requests.
            scope: of the request's client; entered where the body waits for a thread.

        Raises:
            RequestError: it is no such object, or `build` refuses it.
            QueueFullError: it has waited too long for a thread.
            ClientGone: the client has disconnected in the meantime.
        """
        return await self.run(lambda: build(parse_object(body, limits)), len(body), scope)

    async def run(self, job: Callable[[], T], num_bytes: int, scope: DisconnectScope) -> T:
        """The result of a job that reads so many bytes, as `read` does.

        Raises:
            QueueFullError: it has waited too long for a thread.
            ClientGone: the client has disconnected in the meantime.
        """
        if num_bytes <= IN_PLACE_BYTES:
            return job()
        lane = self._small if num_bytes <= SMALL_BYTES else self._large
        async with scope:
            return await self._read_on(lane, job)
        raise ClientGone

    async def _read_on(self, lane: _Lane, job: Callable[[], T]) -> T:
        place = lane.thread.submit(lane.run, job)
        future = asyncio.wrap_future(place)  # its cancellation takes the job out of the queue
        try:
            await asyncio.wait({future}, timeout=self._max_wait_s)
            if not future.done() and place.cancel():  # it has not begun
                raise QueueFullError(
                    f"the request waited {self._max_wait_s:g} s to be read, because other large requests came before "
                    f"it; retry later",
                    math.ceil(self._max_wait_s),
                )
            return await future
        finally:
            future.cancel()
            del future, place  # an error holds this frame, and they hold the error

    def close(self) -> None:
        """End the threads after the bodies in progress."""
        for lane in (self._small, self._large):
            lane.thread.shutdown(wait=False, cancel_futures=True)


class _Lane:
    """One thread and its queue."""

    def __init__(self, name: str, sleep: Callable[[float], object], clock: Callable[[], float]) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._sleep = sleep
        self._clock = clock
        self._rested_s = -math.inf  # when the thread may begin the next body

    def run(self, job: Callable[[], T]) -> T:
        """Read a body, on the thread."""
        if (rest_s := self._rested_s - self._clock()) > 0:
            self._sleep(rest_s)
        begin_s = time.thread_time()
        try:
            return job()
        except RequestError as error:
            error.__context__ = None
            raise error.with_traceback(
                None
            ) from None  # its frames hold millions of values, which are freed here
        finally:
            taken_s = time.thread_time() - begin_s
            if taken_s > LONG_S:
                self._rested_s = self._clock() + min(_REST * taken_s, _MAX_REST_S)
