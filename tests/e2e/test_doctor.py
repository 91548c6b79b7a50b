"""`engine doctor` as a user runs it, on this machine."""

from __future__ import annotations

import json

import pytest

from .serving import run_engine

pytestmark = pytest.mark.real_process


@pytest.mark.slow
def test_doctor_says_that_a_model_will_be_served_and_that_a_broken_one_will_not(model, model_copy, tmp_path):
    done = run_engine(tmp_path, "doctor", str(model), "--port", "0", "--json")
    assert done.returncode == 0, done.stdout
    checks = {check["code"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["torch"]["verdict"] == "ok"
    assert checks["fit"]["details"]["max_model_len"] == 2048

    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    done = run_engine(tmp_path, "doctor", str(model_copy), "--port", "0")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert len(failed) == 1 and "truncated" in failed[0], done.stdout
    assert "Traceback" not in done.stderr
