"""What routers ask of their workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer as CoreTokenizer

from engine.models.source import ModelSource
from engine.runtime.scheduler_report import SchedulerReport
from engine.tokenizer_manager.http.app import App
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import MODEL, TOKENIZER, FakeEngine
from tests.tokenizer_manager.http.calling import call


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_tokenizer_of_a_gguf_file_is_in_a_local_folder(serve: Serve, monkeypatch, tmp_path, path):
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    client = serve().client

    info = client.get(path).json()

    assert (info["model_path"], info["served_model_name"]) == ("/models/tiny.gguf", MODEL)
    assert (info["is_generation"], info["max_context_length"]) == (True, 256)
    folder = tmp_path / "tokenizers"
    assert info["tokenizer_path"] == str(next(folder.iterdir()))
    core = CoreTokenizer.from_file(f"{info['tokenizer_path']}/tokenizer.json")
    assert core.encode("hello, world").ids == TOKENIZER.encode("hello, world")
    assert client.get(path).json() == info
    assert len(list(folder.iterdir())) == 1


def test_without_a_cache_folder_there_is_no_tokenizer_path(serve: Serve, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "file"))

    assert serve().client.get("/model_info").json()["tokenizer_path"] == ""


def test_loads_are_those_of_the_latest_report(serve: Serve):
    served = serve()
    assert served.client.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 0
    served.engine.tell(
        SchedulerReport.from_flat(
            {
                "sent_s": 1000.0,
                "num_running_reqs": 3,
                "num_queue_reqs": 2,
                "kv_used_tokens": 64,
                "prompt_tokens_total": 200,
                "cached_tokens_total": 50,
                "generation_tokens_total": 30,
                "step_s_total": 1.5,
                "num_queue_tokens": 700,
            }
        )
    )

    body = served.client.get("/v1/loads").json()

    assert datetime.fromisoformat(body["timestamp"]).tzinfo is UTC
    (load,) = body["loads"]
    total = load["max_total_num_tokens"]
    assert (body["dp_rank_count"], load["dp_rank"]) == (1, 0)
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (3, 2, 5)
    assert load["num_waiting_uncached_tokens"] == 700
    assert (load["num_used_tokens"], load["token_usage"]) == (64, round(64 / total, 4))
    assert (load["cache_hit_rate"], load["gen_throughput"]) == (0.25, 20.0)
    assert served.client.get("/loads").json()["loads"] == [load]
    assert served.client.get("/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 64}
    ]


def test_the_classes_of_the_model_are_those_of_its_config_json(serve: Serve, tmp_path: Path):
    served = serve()
    assert served.client.get("/model_info").json()["architectures"] == []
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    services = dataclasses.replace(served.services, source=ModelSource("hf", str(tmp_path), MODEL))

    for path in ("/model_info", "/get_model_info"):
        reply = asyncio.run(call(App(services), path, method="GET"))
        assert json.loads(reply.body)["architectures"] == ["LlamaForCausalLM"]


def test_internal_states_are_the_loads_and_reports_of_the_replicas(serve: Serve):
    served = serve()
    (state,) = served.client.get("/server_info").json()["internal_states"]
    assert state["num_running_reqs"] == 0
    served.engine.tell(
        SchedulerReport.from_flat(
            {"sent_s": 1.0, "num_running_reqs": 3, "generation_tokens_total": 30, "step_s_total": 1.5}
        )
    )
    for path in ("/server_info", "/get_server_info"):
        (state,) = served.client.get(path).json()["internal_states"]
        assert (state["num_running_reqs"], state["last_gen_throughput"]) == (3, 20.0)
        assert state["avg_spec_accept_length"] == 1.0


def test_server_info_has_what_routers_look_for(serve: Serve):
    client = serve().client
    info = client.get("/get_server_info").json()

    assert info == client.get("/server_info").json()
    found = {name: info[name] for name in ("served_model_name", "tp_size", "dp_size", "disaggregation_mode")}
    assert found == {
        "served_model_name": MODEL,
        "tp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": "null",
    }
    assert info["max_total_num_tokens"] == info["capacity"]["num_pages"] * info["capacity"]["page_size"]
    json.dumps(info)


@pytest.mark.parametrize(
    ("mode", "num_others", "owner"),
    [
        ("null", 0, "engine"),
        ("null", 1, "sglang"),
        ("both", 1, "engine"),
        ("prefill", 0, "sglang"),
        ("decode", 0, "sglang"),
    ],
)
def test_smg_is_told_that_it_may_name_rooms_and_replicas(
    serve: Serve, mode: str, num_others: int, owner: str
):
    others = [FakeEngine() for _ in range(num_others)]
    client = serve(scheduler={"disaggregation_mode": mode}, others=others).client
    (model,) = client.get("/v1/models").json()["data"]
    assert model["owned_by"] == owner


def test_the_cache_can_be_flushed_as_older_routers_do(serve: Serve):
    client = serve().client

    assert client.get("/flush_cache").json() == client.post("/flush_cache").json()
