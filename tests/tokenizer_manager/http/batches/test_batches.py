"""`/v1/batches`: validation, results in order, cancel, expiry, restarts, full disks and other owners' ids."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.config.answer_config import RequestLimits
from engine.runtime.messages import GenerateRequest, TextOutput
from engine.tokenizer_manager.http.batch_runner.lines import InputReader, body_at, prefix_key
from engine.tokenizer_manager.http.batch_runner.runner import BatchRunner
from engine.tokenizer_manager.http.batch_runner.wire import BatchBody
from engine.tokenizer_manager.http.openai.wire import CompletionRequest
from engine.tokenizer_manager.http.routes import ROUTES
from engine.tokenizer_manager.http.schema.values import convert
from engine.tokenizer_manager.state import store as store_module
from engine.tokenizer_manager.state.store import StateStore
from engine.tokenizer_manager.state.tables import BATCH_LINES
from tests.tokenizer_manager.conftest import Serve, Served
from tests.tokenizer_manager.fake_engine import STOP, WAIT_S, row, say_all

from ..pooling.test_embeddings import ANSWER, EMBEDDER

MESSAGE = {
    "custom_id": "a",
    "params": {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def serve_kept(serve: Serve, tmp_path: Path) -> Callable[..., Served]:
    """Starts a server with the state of this test."""
    return lambda script=None, **settings: serve(script, state_dir=str(tmp_path / "state"), **settings)


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hi"} | body}


def as_file(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def create(served: Served, content: bytes, endpoint: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    file = served.client.post("/v1/files", files={"file": ("f", content)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"} | fields
    reply = served.client.post("/v1/batches", json=body)
    assert reply.status_code == 200, reply.text
    batch: dict[str, Any] = reply.json()
    return batch


def wait(served: Served, batch_id: str, *statuses: str) -> dict[str, Any]:
    """The batch once it has a status; each look is a round trip, and a turn of the server's loop."""
    statuses = statuses or ("completed", "failed", "expired", "cancelled")
    deadline = served.engine.ticks + WAIT_S * 100
    while True:
        batch: dict[str, Any] = served.client.get(f"/v1/batches/{batch_id}").json()
        if batch["status"] in statuses:
            return batch
        assert served.engine.ticks < deadline, batch


def results(served: Served, batch: dict[str, Any], name: str = "output_file_id") -> list[dict[str, Any]]:
    content = served.client.get(f"/v1/files/{batch[name]}/content").content
    return [json.loads(each) for each in content.splitlines()]


def check(body: dict[str, Any]) -> None:
    """The check of types only."""
    convert(body, CompletionRequest)


def echo(request: GenerateRequest) -> Iterable[TextOutput]:
    """Answers with the seed."""
    yield row(request, str(request.sampling.seed), finish=STOP)


def test_results_are_in_the_order_of_the_input_and_errors_have_a_file_of_their_own(serve_kept):
    served = serve_kept(say_all("x"))
    lines = [line(f"l{i}", max_tokens=3) for i in range(5)]
    lines[2]["body"]["prompt"] = "x" * 999
    batch = create(served, as_file(lines), metadata={"run": "7"})

    done = wait(served, batch["id"])

    assert done["status"] == "completed"
    assert done["metadata"] == {"run": "7"}
    assert done["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
    assert done["usage"]["input_tokens"] == 8
    assert done["usage"]["total_tokens"] == done["usage"]["output_tokens"] + 8
    assert {"in_progress_at", "finalizing_at", "completed_at", "expires_at"} <= done.keys()
    outputs = results(served, done)
    assert [each["custom_id"] for each in outputs] == ["l0", "l1", "l3", "l4"]
    assert outputs[0]["response"]["body"]["choices"][0]["text"] == "x"
    assert (outputs[0]["response"]["status_code"], outputs[0]["error"]) == (200, None)
    assert outputs[0]["response"]["request_id"] == outputs[0]["id"]
    [failed] = results(served, done, "error_file_id")
    assert failed["custom_id"] == "l2"
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"
    output = served.client.get(f"/v1/files/{done['output_file_id']}").json()
    assert output["purpose"] == "batch_output"
    assert output["expires_at"] - output["created_at"] == 30 * 86_400


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/score", {"query": "hi", "items": ["a"], "label_token_ids": [5, 6]}),
        ("/v1/decisions", {"input": "hi", "questions": [{"type": "predicate", "instructions": "so"}]}),
    ],
)
def test_each_endpoint_answers_as_over_http(serve_kept, url, body):
    served = serve_kept(say_all("x"))
    over_http = served.client.post(url, json=body)
    entry = {"custom_id": "a", "method": "POST", "url": url, "body": body}

    done = wait(served, create(served, as_file([entry]), url)["id"])

    [result] = results(served, done)
    assert over_http.status_code == 200, over_http.text
    assert result["response"]["body"].keys() - {"service_tier"} == over_http.json().keys()


