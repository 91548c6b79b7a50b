"""HTTPS, with a certificate made for these tests."""

from __future__ import annotations

import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from engine.tokenizer_manager.http.port import LoadingPort, tls_context

from ..conftest import Serve
from ..fake_engine import WAIT_S, say_all

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUXcSypeDRioU6v4myX/L1/M/ABTYwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjA2MjcwMFoYDzIxMjYxMDI5
MDYyNzAwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATj0b0+YkB7IajeQFRrHDMnr18rFCrb8sbiqOXyK7z0T74LjZLmV9xC
0pI6q6WsStzVW2c8t4aKVqPaXf4cWHSwo28wbTAdBgNVHQ4EFgQU1s97QWZMry6u
qrnHuIcS8GKzz7gwHwYDVR0jBBgwFoAU1s97QWZMry6uqrnHuIcS8GKzz7gwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhALEM6V5ehsU6XJo59n+rBnKF3HLXfOd4Qe2WkG8mmsm/AiAd
zr3KBYBg30asSg76wnIKVMOas/aCBmCN7kAYWOxAww==
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgd5iRen3XDokPBjCv
bXn/W5lOqIJlNSu0LhjchBO1+G+hRANCAATj0b0+YkB7IajeQFRrHDMnr18rFCrb
8sbiqOXyK7z0T74LjZLmV9xC0pI6q6WsStzVW2c8t4aKVqPaXf4cWHSw
-----END PRIVATE KEY-----
"""
KEY_WITH_PASSWORD = """\
-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-256-CBC,8E3F97D843D245A99A61BE60D83428C5

vfdJIAP+7a7CZPXkNHy9CndajQbbrasZmpGbkdNH5F1aLF2I//3c2DvpKsYFT2Gr
SVTagH47Rd+O0Mj/tOoD9bT1ATocPg4Zl5R5ZxOh7CK86TmDGbbClDNnlCpAaAts
QUEZ4axCWqeXugXrcVfnBcLU83ujlWe9+M1Z79USyRo=
-----END EC PRIVATE KEY-----
"""


def write(tmp_path: Path, certificate: str = CERTIFICATE, key: str = KEY) -> dict[str, Any]:
    """The settings for such files."""
    (tmp_path / "cert.pem").write_text(certificate)
    (tmp_path / "key.pem").write_text(key)
    return {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}


def test_a_server_whose_model_loads_answers_over_tls(tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with closing(LoadingPort(ServerConfig(port=0, **write(tmp_path)))) as port:
        url = f"https://127.0.0.1:{port.listener.getsockname()[1]}/health"
        reply = httpx.get(url, verify=context, timeout=WAIT_S)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "loading_model")


@pytest.mark.parametrize("in_one_file", [True, False])
def test_requests_are_answered_over_tls_with_our_certificate(serve: Serve, tmp_path, in_one_file):
    settings = write(tmp_path, CERTIFICATE + KEY if in_one_file else CERTIFICATE)
    if in_one_file:
        del settings["ssl_keyfile"]
    tls_context(ServerConfig(**settings))
    served = serve(say_all("x"), **settings)
    host, port = served.url.removeprefix("http://").split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # its dates are those of the day it was made
    with httpx.Client(base_url=f"https://{host}:{port}", verify=context, timeout=WAIT_S) as client:
        body = {"prompt": "hi", "max_tokens": 5, "stream": True}
        assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    shown = ssl.get_server_certificate((host, int(port)), timeout=WAIT_S)
    assert shown.split() == CERTIFICATE.split()


def test_who_speaks_no_tls_gets_no_answer_and_others_do(serve: Serve, tmp_path):
    served = serve(say_all("x"), **write(tmp_path))
    with pytest.raises(httpx.TransportError):
        served.client.get("/health")


@pytest.mark.parametrize(
    ("certificate", "key"),
    [
        (CERTIFICATE, KEY_WITH_PASSWORD),
        (CERTIFICATE, CERTIFICATE),
        (CERTIFICATE, ""),
        ("", KEY),
        ("nonsense", KEY),
    ],
)
def test_files_that_do_not_do_are_named_at_start(tmp_path, certificate, key):
    with pytest.raises(
        ConfigError, match=r"ssl_certfile .*cert.pem with the key in .*key.pem cannot be used: .+"
    ):
        tls_context(ServerConfig(**write(tmp_path, certificate, key)))


def test_a_missing_file_is_named_at_start():
    with pytest.raises(ConfigError, match="ssl_certfile /none.pem .* No such file"):
        tls_context(ServerConfig(ssl_certfile="/none.pem"))


def test_a_key_without_certificate_is_refused():
    with pytest.raises(ConfigError, match="set ssl_certfile too"):
        ServerConfig(ssl_keyfile="key.pem")
