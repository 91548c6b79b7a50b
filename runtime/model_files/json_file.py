"""Reading of the JSON files in a model folder, which come from the internet and may be anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ..errors import ConfigError

_MAX_BYTES: Final = 64 << 20


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
        value = json.loads(path.read_bytes())
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