@pytest.mark.parametrize(("fields", "num_stored"), [({}, 0), ({"store": None}, 0), ({"store": True}, 1)])
def test_a_response_of_a_line_is_stored_only_if_the_line_says_so(serve_kept, fields, num_stored):
    served = serve_kept(say_all("x"))
    url = "/v1/responses"
    entry = {"custom_id": "a", "method": "POST", "url": url, "body": {"input": "hi"} | fields}

    [result] = results(served, wait(served, create(served, as_file([entry]), url)["id"]))

    body = result["response"]["body"]
    assert body["store"] == bool(num_stored)
    assert served.client.get(f"/v1/responses/{body['id']}").status_code == (200 if num_stored else 404)


def test_vectors_of_a_batch(serve_kept):
    served = serve_kept(ANSWER, pooling=EMBEDDER)
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"input": "hi"}}
        for i in range(3)
    ]

    done = wait(served, create(served, as_file(lines), "/v1/embeddings")["id"])

    assert done["request_counts"]["completed"] == 3
    assert all(each["response"]["body"]["data"][0]["embedding"] for each in results(served, done))


@pytest.mark.parametrize(
    ("content", "code", "param", "number"),
    [
        (b"{", "invalid_json", None, 1),
        (b"\n\n[]\n", "invalid_json", None, 3),
        (as_file([line("a"), line("a")]), "invalid_value", "custom_id", 2),
        (as_file([line("")]), "invalid_value", "custom_id", 1),
        (as_file([line("a") | {"method": "GET"}]), "invalid_value", "method", 1),
        (as_file([line("a", CHAT)]), "invalid_value", "url", 1),
        (as_file([line("a") | {"body": []}]), "invalid_value", "body", 1),
        (as_file([line("a") | {"color": 1}]), "invalid_value", '"color"', 1),
        (as_file([line("a", stream=True)]), "invalid_value", "body.stream", 1),
        (as_file([line("a", max_tokens="9")]), "invalid_type", "body.max_tokens", 1),
        (b"", "empty_file", None, None),
        (b'{"custom_id": "' + b"x" * 30_000 + b'"}\n' + as_file([line("a")]), "request_too_large", None, 1),
    ],
)
def test_an_error_of_a_line_has_its_number_and_its_field(tmp_path, content, code, param, number):
    (tmp_path / "f").write_bytes(content)
    reader = InputReader(COMPLETIONS, check, RequestLimits(), max_body_bytes=20_000)

    _, [error] = reader.read(tmp_path / "f")

    assert (error.code, error.param or None, error.line or None) == (code, param, number)


