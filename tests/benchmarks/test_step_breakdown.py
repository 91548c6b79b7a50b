"""`step_breakdown` without a model: what is counted where, and the tables."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from engine.model_runner.kernels.cpu import library

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def breakdown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("path")
    (folder / "benchmarks").symlink_to(BENCHMARKS, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("benchmarks.step_breakdown")


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("linear_to", "linears"),
        ("attend", "attention"),
        ("plan_attention", "attention"),
        ("add_rms_norm", "norms, rotary, activation"),
        ("rotate_and_store", "norms, rotary, activation"),
        ("num_threads", "other kernels"),
    ],
)
def test_functions_belong_to_parts(breakdown: ModuleType, function: str, part: str) -> None:
    assert function in library._SIGNATURES
    assert breakdown.part_of(function) == part


def test_what_the_sampler_calls_is_the_samplers(breakdown: ModuleType) -> None:
    ticks = itertools.count()
    timers = breakdown.Timers(clock=lambda: float(next(ticks)))
    fake = SimpleNamespace(linear=lambda x: x + 1, attend=lambda: None, path="x.so")
    native = breakdown.TimedLibrary(fake, ("linear", "attend"), timers)
    sample = timers.whole(breakdown.SAMPLING, native.linear)

    assert native.path == "x.so"
    assert native.linear(1) == 2
    native.attend()
    assert sample(2) == 3
    assert native.linear is native.linear  # made once
    native.linear(4)

    assert timers.spent_s == {"linears": 2.0, "attention": 1.0, "sampling": 1.0}


def test_runners_that_are_loaded_within_call_a_library_that_counts(breakdown: ModuleType) -> None:
    if reasons := library.reasons_against_library():
        pytest.skip("; ".join(reasons))
    ticks = itertools.count()
    timers = breakdown.Timers(clock=lambda: float(next(ticks)))
    with breakdown.timed_library(timers):
        library.load_library().packed_linear_bytes(64, 64)
    library.load_library().packed_linear_bytes(64, 64)
    assert timers.spent_s == {"linears": 1.0}


def test_the_table_shows_shares_and_what_is_left(breakdown: ModuleType) -> None:
    parts = {"linears": 600.0, "attention": 200.0, "step, operation by operation": 1000.0}
    parts |= {
        "step as served": 900.0,
        "scheduler": 50.0,
        "between tokens over HTTP": 1200.0,
        "CPU a token: x": 7.0,
    }
    breakdown.add_remainder(parts)
    made = breakdown.Breakdown(breakdown.SCHEMA, None, {}, 2, {"1 x 256": parts})

    assert breakdown.table(made)[4:] == [
        "| linears | 600 | 60% |",
        "| attention | 200 | 20% |",
        "| step, operation by operation | 1,000 |  |",
        "| step as served | 900 | 75% |",
        "| scheduler | 50.0 | 4% |",
        "| IPC, detokenizer, HTTP, client | 250 | 21% |",
        "| between tokens over HTTP | 1,200 |  |",
        "| CPU a token: x | 7.0 |  |",
    ]


def test_two_files_are_compared(breakdown: ModuleType, tmp_path: Path) -> None:
    import msgspec

    before, now = (
        breakdown.Breakdown(breakdown.SCHEMA, None, {}, 2, {"1 x 256": {"linears": us, "sampling": 10.0}})
        for us in (600.0, 400.0)
    )
    path = tmp_path / "before.json"
    path.write_bytes(msgspec.json.encode(before))

    lines = breakdown.table(now, breakdown.read_breakdown(path))

    assert lines[2] == "| | before, us | now, us | share | before / now |"
    assert lines[4:] == ["| linears | 600 | 400 |  | 1.50 |", "| sampling | 10.0 | 10.0 |  | 1.00 |"]


def test_another_file_ends_the_program(breakdown: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(SystemExit, match="cannot be read"):
        breakdown.read_breakdown(tmp_path / "x.json")
