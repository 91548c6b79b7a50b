"""The wait policy: set before torch, never against the user."""

import os
import subprocess
import sys

from engine.launch.child.process_resources import shorten_spinning

SCRIPT = """
import os, sys
from engine.launch.child.process_resources import shorten_spinning
took_effect = shorten_spinning()
assert "torch" not in sys.modules
print(took_effect, os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


def run_script(environ):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_spinning_is_bounded_by_default():
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))
    }

    assert run_script(environ) == ["True", "None", "1500"]


def test_a_policy_of_the_user_stays():
    environ = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}

    assert run_script({**environ, "OMP_WAIT_POLICY": "active"}) == ["False", "active", "None"]


def test_too_late_once_torch_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    environ: dict[str, str] = {}

    assert not shorten_spinning(environ)
    assert not environ
