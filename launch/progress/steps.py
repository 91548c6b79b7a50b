"""Names of the steps of a start that several modules use."""

from __future__ import annotations

from typing import Final

COMPILE_STEP: Final = "compile the CPU kernels, once"
