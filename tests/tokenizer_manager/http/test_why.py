"""`GET /v1/requests/{id}/why`."""

from __future__ import annotations

from engine.runtime.messages import Explanation

from ..conftest import Serve
from ..fake_engine import WAIT_S, say_all
from .test_bad_input import check_error

WAITED = Explanation(
    found=True,
    sentence="It waited 2 passes for memory.",
    columns=("pass", "verdict"),
    rows=(("1", "NO_KV"),),
)


def test_a_choice_and_an_answer_can_be_asked_for(serve: Serve):
    served = serve(say_all("x"))
    answer_id = served.client.post("/v1/completions", json={"prompt": "hi"}).json()["id"]
    served.engine.explanations[f"{answer_id}-0"] = WAITED

    for request_id in (answer_id, f"{answer_id}-0"):
        reply = served.client.get(f"/v1/requests/{request_id}/why")
        assert reply.status_code == 200
        assert reply.json() == {
            "id": request_id,
            "found": True,
            "sentence": "It waited 2 passes for memory.",
            "columns": ["pass", "verdict"],
            "rows": [["1", "NO_KV"]],
        }


def test_what_nobody_remembers_is_a_404(serve: Serve):
    client = serve().client
    for request_id in ("cmpl-1", "", "a/b", "x" * 4000, "%00"):
        reply = client.get(f"/v1/requests/{request_id}/why")
        check_error(reply, 404, None, "nothing is remembered of the request")
        assert reply.json()["error"]["code"] == "request_not_found"
        assert len(reply.text) < 500
    check_error(client.get("/v1/requests/cmpl-1"), 404, None, "there is no /v1/requests/cmpl-1 here")
    check_error(client.post("/v1/requests/a/why", json={}), 405, None, "use GET")


def test_a_dead_engine_is_a_503(serve: Serve):
    served = serve()
    served.engine.answers = False
    reply = served.threads.submit(served.client.get, "/v1/requests/a/why")
    served.engine.explains.get(timeout=WAIT_S)
    served.engine.loop.call_soon_threadsafe(served.services.manager.engine_died, "it fell over")  # type: ignore[union-attr]
    check_error(reply.result(WAIT_S), 503, None, "it fell over")
