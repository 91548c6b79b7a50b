"""`engine decisions fit`: temperature, log loss and calibration error, and files that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main as cli
from engine.cli.decisions import (
    LEAST_EXAMPLES,
    Labeled,
    best_temperature,
    calibration_error,
    fit_temperatures,
    log_loss,
    tempered,
)

ASKED = {"type": "choice", "instructions": "x", "choices": [{"value": "true"}, {"value": True}]}


def says(share: float, num_right: int, num_wrong: int, kind: str = "predicate") -> list[Labeled]:
    """A model that gives the first option a share, which is right so often."""
    return [Labeled(kind, [share, 1 - share], int(i >= num_right)) for i in range(num_right + num_wrong)]


def test_a_temperature_of_one_changes_nothing():
    assert tempered([0.2, 0.5, 0.3], 1.0) == pytest.approx([0.2, 0.5, 0.3])
    assert tempered([0.8, 0.2], 2.0) == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(("share", "right"), [(0.8, 80), (0.99, 75), (0.55, 90)])
def test_the_best_temperature_says_what_is_true(share: float, right: int):
    examples = says(share, right, 100 - right)

    found = best_temperature(examples)

    assert tempered(examples[0].shares, found)[0] == pytest.approx(right / 100, abs=1e-3)
    assert log_loss(examples, found) <= log_loss(examples, 1.0)
    assert calibration_error(examples, found) == pytest.approx(0.0, abs=1e-3)
    assert calibration_error(examples, 1.0) == pytest.approx(abs(share - right / 100))


def test_a_model_that_is_always_right_or_at_random_stays_within_the_range():
    assert 0.05 <= best_temperature(says(0.9, 20, 0)) < 0.1
    assert best_temperature(says(0.9, 5, 15)) == pytest.approx(20.0)
    assert math.isfinite(log_loss([Labeled("predicate", [1.0, 0.0], 1)], 1.0))


def test_gaps_in_one_bin_cancel_and_those_of_two_bins_add():
    assert calibration_error(says(0.8, 4, 1), 1.0) == pytest.approx(0.0)
    both = says(0.9, 1, 1) + says(0.6, 2, 0)
    assert calibration_error(both, 1.0) == pytest.approx((2 * 0.4 + 2 * 0.4) / 4)


def test_a_group_with_few_examples_has_the_temperature_of_its_type():
    few = [Labeled("choice", [0.5, 0.3, 0.2], 0)] * (LEAST_EXAMPLES - 1)
    many = says(0.9, 9, 6, "choice")

    assert list(fit_temperatures(few)) == []
    assert list(fit_temperatures(few + many)) == ["choice", "choice.2"]
    assert list(fit_temperatures(says(0.9, 9, 6))) == ["predicate"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 has no list of questions"),
        ({"questions": []}, "line 2 has no list of questions"),
        (
            {"questions": [ASKED | {"answer": 1}]},
            'line 2: questions[0].answer is 1, but it must be one of "true", true',
        ),
        ({"questions": [ASKED | {"answer": True}, ASKED]}, "questions[1].answer is null"),
        (
            {"questions": [{"type": "score", "levels": [{}, {}], "answer": 2}]},
            "answer is 2, but it must be one of 0, 1",
        ),
        (
            {"questions": [{"type": "score", "levels": 3, "answer": 2}]},
            "questions[0].levels is 3, but it must be a list",
        ),
        ({"questions": [{"type": "choice", "answer": 2}]}, "questions[0].choices is null"),
        ("[" * 5000, "line 2 is no JSON"),
        ({"questions": [{"type": "noul"}]}, "questions[0].type is 'noul', but it must be predicate"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, capsys: Any, monkeypatch: Any, line: Any, said: str):
    class NoServer:
        base, model = "http://x", "m"

        def __init__(self, *_args: Any, **_options: Any) -> None:
            import httpx

            self.client = httpx.Client(transport=httpx.MockTransport(self.answer))

        def answer(self, _request: Any) -> Any:
            import httpx

            return httpx.Response(200, json={"answers": []})

    monkeypatch.setattr("engine.cli.decisions.ServerConnection", NoServer)
    file = tmp_path / "labeled.jsonl"
    file.write_text(f"\n{line if isinstance(line, str) else json.dumps(line)}\n")

    assert cli.run(["decisions", "fit", str(file)]) == 2

    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_the_server_is_asked_without_temperature_and_refusals(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    import httpx

    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"answers": [{"type": "predicate", "probability": 0.9}]})

    class Server:
        base, model = "http://x", "m"

        def __init__(self, *_args: Any, **_options: Any) -> None:
            self.client = httpx.Client(transport=httpx.MockTransport(answer))

    monkeypatch.setattr("engine.cli.decisions.ServerConnection", Server)
    line = {
        "input": "one\u2028two\u0085",  # separators of lines for Python, not for JSON
        "temperature": 3,
        "min_label_mass": 0.9,
        "questions": [{"type": "predicate", "instructions": "x"}],
    }
    lines = []
    for i in range(20):
        line["questions"] = [{"type": "predicate", "instructions": "x", "answer": i % 4 > 0}]
        lines.append(json.dumps(line, ensure_ascii=False))
    labeled, output = tmp_path / "labeled.jsonl", tmp_path / "out.json"
    labeled.write_text("\r\n".join(lines), encoding="utf-8")

    assert cli.run(["decisions", "fit", str(labeled), "-o", str(output)]) == 0

    assert len(asked) == 20
    assert all((each["temperature"], each["min_label_mass"]) == (1, 0) for each in asked)
    assert asked[0]["questions"] == [{"type": "predicate", "instructions": "x"}]
    assert asked[0]["input"] == line["input"]
    (found,) = json.loads(output.read_text()).values()
    assert found == pytest.approx(2.0, abs=1e-3)  # 0.9 becomes 0.75
    assert cli.run(["decisions", "fit", str(labeled), "-o", "/nope/x"]) != 0
    assert (
        "predicate.2" in capsys.readouterr().out.rpartition("use it with")[2]
    )  # the temperatures are not lost
