"""`check_limit`: refuses requests beyond `RequestLimits` before anything is tokenized."""

from __future__ import annotations

from typing import Final

from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError

DEFAULT_LIMITS: Final = RequestLimits()


def check_limit(param: str, count: int, what: str, limit: int, setting: str) -> None:
    """Refuse a list that is too long.

    Args:
        param: the client's name of the field.
        count: of its items.
        what: the items, such as "messages".
        limit: the largest count.
        setting: the setting that raises the limit, for the error.

    Raises:
        RequestError: there are more.
    """
    if count > limit:
        raise RequestError(
            f"{param} has {count} {what}, the limit is {limit}; send fewer, or raise "
            f"--{setting.replace('_', '-')}",
            param=param,
            code="invalid_value",
        )


def check_count(param: str, count: int, low: int, limit: int, setting: str) -> None:
    """Refuse a requested number that is out of range.

    Raises:
        RequestError: it is out of range.
    """
    if not low <= count <= limit:
        raise RequestError(
            f"{param} is {count}, but it must lie in [{low}, {limit}] (--{setting.replace('_', '-')})",
            param=param,
            code="invalid_value",
        )
