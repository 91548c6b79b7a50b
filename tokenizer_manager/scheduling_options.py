"""`Scheduling`: how a request wants to be scheduled, and the rules for what clients may ask.

Shared by the HTTP endpoints and `LLM`, so that a priority or a timeout means the same everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from ..runtime.errors import RequestError

PRIORITY_CLASSES: Final[Mapping[str, int]] = {"high": 20, "normal": 0, "low": -20}
"""Further apart than the 10 levels by which a request must exceed one whose place it takes."""
MAX_PRIORITY: Final = 1_000_000
MAX_TIMEOUT_S: Final = 86_400.0
MAX_SALT_CHARS: Final = 256
_MAX_TENANT_CHARS: Final = 64


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """Verified wishes, for all choices of a request.

    Attributes:
        priority: larger is scheduled earlier where the policy looks at it.
        tenant: whom to account the request to.
        extra_key: namespace of the prefix cache.
        queue_timeout_s: seconds from arrival within which it must be started; None: the server's limit.
        timeout_s: seconds from arrival within which it must have ended; None: the server's limit.
        owner: who may end it besides the operator; "" where nobody is told apart.
    """

    priority: int = 0
    tenant: str = ""
    extra_key: str = ""
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    owner: str = ""


def checked_priority(value: int | str | None, param: str = "priority") -> int:
    """A priority, given as a number or as a class.

    Raises:
        RequestError: out of range, or no class.
    """
    if isinstance(value, str):
        if value not in PRIORITY_CLASSES:
            words = ", ".join(f'"{name}" ({level})' for name, level in PRIORITY_CLASSES.items())
            shown = value if len(value) <= _MAX_TENANT_CHARS else value[:_MAX_TENANT_CHARS] + "…"
            raise RequestError(
                f'{param} is "{shown}", but it must be an integer or one of {words}; larger ones go first',
                param=param,
                code="invalid_value",
            )
        return PRIORITY_CLASSES[value]
    if value is not None and not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise RequestError(
            f"{param} is {value}, but it must lie in [{-MAX_PRIORITY}, {MAX_PRIORITY}]; 0 is usual, larger ones go "
            f"first",
            param=param,
            code="invalid_value",
        )
    return value or 0


def checked_timeout(value: float | None, param: str) -> float | None:
    """A time limit in seconds; None for the server's.

    Raises:
        RequestError: not positive and finite, or longer than a day.
    """
    if value is not None and not (math.isfinite(value) and 0 < value <= MAX_TIMEOUT_S):
        raise RequestError(
            f"{param} is {value:g}, but it must lie in (0, {MAX_TIMEOUT_S:g}] seconds; leave it out for the server's "
            f"limit",
            param=param,
            code="invalid_value",
        )
    return value


def tenant_of(user: str | None, api_key: bytes) -> str:
    """Whom to account a request to: the `user` it names, else the API key it came with, else nobody in particular.

    What the scheduler keeps per tenant is bounded by hashing long names, and a key is never kept or shown: the hash is
    the same on every start, so that logs of several days can be compared.
    """
    if user:
        return user if len(user) <= _MAX_TENANT_CHARS else f"user-{digest_of(user.encode())}"
    return f"key-{digest_of(api_key)}" if api_key else ""


def checked_salt(value: str | None, param: str = "cache_salt") -> str | None:
    """A namespace of the prefix cache, which is kept as long as something is cached under it.

    Raises:
        RequestError: too long.
    """
    if value is not None and len(value) > MAX_SALT_CHARS:
        raise RequestError(
            f"{param} has {len(value)} characters, the limit is {MAX_SALT_CHARS}; send a hash of it",
            param=param,
            code="invalid_value",
        )
    return value


def digest_of(data: bytes) -> str:
    """A name for a secret, or for something long: 16 hex digits that are the same on every start."""
    return hashlib.blake2b(data, digest_size=8, person=b"engine-tenant").hexdigest()
