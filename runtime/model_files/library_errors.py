"""`library_errors`: what a library says of a damaged file, as our own error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from ..errors import ConfigError

_MAX_QUOTED_CHARS: Final = 300
"""Of its words, which may quote the file."""


@contextlib.contextmanager
def library_errors(before: str, behind: str = "") -> Iterator[None]:
    """Turn whatever is raised inside into an error with these words around the library's own.

    The tokenizers library raises plain `Exception`, and where its Rust code panics (a merge that is shorter than the
    prefix it must have) a `PanicException`, which cannot be imported and is no `Exception`.

    Raises:
        ConfigError: something was.
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
