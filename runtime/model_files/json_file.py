"""Reading of the JSON files in a model folder, which come from the internet and may be anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from ..errors import ConfigError

_MAX_BYTES: Final = 64 << 20
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a pair has no UTF-8 form, and whoever wants one of it later would fail with something else than a reason."""


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`.

    Raises:
        ConfigError: the file is missing, unreadable, absurdly large, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path}: larger than {_MAX_BYTES >> 20} MiB, this cannot be a configuration file"
            )
        data = path.read_bytes()
        value = json.loads(data, object_pairs_hook=_unambiguous)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError, too
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; the model folder is incomplete, download it again"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object; a field that is there twice must say the same twice, as some published files do."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        for name, value in pairs:
            if fields[name] != value:
                raise ValueError(f"the field {name!r} is there twice, with different values")
    return fields
