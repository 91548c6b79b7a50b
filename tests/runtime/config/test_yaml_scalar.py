"""Values that YAML 1.1 would change: refused for numbers, kept as they are for texts."""

from __future__ import annotations

import pytest

from engine.runtime.config.config_fields import config_fields
from engine.runtime.config.config_sources import from_yaml_file
from engine.runtime.errors import ConfigError

CHANGED = {
    "0777": "511",  # octal
    "-010": "-8",
    "0b101": "5",
    "0x1F": "31",
    "1:30": "90",  # base 60
    "190:20:30": "685230",
    "1:30.5": "90.5",
    "01.5": "1.5",
    "00": "0",
}
"""Text in the file -> what YAML 1.1 makes of it."""
DECIMAL = {"0": 0, "7": 7, "+7": 7, "-1": -1, "1_000": 1000}
INTEGERS = sorted(name for name, field in config_fields().items() if field.kind is int and not field.many)
NUMBERS = sorted(name for name, field in config_fields().items() if field.kind is float and not field.many)
TEXTS = sorted(name for name, field in config_fields().items() if field.kind is str and not field.choices)
SWITCHES = sorted(name for name, field in config_fields().items() if field.kind is bool)


@pytest.fixture
def read(tmp_path):
    def value_of(name, text):
        path = tmp_path / "engine.yaml"
        path.write_text(f"{name}: {text}\n")
        return from_yaml_file(path)[name].value

    return value_of


@pytest.mark.fast_cases(86)
@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
@pytest.mark.parametrize("text", CHANGED)
def test_a_number_that_is_not_decimal_is_refused_with_the_value_that_yaml_reads(read, name, text):
    with pytest.raises(ConfigError) as refused:
        read(name, text)
    assert f":1: {name} is {text}, which YAML reads as {CHANGED[text]}; write a " in str(refused.value)
    assert str(refused.value).endswith(" in decimal digits")


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_in_decimal_is_itself(read, name):
    for text, value in DECIMAL.items():
        assert read(name, text) == value
    with pytest.raises(ConfigError, match=f"{name} is '1.5', but it must be a whole number"):
        read(name, "1.5")
    with pytest.raises(ConfigError, match=f"{name} is True, but it must be a whole number"):
        read(name, "yes")


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_in_decimal_is_itself(read, name):
    for text in ("0.5", ".5", "5.", "1e-3", "1.5e3", "-1.5", "1_000.5", "12", "0.0"):
        assert read(name, text) == float(text.replace("_", ""))
    assert read(name, ".inf") == float("inf")  # the range check refuses it with its value


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_keeps_its_characters(read, name):
    many = config_fields()[name].many
    for text in (*CHANGED, "1.10", "1e3", "2026-11-25", "12:30:45", "1_000", "0o17"):
        assert read(name, text) == ((text,) if many else text)
    for text in ("yes", "no", "on", "off", "true", "False"):
        with pytest.raises(ConfigError, match="must be text; put it in quotes"):
            read(name, text)
        assert read(name, f'"{text}"') == ((text,) if many else text)


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("name", SWITCHES)
def test_a_truth_value_is_a_word_of_yaml(read, name):
    for text in ("yes", "on", "true", "True"):
        assert read(name, text) is True
    for text in ("no", "off", "false"):
        assert read(name, text) is False
    with pytest.raises(ConfigError, match="must be true or false"):
        read(name, "0777")


def test_a_list_of_texts_keeps_their_characters(read):
    assert read("api_key", "[0777, 1:30, 'x']") == ("0777", "1:30", "x")
    with pytest.raises(ConfigError, match="api_key is no text, but it must be text; put it in quotes"):
        read("api_key", "[x, no]")
