"""Web pages: none may use the API unless its origin is allowed."""

from __future__ import annotations

import pytest

from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import say_all

PAGE = "https://chat.example"
PROMPT = {"prompt": "hi", "max_tokens": 5}
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.mark.parametrize("origin", [PAGE, "null", "http://127.0.0.1:30000", "https://chat.example.evil"])
@pytest.mark.parametrize("allowed", [(), ("https://other.example",)])
def test_a_server_without_keys_carries_out_nothing_for_other_pages(serve: Serve, origin, allowed):
    """A page needs no leave to have a browser send a POST; it must not be carried out."""
    served = serve(say_all("x"), cors_origin=allowed)
    for path, body in (
        ("/v1/completions", PROMPT),
        ("/flush_cache", {}),
        ("/start_profile", {}),
        ("/abort_request", {"abort_all": True}),
    ):
        reply = served.client.post(path, json=body, headers={"Origin": origin, "Content-Type": "text/plain"})
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_not_allowed"
        assert "--cors-origin" in reply.json()["error"]["message"]
        assert "access-control-allow-origin" not in reply.headers
    assert served.engine.generate.empty()


def test_an_allowed_page_asks_beforehand_and_reads_the_answer(serve: Serve):
    client = serve(say_all("x"), cors_origin=("https://other.example", PAGE), api_key=("k",)).client

    asked = client.options("/v1/completions", headers={"Origin": PAGE} | ASKS)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in asked.headers
    reply = client.post("/v1/completions", json=PROMPT, headers={"Origin": PAGE, "Authorization": "Bearer k"})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["vary"] == "origin"
    readable = set(reply.headers["access-control-expose-headers"].split(", "))
    assert {"retry-after", "x-request-id", "x-engine-queue-position"} <= readable
    refused = client.post("/v1/completions", json=PROMPT, headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_an_allowed_page_may_send_the_headers_that_its_client_library_adds(serve: Serve):
    """OpenAI's JavaScript client sends ten `x-stainless-*` ones; a browser refuses all if one is not allowed."""
    client = serve(say_all("x"), cors_origin=(PAGE,), api_key=("k",)).client
    wanted = "authorization,content-type,x-stainless-os"
    asked = client.options(
        "/v1/chat/completions",
        headers={"Origin": PAGE} | ASKS | {"Access-Control-Request-Headers": wanted},
    )
    assert asked.headers["access-control-allow-headers"] == wanted


def test_another_page_learns_nothing_from_a_server_with_keys(serve: Serve):
    client = serve(say_all("x"), cors_origin=(PAGE,), api_key=("k",)).client
    asked = client.options("/v1/completions", headers={"Origin": "https://evil.example"} | ASKS)
    assert asked.status_code == 401
    assert "access-control-allow-origin" not in asked.headers


def test_any_page_where_that_is_asked_for(serve: Serve):
    reply = serve(say_all("x"), cors_origin=("*",)).client.get("/v1/models", headers={"Origin": PAGE})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")


def test_who_is_no_browser_sends_no_origin_and_is_not_concerned(serve: Serve):
    assert serve(say_all("x")).client.post("/v1/completions", json=PROMPT).status_code == 200


@pytest.mark.parametrize(
    "origin", ["", "example.org", "https://a.example/path", "https://A.example", "https://"]
)
def test_what_is_no_origin_is_refused_at_start(origin):
    with pytest.raises(ConfigError, match=r"cors_origin is .* scheme://host"):
        ServerConfig(cors_origin=(origin,))
