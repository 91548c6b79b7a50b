"""Layers of settings: who wins, where each value came from, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runtime.config.config_fields import config_fields, setting_names
from engine.runtime.config.config_sources import (
    from_arguments,
    from_flags,
    from_yaml_file,
    merge,
)
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.config.environment import from_environment
from engine.runtime.errors import ConfigError


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "engine.yaml"
        path.write_text(text)
        return path

    return write


def test_no_layers_is_the_default_config():
    merged = merge()
    assert merged.config == EngineConfig()
    assert set(merged.origins.values()) == {"default"}
    assert set(merged.origins) == set(config_fields())


def test_later_layers_win_and_origins_name_the_place(yaml_file):
    path = yaml_file("port: 1\npage-size: 4\n\napi_key: from-file\nseed: 7\n")
    merged = merge(
        from_yaml_file(path),
        from_environment({"ENGINE_API_KEY": "from-env", "PORT": "9"}),
        from_flags({"port": "2", "host": None}),
    )
    assert merged.config.server.port == 2
    assert merged.config.server.api_key == ("from-env",)
    assert merged.config.cache.page_size == 4
    assert merged.config.model.seed == 7
    assert merged.origins["port"] == "--port"
    assert merged.origins["api_key"] == "$ENGINE_API_KEY"
    assert merged.origins["page_size"] == f"{path}:2"
    assert merged.origins["seed"] == f"{path}:5"
    assert merged.origins["host"] == "default"


def test_yaml_groups_and_flat_keys_mean_the_same(yaml_file):
    flat = merge(from_yaml_file(yaml_file("model: m\npage_size: 8\nradix_cache: no\nmem_fraction: 1\n")))
    grouped = merge(
        from_yaml_file(
            yaml_file("model:\n  model: m\ncache:\n  page-size: 8\n  radix_cache: off\nmem_fraction: 1.0\n")
        )
    )
    assert flat.config == grouped.config
    assert flat.config.cache.radix_cache is False
    assert flat.config.model.model == "m"


def test_every_flag_text_reaches_its_type():
    layer = from_flags(
        {"page_size": "1_024", "mem_fraction": "0.5", "max_model_len": "auto", "dtype": "float32"}
    )
    config = merge(layer).config
    assert (config.cache.page_size, config.cache.mem_fraction) == (1024, 0.5)
    assert (config.model.max_model_len, config.model.dtype) == ("auto", "float32")


@pytest.mark.parametrize(("value", "means"), [("auto", "auto"), (True, True), ("off", False), (None, "auto")])
def test_a_truth_value_may_be_left_to_the_machine(value, means):
    arguments = {} if value is None else {"overlap": value}
    assert merge(from_arguments(arguments)).config.scheduler.overlap == means


def test_what_is_neither_true_nor_false_nor_auto_is_refused():
    with pytest.raises(ConfigError, match="overlap is 'maybe', but it must be true or false or 'auto'"):
        from_arguments({"overlap": "maybe"})


def test_an_empty_environment_variable_counts_as_not_set():
    assert from_environment({"ENGINE_API_KEY": ""}) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\nmax_runing_requests: 3\n",
            ":2: unknown setting 'max_runing_requests'; did you mean 'max_running_requests'?",
        ),
        ("page_size: big\n", ":1: page_size is 'big', but it must be a whole number"),
        ("page_size: 1.5\n", ":1: page_size is '1.5', but it must be a whole number"),
        ("page_size: true\n", ":1: page_size is True, but it must be a whole number"),
        ("page_size: [1]\n", ":1: page_size is a list or a mapping"),
        ("page_size:\n", ":1: page_size is None, but it must be a whole number"),
        ("max_model_len: some\n", "must be a whole number or 'auto'"),
        ("served_model_name: yes\n", ":1: served_model_name is yes, but it must be text; put it in quotes"),
        ("dtype: floar32\n", "must be one of auto, bfloat16, float32; did you mean 'float32'?"),
        ("port: 1\nport: 2\n", ":2: port is set a second time (first at "),
        ("server:\n  page_size: 1\n", ":2: page_size belongs to the group 'cache', not to 'server'"),
        ("port: 1\n  x: 2\n", "not valid YAML"),
        ("- a\n", ":1: must hold settings as `name: value` lines"),
        ("port: !!python/object/apply:os.getpid []\n", ":1: port is a list or a mapping"),
        ("host: !!python/name:os.getpid ''\n", ":1: host cannot be read"),
        ("!!python/name:os.getpid '': 1\n", "unknown setting"),
    ],
)
def test_a_wrong_file_is_one_line_with_file_and_line(yaml_file, text, message):
    path = yaml_file(text)
    with pytest.raises(ConfigError) as raised:
        merge(from_yaml_file(path))
    assert str(path) in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_empty_file_sets_nothing(yaml_file):
    assert from_yaml_file(yaml_file("# nothing here\n")) == {}


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration file .*missing.yaml: No such file"):
        from_yaml_file(tmp_path / "missing.yaml")


def test_null_resets_an_optional_setting(yaml_file):
    assert merge(from_yaml_file(yaml_file("api_key: null\n"))).config.server.api_key == ()


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_a_key_that_is_no_text_is_refused_without_showing_it(yaml_file, name):
    with pytest.raises(ConfigError, match=f"{name} is no text, but it must be text; put it in quotes"):
        from_yaml_file(yaml_file(f"{name}: no\n"))


def test_a_value_out_of_range_names_its_origin(yaml_file):
    path = yaml_file("host: x\nport: 70000\n")
    with pytest.raises(
        ConfigError, match=r"port is 70000, but it must lie in \[0, 65535\] \(set by .*engine.yaml:2\)"
    ):
        merge(from_yaml_file(path))
    with pytest.raises(ConfigError, match=r"mem_fraction is nan, .* \(set by --mem-fraction\)"):
        merge(from_flags({"mem_fraction": "nan"}))


def test_a_flag_that_does_not_parse_is_named_as_a_flag():
    with pytest.raises(ConfigError, match="^--page-size is 'x', but it must be a whole number$"):
        from_flags({"page_size": "x"})


def test_python_arguments_are_checked_like_all_others():
    assert merge(from_arguments({"mem_fraction": 1})).origins["mem_fraction"] == "argument mem_fraction"
    with pytest.raises(ConfigError, match="unknown setting 'max_model_length'; did you mean 'max_model_len'"):
        from_arguments({"max_model_length": 5})
    with pytest.raises(ConfigError, match="page_size is 2.5, but it must be a whole number"):
        from_arguments({"page_size": 2.5})


@pytest.mark.parametrize(
    ("key", "value", "setting", "means"),
    [
        ("max_num_seqs", 5, "max_running_requests", 5),
        ("parallel", 5, "max_running_requests", 5),
        ("max-num-seqs", "auto", "max_running_requests", "auto"),
        ("block_size", 32, "page_size", 32),
        ("context_length", 512, "max_model_len", 512),
        ("ctx_size", 512, "max_model_len", 512),
        ("enable_prefix_caching", False, "radix_cache", False),
        ("disable_radix_cache", True, "radix_cache", False),
        ("async_scheduling", True, "overlap", True),
        ("disable_overlap_schedule", True, "overlap", False),
        ("radix_eviction_policy", "lfu", "eviction_policy", "lfu"),
        ("enable_mixed_chunk", True, "phases", "mixed"),
        ("enable_mixed_chunk", False, "phases", "prefill-first"),
        ("enable_chunked_prefill", True, "chunked_prefill_size", "auto"),
        ("enable_chunked_prefill", False, "chunked_prefill_size", -1),
        ("num_lookahead_slots", 2, "num_lookahead_tokens", 2),
        ("priority_scheduling_preemption_threshold", 3, "priority_preemption_threshold", 3),
        ("cuda_graph", False, "record_steps", False),
        ("cuda_graph_max_bs", 3, "max_recorded_bs", 3),
        ("disable_cuda_graph", True, "record_steps", False),
        ("enforce_eager", True, "record_steps", False),
        ("tensor_parallel_size", 2, "tp", 2),
        ("pipeline_parallel_size", 2, "pp", 2),
        ("pp_size", 2, "pp", 2),
        ("tp_size", 2, "tp", 2),
        ("data_parallel_size", 2, "dp", 2),
        ("dp_size", 2, "dp", 2),
        ("disaggregation_bootstrap_port", 9000, "bootstrap_port", 9000),
        ("disaggregation_transfer_backend", "nixl", "transfer_backend", "nixl"),
        ("num_speculative_tokens", 4, "speculative_num_draft_tokens", 4),
        ("model_path", "m", "model", "m"),
        ("alias", "m", "served_model_name", "m"),
        ("threads", 2, "num_threads", 2),
        ("chat_template_file", "t", "chat_template", "t"),
        ("random_seed", 3, "seed", 3),
        ("ssl_cert_file", "c", "ssl_certfile", "c"),
        ("ssl_key_file", "k", "ssl_keyfile", "k"),
        ("shutdown_timeout", 2.5, "drain_timeout", 2.5),
        ("enable_log_requests", True, "log_requests", True),
        ("disable_log_requests", True, "log_requests", False),
        ("crash_dump_folder", "f", "crash_dir", "f"),
        ("otlp_traces_endpoint", "http://h:4318", "otlp_endpoint", "http://h:4318"),
        ("lora_paths", "a=x", "lora", ("a=x",)),
        ("lora_modules", "a=x", "lora", ("a=x",)),
        ("max_cpu_loras", 9, "max_loaded_loras", 9),
        ("max_loras", 3, "max_loras_per_batch", 3),
        ("kv_events_config", "tcp://*:5557", "kv_events", "tcp://*:5557"),
        ("kv_offloading_size", 2.5, "kv_host_size", 2.5),
        ("decode_burst_ms", 25.0, "multi_step_ms", 25.0),
        ("speculative_draft_model_path", "/m/head", "speculative_model", "/m/head"),
        ("model_draft", "small.gguf", "speculative_model", "small.gguf"),
        ("mm_processor_cache_gb", 2.5, "mm_cache_gb", 2.5),
    ],
)
def test_names_of_other_engines_are_taken_everywhere(yaml_file, key, value, setting, means):
    written = str(value).lower() if isinstance(value, bool) else value
    path = yaml_file(f"{key}: {written}\n")
    layers = [from_arguments({key: value}), from_yaml_file(path)]
    name = key.replace("-", "_")
    layers.append(from_flags({name: value if isinstance(value, bool) else str(value)}))

    for layer in layers:
        assert list(layer) == [setting]
        assert layer[setting].value == means
    origins = [layer[setting].origin for layer in layers]
    assert origins == [f"argument {name}", f"{path}:1", "--" + name.replace("_", "-")]


def test_every_alias_is_in_the_test_above():
    aliases = {
        name
        for name, setting in setting_names().items()
        if setting.alias is not None and setting.alias.translate is None  # these are in test_peer_*.py
    }
    [mark] = [
        m for m in test_names_of_other_engines_are_taken_everywhere.pytestmark if m.name == "parametrize"
    ]
    assert aliases == {case[0].replace("-", "_") for case in mark.args[1]}


def test_one_setting_under_two_names_is_refused_with_both(yaml_file):
    with pytest.raises(
        ConfigError, match="^--page-size and --block-size are two names of one setting; give one of them$"
    ):
        from_flags({"page_size": "4", "block_size": "4"})
    with pytest.raises(ConfigError, match="argument max_num_seqs and argument max_running_requests are two"):
        from_arguments({"max_num_seqs": 4, "max_running_requests": 4})
    with pytest.raises(
        ConfigError, match="disable_radix_cache, another name of radix_cache, is set a second"
    ):
        from_yaml_file(yaml_file("radix_cache: false\ndisable_radix_cache: true\n"))


def test_a_later_layer_may_use_another_name(yaml_file):
    merged = merge(from_yaml_file(yaml_file("max_num_seqs: 2\n")), from_flags({"max_running_requests": "3"}))
    assert merged.config.scheduler.max_running_requests == 3


def test_errors_call_a_setting_as_the_user_did(yaml_file):
    with pytest.raises(
        ConfigError, match="^--max-num-seqs is 'many', but it must be a whole number or 'auto'"
    ):
        from_flags({"max_num_seqs": "many"})
    with pytest.raises(ConfigError, match=r"max_running_requests is 0, .* \(set by --max-num-seqs\)"):
        merge(from_flags({"max_num_seqs": "0"}))
    with pytest.raises(ConfigError, match="enable_mixed_chunk is 3, but it must be true or false"):
        from_arguments({"enable_mixed_chunk": 3})
    with pytest.raises(
        ConfigError, match="disable_radix_cache is False, but it can only be True; set radix_c"
    ):
        from_arguments({"disable_radix_cache": False})
    with pytest.raises(ConfigError, match="belongs to the group 'scheduler', not to 'cache'"):
        from_yaml_file(yaml_file("cache:\n  max_num_seqs: 3\n"))


@pytest.mark.parametrize("name", ["api_key", "api-key", "api_key_file", "admin_api_key", "ssl_certfile"])
@pytest.mark.parametrize("value", ["", " ", ' ""', "  # later"])
def test_a_guard_without_a_value_is_an_error_and_not_an_open_door(tmp_path, name, value):
    path = tmp_path / "engine.yaml"
    path.write_text(f"port: 1\n{name}:{value}\n")
    with pytest.raises(
        ConfigError, match=rf"engine.yaml:2: {name} has no value, and without one .*; write one, or"
    ):
        from_yaml_file(path)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_len", "max_model_len"),
        ("model_len", "max_model_len"),
        ("running_requests", "max_running_requests"),
        ("prefill_size", "chunked_prefill_size"),
        ("pag_size", "page_size"),
    ],
)
def test_a_part_of_a_name_suggests_the_name(name, near):
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'; did you mean '{near}'"):
        from_arguments({name: 1})


def test_a_path_object_is_text():
    assert merge(from_arguments({"model": Path("folder")})).config.model.model == "folder"
    assert merge(from_arguments({"allowed_host": [Path("a")]})).config.server.allowed_host == ("a",)
    with pytest.raises(ConfigError, match="dtype is 'x', but it must be one of"):
        from_arguments({"dtype": Path("x")})
    with pytest.raises(ConfigError, match=r"model is \['a'\], but it must be text$"):
        from_arguments({"model": ["a"]})
