"""`gpus_of_torch`: the GPUs that torch finds, for machines without a usable NVML.

It takes seconds, and a process of its own: a CUDA context in this one would take memory of the GPU that its children
serve with.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Final

from .device_order import DEVICE_ORDER
from .driver_gpu import GpuFacts

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 120.0
_PROGRAM: Final = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    facts, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    gpus.append([facts.name, total, free, facts.major, facts.minor])
print(json.dumps(gpus))
"""


def gpus_of_torch(program: str = _PROGRAM) -> tuple[GpuFacts, ...]:
    """The GPUs, as CUDA shows and orders them; none if torch fails."""
    command = [sys.executable, "-P", "-c", program]
    environ = {**os.environ, **DEVICE_ORDER}
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        rows = json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        logger.warning("neither libnvidia-ml.so.1 nor torch can list the GPUs: %s", error)
        return ()
    return tuple(GpuFacts(name, total, free, (major, minor)) for name, total, free, major, minor in rows)
