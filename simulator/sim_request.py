"""`SimRequest`: one request of a simulated workload, and the construction of its token ids.

In a simulation only the prefix cache reads prompt tokens, so prompts consist of *segments*: equal segments have equal
tokens, different ones differ in their first two tokens and are filled with the same token after those. A radix tree
over such prompts has the same shape as over real text, and a prompt of 1,000 tokens is made in 2 us.
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
    """A client's request, and the model's answer.

    Attributes:
        rid: unique.
        arrival_s: on the virtual clock.
        input_ids: int32 bytes.
        output_len: tokens of the answer. The scheduler learns it when the last token is sampled.
        max_new_tokens: the client's limit, `output_len` or more; the scheduler knows it.
        tenant, priority: as in `GenerateRequest`.
        output_ids: [output_len] int32 bytes, if they are known (a recorded run); b"": filler, then EOS.
        template: the recorded message, sent with this request's limit and arrival; None: a new message is made.
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
"""Requests by arrival; generated lazily, so that a million of them need no memory."""


class Segment(NamedTuple):
    """A run of prompt tokens. Equal ids and lengths mean equal tokens; with equal ids the shorter is a prefix."""

    segment_id: int
    length: int


def segment_ids(segment: Segment) -> bytes:
    """The tokens of a segment, int32 bytes.

    The low part of the id goes first. Two segments that begin with the same token, and could share one page too many,
    are therefore one pair in 32,766.
    """
    segment_id, length = segment
    high, low = divmod(segment_id, _NUM_IDS)
    head = _PAIR.pack(2 + low, 2 + high % _NUM_IDS)
    if length < 2:
        return head[: TOKEN_ID_BYTES * length]
    return head + _FILLER * (length - 2)


def answer_ids(output_len: int) -> bytes:
    """The tokens of an answer in the history of a later turn."""
    return _FILLER * (output_len - 1) + _EOS


def prompt_ids(segments: Sequence[Segment]) -> bytes:
    """A prompt made of segments."""
    return b"".join(map(segment_ids, segments))
