"""The open port of a server that loads: what clients of each API see, and that the port is handed over whole."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import pytest

from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from engine.tokenizer_manager.http.port import RETRY_AFTER_S, LoadingPort

WAIT_S = 20.0


def address_of(port: LoadingPort) -> str:
    return f"127.0.0.1:{port.listener.getsockname()[1]}"


@pytest.fixture
def port() -> Iterator[LoadingPort]:
    with closing(LoadingPort(ServerConfig(port=0))) as port:
        yield port


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/health", "/v1/chat/completions?a=1", "/v1/messages", "/api/chat", "/", "/nothing"]
)
def test_every_endpoint_says_that_the_model_loads_in_the_form_of_its_api(
    port: LoadingPort, method: str, path: str
):
    reply = httpx.request(method, f"http://{address_of(port)}{path}", timeout=WAIT_S)
    body = reply.json()
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == str(RETRY_AFTER_S)
    waited = re.search(r"loading, for (\d+) s", reply.text)
    assert waited and int(waited[1]) <= WAIT_S, reply.text
    message = f"the model is loading, for {waited[1]} s so far; try again in 5 s"
    match path:
        case "/v1/messages":
            assert body.pop("request_id") == reply.headers["x-request-id"]
            assert body == {"type": "error", "error": {"type": "overloaded_error", "message": message}}
        case "/api/chat":
            assert body == {"error": message}
        case _:
            error = {"message": message, "type": "server_error", "param": None, "code": "loading_model"}
            assert body == {"error": error}


def test_the_answer_to_head_has_no_body(port: LoadingPort):
    reply = httpx.head(f"http://{address_of(port)}/health", timeout=WAIT_S)
    assert (reply.status_code, reply.content) == (503, b"")


def test_a_client_that_sends_a_long_body_gets_the_answer(port: LoadingPort):
    reply = httpx.post(f"http://{address_of(port)}/v1/completions", content=b"x" * (8 << 20), timeout=WAIT_S)
    assert reply.status_code == 503


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET", b"x" * (1 << 20)])
def test_what_is_no_request_disturbs_nobody(port: LoadingPort, sent: bytes):
    with socket.create_connection(port.listener.getsockname(), timeout=WAIT_S) as connection:
        connection.sendall(sent)
        assert httpx.get(f"http://{address_of(port)}/health", timeout=WAIT_S).status_code == 503


def test_connections_beyond_the_limit_are_closed_and_take_no_files_of_the_model(
    port: LoadingPort, monkeypatch
):
    monkeypatch.setattr("engine.tokenizer_manager.http.port._LIMIT_S", 10 * WAIT_S)  # none ends by itself
    address = port.listener.getsockname()
    num_files = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(address, timeout=WAIT_S)) for _ in range(300)
        ]
        assert connections[-1].recv(1) == b""
        assert len(os.listdir("/proc/self/fd")) - num_files < 2 * len(connections) - 40
    assert httpx.get(f"http://{address_of(port)}/health", timeout=WAIT_S).status_code == 503


def test_more_connections_than_asyncios_default_wait(port: LoadingPort):
    with port.listener.dup() as inherited, ExitStack() as stack:
        port.close()
        for _ in range(120):
            stack.enter_context(socket.create_connection(inherited.getsockname(), timeout=WAIT_S))


def test_a_connection_that_is_accepted_while_the_port_closes_is_answered(port: LoadingPort):
    """The loop has polled the listener, and runs a callback before it accepts; then `close` is called."""
    polls, is_polled, accepts = threading.Event(), threading.Event(), threading.Event()
    closer = threading.Thread(target=port.close)
    pending = vars(port._loop)["_ready"]

    def before_accept() -> None:
        is_polled.set()
        accepts.wait(WAIT_S)

    port._loop.call_soon_threadsafe(polls.wait, WAIT_S)
    with socket.create_connection(port.listener.getsockname(), timeout=WAIT_S) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        port._loop.call_soon_threadsafe(before_accept)
        polls.set()
        assert is_polled.wait(WAIT_S)
        num_pending = len(pending)
        closer.start()
        while closer.is_alive() and len(pending) == num_pending:
            pass
        accepts.set()
        assert client.recv(100).startswith(b"HTTP/1.1 503 ")
    closer.join(WAIT_S)


def test_connections_wait_for_the_process_that_takes_over(port: LoadingPort):
    inherited = port.listener.dup()
    address = inherited.getsockname()
    port.close()
    port.close()
    with inherited, socket.create_connection(address, timeout=WAIT_S) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        inherited.settimeout(WAIT_S)
        connection, _ = inherited.accept()
        with connection:
            connection.settimeout(WAIT_S)
            assert connection.recv(100).startswith(b"GET /health")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=WAIT_S)


def test_a_port_in_use_is_refused(port: LoadingPort):
    number = port.listener.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {number}"):
        LoadingPort(ServerConfig(port=number))
