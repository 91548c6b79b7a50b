"""What clients send is nobody else's business: a mark in every field of every endpoint shows up in no log, no metric,
no report of a crash, no settings and no process title, also at the level `debug`.

Where it may stand: in the answer to who sent it. Labels that clients choose (`X-Request-Id`, paths) are logged.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from .serving import DEADLINE_S, SLOW

pytestmark = pytest.mark.real_process

MARK = "zq7xmark"
KEY, ADMIN_KEY = f"{MARK}-key", f"{MARK}-admin"
FILES = "/v1/files"
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": MARK}], "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": MARK}], "max_tokens": 2},
    "/v1/chat/completions/control": {"id": MARK, "action": "reasoning_end"},
    "/v1/completions": {"prompt": MARK, "max_tokens": 2},
    "/v1/completions/render": {"prompt": MARK, "max_tokens": 2},
    "/v1/responses": {"input": MARK, "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": MARK},
    "/v1/messages": {"messages": [{"role": "user", "content": MARK}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": MARK}]},
    "/api/chat": {"messages": [{"role": "user", "content": MARK}], "options": {"num_predict": 2}},
    "/api/generate": {"prompt": MARK, "options": {"num_predict": 2}},
    "/api/show": {"model": MARK},
    "/api/pull": {"model": MARK},
    "/completion": {"prompt": MARK, "n_predict": 2},
    "/infill": {"input_prefix": MARK, "input_suffix": MARK},
    "/generate": {"text": MARK, "sampling_params": {"max_new_tokens": 2}},
    "/apply-template": {"messages": [{"role": "user", "content": MARK}]},
    "/embedding": {"content": MARK},
    "/tokenize": {"prompt": MARK},
    "/detokenize": {"tokens": [5]},
    "/v1/cache/pins": {"prompt": MARK, "ttl": 1},
    "/open_session": {"session_id": MARK},
    "/close_session": {"session_id": MARK},
    "/v1/kv_hints": {
        "protocol_version": 1,
        "session_id": MARK,
        "actions": [{"action_id": MARK, "action_type": "release"}],
    },
    "/v1/grammar/check": {"guided_json": {"title": MARK}},
    "/abort_request": {"rid": MARK},
    "/start_profile": {"duration": 3600},
    "/pause_generation": {"mode": "in_place"},
    FILES: {"purpose": "batch"},
    "/v1/batches": {"input_file_id": MARK, "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/messages/batches": {"requests": [{"custom_id": MARK, "params": {"messages": MARK}}]},
    "/v1/embeddings": {"input": MARK},
    "/v1/rerank": {"query": MARK, "documents": [MARK]},
    "/rerank": {"query": MARK, "documents": [MARK]},
    "/v2/rerank": {"query": MARK, "documents": [MARK]},
    "/classify": {"input": MARK},
    "/pooling": {"input": MARK},
    "/v1/score": {"query": MARK, "items": [MARK], "label_token_ids": [5]},
    "/score": {"query": MARK, "items": [MARK], "label_token_ids": [5]},
    "/v1/decisions": {
        "input": MARK,
        "questions": [{"type": "predicate", "instructions": MARK, "name": MARK}],
    },
    "/v1/systemone": {"state": MARK, "questions": {MARK: {"type": "noul", "instructions": MARK}}},
    "/api/embed": {"input": MARK},
    "/api/embeddings": {"prompt": MARK},
    "/v1/load_lora_adapter": {"lora_name": MARK, "lora_path": MARK},
    "/load_lora_adapter": {"lora_name": MARK, "lora_path": MARK},
    "/v1/unload_lora_adapter": {"lora_name": MARK},
    "/unload_lora_adapter": {"lora_name": MARK},
}
IN_USE = {
    "stop": [MARK],
    "user": MARK,
    "cache_salt": MARK,
    "session_id": MARK,
    "prompt": f"{MARK} and more",
    "max_tokens": 4,
}


def marked(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Requests that have the mark in one field after the other, as a text, in a list and as a name."""
    schemas = document["components"]["schemas"]
    requests = [(path, VALID[path]) for path in VALID]
    for path, item in document["paths"].items():
        body = item.get("post", {}).get("requestBody")
        if body is None:
            continue
        if path == FILES:
            forms = ({"purpose": MARK}, {"purpose": "batch", "wibble": MARK})
            requests += [(path, form) for form in forms]
            continue
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        values: tuple[Any, ...] = (MARK, [MARK], {MARK: MARK}, [{"role": MARK, "content": MARK}])
        for field in (*schemas[name]["properties"], "tools", "response_format", "metadata", "wibble"):
            requests += [(path, VALID[path] | {field: value}) for value in values]
    for field in schemas["NativeSampling"]["properties"]:
        requests += [
            ("/generate", {"text": MARK, "sampling_params": {field: form}}) for form in (MARK, [MARK])
        ]
    return requests


