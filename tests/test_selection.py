"""Which cases run in `make test`, and the file that a slow run begins with (`selection.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

FILES = {
    "test_a.py": """
        import pytest

        @pytest.mark.fast_cases(2)
        @pytest.mark.parametrize("n", range(5))
        def test_costly(n): pass

        @pytest.mark.parametrize("n", range(3))
        def test_cheap(n): pass
        """,
    "test_b.py": """
        import pytest

        @pytest.mark.fast_cases(1)
        @pytest.mark.parametrize("n", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
        def test_costly(n): pass
        """,
    **{f"test_{letter}.py": "def test_it(): pass" for letter in "cdefg"},
}


HOOK = """

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    select(config, items)
"""


@pytest.fixture
def collected(pytester: pytest.Pytester):
    """Names of the tests that a run with these options has, in its order."""
    pytester.makeconftest((Path(__file__).parent / "selection.py").read_text() + HOOK)
    pytester.makepyprojecttoml(
        """
        [tool.pytest.ini_options]
        markers = ["slow", "fast_cases(n)"]
        """
    )
    pytester.makepyfile(**{name.removesuffix(".py"): text for name, text in FILES.items()})

    def run(*options: str) -> list[str]:
        result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", *options)
        return [line for line in result.outlines if "::" in line]

    return run


def test_of_costly_tests_some_cases_are_fast_and_all_others_slow(collected):
    fast, slow = collected("-m", "not slow"), collected("-m", "slow")

    assert [name for name in fast if "costly" in name] == [
        "test_a.py::test_costly[0]",
        "test_a.py::test_costly[2]",
        "test_b.py::test_costly[1]",
    ]
    assert [name for name in slow if "test_a" in name] == [f"test_a.py::test_costly[{n}]" for n in (1, 3, 4)]
    assert [name for name in slow if "test_b" in name] == [f"test_b.py::test_costly[{n}]" for n in (0, 2)]
    assert sorted(fast + slow) == sorted(collected())


def test_each_day_begins_with_other_files_and_has_all(collected):
    days = [collected("--day", str(day)) for day in (0, 1, 3, 6, 7)]

    assert [names[0].partition("::")[0] for names in days] == [f"test_{letter}.py" for letter in "abdga"]
    assert all(sorted(names) == sorted(days[0]) for names in days)
