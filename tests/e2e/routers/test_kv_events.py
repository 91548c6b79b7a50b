"""vllm-router with `--policy kv_aware`: a prompt goes to the server that has announced its blocks.

The router is found on the PATH, in the folder that `ENGINE_TEST_ROUTERS` names, or where `make routers` installs it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from ..conftest import StartServe
from ..kv_event_reader import KVEventReader, Prefix, sockets_of
from ..serving import DEADLINE_S, EngineServe, engine_environment

INSTALLED: Final = Path(__file__).parents[3] / "build" / "routers" / "vllm-router" / "bin"
PLACES: Final = os.pathsep.join(
    [os.environ.get("ENGINE_TEST_ROUTERS", ""), os.environ["PATH"], str(INSTALLED)]
)
ROUTER: Final = shutil.which("vllm-router", path=PLACES)

pytestmark = [
    pytest.mark.real_process,
    pytest.mark.slow,
    pytest.mark.skipif(
        ROUTER is None,
        reason="vllm-router is not installed: put it on the PATH, or name its folder in ENGINE_TEST_ROUTERS",
    ),
]

FOX: Final = "the quick brown fox jumps over the lazy dog " * 8
COUNT: Final = "one two three four five six seven eight nine ten " * 8
CHAT: Final = "a request waits, runs, and is answered once " * 8

_COLORS: Final = re.compile(r"\x1b\[[0-9;]*m")
_DECISION: Final = re.compile(
    r'KV prefix decision outcome="(\w+)" worker="(\S+)" .*credited_prefix_tokens=(\d+)'
)


class KVAwareRouter:
    """The router before some servers.

    Attributes:
        url: where it listens.
    """

    def __init__(self, folder: Path, servers: list[EngineServe]) -> None:
        port, metrics_port = _free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "router.log"
        command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(port), "--policy", "kv_aware"]
        for server in servers:
            _, events, replays = sockets_of(server)
            command += ["--kv-event-source", f"{server.url}={events}"]
            command += ["--kv-event-replay-source", f"{server.url}={replays}"]
        command += ["--kv-event-block-size", "16", "--kv-event-model", "m", "--log-level", "debug"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--worker-urls", *(server.url for server in servers)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(folder) | {"RUST_LOG": "info,vllm_router_rs=debug"},
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it has said so far."""
        return _COLORS.sub("", self._log.read_text(errors="replace"))

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        """Wait until its log is as it should be."""
        until_s = time.monotonic() + DEADLINE_S
        while not condition(self.log):
            assert self._process.poll() is None, self.log
            assert time.monotonic() < until_s, self.log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)

    def wait_for_news(self, server: EngineServe, condition: Callable[[KVEventReader], bool]) -> None:
        """Wait until a server has published what leads to this condition, and until the router has read it."""
        until_s = time.monotonic() + DEADLINE_S
        _, events, replays = sockets_of(server)
        with KVEventReader(events, replays) as reader:
            reader.catch_up()
            while not condition(reader):
                assert time.monotonic() < until_s, reader.kinds
                server.leave_the_core_to_it()
                reader.catch_up()
        message = f"sequence advanced source={server.url} rank=0 seq={reader.seqs[-1]}\n"
        self.wait_for(lambda log: message in log)

    def ask(self, prompt: str, *, is_chat: bool = False) -> tuple[str, int, int]:
        """Send a prompt; the server that got it, the tokens that the router expected there, and those that were."""
        num_before = len(_DECISION.findall(self.log))
        cached = (chat if is_chat else complete)(self.url, prompt)
        self.wait_for(lambda log: len(_DECISION.findall(log)) > num_before)
        outcome, url, expected = _DECISION.findall(self.log)[num_before]
        assert outcome == "prefix_cost"
        return url, int(expected), cached

    def close(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def complete(url: str, prompt: str) -> int:
    """Have a prompt answered; returns its cached tokens."""
    return _post(f"{url}/v1/completions", {"prompt": prompt})


def chat(url: str, text: str) -> int:
    """The same for a chat of one message."""
    return _post(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})