def status(client: httpx.Client, path: str, body: dict[str, Any]) -> int:
    """The status of the answer to a request; a pause ends at once, since no other request would be answered."""
    if path == FILES:
        return client.post(path, data=body, files={"file": (MARK, f"{MARK}\n")}).status_code
    code = client.post(path, json=body).status_code
    if path == "/pause_generation":
        assert client.post("/continue_generation").status_code == 200
    return code


def titles(pids: list[int]) -> str:
    """What `ps` shows of processes."""
    return "\n".join(Path(f"/proc/{pid}/{name}").read_text() for pid in pids for name in ("cmdline", "comm"))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "strict"), [("text", ()), ("json", ("--strict",))], ids=["text", "json"])
def test_a_mark_in_every_field_shows_up_nowhere(start_serve, model, tmp_path, form, strict):
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--max-restarts", "0")
    logs = ("--log-level", "debug", "--log-format", form, "--log-interval", "0.1")
    stored = ("--state-dir", str(tmp_path))
    engine = start_serve(str(model), "--dtype", "float32", *keys, *logs, *stored, *strict, *SLOW)
    engine.wait_until_ready()
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=engine.url, headers=headers, timeout=DEADLINE_S) as client:
        document = client.get("/openapi.json").json()
        assert VALID.keys() == {
            path for path, item in document["paths"].items() if "requestBody" in item.get("post", {})
        }
        statuses = {status(client, path, body) for path, body in marked(document)}
        assert statuses == {200, 400, 403, 404, 409, 501}  # 501: the pull of another model
        assert client.put("/log_level", json={"level": MARK}).status_code == 400
        assert client.post("/v1/completions", content=f'{{"prompt": "{MARK}"').status_code == 400
        for wrong in (f"Bearer {MARK}", f"Basic {MARK}", MARK):
            assert client.get("/v1/models", headers={"Authorization": wrong}).status_code == 401
        long = IN_USE | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=long) as stream:
            next(stream.iter_lines())
            shown = {
                path: client.get(path).text
                for path in ("/metrics", "/server_info", "/v1/requests", "/v1/sessions", "/slots", "/props")
            }
            folder = Path(client.post("/stop_profile").json()["folder"])
            shown |= {path.name: path.read_text() for path in folder.iterdir()}
            assert len(shown) == 9
            shown["titles"] = titles([engine.process.pid, *engine.pids.values()])
            os.kill(engine.pids["scheduler"], signal.SIGSEGV)
            assert engine.wait() == 1  # with the request alive, of which the report must not tell
    [report] = engine.crash_dir.glob("crash-*")
    shown |= {"report": report.read_text(), "log": engine.log}
    assert "level=debug" in shown["log"] or '"level":"debug"' in shown["log"]
    assert "scheduler" in shown["report"] and "engine: scheduler" in shown["titles"]
    assert [line for text in shown.values() for line in text.splitlines() if MARK in line] == []
