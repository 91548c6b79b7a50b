"""docs/tools.md has a row for each format."""

from __future__ import annotations

from pathlib import Path

from engine.tokenizer_manager.conversation.parsing.families import FAMILIES
from engine.tokenizer_manager.conversation.parsing.reasoning_families import REASONING_FAMILIES

TEXT = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def rows(section: str) -> list[str]:
    lines = TEXT.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0].splitlines()
    return [line.split("`")[1] for line in lines if line.startswith("| `")]


def test_every_format_of_tool_calls_has_a_row():
    assert sorted(rows("Formats of tool calls")) == sorted(FAMILIES)


def test_every_format_of_reasoning_has_a_row():
    assert sorted(rows("Reasoning")) == sorted(REASONING_FAMILIES)
