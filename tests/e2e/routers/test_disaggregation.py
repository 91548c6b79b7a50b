"""A prefill and a decode engine behind real routers, with each transfer backend: the text is that of one engine.

An engine that does not get a prompt computes it itself, so that equal text alone would show nothing: the tests also
ask the decode engine how many prompts it has received.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..serving import DEADLINE_S, SLOW, EngineServe
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
from .routing import ALL, SMG, Router, free_ports, kill, why_not

pytestmark = [pytest.mark.real_process, pytest.mark.slow]


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest, model: Path) -> Iterator[EnginePair]:
    """Two engines that the tests of a backend share."""
    if reason := why_not_backend(request.param):
        pytest.skip(reason)
    with ExitStack() as stack:
        pair = EnginePair(stack, model, request.param)
        yield pair
        for engine in (pair.decode, pair.prefill):
            assert engine.stop() == 0, engine.log
            assert "Traceback" not in engine.log


@pytest.fixture(scope="module", params=ALL)
def routed(request: pytest.FixtureRequest, pair: EnginePair) -> Iterator[Router]:
    """A router in front of them, started as its own documentation says."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    prefill = ("--prefill", pair.prefill.url)
    decode = ("--decode", pair.decode.url)
    roles = {
        "vllm-router": ("--vllm-pd-disaggregation", "--kv-connector", "nixl", *prefill, *decode),
        "sglang-router": ("--pd-disaggregation", *prefill, str(pair.bootstrap_port), *decode),
        SMG: ("--pd-disaggregation", *prefill, str(pair.bootstrap_port), *decode),
    }
    with Router(request.param, policy="round_robin", roles=roles[request.param]) as router:
        yield router.wait_until_ready()


def test_a_router_gets_the_text_of_one_engine(pair: EnginePair, routed: Router) -> None:
    for path, body in (
        ("/v1/completions", {**GREEDY, "prompt": PROMPT}),
        ("/v1/chat/completions", {**GREEDY, "messages": [{"role": "user", "content": PROMPT}]}),
    ):
        expected = alone(pair, body, path)["choices"]
        before = pair.received()
        with routed.client() as client:
            answer = client.post(path, json=body)
        assert answer.status_code == 200, (answer.text, routed.log)
        assert answer.json()["choices"] == expected
        pair.wait_received(before + 1)
    pair.wait_balanced()


def test_a_router_passes_a_stream(pair: EnginePair, routed: Router) -> None:
    body = {**GREEDY, "prompt": PROMPT + "streamed"}
    expected = alone(pair, body)["choices"][0]["text"]
    before = pair.received()

    with (
        routed.client() as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]

    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == expected
    pair.wait_received(before + 1)


def test_requests_at_once(pair: EnginePair, routed: Router) -> None:
    bodies = [{**GREEDY, "prompt": f"number {number} " + PROMPT, "max_tokens": 6} for number in range(6)]
    expected = [alone(pair, body)["choices"][0]["text"] for body in bodies]
    before = pair.received()

    with routed.client() as client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda body: client.post("/v1/completions", json=body).json(), bodies))

    assert [answer["choices"][0]["text"] for answer in answers] == expected
    pair.wait_received(before + 6)
    pair.wait_balanced()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "seed": 11, "top_p": 0.9},
        {"logprobs": 2},
        {"n": 3, "temperature": 0.9, "seed": 5},
        {"max_tokens": 1},
        {"repetition_penalty": 1.3, "min_tokens": 4},
    ],
    ids="-".join,
)
def test_options_of_a_request(pair: EnginePair, fields: dict[str, Any]) -> None:
    body = {**GREEDY, "prompt": PROMPT, **fields}
    expected = alone(pair, body)["choices"]
    before = pair.received()

    answer = pair.both(body, room=hash(str(fields)) & (2**62 - 1))

    assert answer["choices"] == expected
    pair.wait_received(before + 1)
    pair.wait_balanced()


def test_a_grammar(pair: EnginePair) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
    }
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
    }
    body = {
        **GREEDY,
        "messages": [{"role": "user", "content": PROMPT}],
        "response_format": form,
        "max_tokens": 40,
    }
    body.pop("ignore_eos")
    path = "/v1/chat/completions"
    expected = alone(pair, body, path)["choices"]
    before = pair.received()

    assert pair.both(body, room=991, path=path)["choices"] == expected
    pair.wait_received(before + 1)


