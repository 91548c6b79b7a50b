from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator

import msgspec
import ollama
import pytest

from engine.models.spec.quantization import QuantizationSpec
from engine.tokenizer_manager.http.app import App
from engine.tokenizer_manager.http.routes import ROUTES

from ...conftest import NO_TLS, Serve, Served
from ...fake_engine import LENGTH, MODEL, TOKENIZER, FakeEngine, ids_of, make_services, row, say_all
from ..calling import Reply, call
from ..serving import CALL, FAILED, PARAMETERS, ROOMY

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


ClientOf = Callable[..., ollama.Client]


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """Makes clients that are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(served: Served) -> ollama.Client:
            client = ollama.Client(served.url, verify=NO_TLS)
            stack.enter_context(client)
            return client

        yield make


def test_a_chat_in_one_piece(serve: Serve, client_of: ClientOf):
    answer = client_of(serve(say_all("Hel", "lo"))).chat(MODEL, HI)

    assert (answer.message.role, answer.message.content) == ("assistant", "Hello")
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "stop", 5)
    assert answer.prompt_eval_count
    assert answer.prompt_eval_count > 0
    assert isinstance(answer.total_duration, int)


def test_streams_by_default(serve: Serve):
    served = serve(say_all("Hel", "lo", finish=LENGTH))
    reply = served.client.post("/api/chat", json={"model": MODEL, "messages": HI})
    lines = [json.loads(line) for line in reply.text.splitlines()]

    assert reply.headers["content-type"] == "application/x-ndjson"
    assert [line["message"]["content"] for line in lines] == ["Hel", "lo", ""]
    assert [line["done"] for line in lines] == [False, False, True]
    assert lines[-1]["done_reason"] == "length"


def test_a_call(serve: Serve, client_of: ClientOf):
    client = client_of(serve(say_all(CALL[:20], CALL[20:]), capacity=ROOMY))
    whole = client.chat(MODEL, HI, tools=[TOOL])
    parts = list(client.chat(MODEL, HI, tools=[TOOL], stream=True))

    for message in (whole.message, parts[0].message):
        [call] = message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("f", {"a": 1})
    assert parts[-1].done_reason == "stop"


def test_generate(serve: Serve, client_of: ClientOf):
    served = serve(say_all("x"))
    client = client_of(served)

    assert client.generate(MODEL, "hi").response == "x"
    assert TOKENIZER.decode(ids_of(served.engine.next_request()), skip_special_tokens=True) == (
        "user\nhi\nassistant\n"
    )
    assert "".join(part.response or "" for part in client.generate(MODEL, "hi", stream=True)) == "x"
    served.engine.next_request()
    assert client.generate(MODEL, "hi", raw=True).response == "x"
    assert TOKENIZER.decode(ids_of(served.engine.next_request()), skip_special_tokens=False) == "hi"
    assert [part.response for part in client.generate(MODEL, "hi", raw=True, stream=True)] == ["x", ""]


def test_a_request_without_a_prompt_only_loads(serve: Serve, client_of: ClientOf):
    served = serve()

    assert client_of(served).generate(MODEL).done_reason == "load"
    assert client_of(served).chat(MODEL).done_reason == "load"
    assert served.engine.generate.empty()


def test_the_model(serve: Serve, client_of: ClientOf):
    served = serve()
    client = client_of(served)

    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 256
    assert served.client.get("/api/version").json() == {"version": "0.14.1"}, (
        "clients ask for a minimum of Ollama's"
    )
    assert served.client.get("/").text == "Ollama is running"
    assert served.client.head("/").status_code == 200


def test_a_gguf_model_has_the_format_of_most_of_its_modules():
    quantization = QuantizationSpec(
        method="gguf", types={f"model.layers.0.{name}": "Q4_1" for name in ("a", "b")} | {"lm_head": "Q8_0"}
    )

    async def run() -> Reply:
        plain = make_services(FakeEngine(say_all("x")))
        spec = msgspec.structs.replace(plain.spec, quantization=quantization)
        return await call(App(dataclasses.replace(plain, spec=spec)), "/api/show", {})

    details = json.loads(asyncio.run(run()).body)["details"]
    assert (details["format"], details["quantization_level"]) == ("gguf", "Q4_1")


def test_what_changes_models_is_a_501(serve: Serve, client_of: ClientOf):
    served = serve()

    unavailable = [route for route in ROUTES if 501 in route.fails and route.path.startswith("/api/")]
    assert len(unavailable) == 5
    for route in unavailable:
        reply = served.client.request(route.method, route.path, json={"model": "x"})
        assert reply.status_code == 501, route.path
        assert reply.json()["error"].startswith(f"{route.path} is not available here")
    with pytest.raises(ollama.ResponseError, match="not available"):
        client_of(served).pull("x")


def test_the_served_model_is_pulled_already(serve: Serve, client_of: ClientOf):
    served = serve()
    for name in (MODEL, f"{MODEL}:latest"):
        assert client_of(served).pull(name).status == "success"
        assert [part.status for part in client_of(served).pull(name, stream=True)] == ["success"]
    any_name = serve(model={"served_model_name": "*"})
    assert client_of(any_name).pull("gpt-oss:20b").status == "success"


def test_errors(serve: Serve, client_of: ClientOf):
    served = serve(say_all("x"))

    with pytest.raises(ollama.ResponseError) as refused:
        client_of(served).chat(MODEL, HI, options={"num_predict": 0})
    assert refused.value.status_code == 400
    assert refused.value.error.startswith("options.num_predict is 0")
    with pytest.raises(ollama.ResponseError) as unknown:
        client_of(served).chat("other", HI)
    assert unknown.value.status_code == 404


def test_a_stream_that_fails_ends_with_an_error(serve: Serve, client_of: ClientOf):
    served = serve(lambda request: [row(request, "some"), row(request, "", finish=FAILED)])

    with pytest.raises(ollama.ResponseError, match="out of luck"):
        list(client_of(served).chat(MODEL, HI, stream=True))


def test_a_stream_that_is_left_is_aborted(serve: Serve):
    served = serve(lambda request: [row(request, "some")])
    with served.client.stream("POST", "/api/chat", json={"messages": HI}) as reply:
        next(reply.iter_lines())

    assert served.engine.next_abort().rid == served.engine.next_request().rid
