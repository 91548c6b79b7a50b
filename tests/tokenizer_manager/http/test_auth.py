from __future__ import annotations

import http.client

import pytest

from engine.tokenizer_manager.http.routes import ROUTES

from ..conftest import Serve
from ..fake_engine import say_all

KEY = "sk-ключ-1"  # a key may have any characters; it is compared as UTF-8 bytes


def status(url: str, method: str, path: str, authorization: bytes | None = None) -> int:
    """Over http.client, which sends paths and headers as they are."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    try:
        connection.putrequest(method, path)
        connection.putheader("Content-Length", "0")
        if authorization is not None:
            connection.putheader("Authorization", authorization)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def test_every_route_but_health_needs_the_key(serve: Serve):
    served = serve(say_all("x"), api_key=KEY)
    for route in ROUTES:
        path = route.path.replace("{model}", "x")
        assert status(served.url, route.method, path) == (200 if path == "/health" else 401), path
        assert status(served.url, route.method, path, f"Bearer {KEY}".encode()) != 401


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/docs",
        "/openapi.json",
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models/",
        "/v1/./models",
        "/v1/%6dodels",
        "/%2fv1/models",
        "/health/",
        "//health",
        "/HEALTH",
        "/health/../v1/models",
        "/health%2f..%2fv1/models",
        "/health;/v1/models",
        "*",
        "http://x/v1/models",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "FOO"])
def test_no_way_of_writing_a_path_goes_round_the_key(keyed, path, method):
    assert status(keyed, method, path) in (400, 401)


@pytest.fixture(scope="module")
def keyed(stopped_servers):
    from ..conftest import _served

    with _served(stopped_servers, say_all("x"), {"api_key": KEY}) as served:
        yield served.url


@pytest.mark.parametrize(
    "authorization",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Bearer sk-\xff\xfe",
        "Bearer sk-ключ-".encode(),
        "Bearer sk-ключ-12".encode(),
        "Basic sk-ключ-1".encode(),
        "sk-ключ-1".encode(),
        "Bearer sk-ключ-1".encode("utf-16-le"),
        b"Bearer " + b"x" * 10_000,
    ],
)
def test_a_wrong_key_is_a_401_whatever_its_bytes(keyed, authorization):
    if b"\n" in authorization or b"\0" in authorization:
        authorization = authorization.replace(b"\0", b"\x7f")
    assert status(keyed, "GET", "/v1/models", authorization) in (400, 401)


def test_the_right_key_opens(keyed):
    assert status(keyed, "GET", "/v1/models", f"Bearer {KEY}".encode()) == 200
    assert status(keyed, "GET", "/v1/models", f"bearer  {KEY} ".encode()) == 200


def test_a_refusal_says_what_to_send(serve: Serve):
    reply = serve(api_key="k").client.get("/v1/models")

    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert "Authorization: Bearer" in reply.json()["error"]["message"]


def test_the_key_appears_nowhere(serve: Serve):
    served = serve(say_all("x"), api_key="sk-secret")
    served.client.headers["Authorization"] = "Bearer sk-secret"
    for path in ("/server_info", "/metrics", "/openapi.json", "/docs"):
        reply = served.client.get(path)
        assert reply.status_code == 200
        assert "sk-secret" not in reply.text
