"""`compressed_weights`: the two forms are compared before they are measured, and levels without one say so."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from engine.model_runner.kernels.compressed_linear import CompressedLinear
from engine.model_runner.kernels.cpu.compiler import NoLibraryError
from engine.model_runner.kernels.cpu.library import load_library

from .conftest import run_benchmark as run


@pytest.fixture
def compressed_weights(
    monkeypatch: pytest.MonkeyPatch, import_benchmark: Callable[[str], ModuleType]
) -> ModuleType:
    module = import_benchmark("compressed_weights")
    monkeypatch.setattr(module, "HEAD_SHAPE", (4096, module.HIDDEN))
    return module


SMALL = ("--layers", 1, "--rounds", 2, "--threads", 1)


def test_both_forms_are_measured(
    compressed_weights: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _skip_where_nothing_compresses(compressed_weights)
    run(compressed_weights, monkeypatch, "--tokens", 1, 7, *SMALL)
    sizes, _, one, seven = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"5 weights, (\d+) MB uncompressed, (\d+) MB compressed", sizes)
    assert found is not None and (int(found[1]), int(found[2])) == (12, 9)
    for line, num_tokens in ((one, 1), (seven, 7)):
        assert int(line.split()[0]) == num_tokens and all(float(number) > 0 for number in line.split()[1:4])


def test_forms_that_disagree_are_not_measured(
    compressed_weights: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _skip_where_nothing_compresses(compressed_weights)
    monkeypatch.setattr(
        CompressedLinear, "__call__", lambda self, x: torch.zeros(len(x), self._width, dtype=x.dtype)
    )
    with pytest.raises(SystemExit, match="3 tokens: the two results are not bit-identical"):
        run(compressed_weights, monkeypatch, "--tokens", 3, *SMALL)


def test_a_level_without_such_products_says_so(
    compressed_weights: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        library = load_library()
    except NoLibraryError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(library, "compressed_linear_bytes", lambda *_: 0)
    with pytest.raises(SystemExit, match="no matmuls with compressed weights"):
        run(compressed_weights, monkeypatch, *SMALL)


def test_the_ratio_is_the_median_of_the_rounds(compressed_weights: ModuleType) -> None:
    seconds = np.array([[1.0, 0.5], [4.0, 1.0], [2.0, 2.0], [3.0, 2.25], [1.0, 0.75]])
    line = compressed_weights.report(4, seconds)
    assert line.split() == ["4", "2000.00", "1000.00", "0.750", "0.500", "to", "0.750"]


def _skip_where_nothing_compresses(module: ModuleType) -> None:
    try:
        module.make_weights(load_library(), 1)
    except (NoLibraryError, module.ComparisonError) as error:
        pytest.skip(str(error))
