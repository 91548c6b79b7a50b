"""`triage.py` on the CPU with planted faults: what it finds, and that it survives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.gpu import golden

    folder = tmp_path_factory.mktemp("golden")
    golden.make(folder, ("llama",), (3, 70), 1, 8, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def smaller_golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's interpreter needs seconds for a step."""
    from benchmarks.gpu import golden

    folder = tmp_path_factory.mktemp("golden")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    golden.make(folder, ("llama",), (5,), 3, 5, **sizes)
    return folder


def run(
    golden: Path,
    out: Path,
    plant: str = "",
    device: str = "cpu",
    program: str = "benchmarks.gpu.triage",
) -> dict[str, Any]:
    """The report, with the exit code and the printed text."""
    command = [sys.executable, str(BENCHMARKS / "gpu/path.py"), program, "--device", device]
    command += ["--out", str(out), "--golden", str(golden), "--models", "llama", "--budget", "2000"]
    command += ["--patience", "40", *(["--plant", f"tests.benchmarks.gpu.{plant}"] if plant else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    report: dict[str, Any] = json.loads((out / "triage.json").read_text())
    return {**report, "code": done.returncode, "text": done.stdout + done.stderr}


def test_without_a_fault_it_is_over_after_everything_on(golden: Path, tmp_path: Path) -> None:
    report = run(golden, tmp_path / "out")
    assert report["code"] == 0, report["text"]
    assert [(each["name"], each["status"]) for each in report["attempts"]] == [
        ("facts", "pass"),
        ("all on", "pass"),
    ]
    assert report["settings"] == {} and report["flags"] == ""
    assert report["facts"]["torch_version"]


def test_a_wrong_operator_is_switched_off_named_and_saved(golden: Path, tmp_path: Path) -> None:
    report = run(golden, tmp_path / "out", "planted_faults:wrong")
    assert report["code"] == 0, report["text"]
    assert report["flags"] == "--avoid-kernels native:add_rms_norm", report["text"]
    assert report["settings"] == {"avoid_kernels": ["native:add_rms_norm"]}
    (difference,) = next(each for each in report["attempts"] if each["name"] == "compare")["differences"]
    assert (difference["op"], difference["provider"]) == ("add_rms_norm", "native")
    assert "after the attention of layer 0" in difference["where"]
    assert "bfloat16" in difference["inputs"] and "differ, most at" in difference["reason"]
    from benchmarks.gpu.first_difference import replay

    assert (
        replay(tmp_path / "out" / difference["saved"]) == ""
    )  # the operator itself is right; the test changed it


def test_several_wrong_operators_are_found(golden: Path, tmp_path: Path) -> None:
    report = run(golden, tmp_path / "out", "planted_faults:two_wrong")
    assert set(report["settings"]["avoid_kernels"]) == {"native:add_rms_norm", "native:rotate_and_store"}
    compared = next(each for each in report["attempts"] if each["name"] == "compare")
    assert {each["op"] for each in compared["differences"]} == {"add_rms_norm", "rotate_and_store"}


@pytest.mark.parametrize(("plant", "status"), [("crash", "crash"), ("hang", "hang")])
def test_a_crash_or_a_hang_ends_only_its_attempt(
    golden: Path, tmp_path: Path, plant: str, status: str
) -> None:
    program = "tests.benchmarks.gpu.ended_hangs" if plant == "hang" else "benchmarks.gpu.triage"
    report = run(golden, tmp_path / "out", f"planted_faults:{plant}", program=program)
    by_name = {each["name"]: each for each in report["attempts"]}
    assert by_name["all on"]["status"] == status and by_name["blocking"]["status"] == status
    assert "planted_faults.py" in (tmp_path / "out/logs" / by_name["all on"]["log"]).read_text()
    assert report["ended_in"].startswith("add_rms_norm (native)"), report["text"]
    assert report["flags"] == "--avoid-kernels native:add_rms_norm", report["text"]


def test_a_fault_that_is_in_no_operator(golden: Path, tmp_path: Path) -> None:
    report = run(golden, tmp_path / "out", "planted_faults:wrong_overlap")
    assert report["flags"] == "--no-overlap", report["text"]
    assert "each operator agrees with torch" in report["text"]


def test_a_broken_base_ends_it(golden: Path, tmp_path: Path) -> None:
    report = run(golden, tmp_path / "out", "planted_faults:broken_base")
    assert report["code"] == 1 and "settings" not in report
    assert [each["name"] for each in report["attempts"]] == ["facts", "all on", "all off"]
    assert "with everything off it fails, too" in report["text"]


def test_a_wrong_kernel_on_a_mirror_of_a_gpu(smaller_golden: Path, tmp_path: Path) -> None:
    """The unchanged CUDA assembly: recorded steps, overlap, Triton."""
    report = run(smaller_golden, tmp_path / "out", "mirror_faults:wrong", device="cuda")
    assert report["flags"] == "--avoid-kernels triton:add_rms_norm", report["text"]
    assert "add_rms_norm of triton differs, after the attention of layer 0" in report["text"]
    assert (tmp_path / "out/wrong-add_rms_norm.pt").exists()


def test_a_kernel_that_crashes_on_a_mirror_of_a_gpu(smaller_golden: Path, tmp_path: Path) -> None:
    report = run(smaller_golden, tmp_path / "out", "mirror_faults:crash", device="cuda")
    assert report["flags"] == "--avoid-kernels triton:add_rms_norm", report["text"]
    assert [each["status"] for each in report["attempts"] if each["name"] == "all on"] == ["crash"]
