"""`reason_to_refuse`: the scheduler's own look at an arriving request.

The door has checked all this. It is checked again because what slips through here would be found out in the middle of
a batch, by everybody.
"""

from __future__ import annotations

import numpy as np

from ...runtime.errors import RequestError
from ...runtime.feasibility import Capacity, reason_against
from ...runtime.messages import GenerateRequest
from ..arrays import TOKEN_ID_BYTES


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
    delivered_ids = b"" if message.delivered is None else message.delivered.output_ids
    if len(delivered_ids) % TOKEN_ID_BYTES or (message.delivered is not None and not delivered_ids):
        return f"delivered.output_ids has {len(delivered_ids)} bytes, but it must be int32 token ids, at least one"
    if len(delivered_ids) // TOKEN_ID_BYTES >= message.sampling.max_new_tokens:
        return (
            f"{len(delivered_ids) // TOKEN_ID_BYTES} tokens were delivered, but the limit is "
            f"{message.sampling.max_new_tokens}: there is nothing to go on with"
        )
    token_ids = np.frombuffer(message.input_ids + delivered_ids, dtype=np.int32)
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= capacity.vocab_size:
        wrong = low if low < 0 else high
        return f"the prompt has token id {wrong}, but ids must lie in [0, {capacity.vocab_size})"
    prompt_len = len(message.input_ids) // TOKEN_ID_BYTES
    return reason_against(prompt_len, message.sampling.max_new_tokens, capacity)
