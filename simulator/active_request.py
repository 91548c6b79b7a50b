"""`ActiveRequest`: a request of the workload on its way through the replicas."""

from __future__ import annotations

import functools
import math

import msgspec
import numpy as np

from ..runtime.messages import GenerateRequest
from ..runtime.sampling_params import SamplingParams
from .sim_request import FILLER_TOKEN, SimRequest


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
        self.prefilled = False

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
        )
    sampling = msgspec.structs.replace(request.template.sampling, max_new_tokens=request.max_new_tokens)
    return msgspec.structs.replace(request.template, arrival_s=request.arrival_s, sampling=sampling)


@functools.cache
def _sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, seed=1)
