"""`SimRequest`: one request of a simulated workload, the construction of its token ids, and its way (`ActiveRequest`).

In a simulation only the prefix cache reads prompt tokens, so prompts consist of *segments*: equal segments have equal
tokens, different ones differ in their first two tokens and are filled with the same token after those. A radix tree
over such prompts has the same shape as over real text, and a prompt of 1,000 tokens is made in 2 us.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ..runtime.messages import GenerateRequest
from ..runtime.sampling_params import SamplingParams

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
        max_new_tokens: the client's limit, `output_len` or more; part of the message to the scheduler.
        tenant, priority, background: as in `GenerateRequest`.
        output_ids: [output_len] int32 bytes, if they are known (a recorded run); b"": filler, then EOS.
        template: the recorded message, sent with this request's limit and arrival; None: a new message is made.
        ready_s: when it could be scheduled at the earliest (its grammar was compiled, the KV of its prompt had come);
            None: at its arrival.
        is_prefilled: the KV of its prompt comes from outside the simulation, with the first token.
        next_turn: in a closed loop, from the time of its answer to the request that follows; None: there is none.
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
    ready_s: float | None = None
    is_prefilled: bool = False
    next_turn: Callable[[float], SimRequest | None] | None = None
    background: bool = False

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


class ActiveRequest:
    """An unfinished request.

    Attributes:
        request: the request of the workload.
        message: what a client's server would send to a scheduler.
        replica: its number among those of its dispatcher; -1 before.
        start_s: when its prompt was started for the first time; NaN before.
        first_s: when its first token was sampled; NaN before.
        last_s: when its newest token was sampled, while it has no row.
        row: its row, or its last one; -1 before.
        prefilled: its KV came from another replica, with the first token.
    """

    __slots__ = ("first_s", "last_s", "message", "prefilled", "replica", "request", "row", "start_s")

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.message = _message_of(request)
        self.start_s = self.first_s = self.last_s = math.nan
        self.row = self.replica = -1
        self.prefilled = request.is_prefilled
        if request.is_prefilled and request.ready_s is not None:
            self.start_s = self.first_s = self.last_s = request.ready_s

    def first_token_only(self) -> GenerateRequest:
        """The message for a prefill replica."""
        return self._limited(self.message.input_ids, 1)

    def after_first_token(self) -> GenerateRequest:
        """The message for a decode replica."""
        first_token = np.int32(FILLER_TOKEN).tobytes()
        return self._limited(self.message.input_ids + first_token, self.request.max_new_tokens - 1)

    def _limited(self, input_ids: bytes, limit: int) -> GenerateRequest:
        sampling = msgspec.structs.replace(self.message.sampling, max_new_tokens=limit)
        return msgspec.structs.replace(self.message, input_ids=input_ids, sampling=sampling)


def _message_of(request: SimRequest) -> GenerateRequest:
    if request.template is None:
        return GenerateRequest(
            request.rid,
            request.input_ids,
            _sampling(request.max_new_tokens),
            request.arrival_s,
            request.priority,
            tenant=request.tenant,
            background=request.background,
        )
    sampling = msgspec.structs.replace(request.template.sampling, max_new_tokens=request.max_new_tokens)
    return msgspec.structs.replace(request.template, arrival_s=request.arrival_s, sampling=sampling)


@functools.cache
def _sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, seed=1)
