"""Sampling defaults from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.hf.hf_sampling import read_hf_sampling
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [151645]}


def read(folder: Path, config: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return read_hf_sampling(folder)


def test_the_files_values_and_their_source(tmp_path: Path):
    assert read(tmp_path, QWEN3) == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, source="generation_config.json"
    )


def test_no_file_and_a_file_without_values_are_openais_defaults(tmp_path: Path):
    assert read_hf_sampling(tmp_path) == OPENAI_DEFAULTS
    assert read(tmp_path, {"eos_token_id": 2, "temperature": None, "max_length": 20}) == OPENAI_DEFAULTS


@pytest.mark.parametrize("config", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}])
def test_do_sample_false_is_greedy(tmp_path: Path, config: dict[str, Any]):
    assert read(tmp_path, config | {"do_sample": False}).params().greedy
    assert not read(tmp_path, config | {"do_sample": True}).params().greedy
    assert not read(tmp_path, config).params().greedy  # unlike transformers, whose own default is greedy


def test_what_is_not_taken_is_named(tmp_path: Path):
    config = {
        "temperature": 0.6,
        "max_new_tokens": 2048,
        "num_beams": 4,
        "typical_p": 1.0,
        "suppress_tokens": [],
    }
    assert read(tmp_path, config).not_taken == ("max_new_tokens", "num_beams")


def test_a_file_that_is_no_object_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="expected an object"):
        read(tmp_path, [1])
