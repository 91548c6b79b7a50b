"""`benchmarks/house.py`: the sizes that may not grow without a commit that says why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import house


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A product of two files, with one class and one protocol; tests do not count."""
    for name, text in {
        "runtime/one.py": "class A: ...\n",
        "runtime/two.py": "from typing import Protocol\n\n\nclass B(Protocol[int]): ...\n",
        "tokenizer_manager/http/app.py": "x = 1\n",
        "tests/test_one.py": "class C: ...\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_product_is_counted_without_its_tests(checkout):
    assert house.measure(checkout) == house.Sizes(
        files=3, lines=6, classes=2, protocols=1, runtime_lines=5, http_files=1
    )


@pytest.mark.parametrize("figure", ["files", "lines", "classes", "protocols", "runtime_lines", "http_files"])
def test_a_figure_that_grew_fails_the_check(checkout, tmp_path, figure):
    sizes = asdict(house.measure(checkout))
    limits = tmp_path / "house.json"
    limits.write_text(json.dumps(sizes))
    assert house.check(checkout, limits) is None

    limits.write_text(json.dumps(sizes | {figure: sizes[figure] - 1}))

    growth = house.check(checkout, limits)
    assert growth is not None
    assert f"{figure}: {sizes[figure]}, the limit is {sizes[figure] - 1}" in growth
    assert "in the same commit, with the reason in its body" in growth


def test_a_figure_that_shrank_passes(checkout, tmp_path):
    limits = tmp_path / "house.json"
    limits.write_text(json.dumps(dict.fromkeys(asdict(house.measure(checkout)), 100)))

    assert house.check(checkout, limits) is None
