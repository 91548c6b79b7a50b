"""Reports in sections: what breaks, hangs or dies ends itself and not the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

FAKE = """
import os, sys, threading
from benchmarks.gpu.sections import Figure, Report, Section, run_sections

def good(report):
    report.note("hello")
    report.figure(Figure("step", 2.0, "ms", 1.0, 3.0))
    report.figure(Figure("rate", 50.0, "tok/s", 100.0, 60.0, more_is_better=True))

def half_good(report):
    with report.part("first"):
        raise ValueError("broken")
    with report.part("second"):
        pass

def crash(report):
    report.figure(Figure("before the end", 1.0, "ms"))
    print("last words", flush=True)
    os.abort()

def hang(report):
    report.note("on its way")
    threading.Event().wait()

def no_good(report):
    report.fail("cannot find out")

def skip(report):
    report.skip("not here")

SECTIONS = (
    Section("good", good, 30),
    Section("half_good", half_good, 30),
    Section("crash", crash, 30),
    Section("hang", hang, 1.0),
    Section("no_good", no_good, 30),
    Section("skip", skip, 30),
    Section("gpu", good, 30, needs_cuda=True),
)
if __name__ == "__main__":
    run_sections("fake_report", "a report", SECTIONS, 100.0)
"""


def run(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and the sections of the JSON file by name."""
    (folder / "fake_report.py").write_text(FAKE)
    out = folder / "report.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu/path.py"),
        "fake_report",
        "--device",
        "cpu",
        "--json",
        str(out),
    ]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    sections = json.loads(out.read_text())["sections"] if out.exists() else []
    return done.returncode, done.stdout, {section["name"]: section for section in sections}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any]]:
    return run(tmp_path_factory.mktemp("report"))


def test_each_section_has_its_verdict(report: tuple[int, str, dict[str, Any]]) -> None:
    code, output, sections = report

    assert code == 1
    assert {name: section["status"] for name, section in sections.items()} == {
        "good": "PASS",
        "half_good": "FAIL",
        "crash": "FAIL",
        "hang": "FAIL",
        "no_good": "FAIL",
        "skip": "SKIP",
        "gpu": "SKIP",
    }
    assert sections["half_good"]["failures"] == ["first: ValueError: broken"]
    assert sections["hang"]["failures"] == ["ended after 1 s, its limit"]
    assert sections["no_good"]["failures"] == ["cannot find out"]
    assert sections["skip"]["notes"] == ["not here"]
    assert "last words" in output and "FAILED first: ValueError: broken" in output


def test_figures_survive_the_section_that_found_them(report: tuple[int, str, dict[str, Any]]) -> None:
    _, output, sections = report

    assert [figure["value"] for figure in sections["good"]["figures"]] == [2.0, 50.0]
    assert [figure["name"] for figure in sections["crash"]["figures"]] == ["before the end"]
    (step,) = (line for line in output.splitlines() if line.startswith("step "))
    assert step.split()[1:] == ["2", "ms", "1", "50.0%", "<=", "3", "reached"]
    (rate,) = (line for line in output.splitlines() if line.startswith("rate "))
    assert rate.split()[1:] == ["50", "tok/s", "100", "50.0%", ">=", "60", "MISSED"]


def test_what_passes_ends_with_zero_and_what_has_no_time_does_not(tmp_path: Path) -> None:
    code, _, sections = run(tmp_path, "--only", "good,skip")
    assert (code, list(sections)) == (0, ["good", "skip"])

    code, output, sections = run(tmp_path, "--only", "good", "--budget", "1")
    assert (code, sections["good"]["status"]) == (1, "NOT RUN")
    assert "no time left" in output

    code, output, _ = run(tmp_path, "--only", "bad")
    assert code == 2 and "no such section: bad" in output
