"""`GET /v1/requests`: the live requests in figures."""

from __future__ import annotations

from engine.runtime.messages import LiveRequest, RequestList

from ..conftest import Serve
from ..fake_engine import CAPACITY, LENGTH, WAIT_S, row
from .test_bad_input import check_error


def test_live_requests_in_figures_and_without_texts(serve: Serve):
    served = serve()
    reply = served.post_later("/v1/completions", json={"prompt": "secret question", "user": "secret user"})
    request = served.engine.next_request()
    served.engine.say(row(request, "secret answer"))
    waiting = LiveRequest("other", "waiting", 9, 0, 5, 0, 1.25, 1, 3, "no_kv", "KV memory is short", 14, 4)
    served.engine.live = RequestList(
        [LiveRequest(request.rid, "decode", 3, 1, 16, 2, 0.5), waiting], 7, {"step_id": 4}
    )

    found = served.client.get("/v1/requests")
    assert found.status_code == 200
    body = found.json()
    assert (body["object"], body["total"], body["last_pass"]) == ("list", 7, {"step_id": 4})
    running, other = body["data"]
    assert running.pop("ttft_s") >= 0
    assert running == {
        "id": request.rid,
        "phase": "decode",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "completion_tokens": 1,
        "max_tokens": 16,
        "age_s": 0.5,
        "num_retractions": 0,
        "priority": 0,
        "reason": "",
        "why": "",
        "need": 0,
        "have": 0,
        "service_tier": "default",
    }
    assert other["ttft_s"] is None
    assert (other["reason"], other["why"], other["need"], other["have"]) == (
        "no_kv",
        "KV memory is short",
        14,
        4,
    )
    assert "secret" not in found.text
    served.engine.say(row(request, "", total=1, finish=LENGTH))
    assert reply.result(WAIT_S).status_code == 200


def test_a_request_that_was_submitted_again_has_the_id_by_which_it_can_be_aborted(serve: Serve):
    served = serve()
    reply = served.post_later("/v1/completions", json={"prompt": "hi"})
    first = served.engine.next_request()
    for tell in (
        lambda: served.services.manager.peers_lost("gone"),
        lambda: served.services.manager.peers_back(CAPACITY),
    ):
        assert served.engine.loop is not None
        served.engine.loop.call_soon_threadsafe(tell)
    again = served.engine.next_request()
    served.engine.live = RequestList([LiveRequest(again.rid, "decode", 2, 1, 16, 2, 0.5)], 1, {})
    assert served.engine.next_abort().rid == first.rid

    [listed] = served.client.get("/v1/requests").json()["data"]
    assert listed["id"] == first.rid
    assert served.client.post("/abort_request", json={"rid": listed["id"]}).json()["aborted"] == 1
    assert served.engine.next_abort().rid == again.rid
    served.engine.say(row(again, "x", finish=LENGTH))
    assert reply.result(WAIT_S).status_code == 200


def test_it_is_the_admins(serve: Serve):
    """The ids of others' requests are what those could be aborted by."""
    client = serve(api_key="k", admin_api_key="boss").client
    refused = client.get("/v1/requests", headers={"Authorization": "Bearer k"})
    check_error(refused, 403, None, "/v1/requests affects all requests")
    assert client.get("/v1/requests", headers={"Authorization": "Bearer boss"}).json()["data"] == []


def test_it_wants_the_key_and_no_other_method(serve: Serve):
    client = serve(api_key="k").client
    check_error(client.get("/v1/requests"), 401, None, "the API key is missing")
    check_error(
        client.post("/v1/requests", json={}, headers={"Authorization": "Bearer k"}), 405, None, "use GET"
    )
