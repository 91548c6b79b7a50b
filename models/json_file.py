"""Reads the JSON files in a model folder, which are untrusted."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Final

from ..runtime.errors import ConfigError
from .stand_in import damage

logger = logging.getLogger(__name__)

_MAX_BYTES: Final = 64 << 20
_MAX_NAMED: Final = 8  # fields in a warning
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""A lone surrogate has no UTF-8 form: it would fail later with an unclear error, so the file is checked here."""


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`.

    If a field appears twice, the last value counts, as in other JSON readers; if the values differ, a warning is
    logged.

    Raises:
        ConfigError: the file is missing, unreadable, too large, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path}: larger than {_MAX_BYTES >> 20} MiB, this cannot be a configuration file"
            )
        data = path.read_bytes()
        value, doubtful = _parse(data)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError, too
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; the model folder is incomplete, download it again"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(damage(path, f"not valid JSON ({error}); download it again")) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    if doubtful:
        logger.warning(
            "%s: twice in one object, with different values: %s; the last ones are taken",
            path,
            ", ".join(map(repr, doubtful[:_MAX_NAMED])),
        )
    return value


def _parse(data: bytes) -> tuple[object, list[str]]:
    """The value, and the names of fields that appear twice with different values."""
    doubtful: list[str] = []

    def fields_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            doubtful.extend(name for name, value in pairs if fields[name] != value)
        return fields

    return json.loads(data, object_pairs_hook=fields_of), doubtful
