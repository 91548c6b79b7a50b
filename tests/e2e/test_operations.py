"""The engine's own endpoints on a real server, and its numbers after requests that are known."""

from __future__ import annotations

import importlib.metadata
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .model import MAX_MODEL_LEN
from .serving import DEADLINE_S, SLOW

pytestmark = pytest.mark.real_process

GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "queue_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)


@pytest.fixture
def http(serve):
    with httpx.Client(base_url=serve.url, timeout=DEADLINE_S) as http:
        yield http


def generate(http, **fields):
    response = http.post("/generate", json={"sampling_params": GREEDY} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_generate_from_text_ids_and_lists(http):
    ids = http.post("/tokenize", json={"prompt": "lazy dog"}).json()["tokens"]
    from_text, from_ids = generate(http, text="lazy dog"), generate(http, input_ids=ids)
    assert from_text["text"] == from_ids["text"]
    assert len(from_text["output_ids"]) == from_text["meta_info"]["completion_tokens"] == 16
    assert from_text["meta_info"]["finish_reason"] == {"type": "length"}
    batch = generate(http, text=["lazy dog", "quick brown fox"])
    assert [answer["text"] for answer in batch] == [
        from_text["text"],
        generate(http, text="quick brown fox")["text"],
    ]


def test_generate_streams_all_text_so_far_or_only_what_is_new(http):
    whole = generate(http, text="lazy dog")
    so_far, new = (
        list(
            events(
                http,
                {"text": "lazy dog", "sampling_params": GREEDY, "stream": True, "incremental": incremental},
            )
        )
        for incremental in (False, True)
    )
    assert so_far[-1]["text"] == whole["text"]
    assert "".join(event["text"] for event in new) == whole["text"]
    assert [token for event in new for token in event["output_ids"]] == whole["output_ids"]


def test_tokens_there_and_back(http):
    text = "Größe, 東京 and a lazy dog 🙂\n"
    answer = http.post("/tokenize", json={"prompt": text}).json()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_MODEL_LEN)
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["text"] == text

    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["prompt"] == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["text"] == chat["prompt"]


def test_health_server_info_and_docs(http, serve):
    assert http.get("/health").status_code == 200
    assert http.get("/health_generate").status_code == 200
    info = http.get("/server_info").json()
    assert (info["model"], info["config"]["model"]["dtype"]) == (serve.model, "float32")
    chosen_at_request = {"tool_call_parser": "auto", "reasoning_parser": "auto"}
    assert info["config"]["answers"].items() >= chosen_at_request.items()
    rest = {key: value for key, value in info["config"].items() if key != "answers"}
    assert "auto" not in json.dumps(rest)
    assert info["capacity"]["max_model_len"] == MAX_MODEL_LEN
    assert "text/html" in http.get("/docs").headers["content-type"]
    assert http.get("/v2/nothing").status_code == 404
    assert http.get("/generate").status_code == 405


def test_the_metrics_add_up(http, serve):
    before = serve.idle_metrics()
    http.post("/flush_cache")
    prompt = "a prompt for the metrics alone, six or seven pages long if it is told in full: one two three four five"
    num_prompt = http.post("/tokenize", json={"prompt": prompt}).json()["count"]
    usages = [generate(http, text=prompt)["meta_info"] for _ in range(3)]

    after = serve.idle_metrics()

    def grown(name):
        return after[name] - before[name]

    assert grown("prompt_tokens_total") == 3 * num_prompt
    assert grown("generation_tokens_total") == 48
    assert grown("cached_tokens_total") == sum(usage["cached_tokens"] for usage in usages) > 0
    assert after["cache_hit_rate"] == pytest.approx(
        after["cached_tokens_total"] / after["prompt_tokens_total"]
    )
    assert grown("retracted_reqs_total") == 0
    assert 0 < after["kv_cached_tokens"] < after["kv_total_tokens"]
    assert 0 < after["new_token_ratio"] <= 1
    for name in HISTOGRAMS:
        assert grown(f"{name}_count") == (45 if name.startswith("inter") else 3), name
        assert grown(f'{name}_bucket{{le="+Inf"}}') == grown(f"{name}_count")
    assert grown("time_to_first_token_seconds_sum") < grown("e2e_request_latency_seconds_sum")
    assert grown("request_prompt_tokens_sum") == 3 * num_prompt
    assert grown("request_generation_tokens_sum") == 48
    assert grown("request_time_per_output_token_seconds_sum") == pytest.approx(
        grown("inter_token_latency_seconds_sum") / 15
    )
    assert http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    assert http.post("/flush_cache").json() == {
        "flushed_tokens": after["kv_cached_tokens"],
        "kept_tokens": 0,
        "success": True,
    }


def test_the_page_of_a_server_is_valid_and_names_its_model_and_build(http, serve):
    families = {each.name: each for each in text_string_to_metric_families(http.get("/metrics").text)}
    version = http.get("/version").json()

    assert {each.labels["model_name"] for each in families["engine:num_running_reqs"].samples} == {
        serve.model
    }
    [build] = families["engine:build_info"].samples
    assert (build.value, build.labels) == (1, version)
    assert version["device"] == "cpu"
    assert all(version[name] for name in ("version", "torch", "backend", "instruction_set"))
    assert version["torch"] == importlib.metadata.version("torch")


def test_an_abort_by_id_ends_the_stream_with_its_reason(start_serve, model):
    engine = start_serve(str(model), *SLOW).wait_until_ready()
    body = {"text": "for ever", "stream": True, "sampling_params": GREEDY | {"max_new_tokens": 2000}}
    finish = None
    with httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as http:
        for number, event in enumerate(events(http, body)):
            if number == 0:
                aborted = http.post("/abort_request", json={"rid": event["meta_info"]["id"]})
                assert aborted.json() == {"aborted": 1}
            finish = event["meta_info"]["finish_reason"]
    assert finish is not None
    assert finish["type"] == "abort"
    assert number < 1999
    engine.idle_metrics()


def test_openapi_describes_every_route(http):
    """What tools rely on: a version, operations with ids and responses, references that lead somewhere."""
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert document["info"].keys() >= {"title", "version"}
    schemas = document["components"]["schemas"]
    assert document["paths"].keys() >= {
        "/v1/chat/completions",
        "/v1/models/{model}",
        "/generate",
        "/health",
        "/metrics",
    }
    operation_ids = []
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert method in {"get", "post", "put", "delete"}
            operation_ids.append(operation["operationId"])
            assert all("description" in response for response in operation["responses"].values())
            placeholders = {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"} == placeholders
            assert all(p["required"] for p in operation.get("parameters", ()) if p["in"] == "path")
    assert len(set(operation_ids)) == len(operation_ids)
    references = list(find_references(document))
    assert references
    for reference in references:
        assert reference.removeprefix("#/components/schemas/") in schemas, reference


def find_references(value):
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "$ref":
                yield item
            else:
                yield from find_references(item)
    elif isinstance(value, list):
        for item in value:
            yield from find_references(item)


def events(http, body):
    with http.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))
