"""`BodyReader`: parses and checks request bodies, large ones off the event loop.

Parsing and checking 16 MB (`--max-body-mb`) of numbers takes more than a second, and a JSON Schema takes 3 us for each
of its keys, 200 ms at `--max-schema-kb`. Bodies of more than `IN_PLACE_BYTES` are read on threads; the thread hop costs
less than their parsing. A thread releases the GIL between two values, because `json_body` calls Python for each number
and object, and between two prompts; `template_renderer.share_the_gil` makes it do so soon.

There are two threads, one for bodies of up to `SMALL_BYTES` and one for longer ones, each first in, first out. At most
two bodies share the GIL with the event loop, and a client that sends many large schemas delays other large bodies
only. A body of a client that disconnects leaves the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ...runtime.config.request_limits import RequestLimits
from .exchange import ClientGone, DisconnectScope
from .schema.json_body import Body, parse_object

IN_PLACE_BYTES: Final = 8 << 10
SMALL_BYTES: Final = 64 << 10

T = TypeVar("T")


class BodyReader:
    """The threads that read the bodies of a server."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(1, thread_name_prefix="read-small")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="read-large")

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
            ClientGone: the client has disconnected in the meantime.
        """
        if len(body) <= IN_PLACE_BYTES:
            return build(parse_object(body, limits))
        loop = asyncio.get_running_loop()
        thread = self._small if len(body) <= SMALL_BYTES else self._large
        async with scope:
            return await loop.run_in_executor(thread, lambda: build(parse_object(body, limits)))
        raise ClientGone

    def close(self) -> None:
        """End the threads after the bodies in progress."""
        for thread in (self._small, self._large):
            thread.shutdown(wait=False, cancel_futures=True)
