"""`--kv-store` with a real server on loopback (Redis or Valkey, Mooncake): what others find, and one that dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
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
from engine.scheduler.kv_stores import redis_client
from engine.scheduler.kv_stores.page_store import StoreError
from engine.scheduler.kv_stores.redis_client import RedisClient
from engine.scheduler.kv_stores.remote_store import RemoteStore, Seal, open_client
from engine.scheduler.kv_stores.segment_file import RecordBuffer

from .conftest import StartServe
from .routers.engine_pair import LIBRARIES, why_not_backend
from .routers.routing import free_ports
from .serving import EngineServe
from .test_kv_disk import PROMPT, WITHIN_S, ask, kill, stop

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STORED = 'kv_tier_bytes_total{tier="store",direction="store"}'
PATIENCE_S = 60.0


class RedisServer:
    """A server of a test, without files."""

    def __init__(self, *arguments: str) -> None:
        assert SERVER is not None
        self.port = free_ports(1)[0]
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
    if SERVER is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    servers: list[RedisServer] = []

    def start(*arguments: str) -> RedisServer:
        servers.append(RedisServer(*arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def connect(url: str) -> RedisClient:
    return RedisClient(parse_kv_store(url))


def open_store(url: str, seal: Seal | None = None) -> RemoteStore:
    return RemoteStore(parse_kv_store(url), b"i" * 32, connect(url), seal)


def num_records(url: str) -> int:
    return int(connect(url)._client.dbsize())


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
    assert num_records(url) == 0 and store.find(keys) == 0


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
    connect(server.url(":right@"))
    with pytest.raises(ConfigError, match=words) as raised:
        connect(server.url(user, db))
    assert "wrong" not in str(raised.value) and ":right" not in str(raised.value)
    server.end()
    with pytest.raises(ConfigError, match="cannot be used: .*; start redis-server or valkey-server there"):
        connect(server.url(":right@"))


@pytest.mark.parametrize("call", ["find", "has", "read", "write"])
def test_a_stopped_server_costs_the_time_limit_once(
    start_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(redis_client, "ANSWER_LIMIT_S", 0.2)
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


@pytest.mark.parametrize("call", ["find", "has", "read", "write"])
def test_a_connection_that_was_closed_while_idle_is_no_failure(
    start_redis: Callable[..., RedisServer], call: str
) -> None:
    url = start_redis().url()
    store, buffer, keys = open_store(url), filled(2, 1000), [key_of(0), key_of(1)]
    store.write(keys, buffer)
    connect(url)._client.client_kill_filter(_type="normal", skipme=True)
    answer = getattr(store, call)(*((keys,) if call in ("find", "has") else (keys, buffer)))
    assert answer in (2, [True, True])


# ---------------------------------------------------------------- engines


@pytest.fixture
def start(start_serve: StartServe, model: Path) -> Callable[..., EngineServe]:
    def start_with_store(url: str, *arguments: str) -> EngineServe:
        engine = start_serve(
            str(model), "--kv-store", url, "--kv-write", "through", "--log-level", "info", *arguments
        )
        engine.wait_until_ready(WITHIN_S)
        engine.wait_for_log("kv_stores.remote_store kv_store=")
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


class Proxy:
    """Passes bytes between an engine and a server; `limit`: after so many bytes of answers the server is stopped."""

    def __init__(self, server: RedisServer) -> None:
        self.limit: int | None = None
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server.port))
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                if answers and self.limit is not None:
                    self.limit -= len(data)
                    if self.limit < 0:
                        os.kill(self._server.process.pid, signal.SIGSTOP)
                        data = data[: len(data) // 2]
                        self.limit = 1 << 40
                target.sendall(data)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.real_process
def test_a_server_that_is_stopped_in_the_middle_of_a_load(
    start: Callable[..., EngineServe], start_redis: Callable[..., RedisServer]
) -> None:
    """The request is answered, its pages come back, and the store is off for 30 s."""
    server = start_redis()
    engine = start(server.url())
    expected = ask(engine, PROMPT)["output_ids"]
    engine.metrics_when(lambda metrics: metrics[STORED] >= 1984 * 256)
    kill(engine)
    with contextlib.closing(Proxy(server)) as proxy:
        engine = start(proxy.url)
        proxy.limit = 100_000  # of 500,000: the answers to the look-up are 500 bytes

        answer = ask(engine, PROMPT)

        assert (answer["output_ids"], answer["meta_info"]["cached_tokens"]) == (expected, 0)
        engine.wait_for_log("not used, and tried again every 30 s")
        metrics = engine.idle_metrics()
        assert metrics['kv_tier_loading_pages{tier="store"}'] == 0
        assert metrics['kv_tier_failures_total{tier="store",kind="load"}'] == 1
        assert metrics['kv_tier_hit_tokens_total{tier="store"}'] == 0
        assert ask(engine, [3, *PROMPT])["meta_info"]["cached_tokens"] == 0
        stop(engine)
        assert engine.log.count("not used, and tried again every 30 s") == 1


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
    assert num_records(server.url(":right@")) == 0
    server.end()
    check = check_kv_store(cache, 1000)
    assert check.verdict is CheckStatus.FAIL and "start redis-server" in check.fix


# ---------------------------------------------------------------- Mooncake

MASTER = LIBRARIES / "mooncake" / "mooncake" / "mooncake_master"
SEGMENT = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""
"""A process that gives memory to a Mooncake store, as `mooncake_client` does."""


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A master of Mooncake; its store has 64 MiB; its `args` have the address."""
    if reason := why_not_backend("mooncake") or ("" if MASTER.exists() else f"there is no {MASTER}"):
        pytest.skip(reason)
    monkeypatch.syspath_prepend(str(LIBRARIES / "mooncake"))
    paths = [os.environ.get("PYTHONPATH", ""), str(LIBRARIES / "mooncake")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    port, admin_port = free_ports(2)
    arguments = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={admin_port}"]
    with (tmp_path / "master").open("wb") as log:
        master = subprocess.Popen([str(MASTER), *arguments], stdout=log, stderr=log)
    segment = subprocess.Popen(
        [sys.executable, "-c", SEGMENT, f"127.0.0.1:{port}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert segment.stdout is not None and segment.stdin is not None
    assert segment.stdout.readline() == b"ready\n", (tmp_path / "master").read_text(errors="replace")[-2000:]
    yield master
    for process in (segment, master):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    segment.stdout.close()
    segment.stdin.close()


def mooncake_url(master: subprocess.Popen[bytes]) -> str:
    assert isinstance(master.args, list)
    return "mooncake://127.0.0.1:" + str(master.args[1]).partition("=")[2]


@pytest.mark.parametrize("seal", [None, Seal(b"s" * 32)], ids=["clear", "sealed"])
def test_records_in_a_mooncake_store(mooncake: subprocess.Popen[bytes], seal: Seal | None) -> None:
    address = parse_kv_store(mooncake_url(mooncake))
    client, keys = open_client(address), [key_of(number) for number in range(50)]
    store, other = (RemoteStore(address, letter * 32, client, seal) for letter in (b"i", b"j"))
    written, read = filled(50, 20_000), RecordBuffer(51, 20_000)
    assert (store.write(keys, written), other.write(keys[:1], written)) == (50, 1)

    assert store.find([*keys, key_of(1000)]) == 50
    assert store.has([key_of(1000), keys[5]]) == [False, True]
    assert store.read([*keys, key_of(1000)], read) == 50
    assert np.array_equal(read.payloads[:50], written.payloads)
    assert store.read(keys[:1], RecordBuffer(1, 10_000)) == 0, "of another size"
    assert store.has(keys[:1]) == [False]
    large = filled(1, 8_000_000)
    assert store.write([key_of(2000)], large) == 1
    assert store.read([key_of(2000)], read := RecordBuffer(1, 8_000_000)) == 1
    assert np.array_equal(read.payloads, large.payloads)
    store.forget()
    assert store.find(keys) == 0 and other.find(keys) == 1
    store.close()


@pytest.mark.real_process
def test_a_prompt_is_found_in_a_mooncake_store(
    start: Callable[..., EngineServe], mooncake: subprocess.Popen[bytes]
) -> None:
    first = start(mooncake_url(mooncake))
    cold = ask(first, PROMPT)
    first.metrics_when(lambda metrics: metrics[STORED] >= 1984 * 256)
    kill(first)
    second = start(mooncake_url(mooncake))
    warm = ask(second, PROMPT)
    assert (warm["text"], warm["output_ids"]) == (cold["text"], cold["output_ids"])
    assert warm["meta_info"]["cached_tokens_by_tier"] == {"store": 1984}

    os.kill(mooncake.pid, signal.SIGSTOP)
    assert ask(second, [3, *PROMPT])["meta_info"]["cached_tokens"] == 0
    mooncake.kill()
    assert ask(second, [4, *PROMPT])["meta_info"]["cached_tokens"] == 0
    stop(second)


def test_a_mooncake_master_that_is_not_there_is_named_at_the_start(mooncake: subprocess.Popen[bytes]) -> None:
    with pytest.raises(
        ConfigError, match="mooncake://127.0.0.1:1, where nothing answers: .*; start mooncake_master"
    ):
        open_client(parse_kv_store("mooncake://127.0.0.1:1"))
