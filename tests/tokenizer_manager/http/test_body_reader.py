"""`BodyReader`: which thread reads a body, and bodies of clients that disconnect while they wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from engine.runtime.config.request_limits import RequestLimits
from engine.tokenizer_manager.http.body_reader import IN_PLACE_BYTES, SMALL_BYTES, BodyReader
from engine.tokenizer_manager.http.exchange import ClientGone, DisconnectScope
from engine.tokenizer_manager.http.schema.json_body import Body

from ..fake_engine import WAIT_S

LIMITS = RequestLimits()


def body_of(num_bytes: int) -> bytes:
    """An object of so many bytes."""
    return b'{"a": "%s"}' % (b"x" * (num_bytes - 9))


class Client:
    """A client that stays until `leave`."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()

    def leave(self) -> None:
        self._gone.set()

    def scope(self) -> DisconnectScope:
        async def receive() -> dict[str, Any]:
            await self._gone.wait()
            return {"type": "http.disconnect"}

        return DisconnectScope(receive)


class Slow:
    """A check of a body that lasts until the test ends it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._may_end = threading.Event()

    def __call__(self, body: Body) -> str:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self._may_end.wait(WAIT_S)
        return "slow"

    def end(self) -> None:
        self._may_end.set()


def run(test: Callable[[BodyReader], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        reader = BodyReader()
        try:
            await test(reader)
        finally:
            reader.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("num_bytes", "thread"),
    [
        (IN_PLACE_BYTES, "MainThread"),
        (IN_PLACE_BYTES + 1, "read-small_0"),
        (SMALL_BYTES, "read-small_0"),
        (SMALL_BYTES + 1, "read-large_0"),
    ],
)
def test_where_a_body_is_read(num_bytes: int, thread: str):
    async def test(reader: BodyReader) -> None:
        def name_of_thread(_: Body) -> str:
            return threading.current_thread().name

        found = await reader.read(body_of(num_bytes), LIMITS, name_of_thread, Client().scope())
        assert found == thread

    run(test)


def test_large_bodies_do_not_delay_smaller_ones():
    async def test(reader: BodyReader) -> None:
        slow = Slow()
        large = asyncio.create_task(reader.read(body_of(SMALL_BYTES + 1), LIMITS, slow, Client().scope()))
        await slow.begun.wait()
        for num_bytes in (SMALL_BYTES, 100):
            assert await reader.read(body_of(num_bytes), LIMITS, len, Client().scope()) == 1
        slow.end()
        assert await large == "slow"

    run(test)


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES, SMALL_BYTES + 1])
def test_a_body_whose_client_has_left_is_not_checked(num_bytes: int):
    """It leaves the queue; those after it are read."""

    async def test(reader: BodyReader) -> None:
        slow, client = Slow(), Client()
        checked: list[str] = []

        def check(name: str) -> Callable[[Body], str]:
            def build(_: Body) -> str:
                checked.append(name)
                return name

            return build

        body = body_of(num_bytes)
        first = asyncio.create_task(reader.read(body, LIMITS, slow, Client().scope()))
        await slow.begun.wait()
        left = asyncio.create_task(reader.read(body, LIMITS, check("left"), client.scope()))
        last = asyncio.create_task(reader.read(body, LIMITS, check("last"), Client().scope()))
        await asyncio.sleep(0)
        client.leave()
        with pytest.raises(ClientGone):
            await left
        slow.end()
        assert await asyncio.gather(first, last) == ["slow", "last"]
        assert checked == ["last"]

    run(test)
