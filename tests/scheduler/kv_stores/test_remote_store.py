"""The store on a server: what it gives, what it refuses, and when it asks nothing; with a server in the process.

`tests/e2e/test_kv_store.py` has the tests with a real one.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("redis", reason="the package redis is not installed")
pytest.importorskip("cryptography", reason="the package cryptography is not installed")

from redis import exceptions
from redis.exceptions import AuthenticationError, ResponseError

from engine.runtime.config.kv_store_address import parse_kv_store
from engine.runtime.errors import ConfigError
from engine.scheduler.kv_stores.page_store import StoreError
from engine.scheduler.kv_stores.redis_client import RedisClient
from engine.scheduler.kv_stores.remote_store import OFF_S, RemoteStore, Seal, open_client, read_key
from engine.scheduler.kv_stores.segment_file import RecordBuffer

ADDRESS = parse_kv_store("redis://user:secret@127.0.0.1:7000/3")
PAYLOAD = 1000
IDENTITY = b"i" * 32


class FakeServer:
    """A client with its server in this process.

    Attributes:
        failure: raised by each command from now on.
        refusal: given by each SET of a pipeline.
        asked: names of all commands.
        touched: keys that count as used.
        lists: keys that hold no string.
        num_read: bytes of all values that were sent.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lists: set[str] = set()
        self.num_read = 0
        self.failure: Exception | None = None
        self.refusal: Exception | None = None
        self.asked: list[str] = []
        self.touched: list[str] = []
        self.is_closed = False

    @property
    def records(self) -> dict[str, bytes]:
        """The values without the generations of identities."""
        return {name: value for name, value in self.values.items() if not name.endswith(":generation")}

    def _ask(self, command: str) -> None:
        self.asked.append(command)
        if self.failure is not None:
            raise self.failure

    def set(self, name: Any, value: bytes, **_: Any) -> None:
        self._ask("set")
        self.values[name] = value

    def unlink(self, *names: Any) -> None:
        self._ask("unlink")
        for name in names:
            self.values.pop(name, None)

    def scan(self, cursor: int, match: str, count: int) -> tuple[int, list[str]]:
        """A step of two keys."""
        self._ask("scan")
        names = [*self.values][cursor : cursor + 2]
        end = cursor + 2
        return (0 if end >= len(self.values) else end), [
            name for name in names if fnmatch.fnmatchcase(name, match)
        ]

    def pipeline(self, *, transaction: bool) -> FakePipeline:
        assert not transaction
        return FakePipeline(self)

    def close(self) -> None:
        self.is_closed = True


