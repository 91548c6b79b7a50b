"""LoRA adapters over HTTP: their names in every API, loads and unloads, and who may do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.launch.child.control import SetAdapters
from engine.runtime.adapter_spec import LoadedAdapter
from engine.runtime.messages import GenerateRequest
from tests.adapter_files import loaded, write_adapter

from ...conftest import Serve, Served
from ...fake_engine import MODEL, SPEC, STOP, row, say_all
from ..pooling.test_embeddings import ANSWER, EMBEDDER

HI = [{"role": "user", "content": "hi"}]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder `root` of adapters sql, de and wide."""
    for seed, name in enumerate(("sql", "de")):
        write_adapter(tmp_path / "root" / name, SPEC, seed=seed)
    write_adapter(tmp_path / "root" / "wide", SPEC, rank=32)
    return tmp_path / "root"


@pytest.fixture
def adapters(root: Path) -> list[LoadedAdapter]:
    return [loaded(root / name, SPEC, n, name, pinned=True) for n, name in enumerate(("sql", "de"), 1)]


def opened(serve: Serve, root: Path, **options: Any) -> Served:
    """A server that loads adapters."""
    return serve(say_all("x"), lora={"allow_runtime_lora": True, "lora_root": str(root)}, **options)


def error(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


# ---------------------------------------------------------------- names in requests and answers

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}


def models_in(text: str) -> set[str]:
    """Values of all fields `model` of a body or a stream."""
    found: set[str] = set()
    for line in text.splitlines():
        line = line.removeprefix("data: ")
        if line.startswith("{"):
            document = json.loads(line)
            for part in (document, document.get("response", {}), document.get("message", {})):
                if isinstance(part, dict) and "model" in part:
                    found.add(part["model"])
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["sql", f"{MODEL}:sql"])
def test_the_model_of_a_request_may_be_an_adapter(
    serve: Serve, adapters: list[LoadedAdapter], path: str, name: str, stream: bool
):
    served = serve(say_all("x"), adapters=adapters)

    answer = served.client.post(path, json=BODIES[path] | {"model": name, "stream": stream})

    assert answer.status_code == 200, answer.text
    assert served.engine.next_request().lora_id == adapters[0].spec.fingerprint
    # Anthropic's and Ollama's answers repeat the name as it was sent.
    assert models_in(answer.text) <= {"sql", name} and models_in(answer.text)


@pytest.mark.parametrize("path", BODIES)
def test_the_model_itself_has_no_adapter(serve: Serve, adapters: list[LoadedAdapter], path: str):
    served = serve(say_all("x"), adapters=adapters)
    for body in ({}, {"model": MODEL}):
        assert served.client.post(path, json=BODIES[path] | body).status_code == 200
        assert served.engine.next_request().lora_id == ""


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model_lists_the_adapters(serve: Serve, adapters: list[LoadedAdapter], path: str):
    answer = serve(say_all("x"), adapters=adapters).client.post(path, json=BODIES[path] | {"model": "sq"})
    assert answer.status_code == 404
    assert f"'sq' is not served here; use '{MODEL}' or 'sql' or 'de'" in answer.text.replace('\\"', "'")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_lora_path_wins_over_the_model(serve: Serve, adapters: list[LoadedAdapter], path: str):
    served = serve(say_all("x"), adapters=adapters)
    for model in (MODEL, "de"):
        answer = served.client.post(path, json=BODIES[path] | {"model": model, "lora_path": "sql"})
        assert answer.json()["model"] == "sql"
        assert served.engine.next_request().lora_id == adapters[0].spec.fingerprint
    unknown = error(served.client.post(path, json=BODIES[path] | {"lora_path": "x"}), 404)
    assert unknown["message"] == "lora_path is 'x', but there is no such adapter; the adapters are sql, de"
    assert (unknown["param"], unknown["code"]) == ("lora_path", "adapter_not_found")
    error(served.client.post(path, json=BODIES[path] | {"lora_path": ["sql"]}), 400)


