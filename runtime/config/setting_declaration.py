"""Parts of the declaration of a setting: `Alias`, another engine's name for it, and range checks.

An alias is part of the annotation, `Annotated[int, "help", Alias("max_num_seqs")]`, and is accepted wherever the
setting's own name is: flag, YAML file, `LLM(...)`. A name with another meaning is not an alias: vLLM's
`gpu_memory_utilization` and SGLang's `mem_fraction_static` are shares of the whole memory, weights included, and
`mem_fraction` is a share of the memory that remains after the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ..errors import ConfigError

MAX_INT: Final = 2**63 - 1
"""The largest integer of a setting: the limit of the decision log and of a tensor."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a setting.

    Attributes:
        name: as a field's, with underscores.
        switch: for a boolean name of a setting that is not boolean: the values for true and, if present, for false;
            None for a name that takes the setting's own values.
        translate: for a name with other values: gives values of settings by their names, raises `ConfigError`.
        in_help: whether `--help` names it; docs/configuration.md names all.
    """

    name: str
    switch: Mapping[bool, object] | None = None
    in_help: bool = True
    translate: Callable[[object], Mapping[str, object]] | None = None


def check_finite(name: str, value: float, low: float, *, open_end: bool) -> None:
    """A number of at least `low`, or above it with `open_end`."""
    if not math.isfinite(value) or value < low or (open_end and value == low):
        rule = f"above {low:g}" if open_end else f"{low:g} or more"
        raise ConfigError(f"{name} is {value}, but it must be {rule}")


def check_at_least(name: str, value: int | str, low: int) -> None:
    """An integer of at least `low`; words ("auto") pass."""
    if isinstance(value, int) and value < low:
        raise ConfigError(f"{name} is {value}, but it must be at least {low}")
    if isinstance(value, int) and value > MAX_INT:  # the limit of msgpack and of tensors
        raise ConfigError(f"{name} is {value}, but it must be at most {MAX_INT}")
