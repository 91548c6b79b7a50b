"""`CacheMiss`: why the prefix cache did not have more of a prompt; made when the request is admitted."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class MissKind(enum.StrEnum):
    """Why the cached prefix ends where it ends; `text` is the reason in words."""

    NONE = "none"
    NO_PREFIX = "cold"
    DIFFERS = "differs"
    EVICTED = "evicted"
    FLUSHED = "flushed"
    OTHER_NAMESPACE = "other_namespace"
    ROUNDING = "rounding"
    BYPASSED = "not_asked"
    PROMPT_LONGER = "ends"
    OFF = "off"
    NO_STATE = "no_state"

    @property
    def text(self) -> str:
        """The reason in words."""
        return _TEXTS[self]


_TEXTS: Final = {
    MissKind.NONE: "all that can be cached was cached; the last token is always computed",
    MissKind.NO_PREFIX: "no prompt with this beginning was cached",
    MissKind.DIFFERS: "the nearest cached prompt differs from here on",
    MissKind.EVICTED: "the rest had been cached and was evicted to make room",
    MissKind.FLUSHED: "the rest had been cached, until the whole cache was emptied",
    MissKind.OTHER_NAMESPACE: "the same tokens are cached under another cache salt or adapter, which are never shared",
    MissKind.ROUNDING: "prefixes are shared in whole pages, and the rest fills none",
    MissKind.BYPASSED: "the request needs the results of all tokens of its prompt, so all of it is computed",
    MissKind.PROMPT_LONGER: "the nearest cached prompt ends here, and this one goes on",
    MissKind.OFF: "the prefix cache is switched off",
    MissKind.NO_STATE: "more is cached, but no state of the model's state layers was kept at its end",
}


class CacheMiss(NamedTuple):
    """The result of one look-up in the prefix cache.

    Attributes:
        rid: the request.
        prompt_len: tokens of the prompt.
        prefix_len: tokens found.
        kind: why not more were found.
        differs_at: position of the first token that differs from the nearest cached prompt; `prefix_len` is rounded
            down to a page. Equal to `prefix_len` if there is no prompt to compare with.
        evicted_at: the cache's count of evictions when the missing page was evicted; 0 unless EVICTED.
        own_kind: for OTHER_NAMESPACE: the kind if no other namespace existed.
    """

    rid: str
    prompt_len: int
    prefix_len: int
    kind: MissKind
    differs_at: int
    evicted_at: int = 0
    own_kind: MissKind | None = None

    def for_clients(self) -> CacheMiss:
        """A copy without information about other namespaces, which a cache salt must hide.

        A client can learn neither what another tenant has cached nor, from the count of evictions, how busy other
        tenants are. The operator gets the complete `CacheMiss`.
        """
        return self._replace(kind=self.own_kind or self.kind, evicted_at=0, own_kind=None)