def test_generate_takes_one_adapter_or_one_for_each_prompt(serve: Serve, adapters: list[LoadedAdapter]):
    served = serve(say_all("x"), adapters=adapters)
    sql, de = (each.spec.fingerprint for each in adapters)

    def lora_ids(count: int) -> list[str]:
        return [served.engine.next_request().lora_id for _ in range(count)]

    def generate(**body: Any) -> Any:
        return served.client.post("/generate", json=body)

    assert generate(text="a", lora_path="sql").status_code == 200
    assert lora_ids(1) == [sql]
    assert generate(text=["a", "b"], lora_path="de").status_code == 200
    assert lora_ids(2) == [de] * 2
    assert generate(text=["a", "b", "c"], lora_path=["sql", None, "de"]).status_code == 200
    assert lora_ids(3) == [sql, "", de]
    assert generate(text="a", lora_path=None).status_code == 200
    assert lora_ids(1) == [""]
    wrong = error(generate(text=["a", "b"], lora_path=["sql"]), 400)
    assert wrong["message"].startswith("lora_path has 1 names and there are 2 prompts")
    assert "'x'" in error(generate(text=["a", "b"], lora_path=["sql", "x"]), 404)["message"]
    error(generate(text="a", lora_path=5), 400)
    error(generate(text="a", lora_path=[5]), 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/api/embed", {"input": "a"}),
    ],
)
def test_vectors_and_scores_of_an_adapter(
    serve: Serve, adapters: list[LoadedAdapter], path: str, body: dict[str, Any]
):
    served = serve(ANSWER, pooling=EMBEDDER, adapters=adapters)
    answer = served.client.post(path, json=body | {"model": "de"})
    assert answer.json()["model"] == "de"
    assert served.engine.next_request().lora_id == adapters[1].spec.fingerprint


def test_models_are_listed_with_their_adapters(serve: Serve, adapters: list[LoadedAdapter]):
    client = serve(say_all("x"), adapters=adapters).client
    base, sql, de = client.get("/v1/models").json()["data"]
    assert "parent" not in base and "root" not in base
    assert (sql["id"], sql["parent"], sql["root"]) == ("sql", MODEL, adapters[0].spec.path)
    assert de["max_model_len"] == base["max_model_len"]
    assert client.get("/v1/models/sql").json() == sql
    assert client.get(f"/v1/models/{MODEL}").json() == base
    error(client.get("/v1/models/x"), 404)


def test_a_pin_is_of_the_adapter(serve: Serve, adapters: list[LoadedAdapter]):
    served = serve(say_all("x"), adapters=adapters)
    body = {"prompt": "hello", "ttl": 5}
    assert served.client.post("/v1/cache/pins", json=body | {"model": "sql"}).status_code == 200
    assert served.engine.pins.get().lora_id == adapters[0].spec.fingerprint
    served.client.post("/v1/cache/pins", json=body)
    assert served.engine.pins.get().lora_id == ""


