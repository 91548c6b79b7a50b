"""Every script of `benchmarks/` can be loaded, and says what it does."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PATHS = [*sorted(BENCHMARKS.glob("*.py")), *sorted(BENCHMARKS.glob("vision/*.py"))]
SCRIPTS = [
    ".".join(path.relative_to(BENCHMARKS).with_suffix("").parts)
    for path in PATHS
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_answers_help(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])

    with pytest.raises(SystemExit) as ended:
        asyncio.run(module.main()) if inspect.iscoroutinefunction(module.main) else module.main()

    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