def test_only_what_the_decode_engine_lacks_travels(pair: EnginePair) -> None:
    first = {**GREEDY, "prompt": PROMPT}
    alone(pair, first)
    start = pair.decode.metrics_when(lambda metrics: True)["transfer_received_bytes_total"]
    pair.both(first, room=71)
    whole = pair.decode.metrics_when(lambda metrics: metrics["transfer_received_bytes_total"] > start)
    pair.both({**first, "prompt": PROMPT + "and thirteen more words that no request has had before"}, room=72)

    middle = whole["transfer_received_bytes_total"]
    rest = pair.decode.metrics_when(lambda metrics: metrics["transfer_received_bytes_total"] > middle)
    assert rest["transfer_received_bytes_total"] - middle < middle - start


def test_a_request_without_a_room_is_served_by_each(pair: EnginePair) -> None:
    body = {**GREEDY, "prompt": PROMPT}
    answers = [
        httpx.post(f"{engine.url}/v1/completions", json=body, timeout=DEADLINE_S).json()["choices"]
        for engine in (pair.prefill, pair.decode)
    ]
    assert answers[0] == answers[1]


def test_why_tells_of_the_transfer(pair: EnginePair) -> None:
    body = {**GREEDY, "prompt": "why " + PROMPT}
    answer = pair.both(body, room=81)

    story = httpx.get(f"{pair.decode.url}/v1/requests/{answer['id']}/why", timeout=DEADLINE_S)
    assert story.status_code == 200, story.text
    assert "claimed" in story.text and "received" in story.text


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"bootstrap_room": 5}, 400, "bootstrap_host is None"),
        ({"bootstrap_room": 5, "bootstrap_host": "10.1.2.3", "bootstrap_port": 1}, 400, "no key"),
        ({"bootstrap_room": 5, "bootstrap_host": "127.0.0.1", "bootstrap_port": 0}, 400, "1 to 65535"),
        (
            {"bootstrap_room": [5, 6], "bootstrap_host": "127.0.0.1", "bootstrap_port": 7},
            400,
            "2 values for 1 prompts",
        ),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "remote_request_id is missing"),
        ({"kv_transfer_params": {"do_remote_prefill": "yes"}}, 400, "kv_transfer_params"),
    ],
)
def test_wrong_fields(pair: EnginePair, fields: dict[str, Any], status: int, words: str) -> None:
    answer = httpx.post(
        f"{pair.decode.url}/v1/completions", json={**GREEDY, "prompt": "x", **fields}, timeout=DEADLINE_S
    )
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


def test_no_prefill_engine_at_the_address(pair: EnginePair) -> None:
    body = {**GREEDY, "prompt": PROMPT + "no engine there"}
    expected = alone(pair, body)["choices"]
    nowhere = {"bootstrap_host": "127.0.0.1", "bootstrap_port": free_ports(1)[0], "bootstrap_room": 9}

    answer = httpx.post(f"{pair.decode.url}/v1/completions", json={**body, **nowhere}, timeout=DEADLINE_S)

    assert answer.json()["choices"] == expected
    pair.wait_balanced()


