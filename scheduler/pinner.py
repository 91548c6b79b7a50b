"""`Pinner`: keeps prefixes cached for a time, on request."""

from __future__ import annotations

from ..runtime.messages import PinDone, PinPrefix
from .arrays import TOKEN_ID_BYTES
from .kv_memory import KVMemory


class Pinner:
    """Answers `PinPrefix`."""

    __slots__ = ("_kv",)

    def __init__(self, kv: KVMemory) -> None:
        self._kv = kv

    def pin(self, message: PinPrefix, now_s: float) -> PinDone:
        """Pin what is cached of a prefix, as far as the quota goes."""
        return PinDone(
            message.pin_id, 0, len(message.input_ids) // TOKEN_ID_BYTES, "pinning is not there yet"
        )