def test_a_refused_input_runs_no_line(serve_kept):
    served = serve_kept(say_all("x"))

    failed = wait(served, create(served, as_file([line("a"), line("a")]))["id"])

    assert failed["status"] == "failed"
    assert failed["errors"]["data"][0]["line"] == 2
    assert served.engine.generate.empty()
    assert "output_file_id" not in failed


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "hi", "temperature": 9}, "body.temperature"),
        (CHAT, {"messages": [{"role": "nobody", "content": "hi"}]}, "body.messages[0].role"),
        ("/v1/responses", {"input": "hi", "top_p": 2}, "body.top_p"),
        ("/v1/embeddings", {"input": "hi"}, "body"),
        ("/v1/decisions", {"input": "hi", "questions": []}, "body.questions"),
        ("/v1/score", {"query": "hi", "items": ["a"], "label_token_ids": [999]}, "body.label_token_ids"),
        ("/v1/rerank", {"query": "hi", "documents": []}, "body"),
    ],
)
def test_each_line_is_read_by_its_endpoint_before_any_runs(serve_kept, url, body, param):
    served = serve_kept(say_all("x"))
    over_http = served.client.post(url, json=body)
    entry = {"custom_id": "a", "method": "POST", "url": url, "body": body}

    failed = wait(served, create(served, as_file([entry]), url)["id"])

    assert (over_http.status_code, failed["status"]) == (400, "failed")
    [error] = failed["errors"]["data"]
    assert (error["message"], error["param"]) == (over_http.json()["error"]["message"], param)
    assert served.engine.generate.empty()


def test_lines_have_their_places_in_the_file(tmp_path):
    content = b"\n" + as_file([line("a"), line("b", prompt="\u00e9")]).rstrip()
    (tmp_path / "f").write_bytes(content)
    reader = InputReader(COMPLETIONS, check, RequestLimits(), max_body_bytes=20_000)

    lines, errors = reader.read(tmp_path / "f")

    assert errors == []
    assert [json.loads(content[each.place :][: each.length])["custom_id"] for each in lines] == ["a", "b"]
    assert json.loads(body_at(tmp_path / "f", lines[1].place, lines[1].length)) == {"prompt": "\u00e9"}


def shuffled(num_prefixes: int, num_lines: int) -> list[dict[str, Any]]:
    """Lines of which each `num_prefixes`-th begins alike."""
    return [
        line(f"{own}-{prefix}", prompt=f"{prefix}" * 200 + f"{own}", max_tokens=prefix + 1)
        for own in range(num_lines)
        for prefix in range(num_prefixes)
    ]


def one_at_a_time(served: Served) -> None:
    """Lets the server begin a line when the one before has ended, so that the order of lines can be seen."""
    served.services.required_state.batches._lines._slots = asyncio.Semaphore(1)


def prefixes_of(requests: Iterable[GenerateRequest]) -> list[int]:
    return [(request.sampling.max_new_tokens or 0) - 1 for request in requests]


def test_lines_that_begin_alike_are_answered_one_after_another_and_results_are_in_the_order_of_the_input(
    serve_kept,
):
    served = serve_kept()
    one_at_a_time(served)
    lines = shuffled(3, 4)
    batch = create(served, as_file(lines))
    requests = []
    for _ in lines:
        requests.append(served.engine.next_request())
        served.engine.say(*say_all("x")(requests[-1]))

    done = wait(served, batch["id"])

    order = prefixes_of(requests)
    assert [order[i : i + 4] for i in (0, 4, 8)] == [[prefix] * 4 for prefix in dict.fromkeys(order)]
    assert [each["custom_id"] for each in results(served, done)] == [each["custom_id"] for each in lines]


def test_a_restart_goes_on_in_the_same_order(serve_kept):
    served = serve_kept()
    one_at_a_time(served)
    batch = create(served, as_file(shuffled(2, 3)))
    requests = [served.engine.next_request()]
    served.engine.say(*say_all("x")(requests[0]))
    served.engine.next_request()
    restart(served)

    served = serve_kept()
    one_at_a_time(served)
    for _ in range(5):
        requests.append(served.engine.next_request())
        served.engine.say(*say_all("x")(requests[-1]))
    wait(served, batch["id"])

    first = prefixes_of(requests)[0]
    assert prefixes_of(requests) == [first] * 3 + [1 - first] * 3


LONG = "You answer in one word. " * 12
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}


