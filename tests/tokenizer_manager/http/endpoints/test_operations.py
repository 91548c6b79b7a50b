from __future__ import annotations

import json
import re

import msgspec
import pytest

from engine.runtime.messages import FlushCache
from engine.runtime.scheduler_report import SchedulerReport
from engine.tokenizer_manager.http.routes import ROUTES
from engine.tokenizer_manager.http.schema.errors import shape_of
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import LENGTH, MODEL, WAIT_S, FakeClock, row, say_all


def test_models(serve: Serve):
    client = serve().client
    model = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "engine",
        "max_model_len": 256,
        "task": "generate",
        "sampling_defaults": {
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "source": "OpenAI's default",
        },
    }

    listed = client.get("/v1/models").json()
    [codex] = listed.pop("models")
    assert listed == {"object": "list", "data": [model]}
    assert (codex["slug"], codex["context_window"], codex["visibility"]) == (MODEL, 256, "list")
    assert None not in codex.values()
    assert client.get(f"/v1/models/{MODEL}").json() == model
    assert client.get("/v1/models/org%2Ftiny").json() == model
    missing = client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_health_is_the_schedulers_heartbeat(serve: Serve):
    clock = FakeClock()
    served = serve(clock=clock, watchdog_timeout=5.0)
    assert served.client.get("/health").status_code == 200
    clock.now_s += 6.0
    reply = served.client.get("/health")
    assert reply.status_code == 503
    assert "heartbeat is 6.0 s old" in reply.json()["error"]["message"]
    served.engine.tell(SchedulerReport(sent_s=clock.now_s))
    assert served.client.get("/health").status_code == 200


def test_health_is_red_while_requests_wait_and_nothing_moves(serve: Serve):
    served = serve()
    assert served.client.get("/health").status_code == 200
    served.engine.tell(SchedulerReport(sent_s=1000.0, stalled="2 requests wait, NO_KV need 9 have 4"))
    for path in ("/health", "/health_generate"):
        reply = served.client.get(path)
        assert reply.status_code == 503
        assert "NO_KV need 9 have 4" in reply.json()["error"]["message"]
    served.engine.tell(SchedulerReport(sent_s=1000.0))
    assert served.client.get("/health").status_code == 200


def test_ping_is_health_under_another_name(serve: Serve):
    clock = FakeClock()
    served = serve(clock=clock, watchdog_timeout=5.0, api_key=("key",))
    assert served.client.get("/ping").status_code == 200
    clock.now_s += 6.0
    assert served.client.get("/ping").status_code == 503


def test_metrics_say_whether_the_server_is_healthy(serve: Serve):
    clock = FakeClock()
    served = serve(clock=clock, watchdog_timeout=5.0)
    assert 'engine:healthy{model_name="org/tiny"} 1\n' in served.client.get("/metrics").text
    clock.now_s += 6.0
    assert 'engine:healthy{model_name="org/tiny"} 0\n' in served.client.get("/metrics").text


def test_version_is_the_build(serve: Serve):
    shown = serve().client.get("/version").json()
    assert (shown["version"], shown["torch"], shown["device"]) == ("0.0.0", "2.0", "cpu")


def test_health_generate_runs_one_token(serve: Serve):
    served = serve()
    reply = served.threads.submit(served.client.get, "/health_generate")
    request = served.engine.next_request()
    served.engine.say(row(request, "x"))
    served.engine.say(row(request, "", total=1, finish=LENGTH))

    assert reply.result(WAIT_S).status_code == 200
    assert request.sampling.max_new_tokens == 1


def test_health_generate_is_let_in_when_the_queue_is_full(serve: Serve):
    served = serve(max_queued_requests=1)
    waiting = served.post_later("/v1/completions", json={"prompt": "hi", "n": 9})
    for _ in range(9):
        served.engine.next_request()
    reply = served.threads.submit(served.client.get, "/health_generate")
    served.engine.say(row(served.engine.next_request(), "x", finish=LENGTH))

    assert reply.result(WAIT_S).status_code == 200
    served.engine.loop.call_soon_threadsafe(served.services.manager.engine_died, "over")  # type: ignore[union-attr]
    assert waiting.result(WAIT_S).status_code == 503


