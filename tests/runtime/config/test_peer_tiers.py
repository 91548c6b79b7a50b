"""SGLang's and vLLM's settings for tiers of the prefix cache: the same ones of ours, or an error with the name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.config.config_fields import setting_names
from engine.runtime.config.config_sources import from_arguments, from_flags, from_yaml_file, merge
from engine.runtime.errors import ConfigError

FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
FS = {"type": "fs", "root_dir": "/d/kv", "n_read_threads": 32, "max_disk_gib": 20}


def offloading(*tiers: dict[str, Any], **extra: Any) -> dict[str, Any]:
    extra = {"spec_name": "TieringOffloadingSpec", "block_size": 16, "secondary_tiers": [*tiers], **extra}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hicache_write_policy", "write_through_selective", {"kv_write": "selective"}),
        ("hicache_write_policy", "write_through", {"kv_write": "through"}),
        ("hicache_write_policy", "write_back", {"kv_write": "evicted"}),
        ("hicache_storage_prefetch_policy", "best_effort", {"kv_fetch": "best_effort"}),
        ("hicache_storage_prefetch_policy", "wait_complete", {"kv_fetch": "wait"}),
        ("hicache_storage_prefetch_policy", "timeout", {"kv_fetch": "timeout"}),
        ("hicache_storage_backend", "file", {"kv_disk": "/sglang/kv"}),
        ("hicache_storage_backend", "mooncake", {"kv_store": "mooncake://127.0.0.1:50051"}),
        ("kv_transfer_config", json.dumps(offloading(FS)), {"kv_disk": "/d/kv", "kv_disk_size": 20.0}),
        (
            "kv_transfer_config",
            json.dumps(offloading(FS, cpu_bytes_to_use=3 << 30)),
            {"kv_disk": "/d/kv", "kv_disk_size": 20.0, "kv_host_size": 3.0},
        ),
        (
            "kv_transfer_config",
            '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}}',
            {"kv_host_size": 1.0},
        ),
    ],
)
def test_what_means_the_same_works(monkeypatch, tmp_path, name, value, expected):
    monkeypatch.setenv(FOLDER, "/sglang/kv")
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:50051")
    path = tmp_path / "engine.yaml"
    path.write_text(f"{name}: {value!r}\n")
    for layer in (from_flags({name: value}), from_arguments({name: value}), from_yaml_file(path)):
        assert {key: each.value for key, each in layer.items()} == expected
        if "kv_store" not in expected:
            layer = {**from_arguments({"kv_disk": "x"}), **layer}
        cache = merge(layer).config.cache
        assert {key: getattr(cache, key) for key in expected} == expected


def test_all_of_them_are_in_the_test_above():
    [mark] = [mark for mark in test_what_means_the_same_works.pytestmark if mark.name == "parametrize"]
    assert {case[0] for case in mark.args[1]} == {
        name for name, setting in setting_names().items() if setting.alias and setting.alias.translate
    } - {
        "limit_mm_per_prompt",
        "mm_processor_kwargs",
        "spec_type",
        "speculative_algorithm",
        "speculative_config",
    }


def test_arguments_may_be_objects():
    layer = from_arguments({"kv_transfer_config": offloading(FS)})
    assert layer["kv_disk"].value == "/d/kv"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "hicache_write_policy",
            "write_around",
            "--hicache-write-policy is 'write_around', but it must be one of",
        ),
        ("hicache_storage_prefetch_policy", "never", "must be one of best_effort, wait_complete, timeout"),
        (
            "hicache_storage_backend",
            "nixl",
            "--hicache-storage-backend is 'nixl', but it must be file, or mooncake",
        ),
        ("hicache_storage_backend", "mooncake", "with its master in MOONCAKE_MASTER"),
        ("kv_transfer_config", "{", "is no JSON"),
        ("kv_transfer_config", "[]", "must be an object"),
        (
            "kv_transfer_config",
            {"kv_connector": "NixlConnector"},
            "the connector 'NixlConnector', and Offloading",
        ),
        ("kv_transfer_config", {"kv_connector": "LMCacheConnectorV1"}, "set disaggregation_mode .* kv_store"),
        ("kv_transfer_config", offloading(), "names no tier"),
        ("kv_transfer_config", offloading(FS, FS), "has several secondary tiers"),
        ("kv_transfer_config", offloading({"type": "obj"}), "a tier of type 'obj'"),
        ("kv_transfer_config", offloading({**FS, "shared": True}), "has shared, without a meaning"),
        ("kv_transfer_config", offloading(FS, eviction_policy="arc"), "has eviction_policy"),
        ("kv_transfer_config", offloading(FS, spec_name="Other"), "the spec 'Other'"),
        ("kv_transfer_config", {**offloading(FS), "kv_role": "kv_producer"}, "the role 'kv_producer'"),
        ("kv_transfer_config", {**offloading(FS), "kv_connector_extra_config": 5}, "that is no object"),
        ("kv_transfer_config", offloading({"type": "fs"}), "without root_dir"),
    ],
)
def test_what_differs_is_refused_by_name(monkeypatch, name, value, message):
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(ConfigError, match=message):
        from_flags({name: value if isinstance(value, str) else json.dumps(value)})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hicache_write_policy", ["write_back"], "is \\['write_back'\\], but it must be one of"),
        ("hicache_storage_prefetch_policy", {}, "is {}, but it must be one of"),
        ("kv_transfer_config", "[" * 100_000, "is no JSON"),
        ("kv_transfer_config", {"kv_connector": "OffloadingConnector", 1: 2, "x": 3}, "has 1, x, without"),
    ],
)
def test_arguments_of_other_types_are_refused_by_name(name, value, message):
    with pytest.raises(ConfigError, match=message):
        from_arguments({name: value})


def test_two_names_of_one_setting_are_refused():
    with pytest.raises(ConfigError, match="two names of one setting"):
        from_flags({"kv_write": "through", "hicache_write_policy": "write_through"})
