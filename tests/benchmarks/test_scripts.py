"""Every script of `benchmarks/` can be loaded, and says what it does."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [path.stem for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_answers_help(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])

    with pytest.raises(SystemExit) as ended:
        asyncio.run(module.main()) if inspect.iscoroutinefunction(module.main) else module.main()

    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