def test_server_info_has_settings_capacity_model_and_report(serve: Serve):
    info = serve(max_queued_requests=5).client.get("/server_info").json()

    assert info["model"] == MODEL
    assert info["capacity"]["max_model_len"] == 256
    assert info["config"]["scheduler"]["max_queued_requests"] == 5
    assert info["model_spec"]["num_layers"] == 2
    assert info["limits"]["max_n"] == 128
    assert info["scheduler"]["num_running_reqs"] == 0
    assert info["scheduler"]["waiting_by_reason"] == {}
    assert info["scheduler"]["stalled"] == ""


def test_server_info_has_no_password_of_a_store(serve: Serve):
    reply = serve(cache={"kv_store": "redis://:s3cret@localhost"}).client.get("/server_info")
    assert reply.json()["config"]["cache"]["kv_store"] == "(set)" and "s3cret" not in reply.text


# Whole, with odd values and by real processes: tests/e2e/test_openapi.py, which is slow.
@pytest.mark.parametrize(
    "route",
    [r for r in ROUTES if r.method == "GET" and r.answer is not None and "{" not in r.path],
    ids=lambda route: route.path,
)
def test_answers_are_of_the_type_that_the_document_says(serve: Serve, route, tmp_path):
    state = {"state_dir": str(tmp_path / "state")} if 507 in route.fails else {}
    reply = serve(say_all("x"), **state).client.get(route.path)
    assert reply.status_code == 200
    msgspec.json.decode(reply.content, type=route.answer)


def test_metrics_count_requests_and_never_show_prompts(serve: Serve):
    served = serve(say_all("secret answer"))
    served.client.post("/v1/completions", json={"prompt": "secret question", "user": "secret user"})
    served.client.post("/v1/completions", json={})
    reply = served.client.get("/metrics")

    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'engine:finished_reqs_total{model_name="org/tiny",reason="stop"} 1\n' in reply.text
    assert 'engine:http_responses_total{status="200"} 1\n' in reply.text
    assert 'engine:http_responses_total{status="400"} 1\n' in reply.text
    assert "secret" not in reply.text


def test_openapi_lists_every_route_and_every_reference_resolves(serve: Serve):
    client = serve().client
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]

    assert {(method.upper(), path) for path, item in document["paths"].items() for method in item} == {
        (route.method, route.path) for route in ROUTES
    }
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)):
        assert name in schemas
    for route in ROUTES:
        if route.request is not None:
            fields = {field.encode_name for field in msgspec.structs.fields(route.request)}
            assert schemas[route.request.__name__]["properties"].keys() == fields


def test_openapi_says_what_is_answered_and_how_it_fails(serve: Serve):
    served, guarded = serve(), serve(api_key=("sk-1",))
    document = served.client.get("/openapi.json").json()
    for route in ROUTES:
        responses = document["paths"][route.path][route.method.lower()]["responses"]
        [media_type, *streams] = responses.pop("200")["content"]
        assert media_type == route.media_type
        assert streams == ([route.stream_type] if route.events else [])
        assert responses.keys() >= {"400", "401", "403", "503"}
        kind = shape_of(route.path).kind.__name__
        for failure in responses.values():
            assert failure["content"]["application/json"]["schema"]["$ref"].endswith(f"/{kind}")

    keys: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]
    assert document["paths"]["/v1/messages"]["post"]["security"] == [{}, *keys]

    assert document["security"] == [{}, {"bearer": []}]
    document = guarded.client.get("/openapi.json", headers={"Authorization": "Bearer sk-1"}).json()
    assert document["security"] == [{"bearer": []}]
    assert [
        path for path, item in document["paths"].items() if item.get("get", {}).get("security") == []
    ] == ["/health", "/ping"]