def _post(url: str, body: dict[str, object]) -> int:
    fields = {"model": "m", "max_tokens": 1, "temperature": 0}
    answer = httpx.post(url, json=body | fields, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def token_ids(server: EngineServe, prompt: str) -> list[int]:
    body = {"model": "m", "prompt": prompt}
    ids: list[int] = httpx.post(f"{server.url}/tokenize", json=body, timeout=DEADLINE_S).json()["tokens"]
    return ids


def shared(server: EngineServe, *prompts: str) -> int:
    """Tokens in whole blocks with which all prompts begin: words at the joint may be tokenized differently."""
    together = zip(*(token_ids(server, prompt) for prompt in prompts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, together)) // 16 * 16


def has(reader: KVEventReader, server: EngineServe, prompt: str) -> bool:
    """Whether all whole blocks of a prompt are cached."""
    ids = token_ids(server, prompt)
    return reader.longest(None, ids) == len(ids) // 16 * 16


def all_blocks(server: EngineServe) -> dict[int, Prefix]:
    """What a server has announced so far."""
    _, events, replays = sockets_of(server)
    with KVEventReader(events, replays) as reader:
        reader.catch_up()
        return reader.cached


@pytest.fixture
def servers(start_serve: StartServe, model: Path) -> list[EngineServe]:
    """Two servers."""
    started = []
    for _ in range(2):
        events, replays = (f"tcp://127.0.0.1:{port}" for port in _free_ports(2))  # the same after a restart
        sockets = ("--kv-events", events, "--kv-events-replay", replays)
        started.append(start_serve(str(model), "--dtype", "float32", "--served-model-name", "m", *sockets))
    return [server.wait_until_ready() for server in started]


@pytest.fixture
def router(servers: list[EngineServe], tmp_path: Path) -> Iterator[KVAwareRouter]:
    router = KVAwareRouter(tmp_path, servers)
    try:
        router.wait_for(lambda log: "Router ready" in log)
        yield router
    finally:
        router.close()


def test_prompts_go_to_the_server_that_announced_them(router: KVAwareRouter, servers: list[EngineServe]):
    one, two = servers
    complete(one.url, FOX)
    complete(two.url, COUNT)
    router.wait_for_news(one, lambda reader: has(reader, one, FOX))
    router.wait_for_news(two, lambda reader: has(reader, two, COUNT))

    for number in range(3):
        for prompt, server in ((FOX, one), (COUNT, two)):
            longer = prompt + f"and {number}"
            url, expected, cached = router.ask(longer)
            assert url == server.url
            assert 64 < shared(one, prompt, longer) <= expected <= cached

    num_blocks = len(all_blocks(two))
    chat(two.url, CHAT)
    router.wait_for_news(two, lambda reader: len(reader.cached) >= num_blocks + 4)
    url, expected, cached = router.ask(CHAT + " or so", is_chat=True)
    assert url == two.url
    assert 64 < expected <= cached

    # What is flushed at one and computed at the other one moves.
    httpx.post(f"{one.url}/flush_cache", timeout=DEADLINE_S).raise_for_status()
    complete(two.url, FOX)
    router.wait_for_news(one, lambda reader: reader.kinds[-1] == "AllBlocksCleared")
    router.wait_for_news(two, lambda reader: has(reader, two, FOX))
    again = FOX + "again"
    url, expected, cached = router.ask(again)
    assert url == two.url
    assert 64 < shared(one, FOX, again) <= expected <= cached

    # A scheduler that was killed has nothing.
    os.kill(two.pids["scheduler"], signal.SIGKILL)
    router.wait_for(lambda log: f"kv_index {two.url}: restart seq" in log)
    two.wait_for_log("recovered restart=1")
    assert router.ask(FOX + "after all")[1:] == (0, 0)
