"""`Pinner`: pins prefixes in the cache for a time, on request."""

from __future__ import annotations

from ...runtime.messages import PinDone, PinPrefix
from ..arrays import TOKEN_ID_BYTES
from ..memory.kv_memory import KVMemory
from ..prefix_cache.base import namespace_of
from ..requests.intake import reason_to_refuse_pin


class Pinner:
    """Answers `PinPrefix`."""

    def __init__(self, kv: KVMemory, *, max_pinned_tokens: int) -> None:
        """`max_pinned_tokens`: the quota, for the answer; the prefix cache enforces it."""
        self._kv = kv
        self._max_pinned_tokens = max_pinned_tokens

    def pin(self, message: PinPrefix, now_s: float) -> PinDone:
        """Pin the cached part of a prefix, up to the quota."""
        refusal = reason_to_refuse_pin(message)
        if refusal is not None:
            return PinDone(message.pin_id, 0, 0, refusal)
        page_size = self._kv.page_size
        until_s = now_s + message.ttl_s if message.ttl_s > 0 else None
        pinned_tokens = (
            self._kv.pin(namespace_of(message.extra_key, message.lora_id), message.input_ids, until_s)
            * page_size
        )
        asked_tokens = len(message.input_ids) // TOKEN_ID_BYTES
        reason = ""
        if until_s is not None and pinned_tokens < asked_tokens // page_size * page_size:
            all_pinned = self._kv.pinned_pages * page_size
            if all_pinned >= self._max_pinned_tokens:
                reason = (
                    f"the quota is {self._max_pinned_tokens} tokens and all of it is in use; wait, unpin others, or "
                    f"raise --pin-fraction"
                )
            elif not pinned_tokens and self._kv.num_pins * page_size >= self._max_pinned_tokens:
                reason = (
                    f"there are {self._kv.num_pins} pins, and no more are allowed than the quota has pages; wait, "
                    "unpin others, or raise --pin-fraction"
                )
            else:
                reason = "only what is cached can be pinned; send the prompt as a request first"
        elif pinned_tokens < asked_tokens and until_s is not None:
            reason = f"prefixes are kept in whole pages of {page_size} tokens"
        return PinDone(message.pin_id, pinned_tokens, asked_tokens, reason)
