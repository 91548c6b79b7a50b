"""`ENGINE_<SETTING>`: every setting, who wins, and variables that are none."""

from __future__ import annotations

import pytest

from engine.cli import main as cli
from engine.cli.options import merge_options
from engine.runtime.config.config_fields import config_fields, setting_names
from engine.runtime.config.config_sources import from_flags, merge
from engine.runtime.config.environment import doubtful_variables, from_environment, variable_of
from engine.runtime.errors import ConfigError

TRANSLATED = {
    "hicache_storage_backend": "file",
    "kv_transfer_config": '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": '
    '"TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]}}',
    "hicache_write_policy": "write_back",
    "hicache_storage_prefetch_policy": "timeout",
    "limit_mm_per_prompt": '{"image": 4}',
    "mm_processor_kwargs": '{"max_pixels": 1048576}',
    "speculative_algorithm": "NGRAM",
    "speculative_config": '{"method": "suffix"}',
    "spec_type": "ngram-simple",
}


def text_for(setting):
    """A value that a setting takes under this name, as text."""
    field = setting.field
    if setting.name in TRANSLATED:
        return TRANSLATED[setting.name]
    if setting.is_switch:
        return "true" if setting.switch is None or True in setting.switch else "false"
    if field.choices:
        return field.choices[-1]
    return {int: "7", float: "0.5", str: "text"}[field.kind]


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_and_alias_has_a_variable_that_means_what_the_flag_means(name):
    setting = setting_names()[name]
    text = text_for(setting)
    layer = from_environment({variable_of(name): text, "HOME": "/"})
    flag = from_flags({name: [text] if setting.field.many else text})
    assert list(layer) == [setting.field.name]
    assert layer[setting.field.name].value == flag[setting.field.name].value
    assert layer[setting.field.name].origin == f"$ENGINE_{name.upper()}"
    assert from_environment({variable_of(name): ""}) == {}


def test_an_option_wins_over_the_variable_the_variable_over_the_file_and_that_over_the_default(
    tmp_path, monkeypatch
):
    path = tmp_path / "engine.yaml"
    path.write_text("port: 1\npage_size: 4\nseed: 7\n")
    monkeypatch.setenv("ENGINE_PORT", "2")
    monkeypatch.setenv("ENGINE_PAGE_SIZE", "8")
    settings = dict.fromkeys(setting_names()) | {"port": "3"}
    for merged in (
        merge_options(settings, config_file=path),
        (monkeypatch.setenv("ENGINE_CONFIG", str(path)), merge_options(settings))[1],
    ):
        assert merged.config.server.port == 3
        assert merged.config.cache.page_size == 8
        assert merged.config.model.seed == 7
        origins = [merged.origins[name] for name in ("port", "page_size", "seed", "host")]
        assert origins == ["--port", "$ENGINE_PAGE_SIZE", f"{path}:3", "default"]


def test_a_command_takes_the_variables_of_its_own_settings():
    given = {"ENGINE_PORT": "2", "ENGINE_PAGE_SIZE": "8"}
    assert set(from_environment(given, names={"page_size"})) == {"page_size"}


def test_print_config_shows_the_source(capsys, monkeypatch, tiny_model):
    monkeypatch.setenv("ENGINE_PAGE_SIZE", "8")
    monkeypatch.setenv("ENGINE_PROT", "1")
    assert cli.run(["serve", str(tiny_model), "--print-config"]) == 0
    captured = capsys.readouterr()
    (line,) = (line for line in captured.out.splitlines() if line.strip().startswith("page_size:"))
    assert line.split() == ["page_size:", "8", "#", "$ENGINE_PAGE_SIZE"]
    assert captured.err == "engine: $ENGINE_PROT is no setting and has no effect; did you mean ENGINE_PORT?\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ENGINE_PORT": "x"}, r"^\$ENGINE_PORT is 'x', but it must be a whole number$"),
        ({"ENGINE_PORT": "70000"}, r"^port is 70000, .* \(set by \$ENGINE_PORT\)$"),
        ({"ENGINE_RADIX_CACHE": "maybe"}, r"^\$ENGINE_RADIX_CACHE is 'maybe', but it must be true or false"),
        ({"ENGINE_DTYPE": "floar32"}, r"did you mean 'float32'\?$"),
        ({"ENGINE_HOST": "caf\udce9"}, r"^\$ENGINE_HOST is not UTF-8 text: byte 0xe9 at position 3$"),
        (
            {"ENGINE_PAGE_SIZE": "4", "ENGINE_BLOCK_SIZE": "4"},
            r"are two names of one setting; give one of them$",
        ),
    ],
)
def test_a_wrong_value_names_its_variable(given, message):
    with pytest.raises(ConfigError, match=message):
        merge(from_environment(given))


def test_several_values_are_divided_by_commas_but_a_key_is_not():
    layer = from_environment({"ENGINE_CORS_ORIGIN": "https://a.org, https://b.org,", "ENGINE_API_KEY": "a,b"})
    assert layer["cors_origin"].value == ("https://a.org", "https://b.org")
    assert layer["api_key"].value == ("a,b",)


def test_what_kubernetes_sets_for_a_service_named_engine_is_no_setting():
    given = {
        "ENGINE_PORT": "tcp://10.0.0.1:8000",
        "ENGINE_SERVICE_HOST": "10.0.0.1",
        "ENGINE_SERVICE_PORT": "8000",
        "ENGINE_SERVICE_PORT_HTTP": "8000",
        "ENGINE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ENGINE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert from_environment(given) == {}
    (sentence,) = doubtful_variables(given)
    assert sentence.startswith("$ENGINE_PORT is 'tcp://10.0.0.1:8000', which Kubernetes sets")


def test_unknown_variables_have_a_sentence_each():
    given = {
        "ENGINE_MAX_MODEL_LENGTH": "1",
        "ENGINE_ZQ": "1",
        "engine_port": "1",
        "PORT": "1",
        "ENGINE_PORT": "1",
    }
    assert list(doubtful_variables(given)) == [
        "$ENGINE_MAX_MODEL_LENGTH is no setting and has no effect; did you mean ENGINE_MAX_MODEL_LEN?",
        "$ENGINE_ZQ is no setting and has no effect; docs/environment.md lists the variables",
    ]
    assert list(doubtful_variables({"ENGINE_CACHE_DIR": "/x", "ENGINE_CONFIG": "/y"})) == []
    assert set(config_fields()) <= set(setting_names())
