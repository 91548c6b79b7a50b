"""Files and metadata with temperatures of decisions: which comes first, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runtime.decision_calibration import read_calibration, temperature_of
from engine.runtime.errors import ConfigError


def test_the_number_of_options_comes_before_the_type():
    calibration = {"choice": 2.0, "choice.4": 0.5}

    found = [temperature_of(calibration, *of) for of in (("choice", 4), ("choice", 5), ("score", 4))]

    assert found == [0.5, 2.0, 1.0]


def test_a_good_file(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"predicate": 1, "choice.255": 0.8, "score.10": 100}')

    assert read_calibration(str(tmp_path / "a.json")) == {
        "predicate": 1.0,
        "choice.255": 0.8,
        "score.10": 100.0,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "must be an object with temperatures"),
        ("{}", "must be an object with temperatures"),
        ("{", "is no JSON"),
        ('{"noul": 1}', "'noul' is no type of question; keys are predicate, choice or score"),
        ('{"choice.x": 1}', "'choice.x' is no type of question"),
        ('{"choice.1": 1}', "'choice.1' has 1 options, but a choice has 2 to 255"),
        ('{"score.11": 1}', "'score.11' has 11 options, but a score has 2 to 10"),
        ('{"predicate.3": 1}', "'predicate.3' has 3 options, but a predicate has 2"),
        ('{"predicate": 0}', "'predicate' is 0, but it must be a number above 0 and at most 100"),
        ('{"predicate": 101}', "'predicate' is 101, but it must be a number"),
        ('{"predicate": true}', "'predicate' is 'True', but it must be a number"),
        ('{"predicate": "1"}', "'predicate' is '1', but it must be a number"),
        ('{"predicate": 1e999}', "is no JSON"),
        (f'{{"predicate": 1{"0" * 400}}}', "but it must be a number above 0 and at most 100"),
        (f'{{"predicate": 1{"0" * 9000}}}', "is no JSON"),
    ],
)
def test_a_bad_file_is_one_line_with_value_rule_and_fix(tmp_path: Path, text: str, said: str):
    file = tmp_path / "a.json"
    file.write_text(text)

    with pytest.raises(ConfigError) as error:
        read_calibration(str(file))

    message = str(error.value)
    assert message.startswith(f"decision_calibration {file}") and said in message, message
    assert "engine decisions fit" in message and "\n" not in message