def test_another_model_is_refused_at_the_handshake(pair: EnginePair, model: Path) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(
            EngineServe(str(model), *COMMON, "--disaggregation-mode", "decode", "--page-size", "16")
        ).wait_until_ready()
        body = {**GREEDY, "prompt": PROMPT, **pair.fields, "bootstrap_room": 12}
        answer = httpx.post(f"{other.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert answer.status_code == 200
        other.wait_for_log("they differ in --page-size: 4 and 16")


class TestFaults:
    """Each test has engines of its own."""

    @pytest.fixture(params=["local", "nixl"])
    def fresh(self, request: pytest.FixtureRequest, model: Path) -> Iterator[EnginePair]:
        if reason := why_not_backend(request.param):
            pytest.skip(reason)
        with ExitStack() as stack:
            yield EnginePair(
                stack, model, request.param, "--chaos", "slow=0.05", "--chunked-prefill-size", "4"
            )

    @pytest.mark.parametrize("what", ["whole engine", "scheduler"])
    def test_the_prefill_engine_is_killed(self, fresh: EnginePair, what: str) -> None:
        with ThreadPoolExecutor(2) as pool:
            expected, lost, answer = start_both(fresh, 1, pool)
            if what == "scheduler":
                os.kill(fresh.prefill.pids["scheduler"], signal.SIGKILL)
            else:
                kill(fresh.prefill)
            assert answer.result().json()["choices"] == expected["choices"]
            lost.exception()
        wait_balanced(fresh.decode)
        if what == "scheduler":  # the next one is handed over again
            body = {**GREEDY, "prompt": PROMPT + "after"}
            fresh.prefill.wait_for_log("recovered restart=1")
            before = fresh.received()
            fresh.both(body, room=2)
            fresh.wait_received(before + 1)

    def test_the_prefill_engine_is_frozen_and_goes_on(self, fresh: EnginePair) -> None:
        with ThreadPoolExecutor(2) as pool:
            expected, other, answer = start_both(fresh, 1, pool)
            os.kill(fresh.prefill.pids["scheduler"], signal.SIGSTOP)
            try:
                assert answer.result().json()["choices"] == expected["choices"]
            finally:
                os.kill(fresh.prefill.pids["scheduler"], signal.SIGCONT)
            other.exception()
        fresh.wait_balanced()

    def test_the_decode_engine_is_killed(self, fresh: EnginePair) -> None:
        with ThreadPoolExecutor(2) as pool:
            _, prefilled, lost = start_both(fresh, 1, pool)
            kill(fresh.decode)
            assert prefilled.result().status_code == 200
            lost.exception()
        wait_balanced(fresh.prefill)

    def test_the_client_leaves(self, fresh: EnginePair) -> None:
        body = {**GREEDY, "prompt": PROMPT * 2, **fresh.fields, "bootstrap_room": 3, "stream": True}
        urls = [f"{engine.url}/v1/completions" for engine in (fresh.prefill, fresh.decode)]
        with ExitStack() as stack:
            for url in urls:
                client = stack.enter_context(httpx.Client(timeout=DEADLINE_S))
                request = client.build_request("POST", url, json=body)
                pool = stack.enter_context(ThreadPoolExecutor(1))
                pool.submit(client.send, request, stream=True)
            wait_under_way(fresh.decode)
            for engine in (fresh.prefill, fresh.decode):
                httpx.post(f"{engine.url}/abort_request", json={"abort_all": True}, timeout=DEADLINE_S)
        fresh.wait_balanced()


class TestBoth:
    """`--disaggregation-mode both`: a pair in one server."""

    @pytest.fixture(scope="class")
    def server(self, model: Path) -> Iterator[EngineServe]:
        port = ("--bootstrap-port", str(free_ports(1)[0]))
        with EngineServe(str(model), *COMMON, *SLOW, "--disaggregation-mode", "both", *port) as engine:
            yield engine.wait_until_ready()
            assert engine.stop() == 0, engine.log
            assert engine.leftovers() == []

    @pytest.fixture(scope="class")
    def expected(self, model: Path) -> list[Any]:
        with EngineServe(str(model), *COMMON) as engine:
            return self.answers(engine.wait_until_ready())

    def answers(self, engine: EngineServe) -> list[Any]:
        bodies = [
            {**GREEDY, "prompt": f"number {number} {PROMPT}", "n": 1 + number % 2} for number in range(4)
        ]
        with ThreadPoolExecutor(4) as pool:
            url = f"{engine.url}/v1/completions"
            return [
                answer.json()["choices"]
                for answer in pool.map(lambda body: httpx.post(url, json=body, timeout=DEADLINE_S), bodies)
            ]

    def test_the_answers_of_one_engine(self, server: EngineServe, expected: list[Any]) -> None:
        assert self.answers(server) == expected
        metrics = server.metrics_when(lambda metrics: metrics["transfers_total"] >= 4)
        assert not [name for name in metrics if name.startswith("transfer_failures_total")]

    def test_the_progress_of_a_prompt_ends_with_its_length(self, server: EngineServe) -> None:
        body = {**GREEDY, "prompt": "progress " * 200, "stream": True, "return_progress": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S) as reply:
            lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert [each["processed"] for each in told] == [told[0]["total"]]
        assert events[-1]["choices"][0]["finish_reason"] == "length"

    @pytest.mark.parametrize("lost", ["scheduler_of_replica_0", "scheduler_of_replica_1"])
    def test_one_half_is_killed(self, server: EngineServe, expected: list[Any], lost: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(self.answers, server)
            server.wait_for_requests(6)
            os.kill(server.pids[lost], signal.SIGKILL)
            assert answers.result() == expected
        server.metrics_when(
            lambda metrics: (
                metrics['replica_healthy{replica="0"}'] == metrics['replica_healthy{replica="1"}'] == 1
            )
        )
        server.idle_metrics()
