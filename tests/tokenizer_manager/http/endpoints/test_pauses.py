"""Pausing over HTTP: SGLang's and vLLM's routes, who may use them, and a restart in a pause."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.messages import Finish, FinishKind, PauseMode

from ...conftest import Serve
from ...fake_engine import WAIT_S, row, say_all


@pytest.mark.parametrize(
    ("path", "body", "mode"),
    [
        ("/pause_generation", {"mode": "in_place"}, PauseMode.KEEP),
        ("/pause_generation", {"mode": "retract"}, PauseMode.RETRACT),
        ("/pause_generation", {"mode": "abort"}, PauseMode.KEEP),
        ("/pause_generation", None, PauseMode.KEEP),
        ("/pause?mode=keep", None, PauseMode.KEEP),
        ("/pause?mode=wait", None, PauseMode.WAIT),
        ("/pause", None, PauseMode.KEEP),
    ],
)
def test_each_form_of_a_pause(serve: Serve, path: str, body: Any, mode: PauseMode) -> None:
    served = serve(say_all("x"))
    assert served.client.get("/is_paused").json() == {"is_paused": False}
    reply = served.client.post(path, json=body) if body else served.client.post(path)
    assert (reply.status_code, reply.json()["status"]) == (
        200,
        "paused" if "/pause?" in path or path == "/pause" else "ok",
    )
    assert served.engine.pauses == [mode]
    assert served.client.get("/is_paused").json() == {"is_paused": True}
    assert served.client.get("/health").json() == {"status": "paused"}
    assert served.client.get("/health_generate").json() == {"status": "paused"}  # without a token

    resume = "/continue_generation" if "generation" in path else "/resume"
    assert served.client.post(resume).status_code == 200
    assert served.engine.pauses == [mode, None]
    assert served.client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/pause_generation", "/pause"])
def test_a_pause_ends_the_live_requests_unless_told_otherwise(serve: Serve, path: str) -> None:
    served = serve()
    later = served.post_later("/generate", json={"text": "hi"})
    request = served.engine.next_request()
    assert served.client.post(path).status_code == 200
    assert served.engine.aborts.get(timeout=WAIT_S).rid == request.rid
    served.engine.say(row(request, "", finish=Finish(FinishKind.ABORT, message="the server was paused")))
    reply = later.result(timeout=WAIT_S).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "the server was paused"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause?mode=abrupt", None, "mode"),
        ("/pause_generation", {"mode": "wait"}, "mode"),
        ("/pause_generation", {"mode": 3}, "mode"),
        ("/pause_generation", [], None),
    ],
)
def test_wrong_modes(serve: Serve, path: str, body: Any, param: str | None) -> None:
    served = serve()
    reply = served.client.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"].get("param") == param
    assert not served.engine.pauses


@pytest.mark.parametrize("path", ["/pause", "/resume", "/pause_generation", "/continue_generation"])
def test_only_an_admin_pauses(serve: Serve, path: str) -> None:
    served = serve(api_key=("one",), admin_api_key="root")
    headers = {"Authorization": "Bearer one"}
    assert served.client.post(path, headers=headers).status_code == 403
    assert not served.engine.pauses
