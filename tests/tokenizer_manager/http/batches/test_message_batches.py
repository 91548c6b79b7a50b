"""`/v1/messages/batches` with Anthropic's client: outcomes, states, lists, and what other APIs and owners see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types.messages import MessageBatch

from engine.tokenizer_manager.http.batch_runner.runner import BatchRunner
from tests.tokenizer_manager.conftest import NO_TLS, Serve, Served
from tests.tokenizer_manager.fake_engine import WAIT_S, say_all

PATH = "/v1/messages/batches"


@pytest.fixture
def serve_kept(serve: Serve, tmp_path: Path) -> Callable[..., Served]:
    """Starts a server with the state of this test."""
    return lambda script=None, **settings: serve(script, state_dir=str(tmp_path / "state"), **settings)


ClientOf = Callable[..., anthropic.Anthropic]


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """Makes clients that are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(served: Served, key: str = "none") -> anthropic.Anthropic:
            http = anthropic.DefaultHttpxClient(verify=NO_TLS, timeout=WAIT_S)
            client = anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, http_client=http)
            return stack.enter_context(client)

        yield make


def params(text: str = "hi", **more: Any) -> Any:
    return {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": text}]} | more


def create(client: anthropic.Anthropic, **requests: Any) -> MessageBatch:
    return client.messages.batches.create(
        requests=[{"custom_id": name, "params": each} for name, each in requests.items()]
    )


def ended(served: Served, client: anthropic.Anthropic, batch_id: str) -> MessageBatch:
    deadline = served.engine.ticks + WAIT_S * 100
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert served.engine.ticks < deadline, batch
    return batch


def model_of(served: Served) -> str:
    return str(served.services.served_model)


def test_a_batch_of_messages(serve_kept, client_of: ClientOf):
    served = serve_kept(say_all("x"))
    client, model = client_of(served), model_of(served)

    begun = create(
        client,
        one=params(model=model),
        refused=params(model=model, temperature=9),
        unknown=params(model="nobody"),
        two=params("so", model=model),
    )
    done = ended(served, client, begun.id)

    assert begun.processing_status == "in_progress"
    assert begun.request_counts.processing == 4
    assert (begun.ended_at, begun.results_url) == (None, None)
    counts = done.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 2, 2)
    assert (counts.canceled, counts.expired) == (0, 0)
    assert done.ended_at is not None and (done.expires_at - done.created_at).total_seconds() == 86_400
    assert done.results_url == f"{served.url}{PATH}/{done.id}/results"
    results = list(client.messages.batches.results(done.id))
    assert [each.custom_id for each in results] == ["one", "refused", "unknown", "two"]
    first, refused, unknown, _ = (each.result for each in results)
    assert first.type == "succeeded"
    [block] = first.message.content
    assert block.type == "text" and block.text == "x"
    assert first.message.usage.output_tokens == 1
    assert refused.type == unknown.type == "errored"
    assert refused.error.error.type == "invalid_request_error"
    assert "temperature" in refused.error.error.message
    assert unknown.error.error.type == "not_found_error"
    assert all(served.engine.next_request().background for _ in range(2))


def test_a_canceled_batch_keeps_what_is_answered(serve_kept, client_of: ClientOf):
    served = serve_kept()
    client, model = client_of(served), model_of(served)
    begun = create(client, a=params(model=model), b=params(model=model))
    requests = [served.engine.next_request() for _ in range(2)]
    served.engine.say(*say_all("x")(requests[0]))
    while served.client.get(f"/v1/batches/{begun.id}").json()["request_counts"]["completed"] == 0:
        pass
    with pytest.raises(anthropic.BadRequestError, match="has not ended"):
        client.messages.batches.delete(begun.id)
    assert served.client.get(f"{PATH}/{begun.id}/results").status_code == 400

    canceling = client.messages.batches.cancel(begun.id)
    done = ended(served, client, begun.id)

    assert canceling.cancel_initiated_at is not None
    assert (done.request_counts.succeeded, done.request_counts.canceled) == (1, 1)
    kinds = sorted(each.result.type for each in client.messages.batches.results(done.id))
    assert kinds == ["canceled", "succeeded"]
    assert client.messages.batches.cancel(done.id).processing_status == "ended"


