"""`SimRequest`: one request of a simulated workload; and how its token ids are made up.

Nobody reads the tokens of a simulation but the prefix cache, so prompts are *segments*: equal segments are equal
tokens, different ones differ in their first two tokens and are filled up with one and the same token behind those. A
radix tree over such prompts has the shape it would have over real text, and a prompt of 1,000 tokens is made in 2 us.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ..runtime.messages import GenerateRequest

EOS_TOKEN: Final = 0
FILLER_TOKEN: Final = 1
VOCAB_SIZE: Final = 32_768
TOKEN_ID_BYTES: Final = 4
_NUM_IDS: Final = VOCAB_SIZE - 2
_PAIR: Final = struct.Struct("<ii")
_FILLER: Final = struct.pack("<i", FILLER_TOKEN)
_EOS: Final = struct.pack("<i", EOS_TOKEN)


class SimRequest(NamedTuple):
    """What a client asks for, and what the model would answer.

    Attributes:
        rid: unique.
        arrival_s: on the virtual clock.
        input_ids: int32 bytes.
        output_len: tokens until the model ends by itself. The scheduler learns it when the last one is sampled.
        max_new_tokens: the client's limit, `output_len` or more; this the scheduler knows.
        tenant, priority: as in `GenerateRequest`.
        output_ids: [output_len] int32 bytes, where they are known (a recorded run); b"": filler, then EOS.
        template: the recorded message, sent with this request's limit and arrival; None: one is made up.
    """

    rid: str
    arrival_s: float
    input_ids: bytes
    output_len: int
    max_new_tokens: int
    tenant: str = ""
    priority: int = 0
    output_ids: bytes = b""
    template: GenerateRequest | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.input_ids) // TOKEN_ID_BYTES


Workload = Iterator[SimRequest]
"""Requests by arrival; lazily made, so that a million of them need no memory."""


class Segment(NamedTuple):
    """A run of prompt tokens. Equal ids and lengths are equal tokens; equal ids share the shorter one's tokens."""

    segment_id: int
    length: int


def segment_ids(segment: Segment) -> bytes:
    """The tokens of a segment, int32 bytes.

    The low part of the id goes first, so that two segments which begin with the same token, and could so share one more
    page than they should, are one pair in 32,766.
    """
    segment_id, length = segment
    high, low = divmod(segment_id, _NUM_IDS)
    head = _PAIR.pack(2 + low, 2 + high % _NUM_IDS)
    if length < 2:
        return head[: TOKEN_ID_BYTES * length]
    return head + _FILLER * (length - 2)


def answer_ids(output_len: int) -> bytes:
    """The tokens of an answer, as they stand in the history of a later turn."""
    return _FILLER * (output_len - 1) + _EOS


def prompt_ids(segments: Sequence[Segment]) -> bytes:
    """A prompt made of segments."""
    return b"".join(map(segment_ids, segments))
