"""`CallOptions`: keyword arguments of one call that control how its requests are scheduled."""

from __future__ import annotations

from typing import Any, TypedDict

from ..runtime.errors import RequestError
from ..runtime.request_checks import check_text, plain
from ..tokenizer_manager.scheduling_options import Scheduling, checked_priority, checked_timeout


class CallOptions(TypedDict, total=False):
    """The HTTP fields of the same names; `tenant` is `user` there.

    Attributes:
        priority: larger goes first, under policies that use it; "high", "normal" and "low" are 20, 0 and -20.
        tenant: the requests are accounted to it, for policies that share capacity between tenants.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        queue_timeout: seconds within which a request must be started; after that it ends with an error.
        timeout: seconds within which a request must be finished.
    """

    priority: int | str
    tenant: str
    cache_salt: str
    queue_timeout: float | None
    timeout: float | None


def checked_options(options: CallOptions) -> Scheduling:
    """The options, verified.

    Raises:
        TypeError: there is no such option.
        RequestError: a value has the wrong type or is out of range.
    """
    unknown = sorted(options.keys() - CallOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(CallOptions.__annotations__)
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; the options of a call are {known}")
    values: dict[str, Any] = {name: plain(value) for name, value in options.items()}
    for name, value in values.items():
        kinds, words = _KINDS[name]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise RequestError(
                f"{name} is {value!r}, but it must be {words}", param=name, code="invalid_type"
            )
        if isinstance(value, str):
            check_text(name, value)
    return Scheduling(
        priority=checked_priority(values.get("priority")),
        tenant=values.get("tenant", ""),
        extra_key=values.get("cache_salt", ""),
        queue_timeout_s=checked_timeout(values.get("queue_timeout"), "queue_timeout"),
        timeout_s=checked_timeout(values.get("timeout"), "timeout"),
    )


_SECONDS: tuple[tuple[type, ...], str] = ((int, float, type(None)), "a number of seconds")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "priority": ((int, str), "an integer or a class"),
    "tenant": ((str,), "a text"),
    "cache_salt": ((str,), "a text"),
    "queue_timeout": _SECONDS,
    "timeout": _SECONDS,
}
