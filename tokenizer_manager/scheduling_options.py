"""`Scheduling`: the scheduling options of a request, and the checks of the values that clients send.

The HTTP endpoints and `LLM` share it, so that a priority or a timeout means the same in both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ..runtime.errors import RequestError
from ..runtime.messages import HintAction

PRIORITY_CLASSES: Final[Mapping[str, int]] = {"high": 20, "normal": 0, "low": -20}
"""Further apart than the 10 levels by which a request must exceed the running one that it preempts."""
FLEX: Final = "flex"
SERVICE_TIERS: Final = ("auto", "default", FLEX, "priority", "scale")
"""OpenAI's; all but flex are served alike."""
COMPLETION_WINDOWS_S: Final[Mapping[str, float]] = {"2h": 7200.0, "8h": 28_800.0}
MAX_PRIORITY: Final = 1_000_000
MAX_TIMEOUT_S: Final = 86_400.0
MAX_SALT_CHARS: Final = 256
_MAX_TENANT_CHARS: Final = 64


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """Which half of a request this is, and where the other one is; see `Handoffs`. As it came, unchecked.

    Attributes:
        host, port, room: as SGLang's routers send them; a list has a value for each prompt.
        kv_transfer_params: as vLLM's routers send it.
    """

    host: str | list[str | None] | None = None
    port: int | list[int | None] | None = None
    room: int | list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Hint(msgspec.Struct, frozen=True):
    """A client's request about cached memory.

    Attributes:
        action_id: the client's name for it.
        action: None: it is not done.
        ttl_s: of RETAIN.
        reason: why it is not done.
    """

    action_id: str
    action: HintAction | None
    ttl_s: float = 0.0
    reason: str = ""


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """Verified options, for all choices of a request.

    Attributes:
        priority: larger is scheduled earlier by policies that use it.
        tenant: the tenant that the request is accounted to.
        extra_key: namespace of the prefix cache.
        queue_timeout_s: seconds from arrival within which it must be started; None: the server's limit.
        timeout_s: seconds from arrival within which it must have ended; None: the server's limit.
        owner: may abort it, as the admin may; "" on a server without keys.
        lora_id: fingerprint of the LoRA adapter; "" for the model itself.
        served_as: name of that adapter; "" for the model itself.
        replica: number of the replica that gets it (`data_parallel_rank`); None: the server chooses.
        keep_s: seconds for which the prefix cache keeps the prompt; 0: it is not to be cached, None: as usual.
        session: a digest of the key of its session, see `session_of`; "": it names none.
        in_memory: the prompt is not written to a disk.
        service_tier: that its answer reports, "default" or "flex"; "": the request names none.
        hints: for its prompt, which `keep_s` has, or its session.
        bootstrap: fields about its other half at another engine; None: it names none.
    """

    priority: int = 0
    tenant: str = ""
    extra_key: str = ""
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    owner: str = ""
    lora_id: str = ""
    served_as: str = ""
    replica: int | None = None
    keep_s: float | None = None
    session: str = ""
    in_memory: bool = False
    service_tier: str = ""
    hints: tuple[Hint, ...] = ()
    bootstrap: Bootstrap | None = None

    @property
    def background(self) -> bool:
        """Whether the request runs on what others leave."""
        return self.service_tier == FLEX


def checked_tier(value: str | None, options: object, timeout_s: float | None) -> tuple[str, float | None]:
    """The tier of a request, and the seconds until it must have ended.

    Args:
        value: `service_tier` as it was sent.
        options: `background_options`, which put a request into the background, too.
        timeout_s: its `timeout`.

    Raises:
        RequestError: there is no such tier.
    """
    if value and value not in SERVICE_TIERS:
        raise RequestError(
            f"service_tier is {_shown(value)}, but it must be one of {', '.join(SERVICE_TIERS)}; flex runs on what "
            "other requests leave",
            param="service_tier",
            code="invalid_value",
        )
    window = getattr(options, "completion_window", None)
    if window:
        if window not in COMPLETION_WINDOWS_S:
            raise RequestError(
                f"background_options.completion_window is {_shown(window)}, but it must be one of "
                f"{', '.join(COMPLETION_WINDOWS_S)}",
                param="background_options.completion_window",
                code="invalid_value",
            )
        window_s = COMPLETION_WINDOWS_S[window]
        timeout_s = window_s if timeout_s is None else min(window_s, timeout_s)
    if value == FLEX or window:
        return FLEX, timeout_s
    return "default" if value else "", timeout_s


def _shown(value: str) -> str:
    """A value of a client for an error."""
    return f'"{value}"' if len(value) <= _MAX_TENANT_CHARS else f'"{value[:_MAX_TENANT_CHARS]}…"'


def checked_priority(value: int | str | None, param: str = "priority") -> int:
    """A priority, given as a number or as a class.

    Raises:
        RequestError: out of range, or no class.
    """
    if isinstance(value, str) and value:
        if value not in PRIORITY_CLASSES:
            words = ", ".join(f'"{name}" ({level})' for name, level in PRIORITY_CLASSES.items())
            raise RequestError(
                f"{param} is {_shown(value)}, but it must be an integer or one of {words}; larger ones go first",
                param=param,
                code="invalid_value",
            )
        return PRIORITY_CLASSES[value]
    if isinstance(value, int) and not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise RequestError(
            f"{param} is {value}, but it must lie in [{-MAX_PRIORITY}, {MAX_PRIORITY}]; 0 is usual, larger ones go "
            f"first",
            param=param,
            code="invalid_value",
        )
    return value if isinstance(value, int) else 0


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
    """The tenant of a request: its `user`, else its API key, else "".

    A long name is hashed, which bounds the scheduler's state per tenant, and so is a key, which is never kept or shown.
    The hash is the same on every start, so that logs of several days can be compared.
    """
    if user:
        return user if len(user) <= _MAX_TENANT_CHARS else f"user-{digest_of(user.encode())}"
    return f"key-{digest_of(api_key)}" if api_key else ""


def checked_salt(value: str | None, param: str = "cache_salt") -> str | None:
    """A namespace of the prefix cache.

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
    """A name for a secret or a long value: 16 hex digits that are the same on every start."""
    return hashlib.blake2b(data, digest_size=8, person=b"engine-tenant").hexdigest()
