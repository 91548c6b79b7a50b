"""`compile_ahead`: compiles the kernels before a start needs them, so that the start can show it as a step.

Without it the kernels are compiled by the process that loads the model, in the middle of its start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from ....launch.resolve.host_facts import COMPILERS
from ....launch.startup_display import COMPILE_STEP
from ....runtime.errors import ConfigError
from .build import is_built
from .compiler import NoLibraryError
from .isa import best_isa


def compile_ahead(device: str, on_step: Callable[[str], None]) -> None:
    """Compile the kernels of the CPU if they are needed and not there, in a process of their own.

    A failure is not reported: the process that loads the model tries again, and explains it.

    Args:
        device: of the model.
        on_step: called with `COMPILE_STEP` if the kernels are compiled.
    """
    if device != "cpu" or best_isa() == "portable" or not any(map(shutil.which, COMPILERS)):
        return
    with contextlib.suppress(NoLibraryError, ConfigError):
        if is_built():
            return
    on_step(COMPILE_STEP)
    subprocess.run(
        [sys.executable, "-P", "-m", __package__],  # -P and the path: as for the engine's processes
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
