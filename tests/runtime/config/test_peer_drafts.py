"""Settings of SGLang, vLLM and llama.cpp for drafts: the same ones of ours, or an error with the name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.config.config_fields import setting_names
from engine.runtime.config.config_sources import from_arguments, from_flags, from_yaml_file, merge
from engine.runtime.errors import ConfigError

CONFIG: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
WORKING: list[tuple[str, str, dict[str, Any]]] = [
    ("speculative_algorithm", "NGRAM", {"speculative": "ngram"}),
    ("speculative_algorithm", "SUFFIX", {"speculative": "suffix"}),
    ("speculative_algorithm", "STANDALONE", {"speculative": "draft"}),
    ("speculative_algorithm", "EAGLE3", {"speculative": "eagle3"}),
    ("speculative_algorithm", "NEXTN", {"speculative": "mtp"}),
    ("spec_type", "none", {"speculative": "off"}),
    ("spec_type", "ngram-simple", {"speculative": "ngram"}),
    ("spec_type", "ngram-mod", {"speculative": "suffix"}),
    ("spec_type", "draft-simple", {"speculative": "draft"}),
    ("spec_type", "draft-mtp", {"speculative": "mtp"}),
    ("speculative_config", json.dumps(CONFIG), {"speculative": "ngram", "speculative_num_draft_tokens": 5}),
    ("speculative_config", '{"model": "[ngram]"}', {"speculative": "ngram"}),
    (
        "speculative_config",
        '{"method": "suffix", "suffix_decoding_max_cached_requests": 10000, "suffix_decoding_min_token_prob": 0.1}',
        {"speculative": "suffix"},
    ),
    (
        "speculative_config",
        '{"method": "suffix", "suffix_decoding_max_cached_requests": 0}',
        {"speculative": "ngram"},
    ),
    (
        "speculative_config",
        '{"method": "eagle3", "model": "/m/head", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}',
        {"speculative": "eagle3", "speculative_model": "/m/head", "speculative_num_draft_tokens": 3},
    ),
    (
        "speculative_config",
        '{"method": "draft_model", "model": "org/small"}',
        {"speculative": "draft", "speculative_model": "org/small"},
    ),
    (
        "speculative_config",
        '{"model": "org/small"}',
        {"speculative": "auto", "speculative_model": "org/small"},
    ),
    ("speculative_config", '{"method": "qwen3_next_mtp"}', {"speculative": "mtp"}),
    ("speculative_draft_model_path", "/m/head", {"speculative_model": "/m/head"}),
    ("model_draft", "small.gguf", {"speculative_model": "small.gguf"}),
]


@pytest.mark.parametrize(("name", "value", "expected"), WORKING)
def test_what_means_the_same_works(tmp_path: Path, name: str, value: str, expected: dict[str, Any]) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(f"{name}: {value!r}\n")
    for layer in (from_flags({name: value}), from_arguments({name: value}), from_yaml_file(path)):
        assert {key: each.value for key, each in layer.items()} == expected
    if expected.get("speculative") in ("draft", "eagle3"):
        layer = {**from_arguments({"speculative_model": "x"}), **layer}
    if "speculative" not in expected:
        layer = {**from_arguments({"speculative": "auto"}), **layer}
    scheduler = merge(layer).config.scheduler
    assert {key: getattr(scheduler, key) for key in expected} == expected


def test_all_of_them_are_in_the_test_above() -> None:
    tested = {name for name, _, _ in WORKING}
    names = {
        name
        for name, setting in setting_names().items()
        if setting.field.name.startswith("speculative") and setting.alias
    }
    assert names - tested == {"num_speculative_tokens"}


def test_an_object_of_python_works() -> None:
    layer = from_arguments({"speculative_config": CONFIG})
    assert {key: each.value for key, each in layer.items()} == {
        "speculative": "ngram",
        "speculative_num_draft_tokens": 5,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "speculative_algorithm",
            "EAGLE",
            "is 'EAGLE', and heads of EAGLE-1 and 2 are not supported; use --speculative",
        ),
        ("speculative_algorithm", "DFLASH", "DFlash is not supported"),
        ("speculative_algorithm", "FAST", "is 'FAST', but it must be one of NGRAM, SUFFIX"),
        ("spec_type", "draft,ngram-mod", "is 'draft,ngram-mod', but it must be one of none, ngram-simple"),
        ("speculative_config", "{", "is no JSON"),
        ("speculative_config", "3", "must be an object of JSON"),
        ("speculative_config", "{}", "has neither method nor model"),
        (
            "speculative_config",
            '{"method": "medusa"}',
            "is 'medusa', and heads that draft several tokens at once",
        ),
        ("speculative_config", '{"method": 3}', "is 3, but it must be one of ngram"),
        (
            "speculative_config",
            '{"method": "ngram", "rejection_sample_method": "strict"}',
            "has rejection_sample_method, without a meaning",
        ),
    ],
)
def test_what_differs_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_flags({name: value})
