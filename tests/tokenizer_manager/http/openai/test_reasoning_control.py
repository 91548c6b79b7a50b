"""`/v1/chat/completions/control`: the client of an answer ends its reasoning, also across a crash; no other can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from engine.runtime.grammar_use import ReasoningBlock
from engine.runtime.messages import GenerateRequest, base_rid

from ...conftest import Serve, Served
from ...conversation.chat_templates import QWEN3
from ...fake_engine import CAPACITY, LENGTH, WAIT_S, row
from ..serving import ROOMY

CHAT, CONTROL = "/v1/chat/completions", "/v1/chat/completions/control"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ARMED = HI | {"reasoning_control": True, "model": "org/tiny"}
Begun = tuple[Future[httpx.Response], GenerateRequest]


@pytest.fixture(name="serve")
def _serve(serve: Serve) -> Serve:
    """Starts a server of a model that reasons."""
    return functools.partial(serve, capacity=ROOMY, chat_template=QWEN3)


def begin(served: Served, body: dict[str, Any], **options: Any) -> Begun:
    reply = served.post_later(CHAT, json=body, **options)
    return reply, served.engine.next_request()


def end(served: Served, request_id: str, **options: Any) -> httpx.Response:
    return served.client.post(CONTROL, json={"id": request_id, "action": "reasoning_end"}, **options)


def finish(served: Served, reply: Future[httpx.Response], *requests: GenerateRequest) -> None:
    served.engine.say(*(row(each, "x", finish=LENGTH) for each in requests))
    assert reply.result(WAIT_S).status_code == 200


def reasoning_of(request: GenerateRequest) -> ReasoningBlock:
    assert request.grammar is not None and request.grammar.reasoning is not None
    return request.grammar.reasoning


def test_the_reasoning_of_an_answer_ends(serve: Serve):
    served = serve()
    reply, request = begin(served, ARMED)
    assert request.grammar is not None and request.grammar.spec is None
    assert (reasoning_of(request).budget, reasoning_of(request).ends) == (None, False)
    done = end(served, base_rid(request.rid).rpartition("-")[0])
    assert (done.status_code, done.json()) == (200, {"success": True, "message": ""})
    assert served.engine.ended_reasoning.get(timeout=WAIT_S) == request.rid
    finish(served, reply, request)


def test_it_ends_when_the_request_is_submitted_again(serve: Serve):
    served = serve()
    reply, request = begin(served, ARMED)
    served.engine.say(row(request, "Let me think"))
    assert end(served, request.rid).json()["success"]
    lose(served)
    again = served.engine.next_request()
    assert again.delivered is not None and reasoning_of(again).ends
    finish(served, reply, again)


def lose(served: Served) -> None:
    """Lose the scheduler, and have it again."""
    assert served.engine.loop is not None
    manager = served.services.manager
    steps: list[Callable[[], None]] = [
        lambda: manager.peers_lost("gone"),
        lambda: manager.peers_back(CAPACITY),
    ]
    for step in steps:
        served.engine.loop.call_soon_threadsafe(step)


def test_a_budget_is_enough_and_an_answer_without_a_matcher_says_what_to_send(serve: Serve):
    served = serve()
    reply, request = begin(served, HI | {"thinking_token_budget": 50})
    assert end(served, request.rid).json()["success"]
    finish(served, reply, request)
    reply, request = begin(served, HI)
    assert request.grammar is None
    done = end(served, request.rid).json()
    assert not done["success"] and "send the chat with reasoning_control: true" in done["message"]
    finish(served, reply, request)


def test_what_does_not_reason_says_so_and_is_left_as_it_is(serve: Serve):
    served = serve()
    reply, request = begin(served, ARMED | {"reasoning_effort": "none"})
    assert end(served, request.rid).json() == {"success": False, "message": "the answer has no reasoning"}
    finish(served, reply, request)
    served.engine.is_reasoning = False
    reply, request = begin(served, ARMED)
    assert end(served, request.rid).json() == {"success": False, "message": "the answer is not reasoning now"}
    lose(served)
    again = served.engine.next_request()
    assert not reasoning_of(again).ends
    finish(served, reply, again)


def test_all_choices_of_an_answer_end_or_the_one_that_is_named(serve: Serve):
    served = serve()
    reply, first = begin(served, ARMED | {"n": 2})
    second = served.engine.next_request()
    assert end(served, second.rid).json()["success"]
    assert served.engine.ended_reasoning.get(timeout=WAIT_S) == second.rid
    assert end(served, first.rid.rpartition("-")[0]).json()["success"]
    ended = {served.engine.ended_reasoning.get(timeout=WAIT_S) for _ in range(2)}
    assert ended == {first.rid, second.rid}
    finish(served, reply, first, second)


def test_others_and_ended_answers_are_unknown(serve: Serve):
    served = serve(api_key="a,b", admin_api_key="boss")
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("a", "b", "boss")}
    reply, request = begin(served, ARMED, headers=keys["a"])
    others, unknown = (end(served, rid, headers=keys["b"]) for rid in (request.rid, "chatcmpl-1"))
    assert (others.status_code, unknown.status_code) == (404, 404)
    assert others.json()["error"]["code"] == unknown.json()["error"]["code"] == "request_not_found"
    assert served.engine.ended_reasoning.empty()
    assert end(served, request.rid, headers=keys["a"]).json()["success"]
    assert end(served, request.rid, headers=keys["boss"]).json()["success"]
    finish(served, reply, request)
    assert end(served, request.rid, headers=keys["a"]).status_code == 404


@pytest.mark.parametrize("body", [{"id": "x"}, {"action": "reasoning_end"}, {"id": "x", "action": "cancel"}])
def test_bad_input_is_a_400(serve: Serve, body: dict[str, str]):
    assert serve().client.post(CONTROL, json=body).status_code == 400