def said(system: str, text: str = "hi") -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("one", "other", "third"),
    [
        (said(LONG + "A", "hi"), said(LONG + "A", "so"), said(LONG + "B", "hi")),
        (said(LONG * 20 + "A", "hi"), said(LONG * 20 + "A", "so"), said(LONG * 20 + "B", "hi")),
        (said("A", LONG + "hi"), said("A", LONG + "so"), said("A", "so" + LONG)),
        ({"tools": [TOOL]} | said("A"), {"tools": [TOOL]} | said("B"), said("A")),
        ({"instructions": "A", "input": "hi"}, {"instructions": "A", "input": "so"}, {"input": "hi"}),
        ({"prompt": [7] * 200 + [1]}, {"prompt": [7] * 200 + [2]}, {"prompt": [8] * 200 + [1]}),
        ({"query": LONG + "A", "items": ["a"]}, {"query": LONG + "B"}, {"query": "B" + LONG}),
        ({"prompt": "hi", "model": "m"}, {"prompt": "so", "model": "m"}, {"prompt": "hi", "model": "n"}),
    ],
)
def test_the_key_of_a_line_has_more_in_common_where_its_prompt_has(one, other, third):
    keys = [prefix_key(body) for body in (one, other, third)]

    def num_common(a: bytes, b: bytes) -> int:
        return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(a))

    assert num_common(keys[0], keys[1]) // 4 > num_common(keys[0], keys[2]) // 4


def test_a_key_is_small_and_any_body_has_one():
    assert len(prefix_key({"prompt": "x" * 100_000, "instructions": "y" * 100_000})) <= 300
    assert prefix_key({}) == prefix_key({"messages": "hi"})
    assert prefix_key({"tools": [{"minimum": 10**40}], "messages": [5, None, {"role": []}]})


def test_the_first_hundred_errors_are_listed(serve_kept):
    served = serve_kept(say_all("x"))

    failed = wait(served, create(served, b"{}\n" * 150)["id"])

    assert [each["line"] for each in failed["errors"]["data"]] == list(range(1, 101))


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/audio"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-9"}, 404, None),
        ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
        ({"metadata": {"x": "y" * 600}}, 400, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            400,
            "output_expires_after.seconds",
        ),
        ({"color": "red"}, 400, "color"),
    ],
)
def test_a_bad_batch_is_refused(serve_kept, fields, status, param):
    served = serve_kept(say_all("x"))
    body = {"input_file_id": "file-9", "endpoint": COMPLETIONS, "completion_window": "24h"} | fields

    reply = served.client.post("/v1/batches", json=body)

    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_a_result_is_no_input_and_an_input_in_use_cannot_be_deleted(serve_kept):
    served = serve_kept()
    batch = create(served, as_file([line("a")]))
    request = served.engine.next_request()

    refused = served.client.delete(f"/v1/files/{batch['input_file_id']}")
    served.engine.say(*say_all("x")(request))
    done = wait(served, batch["id"])
    body = {"input_file_id": done["output_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}

    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")
    assert served.client.post("/v1/batches", json=body).status_code == 400
    assert served.client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200


def test_a_cancelled_batch_keeps_what_is_answered(serve_kept):
    served = serve_kept()
    batch = create(served, as_file([line("a"), line("b")]))
    requests = [served.engine.next_request() for _ in range(2)]
    served.engine.say(*say_all("x")(requests[0]))
    while served.client.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] == 0:
        pass

    cancelling = served.client.post(f"/v1/batches/{batch['id']}/cancel").json()
    done = wait(served, batch["id"])

    assert cancelling["status"] in ("cancelling", "cancelled")
    assert done["status"] == "cancelled"
    assert {"cancelling_at", "cancelled_at"} <= done.keys()
    assert served.engine.next_abort().rid == requests[1].rid
    assert len(results(served, done)) == 1
    [missing] = results(served, done, "error_file_id")
    assert (missing["response"], missing["error"]["code"]) == (None, "batch_cancelled")
    again = served.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert again.json() == done


def test_a_batch_is_finished_when_its_files_are_there(serve_kept, monkeypatch):
    """Until the final state is committed the batch has the one before, and it is too late to cancel it."""
    served = serve_kept()
    runner = served.services.required_state.batches
    batch = msgspec.convert(create(served, as_file([line("a")])), BatchBody)
    loop = served.engine.loop
    assert runner is not None and loop is not None
    entered, go = threading.Event(), threading.Event()
    insert = runner.files.insert

    def slow_insert(*args: Any, **values: Any) -> Any:
        entered.set()
        go.wait(WAIT_S)
        return insert(*args, **values)

    monkeypatch.setattr(runner.files, "insert", slow_insert)
    served.engine.say(*say_all("x")(served.engine.next_request()))
    assert entered.wait(WAIT_S)

    assert runner.current(batch).status == "finalizing"
    assert asyncio.run_coroutine_threadsafe(runner.cancel(batch.id), loop).result() is None
    go.set()
    assert wait(served, batch.id)["status"] == "completed"


def test_a_slow_disk_at_the_end_loses_no_result(serve_kept, monkeypatch):
    """The commit of the final state deletes the rows of the results; as long as it may yet happen, the files stay."""
    served = serve_kept()
    runner = served.services.required_state.batches
    assert runner is not None
    runner._lines.retry_s = 0.001
    batch = create(served, as_file([line("a")]))
    finish, insert = runner._finish, runner.files.insert
    is_late = threading.Event()

    async def finish_with_short_limit(*args: Any) -> None:
        if not is_late.is_set():
            monkeypatch.setattr(store_module, "MAX_WAIT_S", 0.001)
        await finish(*args)

    def slow_insert(*args: Any, **values: Any) -> Any:
        monkeypatch.setattr(store_module, "MAX_WAIT_S", 30.0)
        inserted = insert(*args, **values)
        threading.Event().wait(0.05)  # the limit is over
        is_late.set()
        return inserted

    monkeypatch.setattr(runner, "_finish", finish_with_short_limit)
    monkeypatch.setattr(runner.files, "insert", slow_insert)
    served.engine.say(*say_all("x")(served.engine.next_request()))
    assert is_late.wait(WAIT_S)

    done = wait(served, batch["id"])

    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert len(results(served, done)) == 1


def test_a_batch_that_is_cancelled_while_its_files_are_written(serve_kept, monkeypatch):
    served = serve_kept()
    runner = served.services.required_state.batches
    assert runner is not None
    batch = create(served, as_file([line("a")]))
    page = runner._lines.page

    async def page_and_cancel(*args: Any) -> Any:
        rows = await page(*args)
        if not rows and runner.current(msgspec.convert(batch, BatchBody)).status == "finalizing":
            await runner.cancel(batch["id"])
        return rows

    monkeypatch.setattr(runner._lines, "page", page_and_cancel)
    served.engine.say(*say_all("x")(served.engine.next_request()))

    done = wait(served, batch["id"])

    assert (done["status"], done["request_counts"]["completed"]) == ("cancelled", 1)
    assert {"finalizing_at", "cancelling_at", "cancelled_at"} <= done.keys()
    assert len(results(served, done)) == 1


def test_only_an_unfinished_batch_can_be_cancelled(serve_kept):
    served = serve_kept(say_all("x"))
    batch = wait(served, create(served, as_file([line("a")]))["id"])

    reply = served.client.post(f"/v1/batches/{batch['id']}/cancel")

    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "invalid_state")


