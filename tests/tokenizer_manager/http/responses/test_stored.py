"""Stored responses: `GET`, `DELETE`, chains and their items; disks that fail, and other clients' keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.runtime.messages import GenerateRequest, TextOutput
from engine.tokenizer_manager.state import responses as table
from engine.tokenizer_manager.state.store import StateError
from engine.tokenizer_manager.state.tables import RESPONSES

from ...conftest import Serve, Served
from ...fake_engine import EOS, LENGTH, MODEL, STOP, TOKENIZER, ids_of, row, say_all
from ..answers import sse
from ..serving import CALL, FAILED, ROOMY
from .test_endpoint import PATH, TOOL, ClientOf, client_of

__all__ = ["client_of"]


@pytest.fixture
def keeping(serve: Serve, tmp_path: Path) -> Served:
    """A server that stores responses, and answers "yes"."""
    return serve(say_all("yes"), capacity=ROOMY, state_dir=str(tmp_path / "state"))


def ask(served: Served, **body: Any) -> Any:
    reply = served.client.post(PATH, json={"input": "hi"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def prompts(served: Served) -> list[str]:
    """The prompts that have arrived at the engine."""
    found = []
    while not served.engine.generate.empty():
        found.append(TOKENIZER.decode(ids_of(served.engine.next_request())))
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_there_when_its_client_has_it(keeping: Served, client_of: ClientOf, stream: bool):
    client = client_of(keeping)
    if stream:
        with client.responses.stream(model=MODEL, input="hi", metadata={"a": "b"}) as events:
            answer = list(events)[-1].response  # type: ignore[union-attr]
    else:
        answer = client.responses.create(model=MODEL, input="hi", metadata={"a": "b"})
    found = client.responses.retrieve(answer.id)

    assert found.to_dict()["store"] is True
    if not stream:  # the helper adds fields to its final response
        assert found.to_dict() == answer.to_dict()
    assert (found.id, found.status, found.output_text) == (answer.id, "completed", "yes")
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_has_the_prompt_of_all_its_items(keeping: Served, stream: bool):
    first = ask(keeping, instructions="be brief")
    body = {"input": "and?", "instructions": "be long", "previous_response_id": first["id"], "stream": stream}
    second = keeping.client.post(PATH, json=body)
    answer = sse(second.content)[-1][1]["response"] if stream else second.json()
    third = ask(keeping, input=[{"role": "user", "content": "so?"}], previous_response_id=answer["id"])
    told = [
        {"role": "user", "content": "hi"},
        *first["output"],
        {"role": "user", "content": "and?"},
        *answer["output"],
        {"role": "user", "content": "so?"},
    ]
    ask(keeping, input=told)
    _, with_long, by_id, whole = prompts(keeping)

    assert answer["previous_response_id"] == first["id"]
    assert "be long" in with_long and "be brief" not in with_long
    assert by_id == whole and third["previous_response_id"] == answer["id"]
    row_of = keeping.services.required_state.store.submit(
        lambda db: table.find(db, "", third["id"]), writes=False
    ).result()
    assert row_of is not None and (row_of.root, row_of.depth) == (first["id"], 3)


def spelled(text: str) -> list[int]:
    """A token for each character."""
    return [token for char in text for token in TOKENIZER.encode(char)]


SPELLED = [*spelled("a <|im_end|> b"), EOS]
"""Tokens whose text a tokenizer reads as others: the special token in the middle is spelled."""


def spell(request: GenerateRequest) -> Iterator[TextOutput]:
    """An answer of two rows, with and without text."""
    text = TOKENIZER.decode(SPELLED)
    yield row(request, text, token_ids=SPELLED[:-1])
    yield row(request, "", token_ids=SPELLED[-1:], finish=STOP, total=len(SPELLED))


def test_a_chain_has_the_tokens_of_an_answer_that_was_cut(serve: Serve, tmp_path: Path):
    served = serve(
        lambda request: [row(request, "a <|im_end|> b", token_ids=SPELLED[:-1], finish=LENGTH)],
        capacity=ROOMY,
        state_dir=str(tmp_path),
    )
    ask(served, previous_response_id=ask(served)["id"])
    first, second = (ids_of(served.engine.next_request()) for _ in range(2))

    assert second[: len(first + SPELLED)] == first + SPELLED


@pytest.mark.parametrize("body", [{"background": True}, {"stream": True}, {}])
def test_a_chain_has_the_tokens_that_were_generated(serve: Serve, tmp_path: Path, body: dict[str, Any]):
    served = serve(spell, capacity=ROOMY, state_dir=str(tmp_path))
    previous: Any = None
    requests = []
    for text in ("hi", "and?", "so?"):
        asked = {"input": text, "previous_response_id": previous, "background": False} | body
        reply = served.client.post(PATH, json=asked)
        answer = sse(reply.content)[-1][1]["response"] if body.get("stream") else reply.json()
        previous = answer["id"]
        if body.get("background"):
            served.client.get(f"{PATH}/{previous}?stream=true")  # until its end
        requests.append(ids_of(served.engine.next_request()))

    first, second, third = requests
    assert second == first + SPELLED + TOKENIZER.encode(
        TOKENIZER.decode(second[len(first + SPELLED) :], False)
    )
    assert third[: len(second + SPELLED)] == second + SPELLED
    assert [TOKENIZER.decode(ids).count("a <|im_end|> b") for ids in requests] == [0, 1, 2]
    rows = served.services.required_state.store.submit(
        lambda db: table.chain_of(db, "", previous), writes=False
    ).result()
    assert sum(len(each.tokens) for each in rows) == 4 * (len(third + SPELLED) + 3)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([], "none are kept"),
        ([0, *spelled("other text"), EOS], "of another text"),
        ([0, 5000, EOS], "of a model with more tokens"),
        ([0, *spelled("<|im_start|>user\nh")], "not between special tokens"),
    ],
)
def test_other_tokens_of_a_chain_are_not_used(keeping: Served, tokens: list[int], why: str):
    first = ask(keeping)
    stored = array("i", tokens).tobytes()
    keeping.services.required_state.store.submit(
        lambda db: RESPONSES.update(db, "", first["id"], tokens=stored)
    ).result()
    ask(keeping, previous_response_id=first["id"])
    ask(
        keeping,
        input=[{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "hi"}],
    )
    _, by_id, whole = (ids_of(keeping.engine.next_request()) for _ in range(3))

    assert by_id == whole, why


def test_a_chain_goes_on_after_a_call(serve: Serve, tmp_path: Path):
    served = serve(say_all(CALL), capacity=ROOMY, state_dir=str(tmp_path))
    first = ask(served, tools=[TOOL])
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    reference = {"type": "item_reference", "id": call["id"]}
    second = ask(served, tools=[TOOL], input=[reference, result], previous_response_id=first["id"])
    ask(served, tools=[TOOL], input=[{"role": "user", "content": "hi"}, call, result])
    _, by_id, whole = prompts(served)

    assert by_id == whole
    assert "has the item already" in second["warnings"][0]


def test_forks_share_their_beginning(keeping: Served):
    first = ask(keeping)
    forks = [ask(keeping, input=text, previous_response_id=first["id"]) for text in ("left", "right")]
    for fork, text in zip(forks, ("left", "right"), strict=True):
        ask(keeping, previous_response_id=fork["id"])
        assert text in prompts(keeping)[-1]


def test_what_cannot_be_continued(keeping: Served, monkeypatch: pytest.MonkeyPatch):
    first = ask(keeping)
    second = ask(keeping, previous_response_id=first["id"])

    def refusal(response_id: Any) -> tuple[int, str]:
        reply = keeping.client.post(PATH, json={"input": "hi", "previous_response_id": response_id})
        error = reply.json()["error"]
        assert error["param"] == "previous_response_id"
        return reply.status_code, error["code"]

    assert refusal("resp_none") == (404, "previous_response_not_found")
    assert refusal("x" * 10_000) == (404, "previous_response_not_found")
    assert refusal(5)[0] == 400
    with monkeypatch.context() as patched:
        patched.setattr("engine.tokenizer_manager.state.response_store.MAX_DEPTH", 2)
        assert refusal(second["id"]) == (400, "chain_too_long")
    hidden = ask(keeping, store=False, previous_response_id=second["id"])
    assert hidden["store"] is False
    assert refusal(hidden["id"])[0] == 404
    keeping.client.delete(f"{PATH}/{first['id']}")
    assert refusal(second["id"]) == (404, "previous_response_not_found")
    assert keeping.client.get(f"{PATH}/{second['id']}").status_code == 200


def test_a_chain_may_have_as_many_bytes_as_a_body(serve: Serve, tmp_path: Path):
    served = serve(say_all("yes"), capacity=ROOMY, state_dir=str(tmp_path), max_body_mb=0.002)
    first = ask(served, input="a" * 1500)
    second = ask(served, input="b" * 600, previous_response_id=first["id"])
    reply = served.client.post(PATH, json={"input": "hi", "previous_response_id": second["id"]})

    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "chain_too_long")


def test_a_running_response_is_found_and_cannot_be_continued_or_deleted(serve: Serve, tmp_path: Path):
    served = serve(state_dir=str(tmp_path))
    reply = served.post_later(PATH, json={"input": "hi", "stream": True})
    request = served.engine.next_request()
    served.engine.say(row(request, "ye"))
    [(_, response_id)] = served.services.required_state.responses.live
    path = f"{PATH}/{response_id}"
    seen = served.client.get(path).json()
    continued = served.client.post(PATH, json={"input": "hi", "previous_response_id": response_id})
    deleted = served.client.delete(path)
    served.engine.say(row(request, "s", total=3, finish=STOP))
    assert reply.result().status_code == 200

    assert (seen["status"], seen["output"][0]["type"]) == ("in_progress", "message")
    assert (continued.status_code, deleted.status_code) == (409, 409)
    assert served.client.get(path).json()["output"][0]["content"][0]["text"] == "yes"
    assert served.client.delete(path).json() == {
        "id": response_id,
        "object": "response",
        "deleted": True,
    }


def test_one_whose_client_disconnects_or_that_fails_is_not_stored(serve: Serve, tmp_path: Path):
    served = serve(lambda request: [row(request, "some")], state_dir=str(tmp_path))
    body = {"input": "hi", "stream": True}
    with served.client.stream("POST", PATH, json=body):
        [(_, left)] = served.services.required_state.responses.live
    assert served.engine.next_abort().rid == served.engine.next_request().rid
    served.engine.script = lambda request: [row(request, "some"), row(request, "", finish=FAILED)]
    name, data = sse(served.client.post(PATH, json=body).content)[-1]

    assert name == "response.failed"
    for response_id in (left, data["response"]["id"]):
        assert served.client.get(f"{PATH}/{response_id}").status_code == 404
    assert not served.services.required_state.responses.live


def test_the_items_that_a_response_was_made_from(keeping: Served, client_of: ClientOf):
    first = ask(keeping, input=[{"role": "user", "content": f"{i}"} for i in range(30)])
    second = ask(keeping, input="and?", previous_response_id=first["id"])
    client = client_of(keeping)
    newest_first = [item.to_dict() for item in client.responses.input_items.list(second["id"], limit=7)]
    oldest_first = [item.to_dict() for item in client.responses.input_items.list(second["id"], order="asc")]

    assert newest_first == oldest_first[::-1]
    texts = [item["content"][0]["text"] for item in oldest_first]  # type: ignore[index]
    assert texts == [*(f"{i}" for i in range(30)), "yes", "and?"]
    assert len({item["id"] for item in oldest_first}) == 32
    path = f"{PATH}/{second['id']}/input_items"
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=none"):
        reply = keeping.client.get(f"{path}?{query}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_pages_go_on_after_an_item_that_was_sent_twice(keeping: Served, client_of: ClientOf):
    first = ask(keeping)
    [item] = first["output"]
    given = [item, {"role": "user", "content": "a", "id": 5}, {"role": "user", "content": "b", "id": ""}]
    last = ask(keeping, input=given, previous_response_id=first["id"])
    listed = [
        item.id for item in client_of(keeping).responses.input_items.list(last["id"], limit=1, order="asc")
    ]

    assert len(set(listed)) == len(listed) == 5 and listed[1] == item["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_sent_whatever_the_disk_does(
    keeping: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    def fail(*given: object) -> None:
        raise StateError("the state cannot be used: the disk is full", status=507)

    with monkeypatch.context() as patched:
        patched.setattr(table, "add", fail)
        reply = keeping.client.post(PATH, json={"input": "hi", "stream": stream})
    answer = sse(reply.content)[-1][1]["response"] if stream else reply.json()

    assert (answer["status"], answer["store"]) == ("completed", False)
    assert answer["warnings"] == ["the response was not stored: the state cannot be used: the disk is full"]
    assert keeping.client.get(f"{PATH}/{answer['id']}").status_code == 404


def test_other_clients_responses_are_not_found(serve: Serve, tmp_path: Path):
    served = serve(say_all("yes"), capacity=ROOMY, state_dir=str(tmp_path), api_key=("a", "b"))
    keys = {name: {"Authorization": f"Bearer {name}"} for name in "ab"}
    made = served.client.post(PATH, json={"input": "hi"}, headers=keys["a"]).json()
    path = f"{PATH}/{made['id']}"
    body = {"input": "hi", "previous_response_id": made["id"]}
    routes = [
        ("GET", path, None),
        ("GET", f"{path}/input_items", None),
        ("POST", PATH, body),
        ("POST", f"{PATH}/input_tokens", body),
        ("DELETE", path, None),
    ]
    for name, status in (("b", 404), ("a", 200)):
        for method, route, json_body in routes:
            reply = served.client.request(method, route, json=json_body, headers=keys[name])
            assert reply.status_code == status, (name, method, route)


def test_without_a_folder_nothing_is_stored(serve: Serve):
    served = serve(say_all("yes"))
    answer = ask(served, store=True)
    assert (answer["store"], answer["previous_response_id"]) == (False, None)
    for field, value in (("previous_response_id", "resp_1"), ("background", True)):
        reply = served.client.post(PATH, json={"input": "hi", field: value})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field) and "--state-dir" in error["message"]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        reply = served.client.request(method, f"{PATH}/{answer['id']}{path}")
        assert reply.status_code == 404 and "--state-dir" in reply.json()["error"]["message"]
