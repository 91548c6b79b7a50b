"""`Pair`: `--disaggregation-mode both`: replica 0 computes the prompts of replica 1.

Each request is sent to both with the same room, as a router does with two engines. The prefill half has an id of its
own, which is not in the request log: its one row is dropped, and messages about a request are sent for both ids.
"""

from __future__ import annotations

import secrets
from typing import Final

from msgspec.structs import replace

from ...runtime.messages import AbortRequest, GenerateRequest, GrammarReady, KVHandoff, SchedulerInput

PREFILL: Final = 0
DECODE: Final = 1
MIN_PROMPT_TOKENS: Final = 64
"""A shorter prompt delays no step of the decode replica by much, and is computed there."""

_HALF: Final = "~prefill"


class Pair:
    """See the module."""

    def __init__(self, peer: str) -> None:
        """`peer`: HOST:PORT at which the decode replica claims prompts."""
        self._peer = peer

    def halves(self, message: GenerateRequest) -> tuple[GenerateRequest, GenerateRequest] | None:
        """The prefill half and the decode half of a request; None: replica 1 does all of it."""
        is_short = len(message.input_ids) < 4 * MIN_PROMPT_TOKENS
        needs_all = message.pooling is not None or message.sampling.prompt_logprobs is not None
        if is_short or needs_all or message.delivered is not None:
            return None
        room = str(secrets.randbits(63))
        prefill = replace(message, rid=message.rid + _HALF, handoff=KVHandoff(room))
        return prefill, replace(message, handoff=KVHandoff(room, self._peer))

    def mirrored(self, message: SchedulerInput) -> SchedulerInput | None:
        """What the prefill replica must hear about its half; None: nothing."""
        if isinstance(message, AbortRequest | GrammarReady):
            return replace(message, rid=message.rid + _HALF)
        return None
