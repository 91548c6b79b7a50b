"""`BodyReader`: from a body's bytes to a checked request, off the event loop where the body is large.

Parsing and checking 16 MB, which `--max-body-mb` lets in, takes a second and more where it is a list of numbers. Bodies
of more than `_IN_PLACE_BYTES` are read on a thread, one at a time and in order; a thread hop costs less than they do.
The thread gives up the GIL between two values (`json_body` calls Python for each number and object) and between two
prompts.
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
    """One server's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-body")

    async def read(self, body: bytes, limits: RequestLimits, build: Callable[[Body], T]) -> T:
        """What `build` makes of the JSON object in a body.

        Args:
            body: as it came.
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
        """Let the thread end; what it has begun is finished first."""
        self._thread.shutdown(wait=False, cancel_futures=True)
