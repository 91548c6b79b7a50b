"""Which cases and how many examples of costly tests run in `make test`, and the file that a run begins with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

_ALL_SLOW: Final = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)
FAST_SHARE: Final = 3  # `make test` draws one of so many examples
_leaves_slow_tests_out = (
    False  # known before the first test file is imported, which is when `examples` is called
)


def examples(count: int) -> int:
    """How many examples a costly test draws: `count`, or a share of them in runs without slow tests.

    `make test-slow` runs all tests of Hypothesis again, with all examples.
    """
    return -(-count // FAST_SHARE) if _leaves_slow_tests_out else count


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option `--day`."""
    parser.addoption(
        "--day", type=int, default=0, help="begin with another seventh of the files for each number"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Know what `examples` must know."""
    global _leaves_slow_tests_out
    _leaves_slow_tests_out = "not slow" in config.option.markexpr


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave a file unread if all its tests are slow and the run leaves slow tests out."""
    if not _leaves_slow_tests_out or collection_path.suffix != ".py":
        return None
    return True if _ALL_SLOW.search(collection_path.read_text()) else None


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases as slow, and put the tests into the order of the day; before `-m` chooses among them."""
    _leave_cases_to_slow_runs(items)
    _begin_elsewhere(items, config.getoption("--day"))


def _leave_cases_to_slow_runs(items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a test beyond those that its marker `fast_cases` names; those are spread evenly."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("fast_cases") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one in cases.values():
        marker = of_one[0].get_closest_marker("fast_cases")
        assert marker is not None
        (count,) = marker.args
        fast = {number * len(of_one) // count for number in range(count)}
        for number, item in enumerate(of_one):
            if number not in fast:
                item.add_marker(pytest.mark.slow)


def _begin_elsewhere(items: list[pytest.Item], day: int) -> None:
    """Begin with another seventh of the files each day, so that all get their turn in CI's slow runs, which are cut."""
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    begin = day % 7 * len(files) // 7
    places = {file: place for place, file in enumerate(files[begin:] + files[:begin])}
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])
