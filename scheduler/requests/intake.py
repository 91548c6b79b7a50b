"""`reason_to_refuse`: the scheduler's own checks of an arriving request, and of an arriving pin.

The tokenizer manager has made the same checks. They are repeated because a wrong value that passes here fails in the
middle of a batch, for every request of the batch. Decoders check types only, and a message from the same process is
never decoded.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...runtime.errors import RequestError
from ...runtime.feasibility import (
    Capacity,
    reason_against,
    reason_against_pooling,
)
from ...runtime.grammar_use import GrammarUse
from ...runtime.media import reason_against_images, rows_at_runs, runs_of, tile_rows
from ...runtime.messages import (
    Delivered,
    GenerateRequest,
    GrammarUsage,
    KVHandoff,
    MediaItem,
    PinPrefix,
    Usage,
)
from ...runtime.pooling import PoolingKind, PoolingParams
from ...runtime.request_checks import check_flag, check_integer, check_number, check_text, wrong_type
from ...runtime.sampling_params import MAX_COUNT, SamplingParams
from ..arrays import TOKEN_ID_BYTES

_DIGEST_BYTES: Final = 32  # of an image
_MAX_SECONDS: Final = 1e10  # 300 years; the sum of two such times still resolves microseconds


def reason_to_refuse(message: GenerateRequest, capacity: Capacity) -> str | None:
    """Reason for the client why this request cannot run here; None if it can. Fields may have values of any type."""
    try:
        _check_fields(message)
    except RequestError as error:
        return error.message
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
            f"{message.sampling.max_new_tokens}: nothing is left to generate"
        )
    token_ids = np.frombuffer(message.input_ids + delivered_ids, dtype=np.int32)
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= capacity.vocab_size:
        wrong = low if low < 0 else high
        return f"the prompt has token id {wrong}, but ids must lie in [0, {capacity.vocab_size})"
    prompt_len = len(message.input_ids) // TOKEN_ID_BYTES
    if message.media:
        against = reason_against_images(message.media, capacity) or _against_runs(message, capacity)
        if against is not None:
            return against
    if message.pooling is None:
        return reason_against(prompt_len, message.sampling.max_new_tokens, capacity)
    return _against_pooling(message, message.pooling, capacity) or reason_against_pooling(
        prompt_len, capacity
    )


def _against_runs(message: GenerateRequest, capacity: Capacity) -> str | None:
    """Reason why the runs of images do not fit the prompt, or their tiles; None if they do."""
    end, prompt_len = 0, len(message.input_ids) // TOKEN_ID_BYTES
    for number, item in enumerate(message.media):
        num_rows = 0
        for start, length in runs_of(item):
            if start < end or length < 1 or length > prompt_len - start:
                return (
                    f"media[{number}].runs has {length} tokens from position {start}, but runs must follow each other "
                    f"within the {prompt_len} tokens of the prompt"
                )
            end, num_rows = start + length, num_rows + length
        rows, num = rows_at_runs(item, tile_rows(item, capacity)), item.shape[0] * tile_rows(item, capacity)
        if any(first < 0 or length < 1 or length > num - first for first, length in rows):
            return f"media[{number}].rows must be within the {num} rows of its tiles"
        expected = sum(length for _, length in rows)
        if num_rows != expected:
            return f"media[{number}].runs has {num_rows} tokens, but its tiles have {expected} rows"
    return None


def reason_to_refuse_pin(message: PinPrefix) -> str | None:
    """Reason why this prefix cannot be pinned; None if it can."""
    try:
        check_text("extra_key", message.extra_key)
        _check_bytes("input_ids", message.input_ids)
        check_number("ttl_s", message.ttl_s, 0.0, _MAX_SECONDS)
    except RequestError as error:
        return error.message
    if len(message.input_ids) % TOKEN_ID_BYTES:
        return f"input_ids has {len(message.input_ids)} bytes, but it must be int32 token ids"
    return None


def _against_pooling(message: GenerateRequest, pooling: PoolingParams, capacity: Capacity) -> str | None:
    """Reason why a pooling request is not one that the model runner can compute; None if it is."""
    try:
        _check_pooling(pooling, capacity.vocab_size)
    except RequestError as error:
        return error.message
    if message.sampling.max_new_tokens != 1 or message.sampling.prompt_logprobs is not None:
        return "a pooling request generates no text: max_new_tokens must be 1, and prompt_logprobs unset"
    if message.grammar is not None or message.needs_grammar or message.delivered is not None or message.group:
        return "a pooling request has no grammar, no delivered tokens and no parallel samples"
    return None


def _check_pooling(pooling: PoolingParams, vocab_size: int) -> None:
    if not isinstance(pooling, PoolingParams):
        raise wrong_type("pooling", pooling, "a PoolingParams or None")
    if not isinstance(pooling.kind, PoolingKind):
        raise wrong_type("pooling.kind", pooling.kind, "a PoolingKind")
    check_flag("pooling.all_tokens", pooling.all_tokens)
    check_flag("pooling.normalize", pooling.normalize)
    check_integer("pooling.dimensions", pooling.dimensions, 0, MAX_COUNT)
    check_integer("pooling.second_start", pooling.second_start, 0, MAX_COUNT)
    check_integer("pooling.shared_len", pooling.shared_len, 0, MAX_COUNT)
    if not isinstance(pooling.label_ids, tuple):
        raise wrong_type("pooling.label_ids", pooling.label_ids, "a tuple of token ids")
    for token_id in pooling.label_ids:
        check_integer("pooling.label_ids", token_id, 0, vocab_size - 1)
    if (pooling.kind is PoolingKind.LABELS) != bool(pooling.label_ids):
        raise RequestError("pooling.label_ids belong to the kind labels, which needs at least one")


def _check_fields(message: GenerateRequest) -> None:
    """Check types, ranges and finiteness of all fields except those inside `sampling`.

    Raises:
        RequestError: for the first wrong value.
    """
    for name in ("rid", "extra_key", "tenant", "lora_id", "group", "session"):
        check_text(name, getattr(message, name))
    _check_bytes("input_ids", message.input_ids)
    if not isinstance(message.sampling, SamplingParams):
        raise wrong_type("sampling", message.sampling, "a SamplingParams")
    check_number("arrival_s", message.arrival_s, 0.0, _MAX_SECONDS)
    check_integer("priority", message.priority, -MAX_COUNT, MAX_COUNT)
    check_flag("needs_grammar", message.needs_grammar)
    check_flag("reports_progress", message.reports_progress)
    check_flag("in_memory", message.in_memory)
    check_flag("background", message.background)
    if message.queue_timeout_s is not None:
        check_number("queue_timeout_s", message.queue_timeout_s, 0.0, _MAX_SECONDS, low_open=True)
    if message.timeout_s is not None:
        check_number("timeout_s", message.timeout_s, 0.0, _MAX_SECONDS, low_open=True)
    if message.keep_s is not None:
        check_number("keep_s", message.keep_s, 0.0, _MAX_SECONDS)
    if message.delivered is not None:
        _check_delivered(message.delivered)
    if message.grammar is not None and not isinstance(message.grammar, GrammarUse):
        raise wrong_type("grammar", message.grammar, "a GrammarUse or None")
    if not isinstance(message.keep_special_ids, tuple):
        raise wrong_type("keep_special_ids", message.keep_special_ids, "a tuple of token ids")
    for token_id in message.keep_special_ids:
        check_integer("keep_special_ids", token_id, 0, MAX_COUNT)
    if message.data_parallel_rank is not None:
        check_integer("data_parallel_rank", message.data_parallel_rank, 0, MAX_COUNT)
    if message.handoff is not None:
        _check_handoff(message.handoff)
    if not isinstance(message.media, tuple):
        raise wrong_type("media", message.media, "a tuple of MediaItem")
    for number, item in enumerate(message.media):
        _check_image(f"media[{number}]", item)


def _check_image(name: str, item: MediaItem) -> None:
    if not isinstance(item, MediaItem):
        raise wrong_type(name, item, "a MediaItem")
    _check_bytes(f"{name}.digest", item.digest)
    _check_bytes(f"{name}.runs", item.runs)
    check_text(f"{name}.pixels", item.pixels)
    if len(item.digest) != _DIGEST_BYTES:
        raise RequestError(f"{name}.digest has {len(item.digest)} bytes, but it must have {_DIGEST_BYTES}")
    if not item.runs or len(item.runs) % (2 * TOKEN_ID_BYTES):
        raise RequestError(
            f"{name}.runs has {len(item.runs)} bytes, but it must be pairs of int32, at least one"
        )
    _check_bytes(f"{name}.rows", item.rows)
    if len(item.rows) % (2 * TOKEN_ID_BYTES):
        raise RequestError(f"{name}.rows has {len(item.rows)} bytes, but it must be pairs of int32")
    shape: object = item.shape
    if not isinstance(shape, tuple) or len(shape) != 4:
        raise wrong_type(f"{name}.shape", shape, "(tiles, height, width, 3)")
    for size in shape:
        check_integer(f"{name}.shape", size, 1, MAX_COUNT)


def _check_handoff(handoff: KVHandoff) -> None:
    if not isinstance(handoff, KVHandoff):
        raise wrong_type("handoff", handoff, "a KVHandoff or None")
    check_text("handoff.bootstrap_room", handoff.bootstrap_room)
    check_text("handoff.peer", handoff.peer)


def _check_delivered(delivered: Delivered) -> None:
    if not isinstance(delivered, Delivered):
        raise wrong_type("delivered", delivered, "a Delivered or None")
    _check_bytes("delivered.output_ids", delivered.output_ids)
    usage = delivered.usage
    if not isinstance(usage, Usage):
        raise wrong_type("delivered.usage", usage, "a Usage")
    for name in (
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "num_retractions",
        "loaded_tokens",
        "host_tokens",
    ):
        check_integer(f"delivered.usage.{name}", getattr(usage, name), 0, MAX_COUNT)
    check_number("delivered.usage.queue_s", usage.queue_s, 0.0, _MAX_SECONDS)
    if usage.grammar is not None and not isinstance(usage.grammar, GrammarUsage):
        raise wrong_type("delivered.usage.grammar", usage.grammar, "a GrammarUsage or None")


def _check_bytes(field: str, value: object) -> None:
    if type(value) is not bytes:
        raise wrong_type(field, value, "bytes")
