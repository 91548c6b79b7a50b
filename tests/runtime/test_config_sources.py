"""Layers of settings: who wins, where each value came from, and what a wrong one is told."""

from __future__ import annotations

import pytest

from engine.runtime.config import EngineConfig
from engine.runtime.config_fields import config_fields
from engine.runtime.config_sources import from_arguments, from_environment, from_flags, from_yaml_file, merge
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
    assert merged.config.server.api_key == "from-env"
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
        ("page_size: 1.5\n", ":1: page_size is 1.5, but it must be a whole number"),
        ("page_size: true\n", ":1: page_size is True, but it must be a whole number"),
        ("page_size: [1]\n", ":1: page_size is a list or a mapping"),
        ("page_size:\n", ":1: page_size is None, but it must be a whole number"),
        ("max_model_len: some\n", "must be a whole number or 'auto'"),
        ("served_model_name: 12\n", ":1: served_model_name is 12, but it must be text; put it in quotes"),
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
    assert merge(from_yaml_file(yaml_file("api_key: null\n"))).config.server.api_key is None


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
