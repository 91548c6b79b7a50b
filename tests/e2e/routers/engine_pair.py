"""`EnginePair`: a prefill and a decode engine as a user starts them, and a router's part played by the test."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..serving import DEADLINE_S, EngineServe
from .routing import free_ports

LIBRARIES = Path(__file__).parents[3] / "build" / "transfer"
BACKENDS = ("local", "nixl", "mooncake")
COMMON = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--num-threads", "1", "--page-size", "4"),
    *("--chunked-prefill-size", "32", "--max-total-tokens", "2048"),
)
GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen " * 2


def why_not_backend(name: str) -> str:
    """Why the tests of a transfer backend are skipped; "" if its library can be imported."""
    modules = {"nixl": "nixl_cu12", "mooncake": "mooncake"}
    if name == "local" or importlib.util.find_spec(modules[name]) is not None:
        return ""
    if not (LIBRARIES / name / modules[name]).is_dir():
        return f"{name} is not installed in {LIBRARIES / name}: `make transfer-libraries` installs it"
    if name == "mooncake" and ctypes.util.find_library("ibverbs") is None:
        return "mooncake needs libibverbs, which this machine does not have: apt install libibverbs1"
    return ""


class EnginePair:
    """A prefill and a decode engine."""

    def __init__(self, stack: ExitStack, model: Path, backend: str, *more: str) -> None:
        self.bootstrap_port = free_ports(1)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(
                "PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(LIBRARIES / backend)])
            )
            role = ("--transfer-backend", backend, "--disaggregation-mode")
            port = ("--bootstrap-port", str(self.bootstrap_port))
            self.prefill = stack.enter_context(
                EngineServe(str(model), *COMMON, *more, *role, "prefill", *port)
            )
            self.decode = stack.enter_context(EngineServe(str(model), *COMMON, *more, *role, "decode"))
        for engine in (self.prefill, self.decode):
            engine.wait_until_ready()

    @property
    def fields(self) -> dict[str, Any]:
        """Those that a router adds, but for the room."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port}

    def both(self, body: dict[str, Any], room: int, path: str = "/v1/completions") -> dict[str, Any]:
        """What a router does: the body to both engines; the answer is that of the decode engine."""
        body = {**body, **self.fields, "bootstrap_room": room}
        with ThreadPoolExecutor(2) as pool:
            urls = (self.prefill.url + path, self.decode.url + path)
            answers = list(pool.map(lambda url: httpx.post(url, json=body, timeout=DEADLINE_S), urls))
        assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
        answer: dict[str, Any] = answers[1].json()
        return answer

    def received(self) -> float:
        """Prompts that the decode engine has received."""
        return self.decode.metrics_when(lambda metrics: True)["transfers_total"]

    def wait_received(self, count: float) -> None:
        """Wait until it has received so many."""
        self.decode.metrics_when(lambda metrics: metrics["transfers_total"] >= count)
        assert self.received() == count

    def wait_balanced(self) -> None:
        """Wait until no transfer is open and no page is held on either side."""
        for engine in (self.prefill, self.decode):
            wait_balanced(engine)


def wait_balanced(engine: EngineServe) -> None:
    """Wait until an engine holds nothing."""
    nothing = {"num_running_reqs": 0, "num_queue_reqs": 0, "kv_used_tokens": 0, "transfer_held_pages": 0}
    engine.metrics_when(lambda metrics: metrics.items() >= nothing.items())


def wait_under_way(engine: EngineServe) -> None:
    """Wait until pages of a prompt are on their way to it."""
    engine.metrics_when(lambda metrics: metrics["transfer_held_pages"] > 0)


def alone(pair: EnginePair, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """The answer of one engine that is asked as any other."""
    answer = httpx.post(pair.decode.url + path, json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    for engine in (pair.prefill, pair.decode):
        assert httpx.post(f"{engine.url}/flush_cache", timeout=DEADLINE_S).status_code == 200
    result: dict[str, Any] = answer.json()
    return result


def start_both(pair: EnginePair, room: int, pool: ThreadPoolExecutor) -> tuple[dict[str, Any], Any, Any]:
    """A request to both engines, whose prompt takes some 40 steps, and of which some chunks have been sent."""
    body = {**GREEDY, "prompt": PROMPT * 2}
    expected = alone(pair, body)
    halves = [
        pool.submit(
            httpx.post,
            f"{engine.url}/v1/completions",
            json={**body, **pair.fields, "bootstrap_room": room},
            timeout=DEADLINE_S,
        )
        for engine in (pair.prefill, pair.decode)
    ]
    wait_under_way(pair.decode)
    return expected, halves[0], halves[1]
