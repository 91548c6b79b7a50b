"""`DEVICE_ORDER`: how CUDA numbers the GPUs in the engine's processes: as nvidia-smi does, not by their speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DEVICE_ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Environment of every process that uses CUDA."""


def other_order(environ: Mapping[str, str]) -> str | None:
    """The order that the user asks for and the engine replaces; None: there is none."""
    ((variable, order),) = DEVICE_ORDER.items()
    asked = environ.get(variable, order)
    return None if asked == order else asked
