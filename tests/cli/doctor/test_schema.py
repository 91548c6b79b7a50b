"""`engine doctor --schema`: the report in a terminal and as JSON, and the exit code."""

from __future__ import annotations

import json

import pytest

from engine.cli import main as cli
from engine.cli.doctor import schema as schema_module
from engine.cli.doctor.model_facts import ModelFacts

TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
}
WRONG = {"type": "object", "properties": {"age": {"type": "strin"}}}


@pytest.fixture
def no_model(monkeypatch):
    """The report without a compilation."""
    monkeypatch.setattr(
        schema_module, "gather_model", lambda *args, **kwargs: ModelFacts(source_error="none")
    )


def run(tmp_path, value, *options: str) -> int:
    path = tmp_path / "s.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return cli.run(["doctor", "--schema", str(path), *options])


def test_what_needs_a_change_comes_first(capsys, tmp_path, no_model):
    assert run(tmp_path, TAGS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("approximated /properties/tags uniqueItems: a grammar does not remember")
    assert " -> leave it out" in lines[0]
    assert "warning: not compiled for the model: none" in lines
    assert any(line.startswith("warning: s.json/properties/tags: uniqueItems") for line in lines)
    assert lines[-1] == "It can be used."


def test_what_cannot_be_enforced_is_refused_under_strict(capsys, tmp_path, no_model):
    assert run(tmp_path, TAGS, "--strict") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("It cannot be used: s.json/properties/tags: uniqueItems")


def test_json_is_the_body_of_the_endpoint(capsys, tmp_path, no_model):
    assert run(tmp_path, WRONG, "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert not body["ok"] and body["error"]["code"] == "invalid_schema"
    assert body["error"]["param"] == "s.json/properties/age"
    assert body["error"]["message"].startswith("s.json/properties/age: type is")


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ("[1]", "has list at the top"), ('"a"', "has str at the top")]
)
def test_what_is_no_schema_is_one_line_with_a_way_out(capsys, tmp_path, text, words):
    assert run(tmp_path, text) not in (0, 1)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err


def test_a_missing_file_is_named(capsys, tmp_path):
    assert cli.run(["doctor", "--schema", str(tmp_path / "none.json")]) not in (0, 1)
    assert "none.json" in capsys.readouterr().err


@pytest.mark.real_process
def test_it_is_compiled_for_the_model(capsys, tmp_path, tiny_model):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(TAGS))
    assert cli.run(["doctor", str(tiny_model), "--schema", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("compiled in ") and "of a short answer is forced" in line for line in lines)
    assert any(line.startswith("shortest answer: ") for line in lines)