# ---------------------------------------------------------------- loads and unloads


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_load_and_an_unload(serve: Serve, root: Path, prefix: str):
    served = opened(serve, root)
    body = {"lora_name": "sql", "lora_path": str(root / "sql"), "pinned": True}

    answer = served.client.post(f"{prefix}/load_lora_adapter", json=body).json()

    assert answer["success"] is True and answer["message"] == "loaded sql, rank 4"
    [listed] = answer["loaded_adapters"]
    assert (listed["name"], listed["path"], listed["rank"], listed["pinned"]) == (
        "sql",
        str(root / "sql"),
        4,
        True,
    )
    [message] = served.engine.loads
    assert message.adapter.fingerprint == listed["fingerprint"]
    orders = [order for order in served.engine.orders if isinstance(order, SetAdapters)]
    assert [each.spec.name for each in orders[-1].adapters] == ["sql"]
    assert served.client.post("/v1/completions", json={"prompt": "a", "model": "sql"}).status_code == 200

    again = error(served.client.post(f"{prefix}/load_lora_adapter", json=body), 409)
    assert (again["code"], again["param"]) == ("name_taken", "lora_name")
    pinned = error(served.client.post(f"{prefix}/unload_lora_adapter", json={"lora_name": "sql"}), 409)
    assert pinned["code"] == "adapter_pinned"
    answer = served.client.post(
        f"{prefix}/unload_lora_adapter", json={"lora_name": "sql", "force": True}
    ).json()
    assert (answer["message"], answer["loaded_adapters"]) == ("unloaded sql", [])
    assert served.engine.unloads == [message.store_id]
    assert served.client.post("/v1/completions", json={"prompt": "a", "model": "sql"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "lora_name"),
        ({"lora_name": "a"}, 400, "lora_path"),
        ({"lora_name": 5, "lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "a/b", "lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "a", "lora_path": "wide"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": ".."}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "/etc/passwd"}, 400, "lora_path"),
        ({"lora_name": MODEL.partition("/")[2], "lora_path": "nowhere"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "sql", "load_inplace": "yes"}, 400, "load_inplace"),
    ],
)
def test_a_bad_load(serve: Serve, root: Path, body: dict[str, Any], status: int, param: str):
    served = opened(serve, root)
    assert error(served.client.post(LOAD, json=body), status)["param"] == param
    assert served.engine.loads == []
    assert served.client.post(LOAD, json={"lora_name": "a", "lora_path": "sql"}).status_code == 200


def test_what_the_scheduler_cannot_read(serve: Serve, root: Path):
    served = opened(serve, root)
    served.engine.load_error = "sql: a number is not finite"
    found = error(served.client.post(LOAD, json={"lora_name": "a", "lora_path": "sql"}), 400)
    assert found["message"] == "sql: a number is not finite"
    assert len(served.client.get("/v1/models").json()["data"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "lora_name"),
        ({"lora_name": "x"}, 404, "lora_name"),
        ({"lora_name": "sql", "timeout": 0}, 400, "timeout"),
        ({"lora_name": "sql", "timeout": -1}, 400, "timeout"),
        ({"lora_name": "sql", "force": 1}, 400, "force"),
    ],
)
def test_a_bad_unload(
    serve: Serve,
    root: Path,
    adapters: list[LoadedAdapter],
    body: dict[str, Any],
    status: int,
    param: str,
):
    served = opened(serve, root, adapters=adapters)
    assert error(served.client.post(UNLOAD, json=body), status)["param"] == param
    assert len(served.client.get("/v1/models").json()["data"]) == 3


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_a_server_that_is_not_set_to_it(serve: Serve, adapters: list[LoadedAdapter], path: str):
    served = serve(say_all("x"), adapters=adapters)
    found = error(served.client.post(path, json={"lora_name": "sql", "lora_path": "sql"}), 403)
    assert found["code"] == "adapters_fixed"
    assert "--allow-runtime-lora and --lora-root" in found["message"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD, "/load_lora_adapter", "/unload_lora_adapter"])
def test_only_the_admin_may(serve: Serve, root: Path, adapters: list[LoadedAdapter], path: str):
    served = opened(serve, root, adapters=adapters, api_key=("client",), admin_api_key="admin")
    body = {"lora_name": "sql", "lora_path": "sql"} | (
        {"load_inplace": True} if "/load" in path else {"force": True}
    )
    if "unload" in path:
        body.pop("lora_path")
    for key, status in ((None, 401), ("client", 403), ("admin", 200)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        assert served.client.post(path, json=body, headers=headers).status_code == status


def test_an_unload_waits_for_the_requests_and_force_ends_them(serve: Serve, root: Path):
    served = opened(serve, root)
    served.engine.script = None
    served.client.post(LOAD, json={"lora_name": "sql", "lora_path": "sql"})
    stream = served.post_later(
        "/v1/completions", json={"prompt": "a", "model": "sql", "n": 16, "max_tokens": 5}
    )
    requests: list[GenerateRequest] = [served.engine.next_request() for _ in range(16)]

    found = error(served.client.post(UNLOAD, json={"lora_name": "sql", "timeout": 0.001}), 409)
    assert found["code"] == "adapter_in_use"
    assert found["message"].startswith("16 requests still use the adapter 'sql' after 0.001 s, so it stays")
    for request in requests[:8]:
        served.engine.say(row(request, "x", finish=STOP))
    answer = served.client.post(UNLOAD, json={"lora_name": "sql", "force": True})
    assert answer.status_code == 200
    ended = error(stream.result(), 409)
    assert (ended["message"], ended["code"]) == ("the adapter sql was unloaded", "adapter_unloaded")
    assert {served.engine.next_abort().rid for _ in range(8)} == {each.rid for each in requests[8:]}

    served.client.post(LOAD, json={"lora_name": "sql", "lora_path": "sql"})
    stream = served.post_later("/v1/completions", json={"prompt": "a", "model": "sql", "max_tokens": 5})
    request = served.engine.next_request()
    unload = served.post_later(UNLOAD, json={"lora_name": "sql"})
    while served.client.get("/v1/models/sql").status_code != 404:
        pass  # the unload has not arrived
    assert not unload.done()
    served.engine.say(row(request, "x", finish=STOP))
    assert unload.result().status_code == 200
    assert stream.result().json()["choices"][0]["text"] == "x"
