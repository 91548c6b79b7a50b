"""`--kv-store` with a real Redis or Valkey server on loopback: what other servers find, and a store that dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cli.doctor.check import CheckStatus
from engine.cli.doctor.disk import check_kv_store
from engine.runtime.config.engine_config import CacheConfig
from engine.runtime.config.kv_store_address import parse_kv_store
from engine.runtime.errors import ConfigError
from engine.scheduler.kv_stores import redis_store
from engine.scheduler.kv_stores.page_store import StoreError
from engine.scheduler.kv_stores.redis_store import RedisStore, Seal, check_store, connect
from engine.scheduler.kv_stores.segment_file import RecordBuffer

from .conftest import StartServe
from .serving import EngineServe
from .test_kv_disk import PROMPT, WITHIN_S, ask, kill, stop

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(SERVER is None, reason="neither redis-server nor valkey-server is installed"),
]
STORED = 'kv_tier_bytes_total{tier="store",direction="store"}'
PATIENCE_S = 60.0


class RedisServer:
    """A server of a test, without files."""

    def __init__(self, *arguments: str) -> None:
        assert SERVER is not None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory(prefix="redis-")
        self.process = subprocess.Popen(
            [
                *(SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--databases", "4"),
                *("--save", "", "--appendonly", "no", "--dir", self.folder.name, *arguments),
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert self.process.poll() is None and time.monotonic() < deadline_s, "the server does not start"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)

    def url(self, user: str = "", db: int = 0) -> str:
        return f"redis://{user}127.0.0.1:{self.port}/{db}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


@pytest.fixture
def start_redis() -> Iterator[Callable[..., RedisServer]]:
    servers: list[RedisServer] = []

    def start(*arguments: str) -> RedisServer:
        servers.append(RedisServer(*arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def open_store(url: str, seal: Seal | None = None) -> RedisStore:
    address = parse_kv_store(url)
    return RedisStore(address, b"i" * 32, connect(address), seal)


def check(url: str) -> None:
    address = parse_kv_store(url)
    check_store(address, connect(address))


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def filled(num_records: int, payload_bytes: int) -> RecordBuffer:
    buffer = RecordBuffer(num_records, payload_bytes)
    buffer.payloads[:] = np.random.default_rng(1).integers(0, 256, buffer.payloads.shape, np.uint8)
    return buffer


@pytest.mark.parametrize("seal", [None, Seal(b"s" * 32)], ids=["clear", "sealed"])
def test_records_on_a_real_server(start_redis: Callable[..., RedisServer], seal: Seal | None) -> None:
    url, keys = start_redis().url(db=3), [key_of(number) for number in range(300)]
    store, written = open_store(url, seal), filled(300, 20_000)
    assert store.write(keys, written) == 300
    store.close()

    store, read = open_store(url, seal), RecordBuffer(301, 20_000)

    assert store.find([*keys, key_of(1000)]) == 300
    assert store.has([key_of(1000), keys[5]]) == [False, True]
    assert store.read([*keys, key_of(1000)], read) == 300
    assert np.array_equal(read.payloads[:300], written.payloads)
    store.forget()
    assert store.find(keys) == 0 and connect(parse_kv_store(url)).dbsize() == 0


def test_a_full_server_is_still_read(start_redis: Callable[..., RedisServer], caplog: Any) -> None:
    store = open_store(start_redis("--maxmemory", "8mb", "--maxmemory-policy", "noeviction").url())
    buffer, keys = filled(10, 100_000), [key_of(number) for number in range(1000)]
    done = 0
    while store.write(keys[done : done + 10], buffer):
        done += 10

    assert store.read(keys[:10], RecordBuffer(10, 100_000)) == 10
    assert caplog.text.count("stores nothing, and tries every 30 s: ") == 1
    assert len(caplog.text) < 1000, "no value is in the message"


@pytest.mark.parametrize(
    ("user", "db", "words"),
    [
        ("", 0, "refuses the user or the password: .*; write them as redis://USER:PASSWORD@host"),
        (":wrong@", 0, "refuses the user or the password: .*; write them as"),
        ("nobody:right@", 0, "refuses the user or the password"),
        (":right@", 4, "cannot be used: .*DB index.*; end the URL with a smaller database"),
        ("reader:only@", 0, "cannot be used: .*; let this user read, write and delete keys"),
    ],
)
def test_a_server_that_refuses_is_named_at_the_start(
    start_redis: Callable[..., RedisServer], user: str, db: int, words: str
) -> None:
    reader = ("--user", "reader", "on", ">only", "~*", "+@read", "+@connection")
    server = start_redis("--requirepass", "right", *reader)
    check(server.url(":right@"))
    with pytest.raises(ConfigError, match=words) as raised:
        check(server.url(user, db))
    assert "wrong" not in str(raised.value) and ":right" not in str(raised.value)
    server.end()
    with pytest.raises(ConfigError, match="cannot be used: .*; start redis-server or valkey-server there"):
        check(server.url(":right@"))


@pytest.mark.parametrize("call", ["find", "has", "read", "write"])
def test_a_stopped_server_costs_the_time_limit_once(
    start_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(redis_store, "ANSWER_LIMIT_S", 0.2)
    server = start_redis()
    store, buffer = open_store(server.url()), filled(8, 1_000_000)
    keys = [key_of(number) for number in range(8)]
    store.write(keys, buffer)
    os.kill(server.process.pid, signal.SIGSTOP)
    argument = (keys,) if call in ("find", "has") else (keys, buffer)

    with pytest.raises(StoreError, match="the store has failed: "):
        getattr(store, call)(*argument)
    started_s = time.thread_time()
    for _ in range(10):
        with pytest.raises(StoreError):
            getattr(store, call)(*argument)
    assert time.thread_time() - started_s < 1.0


# ---------------------------------------------------------------- engines


@pytest.fixture
def start(start_serve: StartServe, model: Path) -> Callable[..., EngineServe]:
    def start_with_store(url: str, *arguments: str) -> EngineServe:
        engine = start_serve(
            str(model), "--kv-store", url, "--kv-write", "through", "--log-level", "info", *arguments
        )
        engine.wait_until_ready(WITHIN_S)
        engine.wait_for_log("kv_stores.redis_store kv_store=")
        return engine

    return start_with_store


@pytest.mark.real_process
@pytest.mark.parametrize("settings", [(), ("--kv-store-key", "KEY"), ("--tp", "2")])
def test_a_prompt_is_found_by_another_server(
    start: Callable[..., EngineServe],
    start_redis: Callable[..., RedisServer],
    tmp_path: Path,
    settings: tuple[str, ...],
) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    settings = tuple(str(key) if each == "KEY" else each for each in settings)
    server = start_redis("--requirepass", "s3cret")
    first = start(server.url(":s3cret@"), *settings)
    cold = ask(first, PROMPT)
    first.metrics_when(lambda metrics: metrics[STORED] >= 1984 * 256)

    second = start(server.url(":s3cret@"), *settings)
    warm = ask(second, PROMPT)

    assert (warm["text"], warm["output_ids"]) == (cold["text"], cold["output_ids"])
    assert warm["meta_info"]["cached_tokens"] == 1984
    assert warm["meta_info"]["cached_tokens_by_tier"] == {"store": 1984}
    assert second.idle_metrics()['kv_tier_hit_tokens_total{tier="store"}'] == 1984
    kill(first)
    stop(second)
    assert "s3cret" not in first.log + second.log


@pytest.mark.real_process
def test_a_stopped_server_delays_a_request_and_fails_none(
    start: Callable[..., EngineServe], start_redis: Callable[..., RedisServer]
) -> None:
    server = start_redis()
    engine = start(server.url())
    expected = ask(engine, PROMPT)["output_ids"]
    engine.metrics_when(lambda metrics: metrics[STORED] >= 1984 * 256)
    kill(engine)
    engine = start(server.url())
    os.kill(server.process.pid, signal.SIGSTOP)

    assert ask(engine, PROMPT)["output_ids"] == expected
    assert ask(engine, [3, *PROMPT])["meta_info"]["cached_tokens"] == 0

    failures = [f'kv_tier_failures_total{{tier="store",kind="{kind}"}}' for kind in ("timeout", "lookup")]
    engine.metrics_when(lambda metrics: sum(metrics[name] for name in failures) >= 1)
    engine.wait_for_log("not used, and tried again every 30 s")
    assert engine.log.count("not used, and tried again every 30 s") == 1
    server.end()
    assert ask(engine, [4, *PROMPT])["meta_info"]["cached_tokens"] == 0
    stop(engine)


@pytest.mark.real_process
def test_a_server_that_is_not_there_is_named_at_the_start(start_serve: StartServe, model: Path) -> None:
    engine = start_serve(str(model), "--kv-store", "redis://:s3cret@127.0.0.1:1/0")
    assert engine.wait() != 0
    assert any("kv_store is redis://127.0.0.1:1/0, which cannot be used" in line for line in engine.causes)
    assert "s3cret" not in engine.log


def test_the_doctor_measures_the_server(start_redis: Callable[..., RedisServer]) -> None:
    server = start_redis("--requirepass", "right")
    cache = CacheConfig(kv_store=server.url(":right@"))
    check = check_kv_store(cache, 1000)
    assert check.verdict is CheckStatus.OK, check
    assert check.details["write_bytes_per_s"] > 0 and check.details["load_s"] > 0
    assert connect(parse_kv_store(server.url(":right@"))).dbsize() == 0
    server.end()
    check = check_kv_store(cache, 1000)
    assert check.verdict is CheckStatus.FAIL and "start redis-server" in check.fix
