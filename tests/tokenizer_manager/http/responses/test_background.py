"""Responses in the background: queued at once, replayed from any event, canceled, and continued after a crash."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.messages import Finish, FinishKind
from engine.tokenizer_manager.state import responses as table
from engine.tokenizer_manager.state.store import StateError
from engine.tokenizer_manager.state.tables import RESPONSES

from ...conftest import Serve, Served
from ...fake_engine import MODEL, STOP, TOKENIZER, WAIT_S, ids_of, row, say_all
from ..answers import sse
from ..serving import CALL, FAILED, ROOMY
from .test_endpoint import PATH, TOOL, ClientOf, client_of

__all__ = ["client_of"]
ABORTED = Finish(FinishKind.ABORT)
Start = Callable[..., Served]


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Start:
    """Starts servers on one folder; the one before must have crashed."""
    return lambda script=None, **more: serve(
        script, capacity=ROOMY, state_dir=str(tmp_path / "state"), **more
    )


def crash(served: Served) -> None:
    """End the server's use of the folder as `kill -9` does: its tasks write nothing any more."""
    served.services.required_state.store.close()


def begin(served: Served, **body: Any) -> str:
    reply = served.client.post(PATH, json={"input": "hi", "background": True} | body)
    assert (reply.status_code, reply.json()["status"]) == (200, "queued"), reply.text
    response_id: str = reply.json()["id"]
    return response_id


