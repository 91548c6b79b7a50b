"""`BodyReader`: which thread reads a body, and bodies of clients that disconnect while they wait."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from engine.runtime.config.answer_config import RequestLimits
from engine.runtime.errors import QueueFullError, RequestError
from engine.tokenizer_manager.http.app import App
from engine.tokenizer_manager.http.body_reader import IN_PLACE_BYTES, LONG_S, SMALL_BYTES, BodyReader
from engine.tokenizer_manager.http.exchange import ClientGone, DisconnectScope
from engine.tokenizer_manager.http.schema.values import Body

from ..fake_engine import WAIT_S, FakeEngine, make_services, say_all
from .calling import Reply, call

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


def run(test: Callable[[BodyReader], Coroutine[None, None, None]], reader: BodyReader | None = None) -> None:
    """Run a test on the event loop."""
    reader = BodyReader() if reader is None else reader

    async def main() -> None:
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
        assert (await first, await last) == ("slow", "last")
        assert checked == ["last"]

    run(test)


def test_a_body_that_has_waited_too_long_is_refused_unread(monkeypatch: pytest.MonkeyPatch):
    """One that has begun is read to its end."""
    wait, limits_s = asyncio.wait, []

    async def over_at_once(futures: set[Any], timeout: float) -> Any:
        limits_s.append(timeout)
        return await wait(futures, timeout=0)

    async def test(reader: BodyReader) -> None:
        slow = Slow()
        checked: list[Body] = []
        large = body_of(SMALL_BYTES + 1)
        first = asyncio.create_task(reader.read(large, LIMITS, slow, Client().scope()))
        await slow.begun.wait()
        monkeypatch.setattr(asyncio, "wait", over_at_once)
        with pytest.raises(QueueFullError, match=r"waited 2.5 s to be read.*retry later") as caught:
            await reader.read(large, LIMITS, checked.append, Client().scope())
        monkeypatch.undo()
        assert limits_s == [2.5]
        assert (caught.value.status, caught.value.retry_after_s) == (429, 3)
        slow.end()
        assert await first == "slow"
        assert checked == []

    run(test, BodyReader(max_wait_s=2.5))


def test_what_a_refused_body_had_is_freed_on_its_thread():
    """Not by a garbage collection, which would take its time from the event loop: 0.2 s for millions of numbers."""

    class Value:
        """Writes down where it is freed."""

        def __del__(self) -> None:
            freed_on.append(threading.current_thread().name)

    freed_on: list[str] = []

    def refuse(_: Body) -> None:
        value = Value()
        try:
            raise ValueError(f"of what was read: {value}")
        except ValueError as error:
            raise RequestError(f"refused: {error}") from None

    async def test(reader: BodyReader) -> None:
        with pytest.raises(RequestError, match="of what was read"):
            await reader.read(body_of(SMALL_BYTES + 1), LIMITS, refuse, Client().scope())
        assert freed_on == ["read-large_0"]

    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()


@pytest.mark.parametrize("refused", [False, True])
def test_a_thread_rests_after_a_long_body_only(refused: bool):
    rests: list[float] = []

    def long(_: Body) -> None:
        begin_s = time.thread_time()
        while time.thread_time() < begin_s + 2 * LONG_S:
            pass
        if refused:
            raise ValueError("refused")

    async def test(reader: BodyReader) -> None:
        large, small = body_of(SMALL_BYTES + 1), body_of(SMALL_BYTES)
        for _ in range(2):
            await reader.read(large, LIMITS, len, Client().scope())
        assert rests == []
        tasks = [reader.read(large, LIMITS, check, Client().scope()) for check in (long, len)]
        await asyncio.gather(*tasks, return_exceptions=True)
        await reader.read(small, LIMITS, len, Client().scope())
        assert rests == [pytest.approx(0.2)]

    run(test, BodyReader(sleep=rests.append, clock=lambda: 100.0))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/generate",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/v1/grammar/check",
    ],
)
def test_every_endpoint_reads_large_bodies_so(path: str):
    """A client that leaves meanwhile gets no answer; one that stays gets one."""
    services = make_services(FakeEngine(say_all("x")))

    async def main() -> tuple[Reply, Reply]:
        async with asyncio.timeout(WAIT_S):
            slow, gone = Slow(), asyncio.Event()
            body = body_of(SMALL_BYTES + 1)
            first = asyncio.create_task(services.body_reader.read(body, LIMITS, slow, Client().scope()))
            await slow.begun.wait()
            app = App(services)
            left = asyncio.create_task(call(app, path, body, gone=gone))
            stays = asyncio.create_task(call(app, path, body))
            await asyncio.sleep(0)
            gone.set()
            reply = await left
            assert not stays.done()
            slow.end()
            await first
            return reply, await stays

    try:
        left, stays = asyncio.run(main())
    finally:
        services.close()
    assert left == Reply(0, b"")
    assert stays.status in (200, 400)  # an empty request of Ollama loads the model
