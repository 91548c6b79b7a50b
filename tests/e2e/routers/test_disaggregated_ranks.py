"""A prefill and a decode engine with `--tp 2` each: rank i of one writes to rank i of the other.

The text is that of one engine with `--tp 2`; whatever rank is lost, all requests are answered and all pages return.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..serving import DEADLINE_S, EngineServe
from .engine_pair import (
    BACKENDS,
    COMMON,
    GREEDY,
    PROMPT,
    EnginePair,
    alone,
    start_both,
    wait_balanced,
    wait_under_way,
    why_not_backend,
)
from .routing import free_ports

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

TP = ("--tp", "2")


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest, model: Path) -> Iterator[EnginePair]:
    """Two engines that the tests of a backend share."""
    if reason := why_not_backend(request.param):
        pytest.skip(reason)
    with ExitStack() as stack:
        pair = EnginePair(stack, model, request.param, *TP)
        yield pair
        for engine in (pair.decode, pair.prefill):
            assert engine.stop() == 0, engine.log
            assert "Traceback" not in engine.log
            assert engine.leftovers() == []


def words_of(choices: Any) -> list[Any]:
    return [
        (each["text"], each["finish_reason"], each["logprobs"] and each["logprobs"]["tokens"])
        for each in choices
    ]


def logprobs_of(choices: Any) -> list[float]:
    return [value for each in choices if each["logprobs"] for value in each["logprobs"]["token_logprobs"]]


def test_the_text_of_one_engine_with_two_ranks(pair: EnginePair) -> None:
    """Prompts of several chunks, which another one of the prefix cache follows, greedy and sampled."""
    sampled = {"temperature": 0.8, "seed": 11, "top_p": 0.9, "logprobs": 2}
    for room, fields in enumerate(({}, sampled, {"n": 2, "temperature": 0.9, "seed": 5}), 1):
        prompt = f"request {room} {PROMPT}"
        body = {**GREEDY, "prompt": prompt, **fields}
        longer = {**body, "prompt": prompt + "and thirteen more words that no request has had before"}
        expected = [alone(pair, each)["choices"] for each in (body, longer)]
        before = pair.received()

        answers = [pair.both(each, room=10 * room + n)["choices"] for n, each in enumerate((body, longer))]

        for answer, alike in zip(answers, expected, strict=True):
            assert words_of(answer) == words_of(alike)
            # Sums of steps with other shapes differ in their last bits.
            assert logprobs_of(answer) == pytest.approx(logprobs_of(alike), abs=1e-4)
        pair.wait_received(before + 2)
    pair.wait_balanced()


def test_requests_at_once(pair: EnginePair) -> None:
    bodies = [{**GREEDY, "prompt": f"number {number} " + PROMPT, "max_tokens": 6} for number in range(6)]
    expected = [alone(pair, body)["choices"] for body in bodies]
    before = pair.received()

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda n: pair.both(bodies[n], room=100 + n)["choices"], range(6)))

    assert answers == expected
    pair.wait_received(before + 6)
    pair.wait_balanced()


def test_one_rank_is_refused_by_two(pair: EnginePair, model: Path) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(
            EngineServe(str(model), *COMMON, "--disaggregation-mode", "decode")
        ).wait_until_ready()
        body = {**GREEDY, "prompt": PROMPT, **pair.fields, "bootstrap_room": 12}
        answer = httpx.post(f"{other.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert answer.status_code == 200
        other.wait_for_log("refuses this engine: they differ in --tp: 2 and 1")


class TestFaults:
    """Each test has engines of its own, in which a prompt takes some 40 steps."""

    @pytest.fixture(params=["local", "nixl"])
    def fresh(self, request: pytest.FixtureRequest, model: Path) -> Iterator[EnginePair]:
        if reason := why_not_backend(request.param):
            pytest.skip(reason)
        with ExitStack() as stack:
            slow = ("--chaos", "slow=0.05", "--chunked-prefill-size", "4")
            yield EnginePair(stack, model, request.param, *TP, *slow)

    @pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_rank_of_the_prefill_engine_is_lost(self, fresh: EnginePair, signum: signal.Signals) -> None:
        with ThreadPoolExecutor(2) as pool:
            expected, lost, answer = start_both(fresh, 1, pool)
            os.kill(fresh.prefill.pids["model_runner_1"], signum)
            assert answer.result().json()["choices"] == expected["choices"]
            lost.exception()
        self.expect_it_goes_on(fresh, fresh.prefill)

    def test_a_rank_of_the_decode_engine_is_lost(self, fresh: EnginePair) -> None:
        with ThreadPoolExecutor(2) as pool:
            expected, prefilled, answer = start_both(fresh, 1, pool)
            os.kill(fresh.decode.pids["model_runner_1"], signal.SIGKILL)
            assert prefilled.result().status_code == 200
            assert answer.result().json()["choices"] == expected["choices"]
        self.expect_it_goes_on(fresh, fresh.decode)

    def expect_it_goes_on(self, fresh: EnginePair, restarted: EngineServe) -> None:
        """The engine is back, the books of both are balanced, and the next prompt is handed over."""
        restarted.wait_for_log("recovered restart=1")
        fresh.wait_balanced()
        body = {**GREEDY, "prompt": "after " + PROMPT}
        expected = alone(fresh, body)["choices"]
        before = fresh.received()
        assert fresh.both(body, room=2)["choices"] == expected
        fresh.wait_received(before + 1)
        fresh.wait_balanced()

    def test_the_client_leaves(self, fresh: EnginePair) -> None:
        body = {**GREEDY, "prompt": PROMPT * 2}
        with ThreadPoolExecutor(2) as pool:
            expected, *halves = start_both(fresh, 3, pool)
            wait_under_way(fresh.decode)
            for engine in (fresh.prefill, fresh.decode):
                httpx.post(f"{engine.url}/abort_request", json={"abort_all": True}, timeout=DEADLINE_S)
            for half in halves:
                half.exception()
        fresh.wait_balanced()
        assert fresh.both(body, room=4)["choices"] == expected["choices"]
        fresh.wait_balanced()


@pytest.mark.parametrize(
    "settings", [("--tp", "4"), (*TP, "--kv-cache-dtype", "int8")], ids=["replicated heads", "scales of int8"]
)
def test_other_forms_of_pages(model: Path, settings: tuple[str, ...]) -> None:
    """The model has two KV heads: of four ranks two have the same one. An int8 pool has tensors of scales."""
    body = {**GREEDY, "prompt": PROMPT}
    with ExitStack() as stack:
        pair = EnginePair(stack, model, "local", *settings)
        expected = alone(pair, body)["choices"]
        before = pair.received()
        assert pair.both(body, room=1)["choices"] == expected
        pair.wait_received(before + 1)
        pair.wait_balanced()


def test_both_halves_in_one_server_with_two_ranks_each(model: Path) -> None:
    port = ("--bootstrap-port", str(free_ports(1)[0]))
    body: dict[str, Any] = {**GREEDY, "prompt": PROMPT}
    with EngineServe(str(model), *COMMON, *TP) as one:
        one.wait_until_ready()
        expected = httpx.post(f"{one.url}/v1/completions", json=body, timeout=DEADLINE_S).json()["choices"]
    with EngineServe(str(model), *COMMON, *TP, "--disaggregation-mode", "both", *port) as engine:
        engine.wait_until_ready()
        assert len([role for role in engine.pids if role.startswith("model_runner_1")]) == 2
        answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert answer.json()["choices"] == expected
        engine.metrics_when(lambda metrics: metrics["transfers_total"] >= 1)
        wait_balanced(engine)
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