def test_openapi_has_the_ranges_of_fields_and_forbids_two_prompts(serve: Serve):
    schemas = serve().client.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    native = schemas["NativeSampling"]["properties"]["temperature"]["anyOf"][0]
    assert native == {"type": "number", "minimum": 0, "maximum": 100}
    assert fields["max_tokens"]["anyOf"][0]["minimum"] == 1
    assert fields["seed"]["anyOf"][0]["minimum"] == -(2**63)
    assert schemas["NativeRequest"]["properties"]["sampling_params"]["anyOf"][0]["$ref"].endswith(
        "NativeSampling"
    )
    assert [option["required"] for option in schemas["TokenizeRequest"]["oneOf"]] == [
        ["prompt"],
        ["messages"],
        ["content"],
    ]


def test_the_docs_page_lists_every_route_and_loads_nothing_from_elsewhere(serve: Serve):
    reply = serve().client.get("/docs")

    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert all(route.path in reply.text for route in ROUTES)
    row = re.search(r"<code>priority</code></th>(.*?)</tr>", reply.text)
    assert row is not None
    assert "<td>integer or string</td><td><code>0</code></td>" in row[1]
    assert "Larger is scheduled earlier" in row[1]
    assert not re.search(r"<script|<link|<img|src=|@import|url\(", reply.text)
    assert set(re.findall(r'href="(?!#)([^"]*)"', reply.text)) == {"./", "openapi.json"}


@pytest.mark.parametrize(
    ("path", "device", "tier", "host"),
    [
        ("/flush_cache", True, True, True),
        ("/flush_cache?timeout=30", True, True, True),
        ("/flush_cache?tier=", True, True, True),
        ("/flush_cache?tier=device", True, False, False),
        ("/flush_cache?tier=disk", False, True, False),
        ("/flush_cache?tier=host", False, False, True),
        ("/clear_hicache_storage_backend", False, True, False),
    ],
)
def test_a_flush_may_name_a_tier(serve: Serve, path: str, device: bool, tier: bool, host: bool):
    served = serve(cache={"kv_disk": "folder", "kv_host_size": 1.0})
    assert served.client.post(path).json() == {"flushed_tokens": 32, "kept_tokens": 8, "success": False}
    assert served.engine.flushes == [FlushCache(device, tier, host)]


def test_a_flush_that_the_tier_has_not_done_is_an_error(serve: Serve):
    served = serve(cache={"kv_disk": "folder"})
    served.engine.flush_error = "the store does not answer"
    reply = served.client.post("/flush_cache")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_flushed")
    assert (
        "the disk may have some of them after a crash: the store does not answer; flush again" in reply.text
    )


@pytest.mark.parametrize(
    ("path", "kv_disk", "message"),
    [
        (
            "/flush_cache?tier=host",
            "folder",
            'tier is "host", but this server has device and disk; leave it out',
        ),
        (
            "/flush_cache?tier=disk",
            None,
            'tier is "disk", but this server has device; leave it out to flush all',
        ),
        ("/clear_hicache_storage_backend", None, 'tier is "disk", but this server has device'),
    ],
)
def test_a_flush_of_a_tier_that_is_not_there_is_refused(serve: Serve, path, kv_disk, message):
    served = serve(cache={"kv_disk": kv_disk})
    reply = served.client.post(path)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tier")
    assert message in reply.json()["error"]["message"]
    assert not served.engine.flushes


def test_what_trainers_ask_by_the_names_of_vllm(serve: Serve):
    served = serve()
    assert served.client.get("/get_world_size").json() == {"world_size": 1}
    assert "vllm_config" not in served.client.get("/server_info").json()
    config = served.client.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["parallel_config"]["tensor_parallel_size"] == 1
    assert config["lora_config"] is None and config["weight_transfer_config"] is None
    assert served.client.post("/reset_prefix_cache").json()["success"] is False  # the fake engine keeps some
