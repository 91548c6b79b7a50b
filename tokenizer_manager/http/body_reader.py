"""`BodyReader`: parses and checks request bodies, large ones off the event loop.

Parsing and checking 16 MB (`--max-body-mb`) of numbers takes more than a second. Bodies of more than `_IN_PLACE_BYTES`
are read on one thread, in order; the thread hop costs less than their parsing. The thread releases the GIL between two
values, because `json_body` calls Python for each number and object, and between two prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ...runtime.config.request_limits import RequestLimits
from .schema.json_body import Body, parse_object

_IN_PLACE_BYTES: Final = 64 << 10

T = TypeVar("T")


class BodyReader:
    """One thread that reads the large bodies of a server."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-body")

    async def read(self, body: bytes, limits: RequestLimits, build: Callable[[Body], T]) -> T:
        """Parse the JSON object in a body, and return the result of `build`.

        Args:
            body: the bytes of the request.
            limits: as for `parse_object`.
            build: checks the object; it runs on the thread for a large body, and shares nothing with other requests.

        Raises:
            RequestError: it is no such object, or `build` refuses it.
        """
        if len(body) <= _IN_PLACE_BYTES:
            return build(parse_object(body, limits))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: build(parse_object(body, limits)))

    def close(self) -> None:
        """End the thread after the body in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)
