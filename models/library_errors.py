"""`library_errors`: turns a library's exceptions about a damaged file into `ConfigError`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from ..runtime.errors import ConfigError

_MAX_QUOTED_CHARS: Final = 300
"""Of the library's message, which may quote the file."""


@contextlib.contextmanager
def library_errors(before: str, behind: str = "") -> Iterator[None]:
    """Turn any exception raised inside into a ConfigError: `before`, the library's message, `behind`.

    The tokenizers library raises plain `Exception`. If its Rust code panics (for example on a merge that is shorter
    than its required prefix) it raises `PanicException`, which cannot be imported and is not an `Exception`.

    Raises:
        ConfigError: an exception was raised inside.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ConfigError(f"{before}{str(error)[:_MAX_QUOTED_CHARS]}{behind}") from error


def is_panic(error: BaseException) -> bool:
    """Whether a library's Rust code has panicked."""
    return type(error).__name__ == "PanicException"
