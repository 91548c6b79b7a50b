"""`fallback_step`: a small model in both ways, and the table."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from engine.model_runner.kernels.cpu.library import reasons_against_library

from .conftest import run_benchmark


@pytest.fixture
def fallback_step(import_benchmark: Any) -> ModuleType:
    module: ModuleType = import_benchmark("fallback_step")
    return module


def test_a_ratio_is_that_within_a_round(fallback_step):
    rounds = [
        fallback_step.Round(
            {"engine": speed, "transformers": 2 * speed}, {"engine": 1.0, "transformers": speed}
        )
        for speed in (1.0, 3.0, 10.0)
    ]
    found = fallback_step.figures("llama", rounds)
    assert (found.decode_ratio, found.prefill_ratio) == (2.0, 3.0)
    assert (
        "| llama | 3000.00 | 6000.00 | **2.00** | 1000000.0 | 3000000.0 | **3.00** |"
        in fallback_step.table([found], 2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("unchanged", [[], ["--unchanged"]])
def test_figures_of_a_small_model(fallback_step, monkeypatch, capsys, unchanged):
    if reasons := reasons_against_library():
        pytest.skip(reasons[0])
    arguments = ["--families", "qwen3", "--layers", 1, "--rounds", 1, "--prompt-len", 4, "--threads", 1]
    run_benchmark(fallback_step, monkeypatch, *arguments, *unchanged)
    *_, line = capsys.readouterr().out.splitlines()
    family, *numbers = (cell.strip(" *") for cell in line.strip("|").split("|"))
    assert family == "qwen3" and all(float(number) > 0 for number in numbers)


def test_unknown_families_are_named(fallback_step, monkeypatch):
    with pytest.raises(
        SystemExit, match="--families has nothing-like-it; known are llama, qwen3, gemma3_text"
    ):
        run_benchmark(fallback_step, monkeypatch, "--families", "llama,nothing-like-it")
