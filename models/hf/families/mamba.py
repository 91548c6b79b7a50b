"""What configurations with layers of Mamba 2 have in common."""

from __future__ import annotations

import math
from typing import Final

from ...fields import Fields

MAX_TAPS: Final = 64
"""Of the convolution, in the kernels."""
_MOST_STEP: Final = 1e9
"""A larger bound is none."""


def time_step_bounds(fields: Fields, name: str) -> tuple[float, float | None]:
    """The bounds of time steps, from a list of two numbers; None: there is no upper one.

    transformers applies them to prompts only, its decodes have none: bounds that matter would make two models of one.
    The engine applies them to all tokens, so that a text does not depend on how it is divided.
    """
    value = fields.get(name)
    if value is None:
        return 0.0, None
    numbers = [_number(one) for one in value] if isinstance(value, list) else []
    if len(numbers) != 2 or not 0 <= numbers[0] <= min(numbers[1], _MOST_STEP):  # false for NaN
        raise fields.error(name, value, "expected two numbers, the least and the largest time step")
    least, most = numbers
    return least, None if most > _MOST_STEP else most


def _number(value: object) -> float:
    """NaN if it is none. transformers writes an infinite number as an object with its name."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(min(value, 2 * _MOST_STEP))