def test_a_batch_expires(serve_kept):
    served = serve_kept()
    batch = create(served, as_file([line("a")]))
    served.engine.next_request()
    files = served.services.required_state.files
    assert files is not None
    files._wall_clock = lambda: batch["expires_at"]
    runner = served.services.required_state.batches
    assert isinstance(runner, BatchRunner) and served.engine.loop is not None
    asyncio.run_coroutine_threadsafe(runner.tick(), served.engine.loop).result()
    done = wait(served, batch["id"])

    assert (done["status"], done["expired_at"]) == ("expired", batch["expires_at"])
    assert results(served, done, "error_file_id")[0]["error"]["code"] == "batch_expired"


def test_a_restart_answers_what_is_left_with_the_same_seeds(serve: Serve, tmp_path):
    served = serve(state_dir=str(tmp_path / "state"))
    lines = [line("a", max_tokens=1), line("b", max_tokens=2, seed=5), line("c", max_tokens=3)]
    batch = create(served, as_file(lines))
    arrived = [served.engine.next_request() for _ in lines]  # in any order: threads read the bodies
    requests = sorted(arrived, key=lambda request: request.sampling.max_new_tokens or 0)
    served.engine.say(*echo(requests[0]))
    while served.client.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] == 0:
        pass
    restart(served)

    again = serve(echo, state_dir=str(tmp_path / "state"))
    done = wait(again, batch["id"])

    texts = [each["response"]["body"]["choices"][0]["text"] for each in results(again, done)]
    assert texts == [str(request.sampling.seed) for request in requests]
    assert requests[1].sampling.seed == 5
    assert len({request.sampling.seed for request in requests}) == 3
    assert again.engine.generate.qsize() == 2  # the answered line was not sent again


