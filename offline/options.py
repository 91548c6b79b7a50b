"""`CallOptions`: keyword arguments of one call that say how its requests are scheduled."""

from __future__ import annotations

from typing import TypedDict

from ..runtime.errors import RequestError
from ..tokenizer_manager.scheduling_options import Scheduling, checked_priority, checked_timeout


class CallOptions(TypedDict, total=False):
    """As the HTTP fields of these names; `tenant` is `user` there.

    Attributes:
        priority: larger goes first where the policy looks at it; "high", "normal" and "low" are 20, 0 and -20.
        tenant: whom to account the requests to, for policies that share out between tenants.
        cache_salt: requests share cached prefixes only with those of the same salt.
        queue_timeout: seconds within which a request must be started; later it ends with an error.
        timeout: seconds within which a request must have ended.
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
    for name, value in options.items():
        kinds, words = _KINDS[name]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise RequestError(
                f"{name} is {value!r}, but it must be {words}", param=name, code="invalid_type"
            )
    return Scheduling(
        priority=checked_priority(options.get("priority")),
        tenant=options.get("tenant", ""),
        extra_key=options.get("cache_salt", ""),
        queue_timeout_s=checked_timeout(options.get("queue_timeout"), "queue_timeout"),
        timeout_s=checked_timeout(options.get("timeout"), "timeout"),
    )


_SECONDS: tuple[tuple[type, ...], str] = ((int, float, type(None)), "a number of seconds")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "priority": ((int, str), "an integer or a class"),
    "tenant": ((str,), "a text"),
    "cache_salt": ((str,), "a text"),
    "queue_timeout": _SECONDS,
    "timeout": _SECONDS,
}
