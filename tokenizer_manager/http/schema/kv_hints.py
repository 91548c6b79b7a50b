"""The envelope of hints about cached memory, in `kv_hints` of generating requests and in `POST /v1/kv_hints`."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.messages import HintAction, HintOutcome
from ...scheduling_options import Hint
from .field_policy import FieldPolicy
from .field_types import MAX_TTL_S
from .values import Body, convert, objects, refused, show

MAX_ACTIONS: Final = 64
MAX_ACTIONS_IN_TURN: Final = 16
"""With `MAX_ID_CHARS` it keeps the header of the results below 8 KiB, if they are ASCII."""
MAX_ID_CHARS: Final = 256
PROTOCOL_VERSION: Final = 1
HINTS_HEADER: Final = b"x-kv-hints"
"""The results for a generating request, as JSON in ASCII, because each API has another body."""
_ACTIONS: Final = {
    "release": HintAction.CLOSE,
    "demote": HintAction.DEMOTE,
    "retain": HintAction.RETAIN,
    "pin": HintAction.RETAIN,
    "expect": HintAction.RETAIN,
    "prefetch": HintAction.PREFETCH,
}
_PAYLOADS: Final = {"expect": ("return_s", 2.0)}
"""The field with a time, and how many times that pages are kept; `ttl_s` and once for the others. A client's estimate
of its return is a guess, and pages that go just before it are of no use."""


class KvHints(msgspec.Struct, kw_only=True):
    """The envelope."""

    protocol_version: int
    actions: list[dict[str, Any]]
    message_id: str | None = None


class HintFields(msgspec.Struct, kw_only=True):
    """One of the `actions`."""

    action_id: str
    action_type: str
    action_version: int = 1
    payload: dict[str, Any] = {}


class HintResult(msgspec.Struct, kw_only=True):
    """The outcome of an action, with figures or a reason."""

    action_id: str | UnsetType = UNSET
    outcome: HintOutcome
    detail: str


class HintsBody(msgspec.Struct, kw_only=True):
    """Results of the actions, in their order."""

    message_id: str | UnsetType = UNSET
    results: list[HintResult]
    warnings: list[str] | UnsetType = UNSET


ACTIONS_POLICY: Final = FieldPolicy(HintFields, {}, no_effect=())


def checked_hints(envelope: KvHints, at: str = "", most: int = MAX_ACTIONS) -> tuple[Hint, ...]:
    """The actions of an envelope, at most `most`.

    Args:
        at: where it is in the body, for errors.

    Raises:
        RequestError: it is malformed, or of another version.
    """
    version, count = envelope.protocol_version, len(envelope.actions)
    if version != PROTOCOL_VERSION:
        raise refused(f"{at}protocol_version", f"is {version}, but it must be {PROTOCOL_VERSION}")
    if count > most:
        raise refused(f"{at}actions", f"has {count} actions, the limit is {most}; send several")
    return tuple(_hint(action, path) for path, action in objects(envelope.actions, f"{at}actions"))


def _hint(action_fields: Body, at: str) -> Hint:
    fields = convert(action_fields, HintFields, at)
    if len(fields.action_id) > MAX_ID_CHARS:
        raise refused(
            f"{at}.action_id", f"has {len(fields.action_id)} characters, the limit is {MAX_ID_CHARS}"
        )
    ttl_s, reason = 0.0, ""
    action = _ACTIONS.get(fields.action_type)
    if action is None:
        reason = f"{show(fields.action_type)} is not supported; {', '.join(_ACTIONS)} are"
    elif fields.action_version != 1:
        reason = f"action_version is {fields.action_version}, but it must be 1"
    elif action is HintAction.RETAIN:
        field, factor = _PAYLOADS.get(fields.action_type, ("ttl_s", 1.0))
        ttl_s, reason = _ttl_of(fields.payload, field)
        ttl_s = min(factor * ttl_s, MAX_TTL_S)
    return Hint(fields.action_id, None if reason else action, ttl_s, reason)


def _ttl_of(payload: Body, field: str) -> tuple[float, str]:
    """The time of a payload, and why it is none."""
    value = payload.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_TTL_S:
        return float(value), ""
    return 0.0, f"payload.{field} is {show(value)}, but it must be a number in (0, {MAX_TTL_S:g}] seconds"


def keep_s_with(hints: tuple[Hint, ...], keep_s: float | None, *, has_session: bool) -> float | None:
    """`Scheduling.keep_s` of a request with hints: those without a session are for its prompt.

    Args:
        keep_s: what its other fields ask for.
    """
    times = [] if keep_s is None else [keep_s]
    times += [hint.ttl_s for hint in hints if hint.action is HintAction.RETAIN]
    lets_go = (HintAction.DEMOTE,) if has_session else (HintAction.DEMOTE, HintAction.CLOSE)
    if any(hint.action in lets_go for hint in hints):
        times.append(0.0)
    return max(times, default=None)
