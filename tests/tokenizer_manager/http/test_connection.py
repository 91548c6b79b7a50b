"""Clients that are slow, silent, greedy or ahead of their turn: each is answered or closed, and others notice nothing.

Time limits are so short here that they end soon, and nothing is asserted about what a slow machine could miss.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import Any

import pytest

from ..conftest import Serve, Served
from ..fake_engine import WAIT_S, row, say_all

SHORT_S = 0.02
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
BODY = json.dumps({"prompt": "hi", "max_tokens": 5}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: bytes = BODY, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def read_to_end(connection: socket.socket) -> bytes:
    """All that the server says until it closes, with an end or a reset."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def read_answer(connection: socket.socket) -> bytes:
    """One answer, to its end."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    [length] = re.findall(rb"content-length: (\d+)", head)
    while len(body) < int(length):
        body += connection.recv(65536)
    return head + body


def say_and_read_to_end(served: Served, *parts: bytes) -> bytes:
    """What comes back for this, with an answer awaited between the parts. On a slow machine the time for a new
    connection's first byte may be over before it is sent: then again."""
    while True:
        with connect(served) as connection, contextlib.suppress(ConnectionError):
            for part in parts[:-1]:
                connection.sendall(part)
                read_answer(connection)
            connection.sendall(parts[-1])
            if answer := read_to_end(connection):
                return answer


def error_in(answer: bytes, status: int) -> dict[str, Any]:
    """The error object of the last answer."""
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert head.splitlines()[0].startswith(b"HTTP/1.1 %d " % status), answer
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def check_alive(served: Served) -> None:
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("part", [b"G", b"POST /v1/comp", HEAD, HEAD + b"X-Slow: 1\r\n"])
def test_a_head_that_does_not_come_is_answered(serve: Serve, part):
    served = serve(say_all("x"), header_timeout=SHORT_S)
    error = error_in(say_and_read_to_end(served, part), 408)
    assert error["code"] == "request_timeout"
    assert "--header-timeout" in error["message"]


def test_a_connection_that_says_nothing_is_closed_without_a_word(serve: Serve):
    served = serve(say_all("x"), header_timeout=SHORT_S)
    with connect(served) as connection:
        assert read_to_end(connection) == b""


def test_the_second_head_on_a_connection_is_under_the_clock_too(serve: Serve):
    served = serve(say_all("x"), header_timeout=SHORT_S)
    error_in(say_and_read_to_end(served, HEALTH, HEAD), 408)


@pytest.mark.parametrize(
    "part",
    [
        HEAD + b"Content-Length: 100\r\n\r\n",
        HEAD + b'Content-Length: 100\r\n\r\n{"prompt"',
        HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
    ],
)
def test_a_body_that_does_not_come_is_answered(serve: Serve, part):
    served = serve(say_all("x"), body_timeout=SHORT_S)
    with connect(served) as connection:
        connection.sendall(part)
        error = error_in(read_to_end(connection), 408)
    assert "--body-timeout" in error["message"]
    assert served.engine.generate.empty()
    check_alive(served)


def test_an_idle_connection_is_closed_after_its_answer(serve: Serve):
    served = serve(say_all("x"), keep_alive_timeout=SHORT_S)
    with connect(served) as connection:
        connection.sendall(HEALTH)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_a_head_that_is_too_large_is_refused(serve: Serve, in_one_piece):
    served = serve(say_all("x"), max_header_kb=4)
    head = HEAD + b"X-Large: " + b"x" * 5000
    with connect(served) as connection:
        connection.sendall(head + b"\r\n\r\n" if in_one_piece else head)  # no end: it must not be waited for
        error = error_in(read_to_end(connection), 431)
    assert error["code"] == "headers_too_large"
    check_alive(served)


def test_many_small_headers_are_one_large_head(serve: Serve):
    served = serve(say_all("x"), max_header_kb=4)
    with connect(served) as connection:
        connection.sendall(HEAD + b"".join(b"X-%d: y\r\n" % i for i in range(1000)))
        error_in(read_to_end(connection), 431)


def test_a_large_body_is_not_a_large_head(serve: Serve):
    served = serve(say_all("x"), max_header_kb=4)
    body = json.dumps({"prompt": "x", "max_tokens": 5, "metadata": {"note": "y" * 50_000}}).encode()
    with connect(served) as connection:
        for begin in range(0, len(message := post(body)), 1000):
            connection.sendall(message[begin : begin + 1000])
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_connections_beyond_the_limit_are_told_so_and_places_come_back(serve: Serve):
    served = serve(say_all("x"), max_connections=2)
    with connect(served) as first, connect(served) as second:
        for connection in (first, second):
            connection.sendall(HEALTH)
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        with connect(served) as third:
            error = error_in(read_to_end(third), 503)
        assert error["code"] == "too_many_connections"
    answer = b""
    while not answer.startswith(b"HTTP/1.1 200 "):  # the server may not have seen yet that they have gone
        with connect(served) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(HEALTH)
            answer = connection.recv(65536)


def test_2000_idle_connections_disturb_nobody(serve: Serve):
    served = serve(say_all("x"))
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(2000):
                stack.enter_context(connect(served))
        except OSError as error:  # of this machine: client and server share one process's descriptors here
            pytest.skip(f"not so many descriptors: {error}")
        assert served.client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


# ---------------------------------------------------------------- a client that does not read