def events_of(served: Served, response_id: str, after: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """The events of a response until its end."""
    query = "" if after is None else f"&starting_after={after}"
    return sse(served.client.get(f"{PATH}/{response_id}?stream=true{query}").content)


def first_events(served: Served, response_id: str, num: int) -> list[str]:
    """The first lines with data of a response that runs."""
    with served.client.stream("GET", f"{PATH}/{response_id}?stream=true") as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        return [next(lines) for _ in range(num)]


def test_it_is_queued_at_once_and_its_events_are_replayed(start: Start):
    served = start()
    response_id = begin(served)
    request = served.engine.next_request()
    assert served.client.get(f"{PATH}/{response_id}").json()["status"] in ("queued", "in_progress")
    served.engine.say(row(request, "Hel"), row(request, "lo", total=5, finish=STOP))
    events = events_of(served, response_id)
    names = [name.removeprefix("response.") for name, _ in events]

    assert names[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert names[-1] == "completed"
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[0][1]["response"]["background"] is True
    for after in range(len(events)):
        assert events_of(served, response_id, after) == events[after + 1 :]
    final = served.client.get(f"{PATH}/{response_id}").json()
    assert final == events[-1][1]["response"]
    assert final["output"][0]["content"][0]["text"] == "Hello"


def test_the_client_polls_streams_and_continues(start: Start, client_of: ClientOf):
    served = start(say_all("yes"))
    client = client_of(served)
    with client.responses.create(model=MODEL, input="hi", background=True, stream=True) as stream:
        events = list(stream)
    with client.responses.retrieve(events[0].response.id, stream=True, starting_after=2) as rest:  # type: ignore[union-attr]
        assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[3:]]
    answer = client.responses.create(
        model=MODEL,
        input="and?",
        previous_response_id=events[0].response.id,  # type: ignore[union-attr]
    )

    assert answer.output_text == "yes"
    assert client.responses.cancel(events[0].response.id).status == "completed"  # type: ignore[union-attr]


def test_a_disconnect_ends_nothing(start: Start):
    served = start()
    with served.client.stream(
        "POST", PATH, json={"input": "hi", "background": True, "stream": True}
    ) as stream:
        request = served.engine.next_request()
        next(stream.iter_lines())
    served.engine.say(row(request, "yes", finish=STOP))
    [(_, response_id)] = served.services.required_state.responses.live
    assert events_of(served, response_id)[-1][0] == "response.completed"
    assert served.engine.aborts.empty()


def test_a_canceled_response_stays_with_what_it_has(start: Start):
    served = start()
    response_id = begin(served)
    request = served.engine.next_request()
    served.engine.say(row(request, "some"))
    first_events(served, response_id, 6)
    reply = served.post_later(f"{PATH}/{response_id}/cancel")
    assert served.engine.next_abort().rid == request.rid
    served.engine.say(row(request, "", total=4, finish=ABORTED))
    body = reply.result().json()

    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("cancelled", "some")
    assert served.client.post(f"{PATH}/{response_id}/cancel").json() == body
    assert events_of(served, response_id)[-1][0] == "response.cancelled"
    continued = {"input": "go on", "previous_response_id": response_id, "background": True}
    assert served.client.post(PATH, json=continued).status_code == 200


def test_one_that_is_canceled_while_its_events_are_stored_ends(start: Start, monkeypatch: pytest.MonkeyPatch):
    go, advance = threading.Event(), table.advance

    def slow(*given: Any, **columns: Any) -> None:
        assert go.wait(WAIT_S)
        advance(*given, **columns)

    monkeypatch.setattr(table, "advance", slow)
    served = start()
    response_id = begin(served)
    loop, store = served.engine.loop, served.services.required_state.responses
    assert loop is not None and store is not None
    [live] = store.live.values()
    assert live.cancel is not None
    for call in (
        live.cancel,
        live.cancel,
        lambda: loop.call_soon(go.set),
    ):  # the task ends before the thread goes on
        loop.call_soon_threadsafe(call)
    reply = served.client.post(f"{PATH}/{response_id}/cancel")

    assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
    names = [name.removeprefix("response.") for name, _ in events_of(served, response_id)]
    assert names == ["created", "queued", "in_progress", "cancelled"]
    assert served.client.delete(f"{PATH}/{response_id}").status_code == 200


def test_a_cancel_after_a_restart_keeps_what_was_streamed(start: Start):
    first = start()
    response_id = begin(first)
    first.engine.say(row(first.engine.next_request(), "some"))
    first_events(first, response_id, 6)
    crash(first)
    second = start()
    reply = second.post_later(f"{PATH}/{response_id}/cancel")
    again = second.engine.next_request()
    assert second.engine.next_abort().rid == again.rid
    second.engine.say(row(again, "", total=4, finish=ABORTED))
    body = reply.result().json()

    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("cancelled", "some")


def test_two_readers_have_the_same_stream(start: Start):
    served = start()
    response_id = begin(served)
    request = served.engine.next_request()
    readers = [served.threads.submit(events_of, served, response_id, after) for after in (None, 2)]
    for text in "abc":
        served.engine.say(row(request, text))
    served.engine.say(row(request, "d", total=4, finish=STOP))
    whole, rest = (each.result() for each in readers)

    assert whole[-1][0] == "response.completed" and rest == whole[3:]


def test_what_cannot_be_canceled_or_streamed(start: Start):
    served = start(say_all("yes"))
    made = served.client.post(PATH, json={"input": "hi"}).json()["id"]
    for reply, code in (
        (served.client.post(f"{PATH}/{made}/cancel"), 400),
        (served.client.get(f"{PATH}/{made}?stream=true"), 400),
        (served.client.get(f"{PATH}/{made}?stream=yes"), 400),
        (served.client.get(f"{PATH}/{made}?starting_after=-1"), 400),
        (served.client.post(f"{PATH}/resp_none/cancel"), 404),
        (served.client.get(f"{PATH}/resp_none?stream=true"), 404),
        (served.client.post(PATH, json={"input": "hi", "background": True, "store": False}), 400),
    ):
        assert reply.status_code == code, reply.text


def test_a_running_one_is_not_deleted(start: Start):
    served = start()
    response_id = begin(served)
    request = served.engine.next_request()
    assert served.client.delete(f"{PATH}/{response_id}").status_code == 409
    served.engine.say(row(request, "", finish=FAILED))
    assert events_of(served, response_id)[-1][0] == "response.failed"
    assert served.client.delete(f"{PATH}/{response_id}").status_code == 200


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_after_a_crash_it_goes_on_from_what_was_streamed(start: Start, num_rows: int):
    rows = [("Hel", 3), ("lo, ", 7), ("you", 10)]
    first = start()
    response_id = begin(first, seed=None if num_rows else 11)
    request = first.engine.next_request()
    total = 0
    seen: list[str] = []
    for text, total in rows[:num_rows]:
        first.engine.say(row(request, text, total=total))
        seen = first_events(first, response_id, 6 + rows.index((text, total)))
    crash(first)

    second = start()
    again = second.engine.next_request()
    told = "".join(text for text, _ in rows[:num_rows])
    assert (again.sampling.seed, again.input_ids) == (request.sampling.seed, request.input_ids)
    assert again.rid != request.rid  # the scheduler may have outlived the manager
    delivered = b"" if again.delivered is None else again.delivered.output_ids
    assert TOKENIZER.decode(memoryview(delivered).cast("i").tolist() if delivered else []) == told
    for text, total in rows[num_rows:]:
        second.engine.say(row(again, text, total=total, finish=STOP if total == 10 else None))
    events = events_of(second, response_id)

    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "Hello, you"
    assert events[-1][1]["response"]["usage"]["output_tokens"] == 10
    texts = [line.encode() for line in seen]
    replayed = second.client.get(f"{PATH}/{response_id}?stream=true").content
    assert all(text in replayed for text in texts)


def test_a_call_keeps_its_ids_over_a_crash(start: Start):
    first = start()
    response_id = begin(first, tools=[TOOL])
    request = first.engine.next_request()
    first.engine.say(row(request, CALL[:-8]))
    seen = first_events(first, response_id, 5)
    crash(first)
    second = start()
    again = second.engine.next_request()
    second.engine.say(row(again, CALL[-8:], finish=STOP))
    events = events_of(second, response_id)
    [call] = events[-1][1]["response"]["output"]

    assert call["arguments"] == '{"a": 1}'
    assert call["id"] in seen[3] and call["call_id"] in seen[3]


def test_a_response_that_ends_its_server_twice_fails(start: Start):
    response_id = ""
    for _ in range(2):
        served = start()
        response_id = response_id or begin(served)
        served.engine.next_request()
        first_events(served, response_id, 3)
        crash(served)
    last = start()
    events = events_of(last, response_id)

    assert events[-1][0] == "response.failed"
    assert "not tried again" in events[-1][1]["response"]["error"]["message"]
    assert last.engine.generate.empty()


def test_a_server_that_stops_leaves_it_to_the_next_one(start: Start):
    response_id = ""
    for _ in range(3):
        served = start()
        response_id = response_id or begin(served)
        served.engine.next_request()
        first_events(served, response_id, 3)
        assert served.engine.loop is not None
        served.engine.loop.call_soon_threadsafe(served.services.manager.abort_all, "it stops")
        assert (
            events_of(served, response_id)[-1][0] == "response.in_progress"
        )  # the stream ends, the response does not
        crash(served)
    last = start(say_all("yes"))
    assert events_of(last, response_id)[-1][0] == "response.completed"


def test_one_that_a_server_has_left_ends_the_next_ones_twice_at_most(start: Start):
    served = start()
    response_id = begin(served)
    served.engine.next_request()
    first_events(served, response_id, 3)
    assert served.engine.loop is not None
    served.engine.loop.call_soon_threadsafe(served.services.manager.abort_all, "it stops")
    events_of(served, response_id)
    crash(served)
    for _ in range(2):
        served = start()
        served.engine.next_request()
        crash(served)

    assert events_of(start(), response_id)[-1][0] == "response.failed"


def test_what_another_version_has_begun_fails_and_ends_no_server(start: Start):
    first = start()
    response_id = begin(first)
    first.engine.next_request()
    first_events(first, response_id, 3)
    resume = b'{"later": 1}'
    change = first.services.required_state.store.submit(
        lambda db: RESPONSES.update(db, "", response_id, resume=resume)
    )
    assert change.result()
    crash(first)
    second = start(say_all("yes"))
    assert second.client.post(PATH, json={"input": "hi", "background": True}).status_code == 200
    body = second.client.get(f"{PATH}/{response_id}").json()
    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")


def test_progress_between_crashes_is_no_reason_to_give_up(start: Start):
    response_id, total = "", 0
    for _ in range(4):
        served = start()
        response_id = response_id or begin(served)
        request = served.engine.next_request()
        total += 20
        served.engine.say(row(request, "x" * 20, total=total))
        first_events(served, response_id, 5 + total // 20)
        crash(served)
    last = start(lambda request: [row(request, "!", total=total + 1, finish=STOP)])
    body = events_of(last, response_id)[-1][1]["response"]

    assert body["output"][0]["content"][0]["text"] == "x" * total + "!"


def test_only_so_many_run(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.tokenizer_manager.http.responses.background.MAX_LIVE", 1)
    served = start()
    begin(served)
    reply = served.client.post(PATH, json={"input": "hi", "background": True})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "10")


def test_it_waits_while_the_queue_is_full(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.tokenizer_manager.http.responses.background._MAX_RETRY_S", 0.01)
    served = start(max_queued_requests=1)
    ids = [begin(served) for _ in range(12)]
    for _ in ids:
        request = served.engine.next_request()
        served.engine.say(row(request, "yes", finish=STOP))
    assert {events_of(served, each)[-1][0] for each in ids} == {"response.completed"}


def test_a_disk_that_fails_later_ends_no_stream(start: Start, monkeypatch: pytest.MonkeyPatch):
    served = start()
    response_id = begin(served)
    request = served.engine.next_request()
    first_events(served, response_id, 3)

    def fail(*given: object, **columns: object) -> None:
        raise StateError("the state cannot be used: the disk is full", status=507)

    monkeypatch.setattr("engine.tokenizer_manager.http.responses.background._AGAIN_S", 0.01)
    with monkeypatch.context() as patched:
        for name in ("advance", "finish"):
            patched.setattr(table, name, fail)
        served.engine.say(row(request, "Hel"), row(request, "lo", total=5, finish=STOP))
        events = events_of(served, response_id)
        body = served.client.get(f"{PATH}/{response_id}").json()
        assert (events[-1][0], body["status"]) == ("response.completed", "completed")
        assert served.client.post(f"{PATH}/{response_id}/cancel").json() == body
        assert served.client.post(PATH, json={"input": "hi", "background": True}).status_code == 200
        [live, _] = served.services.required_state.responses.live.values()
    assert live.task is not None and served.engine.loop is not None
    asyncio.run_coroutine_threadsafe(asyncio.wait([live.task]), served.engine.loop).result(WAIT_S)

    assert events_of(served, response_id) == events
    assert served.client.delete(f"{PATH}/{response_id}").status_code == 200


def test_other_clients_keys_find_nothing(start: Start):
    served = start(api_key=("a", "b"))
    keys = {name: {"Authorization": f"Bearer {name}"} for name in "ab"}
    reply = served.client.post(PATH, json={"input": "hi", "background": True}, headers=keys["a"])
    path = f"{PATH}/{reply.json()['id']}"
    served.engine.next_request()
    for method, route in (
        ("GET", path),
        ("GET", f"{path}?stream=true"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
    ):
        assert served.client.request(method, route, headers=keys["b"]).status_code == 404
    body = {"input": "hi", "previous_response_id": reply.json()["id"]}
    assert served.client.post(PATH, json=body, headers=keys["b"]).status_code == 404
    assert served.client.post(PATH, json=body, headers=keys["a"]).status_code == 409


def test_the_prompt_of_a_chain_is_the_same_after_a_crash(start: Start):
    first = start(say_all("yes"))
    root = first.client.post(PATH, json={"input": "hi"}).json()["id"]
    first.engine.script = None
    first.engine.next_request()
    begin(first, previous_response_id=root, input="and?")
    request = first.engine.next_request()
    crash(first)
    second = start()
    assert ids_of(second.engine.next_request()) == ids_of(request)
