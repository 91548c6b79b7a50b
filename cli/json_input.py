"""`read_json`: the JSON files that options name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from ..runtime.errors import ConfigError
from ..runtime.text import decode_utf8, is_unicode

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of a surrogate, paired or not."""


def read_json(path: Path, what: str) -> Any:
    """The value in a file.

    Args:
        what: names the file in errors: `--schema FILE`.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, not JSON, or has a text that is not Unicode.
    """
    return read_json_text(path, what)[1]


def read_json_text(path: Path, what: str) -> tuple[str, Any]:
    """As `read_json`, with the text of the file before the value."""
    try:
        text = decode_utf8(path.read_bytes(), what)
        value = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not JSON: {error}") from None
    if _SURROGATE.search(text) and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ConfigError(
            f"{what} has a text with half of a surrogate pair (an escape from \\ud800 to \\udfff); remove it"
        )
    return text, value