class FakePipeline:
    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.commands: list[Callable[[], Any]] = []

    def touch(self, name: str) -> None:
        self.commands.append(lambda: self._touch(name))

    def _touch(self, name: str) -> int:
        self.server.touched.append(name)
        return int(name in self.server.values)

    def exists(self, name: str) -> None:
        self.commands.append(lambda: int(name in self.server.values))

    def getrange(self, name: str, start: int, end: int) -> None:
        self.commands.append(lambda: self._getrange(name, start, end))

    def _getrange(self, name: str, start: int, end: int) -> Any:
        if name in self.server.lists:
            return exceptions.ResponseError(
                "WRONGTYPE Operation against a key holding the wrong kind of value"
            )
        part = self.server.values.get(name, b"")[start : end + 1]
        self.server.num_read += len(part)
        return part

    def set(self, name: str, value: bytes) -> None:
        self.commands.append(lambda: self._set(name, value))

    def _set(self, name: str, value: bytes) -> Any:
        if self.server.refusal is None:
            self.server.values[name] = value
        return self.server.refusal

    def execute(self, *, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error, "its error would name the command with the value"
        self.server._ask("pipeline")
        return [command() for command in self.commands]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


SECRET = bytes(range(32))


@pytest.fixture(params=[None, SECRET], ids=["clear", "sealed"])
def seal(request: pytest.FixtureRequest) -> Seal | None:
    return None if request.param is None else Seal(request.param)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def open_store(
    server: FakeServer, seal: Seal | None = None, identity: bytes = IDENTITY, clock: Clock | None = None
) -> RemoteStore:
    return RemoteStore(ADDRESS, identity, RedisClient(ADDRESS, server), seal, now_s=clock or Clock())


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def payload_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(PAYLOAD)


def put(store: RemoteStore, *numbers: int) -> int:
    buffer = RecordBuffer(max(1, len(numbers)), PAYLOAD)
    for row, number in enumerate(numbers):
        buffer.payloads[row] = np.frombuffer(payload_of(number), np.uint8)
    return store.write([key_of(number) for number in numbers], buffer)


def got(store: RemoteStore, *numbers: int, payload: int = PAYLOAD) -> int:
    """Number of the numbers that are read, all of them right."""
    buffer = RecordBuffer(max(1, len(numbers)), payload)
    count = store.read([key_of(number) for number in numbers], buffer)
    assert [buffer.payloads[row].tobytes() for row in range(count)] == [
        payload_of(number) for number in numbers[:count]
    ]
    return count


def test_records_come_back_in_another_process(server, seal):
    assert put(open_store(server, seal), 1, 2, 3) == 3
    store = open_store(server, seal)

    assert store.has([key_of(each) for each in (3, 4, 1)]) == [True, False, True]
    assert store.find([key_of(each) for each in (1, 2, 4, 3)]) == 2
    assert (store.find([]), store.has([]), got(store)) == (0, [], 0)
    assert got(store, 1, 2, 3) == 3
    assert got(store, 1, 4, 3) == 1
    touched = [name for name in server.touched if not name.endswith(":generation")]
    assert len(touched) == 4, "a look-up is a use, other questions are not"
    store.close()
    assert server.is_closed


def test_other_identities_and_keys_find_nothing(server, seal):
    put(open_store(server, seal), 1)

    assert open_store(server, seal, b"j" * 32).find([key_of(1)]) == 0
    assert got(open_store(server, Seal(b"x" * 32)), 1) == 0
    assert server.values, "the records of others are not touched"


def test_a_sealed_store_shows_neither_values_nor_keys(server):
    put(open_store(server, Seal(SECRET)), 1)
    put(open_store(server, Seal(SECRET)), 1)

    ((name, value),) = server.records.items()
    assert key_of(1).hex() not in name
    assert payload_of(1)[:16] not in value and payload_of(1)[-16:] not in value
    clear = FakeServer()
    put(open_store(clear), 1)
    ((name, value),) = clear.records.items()
    assert name.endswith(key_of(1).hex()) and value.endswith(payload_of(1))


@pytest.mark.parametrize(
    "damage", ["first", "middle", "last", "short", "long", "huge", "empty", "list", "other"]
)
def test_a_damaged_record_is_a_miss_and_is_stored_again(server, seal, caplog, damage):
    store = open_store(server, seal)
    put(store, 1, 2)
    first, second = server.records
    value = bytearray(server.values[first])
    at = {"first": 0, "middle": len(value) // 2, "last": -1}.get(damage)
    if at is None:
        value = {
            "short": value[:-1],
            "long": value + b"x",
            "huge": value + bytes(1 << 20),
            "list": value,
            "empty": bytearray(),
            "other": bytearray(server.values[second]),  # undamaged, of another page
        }[damage]
    else:
        value[at] ^= 1
    server.values[first] = bytes(value)
    if damage == "list":
        server.lists.add(first)

    assert got(store, 1, 2) == got(store, 1, 2) == 0
    assert server.num_read <= 4 * len(server.values[second]) + 4, "no more than records"
    server.lists.clear()
    assert caplog.text.count("a record is damaged") == 1
    assert store.has([key_of(1), key_of(2)]) == [False, True]
    put(store, 1)
    assert got(store, 1, 2) == 2


def test_records_of_another_size_are_misses(server, seal):
    store = open_store(server, seal)
    put(store, 1)
    assert got(store, 1, payload=PAYLOAD + 8) == 0


@pytest.mark.parametrize(
    "failure", [exceptions.ConnectionError("refused"), exceptions.TimeoutError("late"), OSError(110, "late")]
)
@pytest.mark.parametrize("call", ["find", "has", "read", "write"])
def test_a_dead_store_is_left_alone_for_30_s(server, caplog, failure, call):
    clock = Clock()
    store = open_store(server, clock=clock)
    put(store, 1)
    calls: dict[str, Callable[[], Any]] = {
        "find": lambda: store.find([key_of(1)]),
        "has": lambda: store.has([key_of(1)]),
        "read": lambda: got(store, 1),
        "write": lambda: put(store, 1),
    }
    server.failure = failure
    with pytest.raises(StoreError, match="the store has failed: .*(refused|late)"):
        calls[call]()
    num_asked = len(server.asked)
    server.failure = None
    clock.now_s += OFF_S - 1
    for each in calls.values():
        with pytest.raises(StoreError):
            each()
    assert len(server.asked) == num_asked, "nothing is asked"

    clock.now_s += 1
    server.failure = failure
    with pytest.raises(StoreError):
        calls[call]()
    clock.now_s += OFF_S
    server.failure = None
    assert got(store, 1) == 1
    assert caplog.text.count("not used, and tried again every 30 s") == 1, (
        "one warning until it answers again"
    )
    assert "secret" not in caplog.text


def test_a_full_server_is_still_read(server, caplog):
    clock = Clock()
    store = open_store(server, clock=clock)
    put(store, 1)
    server.refusal = ResponseError("OOM command not allowed when used memory > 'maxmemory'.")

    assert put(store, 2) == put(store, 2) == 0
    assert got(store, 1) == 1
    assert caplog.text.count("stores nothing") == 1
    server.refusal = None
    assert put(store, 2) == 0, "it is tried again after 30 s"
    clock.now_s += OFF_S
    assert put(store, 2) == 1


def test_what_is_forgotten_is_never_found_again(server, seal):
    clock = Clock()
    store, other = open_store(server, seal, clock=clock), open_store(server, seal, b"j" * 32)
    put(store, 1)
    put(other, 2)
    server.failure = exceptions.ConnectionError("refused")
    with pytest.raises(StoreError, match="refused"):
        store.forget()
    server.failure = None
    clock.now_s += OFF_S

    assert store.has([key_of(1)]) == [False]
    assert got(other, 2) == 1
    put(store, 1)
    store.forget()
    assert got(store, 1) == 0 and len(server.records) == 1


def test_to_forget_is_bounded_and_seen_by_other_engines(server, seal, monkeypatch):
    """Records that a scan of a large database has no time to delete are not found either."""
    monkeypatch.setattr("engine.scheduler.kv_stores.remote_store.FORGET_LIMIT_S", -1.0)
    one, other = open_store(server, seal), open_store(server, seal)
    put(one, *range(20))
    assert other.find([key_of(1)]) == 1

    one.forget()

    assert server.asked.count("scan") == 1 and len(server.records) > 10
    assert other.find([key_of(1)]) == 0 and one.has([key_of(1)]) == [False]
    put(other, 1)
    assert one.find([key_of(1)]) == 1


def test_all_is_forgotten_if_the_generation_was_evicted(server):
    store = open_store(server)
    put(store, 1)
    for name in server.values.keys() - server.records.keys():
        del server.values[name]
    assert store.find([key_of(1)]) == 0
    put(store, 1)
    assert open_store(server).find([key_of(1)]) == 1


def test_a_server_that_takes_nothing_has_nothing(server):
    store = open_store(server)
    server.refusal = exceptions.ResponseError("OOM command not allowed")
    assert (store.find([key_of(1)]), store.has([key_of(1)]), got(store, 1), put(store, 1)) == (
        0,
        [False],
        0,
        0,
    )
    store.forget()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            exceptions.ConnectionError("Error 111 connecting"),
            "Error 111 connecting; start redis-server or valkey-server there",
        ),
        (exceptions.TimeoutError(), "cannot be used: TimeoutError; start redis-server"),
        (
            AuthenticationError("WRONGPASS"),
            "refuses the user or the password: WRONGPASS; write them as redis://USER:",
        ),
        (
            ResponseError("DB index is out of range"),
            "DB index is out of range; end the URL with a smaller database",
        ),
        (
            ResponseError("READONLY You can't write"),
            "let this user read, write and delete keys, or name a server",
        ),
    ],
)
def test_a_store_that_cannot_be_used_is_an_error_at_the_start(server, error, words):
    server.failure = error
    with pytest.raises(ConfigError, match=words) as raised:
        RedisClient(ADDRESS, server)
    assert "redis://127.0.0.1:7000/3" in str(raised.value) and "secret" not in str(raised.value)


def test_a_store_that_can_be_used_keeps_nothing_of_the_check(server):
    RedisClient(ADDRESS, server)
    assert not server.values


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(
        ConfigError, match=r"redis://127.0.0.1:7000/3, which needs the package redis; .*\.\[redis\]"
    ):
        open_client(ADDRESS)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"kv_store_key needs the package cryptography; .*\.\[redis\]"):
        Seal(SECRET)


def test_a_key_file_has_32_bytes(tmp_path: Path):
    file = tmp_path / "key"
    with pytest.raises(
        ConfigError, match="No such file or directory; make one with: head -c 32 /dev/urandom"
    ):
        read_key(file)
    file.write_bytes(b"x" * 31)
    with pytest.raises(ConfigError, match="has 31 bytes, but a key has 32 or more; make one"):
        read_key(file)
    file.write_bytes(b"x" * 33)
    assert read_key(file) == b"x" * 33
