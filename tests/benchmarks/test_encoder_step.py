"""`encoder_step`: runs a small step and its matmuls, and names the operations."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from engine.model_runner.kernels.cpu.library import reasons_against_library

from .conftest import run_benchmark


@pytest.fixture
def encoder_step(import_benchmark: Any) -> ModuleType:
    module: ModuleType = import_benchmark("encoder_step")
    return module


def test_texts_fill_the_step(encoder_step):
    for tokens in (16, 300, 2000):
        lengths = encoder_step.text_lengths(tokens)
        assert sum(lengths) == tokens and max(lengths) <= 256


@pytest.mark.slow
def test_figures_of_a_small_step(encoder_step, monkeypatch, capsys):
    run_benchmark(encoder_step, monkeypatch, "--tokens", 40, "--rounds", 2, "--threads", 1)
    first, *operations = capsys.readouterr().out.splitlines()
    assert first.startswith("bfloat16, 1 threads: 40 tokens of ") and first.endswith("% of the matmul limit")
    if not reasons_against_library():
        assert {"attend", "add_layer_norm", "activate"} <= {line.split()[0] for line in operations}
