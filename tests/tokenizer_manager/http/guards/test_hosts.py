"""Names by which a server without keys may be called: a page whose name leads to 127.0.0.1 gets nothing."""

from __future__ import annotations

import socket

import pytest

from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import WAIT_S, say_all

GOOD = [
    "127.0.0.1",
    "127.0.0.1:30000",
    "localhost",
    "LocalHost:1",
    "localhost.",
    "a.localhost",
    "[::1]:30000",
    "10.1.2.3",
]
BAD = [
    "evil.example",
    "evil.example:30000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "",
    "[",
    "[evil]",
    "localhos",
]


def status(url: str, host: str | None, version: str = "1.1") -> int:
    name, port = url.removeprefix("http://").split(":")
    with socket.create_connection((name, int(port)), timeout=WAIT_S) as connection:
        line = "" if host is None else f"Host: {host}\r\n"
        connection.sendall(f"GET /v1/models HTTP/{version}\r\n{line}Connection: close\r\n\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            part = connection.recv(65536)
            assert part, answer
            answer += part
    return int(answer.split()[1])


def test_addresses_and_localhost_are_good_and_other_names_are_not(serve: Serve):
    url = serve(say_all("x")).url
    assert {host: status(url, host) for host in GOOD} == dict.fromkeys(GOOD, 200)
    assert {host: status(url, host) for host in BAD} == dict.fromkeys(BAD, 403)
    assert status(url, None, "1.0") == 200


def test_the_refusal_says_the_way_out_and_covers_every_path(serve: Serve):
    client = serve(say_all("x")).client
    for path in ("/v1/models", "/metrics", "/health", "/nothing"):
        reply = client.get(path, headers={"Host": "evil.example"})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (403, "host_not_allowed")
        assert '"evil.example"' in error["message"]
        assert "--allowed-host" in error["message"]


def test_allowed_names_are_good(serve: Serve):
    url = serve(say_all("x"), allowed_host=("LLM.internal", "other.")).url
    assert status(url, "llm.INTERNAL:8000") == 200
    assert status(url, "other") == status(url, "other.") == 200
    assert status(url, "sub.llm.internal") == 403
    assert status(serve(say_all("x"), allowed_host=("*",)).url, "evil.example") == 200


def test_who_asks_for_keys_or_listens_to_others_takes_any_name(serve: Serve):
    reply = serve(say_all("x"), api_key=("k",)).client.get(
        "/v1/models", headers={"Host": "llm.example", "Authorization": "Bearer k"}
    )
    assert reply.status_code == 200
    assert status(serve(say_all("x"), loopback=False).url, "llm.example") == 200


@pytest.mark.parametrize("host", ["", "http://x", "x:80", "a b", "*.example"])
def test_what_is_no_name_is_refused_at_start(host):
    with pytest.raises(ConfigError, match="allowed_host is .* a name without scheme and port"):
        ServerConfig(allowed_host=(host,))