def restart(served: Served) -> None:
    """Stop a server whose lines are in flight, as SIGTERM does, and wait until its folder is free."""
    assert served.engine.loop is not None
    asyncio.run_coroutine_threadsafe(served.services.stop_batches(), served.engine.loop).result()
    served.services.close()


def runs_of(served: Served, batch_id: str) -> list[int]:
    rows = served.services.required_state.store.submit(
        lambda db: BATCH_LINES.parts(db, "", batch_id), writes=False
    ).result()
    return [row["runs"] for row in rows]


def test_a_line_that_kills_the_server_again_and_again_is_an_error(serve_kept):
    served = serve_kept()
    batch = create(served, as_file([line("a"), line("b")]))
    for _ in range(2):
        served.engine.next_request()
    assert runs_of(served, batch["id"]) == [1, 1]
    restart(served)
    # As if the process had died with both twice, and then with the first line alone twice.
    set_runs(served, batch["id"], [4, 2])

    served = serve_kept(say_all("x"))
    done = wait(served, batch["id"])

    assert [each["custom_id"] for each in results(served, done)] == ["b"]
    [killer] = results(served, done, "error_file_id")
    assert (killer["custom_id"], killer["error"]["code"]) == ("a", "server_error")


def test_suspects_run_alone(serve_kept):
    served = serve_kept()
    batch = create(served, as_file([line("a"), line("b"), line("c")]))
    for _ in range(3):
        served.engine.next_request()
    restart(served)
    set_runs(served, batch["id"], [2, 2, 1])

    served = serve_kept()
    crowd = served.engine.next_request()
    assert served.engine.generate.empty()
    served.engine.say(*say_all("x")(crowd))
    for _ in range(2):
        alone = served.engine.next_request()
        assert served.engine.generate.empty()
        served.engine.say(*say_all("x")(alone))

    assert wait(served, batch["id"])["request_counts"]["completed"] == 3


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    parts=st.lists(
        st.binary(max_size=12)
        | st.sampled_from(
            [as_file([line("a")]), as_file([line("b", n=2)]), b'{"custom_id": 1}\n', b"\n", b"\xff\n"]
        ),
        max_size=6,
    )
)
def test_any_input_has_lines_or_errors(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "any-input"
    path.write_bytes(content := b"".join(parts))

    lines, errors = InputReader(COMPLETIONS, check, RequestLimits(), 1000).read(path)

    assert lines or errors
    for each in lines:
        assert json.loads(content[each.place :][: each.length])["custom_id"] == each.custom_id


def set_runs(served: Served, batch_id: str, runs: list[int]) -> None:
    """Change the rows of a server that has stopped."""
    store = StateStore.open(served.services.required_state.store.folder, 1 << 30)

    def update(db: sqlite3.Connection) -> None:
        for number, count in enumerate(runs):
            BATCH_LINES.update(db, "", batch_id, number, runs=count)

    store.submit(update).result()
    store.close()


def test_an_ordered_stop_blames_no_line(serve_kept):
    served = serve_kept()
    batch = create(served, as_file([line("a")]))
    assert served.engine.next_request().background
    restart(served)

    served = serve_kept()
    served.engine.next_request()

    assert runs_of(served, batch["id"]) == [1]


def test_a_full_queue_delays_a_line(serve_kept):
    served = serve_kept(max_queued_requests=1)
    runner = served.services.required_state.batches
    assert runner is not None
    runner._lines.retry_s = 0.001
    batch = create(served, as_file([line(str(i)) for i in range(40)]))
    answered: set[str] = set()
    while len(answered) < 40:
        request = served.engine.next_request()
        answered.add(request.rid)
        served.engine.say(*say_all("x")(request))

    done = wait(served, batch["id"])

    assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


def test_a_full_disk_delays_a_batch(serve_kept):
    served = serve_kept()
    runner, state = served.services.required_state.batches, served.services.required_state.store
    assert runner is not None and state is not None
    runner._lines.retry_s = 0.001
    batch = create(served, as_file([line("a")]))
    request = served.engine.next_request()
    state.submit(lambda db: db.execute("PRAGMA query_only = ON").fetchall(), writes=False).result()
    served.engine.say(*say_all("x")(request))
    ticks = served.engine.ticks
    while served.engine.ticks < ticks + 5:
        assert served.client.get(f"/v1/batches/{batch['id']}").json()["status"] == "in_progress"
    state.submit(lambda db: db.execute("PRAGMA query_only = OFF").fetchall(), writes=False).result()

    done = wait(served, batch["id"])

    assert done["request_counts"]["completed"] == 1


def test_every_route_hides_what_another_key_has_stored(serve_kept):
    served = serve_kept(say_all("x"), api_key=("sk-a", "sk-b"))
    served.client.headers["Authorization"] = "Bearer sk-a"
    batch = wait(served, create(served, as_file([line("a")]))["id"])
    paths = [f"/v1/batches/{batch['id']}"]
    paths += [f"/v1/files/{batch[name]}" for name in ("input_file_id", "output_file_id")]
    paths += [f"{path}/content" for path in paths[1:]]
    own = [served.client.get(path).status_code for path in paths]
    served.client.headers["Authorization"] = "Bearer sk-b"

    def status(method: str, path: str) -> int:
        return int(served.client.request(method, path).status_code)

    assert own == [200] * 5
    assert [status("GET", path) for path in paths] == [404] * 5
    assert [status("DELETE", path) for path in paths[1:3]] == [404] * 2
    assert status("POST", f"{paths[0]}/cancel") == 404
    for path in ("/v1/batches", "/v1/files"):
        assert served.client.get(path).json()["data"] == []
        assert status("GET", f"{path}?after={paths[0].rpartition('/')[2]}") == 400
    body = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    reply: httpx.Response = served.client.post("/v1/batches", json=body)
    assert reply.status_code == 404


def test_no_route_with_an_id_knows_one_of_another_key(serve_kept):
    """All routes of the table that name something stored, so that a new one is not left out."""
    served = serve_kept(say_all("x"), api_key=("sk-a", "sk-b"))
    served.client.headers["Authorization"] = "Bearer sk-a"
    batch = wait(served, create(served, as_file([line("a")]))["id"])
    ids = {
        "batch_id": batch["id"],
        "file_id": batch["output_file_id"],
        "response_id": served.client.post("/v1/responses", json={"input": "hi"}).json()["id"],
        "message_batch_id": served.client.post("/v1/messages/batches", json={"requests": [MESSAGE]}).json()[
            "id"
        ],
    }
    wait(served, ids["message_batch_id"])
    stored = [each for each in ROUTES if any(f"{{{name}}}" in each.path for name in ids)]

    def statuses(key: str, methods: Iterable[str]) -> dict[tuple[str, str], int]:
        served.client.headers["Authorization"] = f"Bearer {key}"
        return {
            (each.method, each.path): served.client.request(each.method, each.path.format(**ids)).status_code
            for each in stored
            if each.method in methods
        }

    assert len(stored) == 13
    assert set(statuses("sk-b", ("GET", "POST", "DELETE")).values()) == {404}
    assert set(statuses("sk-a", ("GET",)).values()) == {200}
    assert set(statuses("sk-a", ("DELETE",)).values()) == {200}


def test_a_list_of_batches_has_pages(serve_kept):
    served = serve_kept(say_all("x"))
    made = [create(served, b"{}\n")["id"] for _ in range(3)]

    first = served.client.get("/v1/batches", params={"limit": 2}).json()
    rest = served.client.get("/v1/batches", params={"after": first["last_id"]}).json()

    assert [each["id"] for each in first["data"]] == [made[2], made[1]]
    assert first["has_more"] and not rest["has_more"]
    assert [each["id"] for each in rest["data"]] == [made[0]]
