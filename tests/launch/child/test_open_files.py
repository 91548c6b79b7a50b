"""The soft limit of open files follows what the server may need; in a process of its own."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from engine.launch.child.process_resources import OWN_FILES

TRY = """
import resource, sys
from engine.launch.child.process_resources import make_room_for
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
make_room_for(connections)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.real_process
@pytest.mark.parametrize(
    ("soft", "connections", "expected"), [(256, 200, 200 + OWN_FILES), (256, 10**9, 512), (400, 10, 400)]
)
def test_the_soft_limit_is_raised_as_far_as_needed_and_allowed(soft, connections, expected):
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 512
    arguments = [sys.executable, "-c", TRY, str(soft), "512", str(connections)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(expected), "512"]
