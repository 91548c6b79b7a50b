"""The wait policy: set before torch, never against the user."""

import os
import subprocess
import sys

from engine.runtime.openmp import let_waiting_threads_sleep

SCRIPT = """
import os, sys
from engine.runtime.openmp import let_waiting_threads_sleep
took_effect = let_waiting_threads_sleep()
assert "torch" not in sys.modules
print(took_effect, os.environ.get("OMP_WAIT_POLICY"))
"""


def run_script(environ):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_threads_sleep_by_default():
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))
    }

    assert run_script(environ) == ["True", "passive"]


def test_a_policy_of_the_user_stays():
    assert run_script({**os.environ, "OMP_WAIT_POLICY": "active"}) == ["False", "active"]


def test_too_late_once_torch_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    environ: dict[str, str] = {}

    assert not let_waiting_threads_sleep(environ)
    assert not environ