def test_a_batch_expires(serve_kept, client_of: ClientOf):
    served = serve_kept()
    client = client_of(served)
    begun = create(client, a=params(model=model_of(served)))
    served.engine.next_request()
    runner = served.services.required_state.batches
    assert isinstance(runner, BatchRunner) and served.engine.loop is not None
    runner.files._wall_clock = begun.expires_at.timestamp
    asyncio.run_coroutine_threadsafe(runner.tick(), served.engine.loop).result()

    done = ended(served, client, begun.id)

    assert done.request_counts.expired == 1
    [result] = client.messages.batches.results(done.id)
    assert result.result.type == "expired"


def test_a_batch_that_has_ended_can_be_deleted_and_not_canceled(serve_kept, client_of: ClientOf):
    served = serve_kept(say_all("x"))
    client = client_of(served)
    done = ended(served, client, create(client, a=params(model=model_of(served))).id)
    with pytest.raises(anthropic.BadRequestError, match="too late to cancel"):
        client.messages.batches.cancel(done.id)

    assert client.messages.batches.delete(done.id).type == "message_batch_deleted"

    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(done.id)
    assert served.client.get("/v1/files").json()["data"] == []


def test_lists_have_pages_both_ways_and_each_api_has_its_own(serve_kept, client_of: ClientOf):
    served = serve_kept(say_all("x"))
    client = client_of(served)
    batches = client.messages.batches
    made = [create(client, a=params(model=model_of(served))).id for _ in range(5)]
    made.reverse()

    first = batches.list(limit=2)
    second = batches.list(limit=2, after_id=str(first.last_id))
    back = batches.list(limit=2, before_id=made[4])

    assert [each.id for each in first.data] == made[:2] and first.has_more
    assert [each.id for each in second.data] == made[2:4]
    assert [each.id for each in back.data] == made[2:4] and back.has_more
    assert [each.id for each in batches.list(limit=2)] == made
    assert served.client.get("/v1/batches").json()["data"] == []


def test_a_batch_of_another_key_is_not_there(serve_kept, client_of: ClientOf):
    served = serve_kept(say_all("x"), api_key=("sk-a", "sk-b"))
    own, other = client_of(served, "sk-a"), client_of(served, "sk-b")
    done = ended(served, own, create(own, a=params(model=model_of(served))).id)

    for call in (
        other.messages.batches.retrieve,
        other.messages.batches.cancel,
        other.messages.batches.delete,
    ):
        with pytest.raises(anthropic.NotFoundError):
            call(done.id)
    assert other.messages.batches.list().data == []
    reply = served.client.get(f"{PATH}/{done.id}/results", headers={"x-api-key": "sk-b"})
    assert (reply.status_code, reply.json()["type"]) == (404, "error")


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([], "requests has 0 entries"),
        ([{"custom_id": "a"}], "requests[0].params"),
        ([{"custom_id": "a b", "params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}], "requests[1].custom_id"),
        ([{"custom_id": "a", "params": {"stream": True}}], "requests[0].params.stream"),
        ([{"custom_id": "a", "params": {}, "url": "/"}], "requests[0].url"),
        ("a", "requests"),
    ],
)
def test_requests_that_are_none_are_refused_at_once(serve_kept, requests, param):
    served = serve_kept()

    reply = served.client.post(PATH, json={"requests": requests})

    assert reply.status_code == 400
    assert param in reply.json()["error"]["message"]
    assert served.client.get("/v1/files").json()["data"] == []


def test_without_a_folder_for_state_there_are_no_batches(serve: Serve):
    served = serve()

    reply = served.client.post(PATH, json={"requests": [{"custom_id": "a", "params": params()}]})

    assert (reply.status_code, reply.json()["type"]) == (404, "error")
    assert "--state-dir" in reply.json()["error"]["message"]
