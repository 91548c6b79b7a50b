"""What `--print-config` prints can be read back, says every origin, and keeps secrets."""

from __future__ import annotations

import dataclasses

import yaml

from engine.cli.print_config import render_config
from engine.runtime.config.config_fields import config_fields
from engine.runtime.config.config_sources import from_flags, from_yaml_file, merge
from engine.runtime.sampling_defaults import SamplingDefaults


def render(notes=None, effective=None, **flags):
    merged = merge(from_flags(flags))
    return render_config(effective or merged.config, merged, notes or {})


def test_it_is_a_config_file_with_the_same_values(tmp_path):
    merged = merge(
        from_flags(
            {"port": "1", "mem_fraction": "1", "host": "::1", "served_model_name": "no", "strict": True}
        )
    )
    path = tmp_path / "engine.yaml"
    path.write_text(render_config(merged.config, merged, {}))
    assert merge(from_yaml_file(path)).config == merged.config


def test_every_setting_is_there():
    document = yaml.safe_load(render())
    assert {name for group in document.values() for name in group} == set(config_fields())


def test_origins_and_reasons():
    merged = merge(from_flags({"dtype": "auto", "page_size": "8"}))
    config = dataclasses.replace(
        merged.config, model=dataclasses.replace(merged.config.model, dtype="float32", num_threads=3)
    )
    text = render_config(
        config, merged, {"dtype": "no bf16", "num_threads": "3 cores", "page_size": "rounded"}
    )
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["dtype"].split() == ["dtype:", "float32", "#", "auto", "by", "--dtype:", "no", "bf16"]
    assert lines["num_threads"].endswith("# auto: 3 cores")
    assert lines["page_size"].endswith("# --page-size, rounded")
    assert lines["port"].endswith("# default")


def test_the_api_key_and_the_password_of_a_store_are_never_shown():
    text = render(api_key="s3cret", kv_store="redis://:s3cret@localhost")
    assert "s3cret" not in text
    assert "# api_key is set and not shown (--api-key)" in text
    assert "# kv_store is set and not shown (--kv-store)" in text


def test_what_a_preset_sets_has_the_preset_as_its_origin(tmp_path):
    merged = merge(from_flags({"preset": "latency", "max_num_seqs": "3"}))
    text = render_config(merged.config, merged, {})
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["preset"].split() == ["preset:", "latency", "#", "--preset"]
    assert lines["phases"].endswith("# preset latency")
    assert lines["max_running_requests"].endswith("# --max-num-seqs")
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    assert merge(from_yaml_file(path)).config == merged.config


def test_each_sampling_default_is_shown_with_its_source():
    merged = merge()
    text = render_config(
        merged.config, merged, {}, SamplingDefaults(top_k=20, source="generation_config.json")
    )
    lines = {line.split(":")[0].strip("# "): line for line in text.splitlines()}
    assert lines["top_k"].split()[2:] == ["20", "#", "generation_config.json"]
    assert lines["temperature"].split()[2:] == ["1.0", "#", "OpenAI's", "default"]
    assert yaml.safe_load(text)["model"].keys() >= {"sampling_defaults", "seed"}
