"""`reason_to_refuse`: the scheduler's own look at an arriving request.

The door has checked all this. It is checked again because what slips through here would be found out in the middle of
a batch, by everybody.
"""

from __future__ import annotations

import numpy as np

from ..runtime.errors import RequestError
from ..runtime.feasibility import Capacity, reason_against
from ..runtime.messages import GenerateRequest
from .arrays import TOKEN_ID_BYTES


def reason_to_refuse(message: GenerateRequest, capacity: Capacity) -> str | None:
    """Why this request cannot run here, for the client; None if it can."""
    if not message.input_ids or len(message.input_ids) % TOKEN_ID_BYTES:
        return f"input_ids has {len(message.input_ids)} bytes, but it must be int32 token ids, at least one"
    if message.sampling.max_new_tokens is None:
        return "max_new_tokens is not set, but the scheduler needs a number"
    if message.sampling.seed is None:
        return "seed is not set, but the model runner needs one"
    try:
        message.sampling.verify(capacity.vocab_size)
    except RequestError as error:
        return error.message
    token_ids = np.frombuffer(message.input_ids, dtype=np.int32)
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= capacity.vocab_size:
        wrong = low if low < 0 else high
        return f"the prompt has token id {wrong}, but ids must lie in [0, {capacity.vocab_size})"
    return reason_against(len(token_ids), message.sampling.max_new_tokens, capacity)
