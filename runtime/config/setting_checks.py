"""Ranges of settings: each check raises a `ConfigError` that says value and rule."""

from __future__ import annotations

import math
from typing import Final

from ..errors import ConfigError

MAX_INT: Final = 2**63 - 1
"""The largest whole number of a setting: what the decision log, and a tensor, can hold."""


def check_finite(name: str, value: float, low: float, *, open_end: bool) -> None:
    """A number of at least `low`, or above it with `open_end`."""
    if not math.isfinite(value) or value < low or (open_end and value == low):
        rule = f"above {low:g}" if open_end else f"{low:g} or more"
        raise ConfigError(f"{name} is {value}, but it must be {rule}")


def check_at_least(name: str, value: int | str, low: int) -> None:
    """A whole number of at least `low`; words ("auto") pass."""
    if isinstance(value, int) and value < low:
        raise ConfigError(f"{name} is {value}, but it must be at least {low}")
    if isinstance(value, int) and value > MAX_INT:  # what msgpack and tensors can hold
        raise ConfigError(f"{name} is {value}, but it must be at most {MAX_INT}")
