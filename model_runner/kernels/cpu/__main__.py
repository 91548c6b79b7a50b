"""`python -m engine.model_runner.kernels.cpu`: compile the kernels for this CPU, if they are missing."""

from __future__ import annotations

import sys

from .library import reasons_against_library

sys.exit(1 if reasons_against_library() else 0)
