"""Names of the steps of a start that more than one place knows."""

from __future__ import annotations

from typing import Final

COMPILE_STEP: Final = "compile the CPU kernels, once"
