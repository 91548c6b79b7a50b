"""Many clients that send most of a large body and stop: together they hold no more than there is budget for."""

from __future__ import annotations

import json

import pytest

from engine.runtime.errors import RequestError
from engine.tokenizer_manager.http.guards.body_budget import SMALL_BYTES, BodyBudget
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import say_all
from tests.tokenizer_manager.http.test_connection import BODY, HEAD, connect, post, read_answer


def test_the_room_is_shared_and_given_back():
    budget = BodyBudget(max_bytes=10 * SMALL_BYTES)
    with budget.reserve() as first, budget.reserve() as second:
        first.grow_to(4 * SMALL_BYTES)
        first.grow_to(6 * SMALL_BYTES)
        second.grow_to(4 * SMALL_BYTES)
        with pytest.raises(RequestError, match=r"393216 bytes .* 655360; retry later") as caught:
            second.grow_to(4 * SMALL_BYTES + 1)
        assert caught.value.status == 429
        assert budget.num_bytes == 10 * SMALL_BYTES
    assert budget.num_bytes == 0


def test_a_small_body_and_a_lone_one_always_have_room():
    budget = BodyBudget(max_bytes=SMALL_BYTES)
    with budget.reserve() as lone, budget.reserve() as small:
        lone.grow_to(100 * SMALL_BYTES)
        small.grow_to(SMALL_BYTES)
    assert budget.num_bytes == 0


def test_bodies_that_do_not_end_leave_no_room_for_large_ones_until_they_go(serve: Serve):
    served = serve(say_all("x"))
    budget = served.services.body_budget
    budget.max_bytes = 4 * SMALL_BYTES
    large = json.dumps({"prompt": "hi", "max_tokens": 5, "user": "u" * 2 * SMALL_BYTES}).encode()
    with connect(served) as slow:
        slow.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (4 * SMALL_BYTES) + b" " * (3 * SMALL_BYTES))
        while budget.num_bytes < 3 * SMALL_BYTES - 1:
            served.client.get("/health")
        with connect(served) as other:
            other.sendall(post(large))
            answer = read_answer(other)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 5" in answer
        with connect(served) as small:
            small.sendall(post(BODY))
            assert read_answer(small).startswith(b"HTTP/1.1 200 ")
    while budget.num_bytes:
        served.client.get("/health")
    with connect(served) as other:
        other.sendall(post(large))
        assert read_answer(other).startswith(b"HTTP/1.1 200 ")
