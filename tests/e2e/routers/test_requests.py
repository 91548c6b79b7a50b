"""Requests through real routers: the answers of the engine, whole and streamed, and what a client does meanwhile."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ..serving import DEADLINE_S, EngineServe
from .routing import ALL, Router, why_not

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}
LONG = {"model": "tiny", "prompt": "for ever", "max_tokens": 2000, "min_tokens": 2000, "stream": True}


def chat(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **GREEDY}


def text_of(stream: str) -> str:
    """The text of a stream of chunks, which must be complete."""
    *events, done = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert done == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def num_answers(engine: EngineServe) -> float:
    return engine.idle_metrics()["e2e_request_latency_seconds_count"]


def test_answers_are_those_of_the_engine(router: Router, workers: list[EngineServe]):
    body = chat("a quick brown fox")
    native = {"text": "a lazy dog", "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    with router.client() as client, httpx.Client(base_url=workers[0].url, timeout=DEADLINE_S) as direct:
        wanted = direct.post("/v1/chat/completions", json=body).json()
        answer = client.post("/v1/chat/completions", json=body).json()
        stream = client.post("/v1/chat/completions", json=body | {"stream": True})
        completion = {"prompt": "a lazy dog", **GREEDY}
        texts = [each.post("/v1/completions", json=completion).json()["choices"] for each in (direct, client)]
        natives = [each.post("/generate", json=native).json()["output_ids"] for each in (direct, client)]

    assert answer["choices"] == wanted["choices"]
    assert answer["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert text_of(stream.text) == wanted["choices"][0]["message"]["content"]
    assert texts[0] == texts[1]
    assert natives[0] == natives[1]


def test_a_refusal_reaches_the_client_with_its_reason(router: Router):
    with router.client() as client:
        reply = client.post("/v1/completions", json={"prompt": "x" * 9000, **GREEDY})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_a_conversation_stays_with_the_worker_that_has_its_prefix(router: Router):
    begin = f"{router.name} tells a long story. " * 20
    with router.client() as client:
        for turn in range(1, 4):
            usage = client.post("/v1/chat/completions", json=chat(begin + "And then? " * turn)).json()[
                "usage"
            ]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert turn == 1 or cached > 0.8 * usage["prompt_tokens"], usage


def test_a_client_that_leaves_ends_its_request(router: Router, workers: list[EngineServe]):
    with router.client() as client, client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()  # kept: without it the stream is closed
        assert next(lines).startswith("data: ")
        with httpx.Client(timeout=DEADLINE_S) as direct:
            live = [direct.get(f"{each.url}/server_info").json()["num_live_requests"] for each in workers]
    assert sum(live) == 1
    for worker in workers:
        worker.wait_for_requests(0)
        worker.idle_metrics()


@pytest.mark.parametrize("name", ALL)
def test_in_turn_both_workers_answer(name: str, workers: list[EngineServe]):
    if reason := why_not(name):
        pytest.skip(reason)
    before = [num_answers(each) for each in workers]
    with Router(name, *(each.url for each in workers), policy="round_robin") as router:
        router.wait_until_ready()
        with router.client() as client, ThreadPoolExecutor(6) as threads:
            replies = threads.map(
                lambda i: client.post("/v1/completions", json={"prompt": f"{name} {i}", **GREEDY}), range(12)
            )
            assert {reply.status_code for reply in replies} == {200}
    counts = [num_answers(each) - old for each, old in zip(workers, before, strict=True)]
    assert counts == [6, 6]


@pytest.mark.parametrize("router", ["vllm-router"], indirect=True)
def test_vllm_router_gets_the_tokens_of_prompts(router: Router):
    with router.client() as client:
        assert client.post("/v1/chat/completions", json=chat("tokens?")).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "tokens?", **GREEDY}).status_code == 200
    assert "render_unavailable" not in router.log
    assert "invalid_token_ids" not in router.log


@pytest.mark.parametrize("router", ["smg"], indirect=True)
def test_smg_gets_the_loads_of_the_workers(router: Router, workers: list[EngineServe]):
    with router.client() as client:
        router.wait_for(lambda: len(client.get("/get_loads").json()["loads"]) == 2)
        loads = client.get("/get_loads").json()["loads"]
    assert {load["worker"] for load in loads} == {each.url for each in workers}
    assert all(load["max_total_num_tokens"] > 0 for load in loads)
