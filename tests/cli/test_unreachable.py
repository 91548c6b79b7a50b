"""A connection that fails: the same sentence, with the right fix, from every client library and command."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from engine.cli.server_client import why_unreachable

HINT = "start one"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1 and its key in one file."""
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=engine"
    )
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


@pytest.fixture(params=["plain", "tls", "none"])
def server(request: pytest.FixtureRequest, certificate: Path) -> Iterator[tuple[str, int]]:
    """How a port answers, and the port. A plain one closes each connection at its first bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    if request.param == "tls":
                        context.wrap_socket(connection, server_side=True)
                    else:
                        connection.recv(65536)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                except OSError:
                    pass

    if request.param == "none":
        listener.close()
        yield "none", port
        return
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield request.param, port
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def by_httpx(url: str) -> str:
    try:
        httpx.get(url, timeout=10)
    except httpx.HTTPError as error:
        connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        return why_unreachable(url, error, connected=connected, hint=HINT)
    return "an answer"


def by_aiohttp(url: str) -> str:
    async def ask() -> str:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(url):
                    return "an answer"
            except aiohttp.ClientError as error:
                connected = not isinstance(error, aiohttp.ClientConnectorError)
                return why_unreachable(url, error, connected=connected, hint=HINT)

    return asyncio.run(ask())


SENTENCES = {
    ("http", "none"): "no server answers at {url} (Connection refused); start one",
    ("https", "none"): "no server answers at {url} (Connection refused); start one",
    ("http", "plain"): "an answer",
    (
        "https",
        "plain",
    ): "{url} does not answer with TLS; if the server has no certificate, use http://127.0.0.1:{port}",
    ("http", "tls"): "{url} closed the connection without an answer; if the server has a certificate, use "
    "https://127.0.0.1:{port}",
    (
        "https",
        "tls",
    ): "the certificate of {url} is not accepted: self-signed certificate; set SSL_CERT_FILE to a file "
    "with the certificate of its CA (PEM)",
}


@pytest.mark.parametrize("ask", [by_httpx, by_aiohttp])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_each_failure_has_its_sentence(server: tuple[str, int], scheme: str, ask) -> None:
    kind, port = server
    url = f"{scheme}://127.0.0.1:{port}"
    assert ask(url) == SENTENCES[scheme, kind].format(url=url, port=port)


@pytest.mark.parametrize("ask", [by_httpx, by_aiohttp])
def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch, ask) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert ask("http://nope.invalid") == (
        "no server answers at http://nope.invalid (Name or service not known); start one"
    )


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("IP address mismatch, certificate is not valid for '127.0.0.1'.", "use a name in the URL that"),
        ("Hostname mismatch, certificate is not valid for 'a'.", "use a name in the URL that"),
        ("certificate has expired", "renew it, or correct the clock"),
        ("certificate is not yet valid", "renew it, or correct the clock"),
        ("unable to get local issuer certificate", "set SSL_CERT_FILE"),
    ],
)
def test_what_is_wrong_with_a_certificate(reason: str, fix: str) -> None:
    error = OSError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {reason} (_ssl.c:1006)")
    sentence = why_unreachable("https://a", error, connected=False, hint=HINT)
    assert sentence.startswith(f"the certificate of https://a is not accepted: {reason.rstrip('.')}; {fix}")
