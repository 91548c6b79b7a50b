"""A client that goes away frees the scheduler at once, whatever it was waiting for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from engine.runtime.messages import Finish, FinishKind, GenerateRequest

from ..conftest import Serve, Served
from ..fake_engine import TICK_S, WAIT_S, row

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LIMIT_S = 0.1  # what is promised; it takes a few milliseconds of the server's time


def send(served: Served, path: str, body: object) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    connection.sendall(head.encode() + content)
    return connection


def check_aborted(served: Served, rids: set[str], gone: int) -> None:
    """The aborts came soon after the client was gone, by the ticks of the server's loop."""
    assert {served.engine.next_abort().rid for _ in rids} == rids
    assert (served.engine.abort_ticks[-1] - gone) * TICK_S < LIMIT_S
    assert served.engine.aborts.empty()
    assert len(served.services.manager.request_log) == 0


REQUESTS = [
    (COMPLETIONS, {"prompt": "hi"}),
    (COMPLETIONS, {"prompt": ["hi", "ho"], "n": 2}),
    (COMPLETIONS, {"prompt": "hi", "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 3}),
    ("/generate", {"text": "hi"}),
    ("/generate", {"text": "hi", "stream": True}),
]


@pytest.fixture(params=REQUESTS, ids=lambda case: f"{case[0]} {json.dumps(case[1])}")
def live(
    request: pytest.FixtureRequest, serve: Serve
) -> Iterator[tuple[Served, socket.socket, list[GenerateRequest]]]:
    """A server with one live request, the connection, and what the scheduler got."""
    path, body = request.param
    served = serve()
    with send(served, path, body) as connection:
        prompts = body.get("prompt", "")
        num_choices = body.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
        requests = [served.engine.next_request() for _ in range(num_choices)]
        yield served, connection, requests


def test_while_it_waits_for_the_first_token(live):
    served, connection, requests = live
    connection.close()
    gone = served.engine.ticks

    check_aborted(served, {request.rid for request in requests}, gone)


def test_in_the_middle_of_the_answer(live):
    served, connection, requests = live
    first = requests[0]
    served.engine.say(row(first, "some"))
    served.client.get("/health")  # by its answer, the row has been taken in
    connection.close()
    gone = served.engine.ticks

    check_aborted(served, {request.rid for request in requests}, gone)
    served.engine.say(row(first, "late"), row(first, "", finish=Finish(FinishKind.ABORT)))
    assert served.client.get("/health").status_code == 200


def test_with_a_reset_instead_of_a_proper_end(live):
    served, connection, requests = live
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    gone = served.engine.ticks

    check_aborted(served, {request.rid for request in requests}, gone)


def test_a_client_that_reads_nothing_can_still_go_away(serve: Serve):
    """The handler hangs in a write then, not in a wait for rows."""
    served = serve()
    with send(served, COMPLETIONS, {"prompt": "hi", "stream": True}) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = served.engine.next_request()
        for _ in range(64):
            served.engine.say(row(request, "x" * 100_000, token_ids=[1]))
        served.client.get("/health")
    gone = served.engine.ticks
    check_aborted(served, {request.rid}, gone)


def test_a_client_that_stays_is_not_aborted(serve: Serve):
    """The connection is kept open after the answer, and used again."""
    served = serve(lambda request: [row(request, "x", finish=Finish(FinishKind.LENGTH))])
    for stream in (False, True, False):
        assert served.client.post(COMPLETIONS, json={"prompt": "hi", "stream": stream}).status_code == 200
    assert served.engine.aborts.empty()
