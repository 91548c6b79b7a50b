"""Checked access to the fields of a model's configuration, from JSON or GGUF metadata."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ..runtime.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_SHOWN_CHARS: Final = 80


class Fields:
    """The fields of one file; every accessor checks type and range and names file, field, value and rule.

    A field that is null counts as missing. Without a default a missing field is an error.
    """

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        """`prefix` is put before field names in messages: the path of a nested object."""
        self.path = path
        self._values = values
        self._prefix = prefix

    def get(self, name: str) -> object | None:
        """The raw value, or None."""
        return self._values.get(name)

    def __contains__(self, name: str) -> bool:
        """Whether the file has the field, also if its value is null."""
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        """The names that the file has."""
        return iter(self._values)

    def given(self, *names: str) -> str:
        """The one of several names of one setting that the file has; the first one if it has none.

        Null, an empty string, list and object count as missing.

        Raises:
            ConfigError: it has two with different values.
        """
        given = [name for name in names if not _is_empty(self.get(name))]
        for name in given[1:]:
            if (self.get(name) != self.get(given[0])) is not False:  # of an array in a GGUF file: an array
                raise self.error(
                    given[0],
                    self.get(given[0]),
                    f"but {name} is {_shown(self.get(name))}, another name of the same setting; remove one of them",
                )
        return given[0] if given else names[0]

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer, low <= value <= high."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, value, f"expected a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number, low <= value <= high."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "expected a number")
        if not low <= value <= high or not math.isfinite(value):  # `isfinite` raises for 10**400
            raise self.error(name, value, f"expected a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "expected true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "expected a string")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Zero or more token ids: null, a number or a list of numbers."""
        value = self.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise self.error(name, value, f"expected token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def known_token_id(self, name: str, vocab_size: int) -> int | None:
        """The first token id, if it is in the vocabulary; one that is not is ignored with a warning.

        For tokens that nothing depends on: files often have -1 or the id of another version here.
        """
        value = self.get(name)
        if _is_empty(value):
            return None
        first = value[0] if isinstance(value, list) else value
        if isinstance(first, bool) or not isinstance(first, int):
            raise self.error(name, value, f"expected token ids from 0 to {vocab_size - 1}")
        if 0 <= first < vocab_size:
            return first
        logger.warning(
            "%s: %s%s is %s, which is ignored: token ids go from 0 to %d",
            self.path,
            self._prefix,
            name,
            first,
            vocab_size - 1,
        )
        return None

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers, low <= each <= high; empty if missing."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or any(
            isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high for item in value
        ):
            raise self.error(name, value, f"expected a list of whole numbers from {low} to {high}")
        return tuple(value)

    def error(self, name: str, value: object, rule: str) -> ConfigError:
        """The error for a field with an invalid value."""
        return ConfigError(f"{self.path}: {self._prefix}{name} is {_shown(value)}, {rule}")

    def _get(self, name: str, default: object | None) -> object:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.path}: the field {self._prefix}{name} is missing")
        return default


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else shown[:_MAX_SHOWN_CHARS] + "..."
