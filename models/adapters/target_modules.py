"""`Targets`: which modules a peft configuration selects, and the ranks that its patterns assign.

Patterns come from files that are not trusted, and Python's regular expressions can take exponential time; so patterns
with repeated groups or many repetitions are refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..fields import Fields
    from .base_modules import BaseModules

ALL_LINEAR: Final = "all-linear"
_MAX_PATTERN_CHARS: Final = 2000
_MAX_REPETITIONS: Final = 8
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")
_REPETITION: Final = re.compile(r"(?<!\\)[*+{]")
_LAYER: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")


class Targets:
    """The selection of one configuration."""

    def __init__(self, fields: Fields, base: BaseModules) -> None:
        """Read `target_modules`, `exclude_modules`, `layers_to_transform` and `layers_pattern`.

        Raises:
            ConfigError: a value is of another type, or a pattern is invalid.
        """
        self._linears = set(base.linears())
        self._chosen = _names_or_pattern(fields, "target_modules")
        self._excluded = _names_or_pattern(fields, "exclude_modules")
        layers = fields.get("layers_to_transform")
        self._layers: set[int] | None = None
        if layers is not None and layers != []:
            indices = layers if isinstance(layers, list) else [layers]
            self._layers = {index for index in indices if type(index) is int and index >= 0}
            if len(self._layers) != len(indices):
                raise fields.error("layers_to_transform", layers, "expected layer numbers, each once")
        patterns = fields.get("layers_pattern") or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or any(not isinstance(pattern, str) for pattern in patterns):
            raise fields.error("layers_pattern", patterns, "expected a string or a list of strings")
        self._layer_patterns = [
            compiled(fields, "layers_pattern", pattern, r"(?:^|.*?\.){}\.(\d+)\.") for pattern in patterns
        ] or [_LAYER]

    def include(self, name: str) -> bool:
        """Whether the module of this name is selected, by peft's rules."""
        if self._excluded is not None and _matches(self._excluded, name):
            return False
        if self._chosen is None:
            return True
        if self._chosen == ALL_LINEAR:
            return name in self._linears and self._includes_layer_of(name)
        if isinstance(self._chosen, re.Pattern):
            return _matches(self._chosen, name)
        return _matches(self._chosen, name) and self._includes_layer_of(name)

    def _includes_layer_of(self, name: str) -> bool:
        if self._layers is None:
            return True
        found = next(filter(None, (pattern.match(name) for pattern in self._layer_patterns)), None)
        return found is not None and int(found[1]) in self._layers


def pattern_value(patterns: Sequence[tuple[re.Pattern[str], float]], name: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's name."""
    return next((value for pattern, value in patterns if pattern.match(name)), default)


def compiled_patterns(fields: Fields, name: str) -> list[tuple[re.Pattern[str], float]]:
    """A field such as `rank_pattern`: numbers by patterns of module names.

    Raises:
        ConfigError: it is no such object.
    """
    values = fields.get(name) or {}
    if not isinstance(values, dict):
        raise fields.error(name, values, "expected an object of numbers by module names")
    return [
        (compiled(fields, name, pattern, r"(?:.*\.)?(?:{})$"), _number(fields, name, values, pattern))
        for pattern in values
    ]


def compiled(fields: Fields, name: str, pattern: str, form: str = "{}") -> re.Pattern[str]:
    """A pattern of the file, put into `form`.

    Raises:
        ConfigError: it is invalid, or could take long.
    """
    too_long = len(pattern) > _MAX_PATTERN_CHARS or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS
    if too_long or _REPEATED_GROUP.search(pattern):
        raise fields.error(
            name,
            pattern,
            f"expected a pattern without repeated groups and with at most {_MAX_REPETITIONS} repetitions",
        )
    try:
        return re.compile(form.replace("{}", pattern))
    except re.error as error:
        raise fields.error(name, pattern, f"which is no regular expression: {error}") from error


def _names_or_pattern(fields: Fields, name: str) -> list[str] | re.Pattern[str] | str | None:
    value = fields.get(name)
    if value is None or value == []:
        return None
    if isinstance(value, str):
        return ALL_LINEAR if value.lower() == ALL_LINEAR else compiled(fields, name, value)
    if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
        raise fields.error(name, value, "expected module names, or a pattern")
    return value


def _matches(chosen: list[str] | re.Pattern[str] | str, name: str) -> bool:
    if isinstance(chosen, re.Pattern):
        return chosen.fullmatch(name) is not None
    return any(name == each or name.endswith(f".{each}") for each in chosen)


def _number(fields: Fields, name: str, values: Mapping[str, object], pattern: str) -> float:
    value = values[pattern]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise fields.error(f"{name}[{pattern!r}]", value, "expected a positive number")
    return float(value)
