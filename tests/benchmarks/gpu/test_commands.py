"""`gpu/check.py` and `gpu/bench.py` in small, on the CPU: that they run is not found out in minutes of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(folder: Path, module: str, only: str, *more: str) -> dict[str, Any]:
    """Sections by name."""
    out = folder / "report.json"
    arguments = ["--device", "cpu", "--tiny", "--budget", "880", "--json", str(out), "--only", only, *more]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu/path.py"), module, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return {section["name"]: section for section in json.loads(out.read_text())["sections"]}


def test_the_check_runs_with_the_settings_of_a_triage(tmp_path: Path) -> None:
    triage = tmp_path / "triage.json"
    triage.write_text(json.dumps({"settings": {"avoid_kernels": ["native:rms_norm", "native:sample"]}}))
    only = "sgl_kernel,kernels,models,graphs,overlap,http"
    sections = run(tmp_path, "benchmarks.gpu.check", only, "--triage", str(triage))

    status = {name: section["status"] for name, section in sections.items()}
    assert status == {
        "sgl_kernel": "SKIP",
        "kernels": "PASS",
        "models": "PASS",
        "graphs": "SKIP",
        "overlap": "PASS",
        "http": "PASS",
    }


def test_the_benchmark_runs(tmp_path: Path) -> None:
    sections = run(tmp_path, "benchmarks.gpu.bench", "ceilings,attention,all_reduce,Qwen3-0.6B")

    measured = {figure["name"] for figure in sections["attention"]["figures"]}
    assert {
        "decode 4/2 heads of 16, 2 x 40: torch_native",
        "decode 2/2 heads of 16, 2 x 40: torch_native, 3 drafts as rows",
        "prompts over an fp8 pool: torch_native",
    } <= measured
    assert [figure["name"] for figure in sections["all_reduce"]["figures"]] == [
        "sum of 8 KiB over 2 ranks: gloo"
    ]
    assert "    ((0, 0), 2): 'torch_native',  # 4/2 heads of 16" in sections["attention"]["notes"]

    figures = {figure["name"]: figure for figure in sections["Qwen3-0.6B"]["figures"]}
    assert {"tiny step, 1 request", "tiny step, 4 requests", "tiny prefill", "tiny offline"} <= set(figures)
    for how in ("", ", kernel by kernel"):
        what = f"tiny prompt of 20 tokens{how}"
        assert 0 < figures[f"{what}: host"]["value"] <= figures[what]["value"]
    for name in ("tiny step, 1 request", "tiny step, 4 requests"):
        assert figures[name]["value"] > 0 and figures[name]["best"] > 0
    assert 0.1 < figures["tiny step, 4 requests: device busy"]["value"] <= 1.001
