"""`check_limit`: the answer to who asks for more than `RequestLimits` lets it, before anything is tokenised."""

from __future__ import annotations

from typing import Final

from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError

DEFAULT_LIMITS: Final = RequestLimits()


def check_limit(param: str, count: int, what: str, limit: int, setting: str) -> None:
    """Refuse a list that is too long.

    Args:
        param: the field, as the client calls it.
        count: how many there are.
        what: of what: "messages".
        limit: how many there may be.
        setting: the flag's name, for the way out.

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
    """Refuse a number of things asked for that is out of range.

    Raises:
        RequestError: it is.
    """
    if not low <= count <= limit:
        raise RequestError(
            f"{param} is {count}, but it must lie in [{low}, {limit}] (--{setting.replace('_', '-')})",
            param=param,
            code="invalid_value",
        )