def test_a_client_that_reads_nothing_is_cut_off_and_others_are_served(serve: Serve):
    served = serve(send_timeout=SHORT_S)
    body = json.dumps({"prompt": "hi", "max_tokens": 100, "stream": True}).encode()
    with connect(served) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post(body))
        request = served.engine.next_request()
        text = "x" * 60_000
        for total in range(1, 200):  # 12 MB, more than the kernel's buffers hold
            served.engine.say(row(request, text, total=total, token_ids=[5]))
        check_alive(served)
        assert served.engine.next_abort().rid == request.rid
    assert len(served.services.manager.request_log) == 0


# ---------------------------------------------------------------- requests before their turn


def test_pipelined_requests_are_answered_in_order(serve: Serve):
    served = serve(say_all("x"))
    with connect(served) as connection:
        connection.sendall(
            HEALTH + post() + b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        answer = read_to_end(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.index(b'"status"') < answer.index(b"text_completion") < answer.index(b'"owned_by"')


def test_a_client_that_leaves_with_another_request_in_line_is_noticed(serve: Serve):
    """uvicorn alone does not read on here, and would not see the end of the connection."""
    served = serve()
    with connect(served) as connection:
        connection.sendall(post())
        request = served.engine.next_request()
        connection.sendall(post())
        check_alive(served)
    assert served.engine.next_abort().rid == request.rid


@pytest.mark.parametrize(
    "second",
    [
        post(b"x" * 100_000),
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        HEALTH * 100,
    ],
    ids=["large", "chunked", "many"],
)
def test_what_is_too_much_to_wait_in_line_closes_the_connection_after_the_answers(serve: Serve, second):
    served = serve()
    with connect(served) as connection:
        connection.sendall(post())
        request = served.engine.next_request()
        connection.sendall(second)
        check_alive(served)
        for output in say_all("the answer")(request):
            served.engine.say(output)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"the answer" in answer
    assert answer.count(b"HTTP/1.1 ") <= 1 + 16
    assert served.engine.aborts.empty()


def test_a_client_that_leaves_with_too_much_in_line_is_noticed(serve: Serve):
    served = serve()
    with connect(served) as connection:
        connection.sendall(post())
        request = served.engine.next_request()
        connection.sendall(post(b"x" * 1_000_000))
        check_alive(served)
    assert served.engine.next_abort().rid == request.rid


def test_garbage_behind_a_request_under_way_does_not_get_into_its_answer(serve: Serve):
    served = serve()
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    with connect(served) as connection:
        connection.sendall(post(body))
        request = served.engine.next_request()
        served.engine.say(row(request, "a"))
        answer = connection.recv(65536)
        connection.sendall(b"NONSENSE\r\n\r\n")
        answer += read_to_end(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert served.engine.next_abort().rid == request.rid


# ---------------------------------------------------------------- what is no plain HTTP


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@pytest.mark.parametrize(
    "request_bytes",
    [HEALTH, post(), HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)],
    ids=["GET", "POST", "chunked"],
)
def test_an_upgrade_is_not_taken_and_the_request_answered(serve: Serve, protocol, request_bytes):
    """Java's HttpClient offers h2c with every first request, also with one that has a body."""
    served = serve(say_all("the answer"))
    head, _, body = request_bytes.partition(b"\r\n\r\n")
    head += b"\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % protocol
    for parts in ([head + body], [head, body]):
        with connect(served) as connection:
            for part in parts:
                connection.sendall(part)
            answer = read_answer(connection)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert (b"the answer" in answer) == bool(body)
            connection.sendall(HEALTH)
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
    check_alive(served)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET \xff HTTP/1.1\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 99999999999999999999999999\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_http_is_answered_with_an_error_object(serve: Serve, request_bytes):
    served = serve(say_all("x"), body_timeout=SHORT_S, keep_alive_timeout=SHORT_S)
    with connect(served) as connection:
        connection.sendall(request_bytes)
        answer = read_to_end(connection)
    assert error_in(answer, int(answer[9:12]))["message"]
    assert 400 <= int(answer[9:12]) < 500
    check_alive(served)


def test_what_stands_behind_a_body_in_chunks_is_bounded_and_is_no_header(serve: Serve):
    """Trailers: a client could fill the memory with them, and nothing here reads them."""
    served = serve(say_all("x"), max_header_kb=4.0)
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    with connect(served) as connection:
        connection.sendall(HEAD + chunks + b"X-Request-Id: from-a-trailer\r\n\r\n")
        answer = read_answer(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"from-a-trailer" not in answer
    with connect(served) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                connection.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")
        assert error_in(read_to_end(connection), 431)["code"] == "headers_too_large"


def test_a_body_may_come_in_tiny_chunks(serve: Serve):
    served = serve(say_all("x"), max_header_kb=1.0)
    body = BODY + b" " * 2000
    with connect(served) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for i in range(len(body)):
            connection.sendall(b"1\r\n%b\r\n" % body[i : i + 1])
        connection.sendall(b"0\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_garbage_behind_a_request_in_line_does_not_get_into_the_answer_before_it(serve: Serve):
    served = serve()
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    with connect(served) as connection:
        connection.sendall(post(body))
        request = served.engine.next_request()
        served.engine.say(row(request, "a"))
        answer = connection.recv(65536)
        connection.sendall(HEALTH + b"NONSENSE\r\n\r\n")
        answer += read_to_end(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert served.engine.next_abort().rid == request.rid
