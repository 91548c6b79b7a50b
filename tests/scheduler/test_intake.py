"""A request with a wrong value is answered with an error, alone; nothing checks it on its way to the scheduler."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from engine.runtime.messages import (
    Call,
    Delivered,
    FinishKind,
    GenerateRequest,
    KVHandoff,
    MediaItem,
    PinDone,
    PinPrefix,
    Usage,
)
from engine.runtime.pooling import PoolingKind, PoolingParams
from engine.runtime.sampling_params import SamplingParams

from .harness import VOCAB_SIZE, Answer

IDS: Final = np.arange(1, 7, dtype=np.int32).tobytes()
SAMPLING: Final[dict[str, list[Any]]] = {
    "max_new_tokens": [
        None,
        2.5,
        "4",
        True,
        math.nan,
        math.inf,
        [4],
        0,
        -3,
        2**40,
        np.int64(4),
        np.float64(2.5),
    ],
    "min_new_tokens": [None, 0.5, "1", True, -1, 5, 2**40, np.int64(1)],
    "temperature": [None, "1", True, math.nan, math.inf, -1.0, 101, 10**400, [1.0], np.float32(1)],
    "top_k": [None, 1.5, "5", True, -2, 2**40, math.nan],
    "top_p": [None, "1", True, math.nan, -0.1, 1.5],
    "min_p": [None, "0", True, math.nan, -0.1, 1.5],
    "seed": [None, 1.5, "1", True, -1, 2**63, math.inf],
    "repetition_penalty": [None, "1", True, math.nan, math.inf, 0.0, 11],
    "frequency_penalty": [None, "0", True, math.nan, -3, 3],
    "presence_penalty": [None, "0", True, math.nan, -3, 3],
    "top_n_sigma": [None, "1", True, math.nan, -1.5, 101],
    "typical_p": [None, "1", True, math.nan, -0.1, 1.5],
    "dynatemp_range": [None, "1", True, math.nan, -0.1, 101],
    "dynatemp_exponent": [None, "1", True, math.nan, -0.1, 101],
    "xtc_probability": [None, "1", True, math.nan, -0.1, 1.5],
    "xtc_threshold": [None, "1", True, math.nan, -0.1, 1.5],
    "dry_multiplier": [None, "1", True, math.nan, -0.1, 101],
    "dry_base": [None, "1", True, math.nan, 0.9, 101],
    "dry_allowed_length": [None, 1.5, "1", True, -1, 4097],
    "dry_penalty_last_n": [None, 1.5, "1", True, -2, 4097],
    "dry_sequence_breakers": [5, ("",), ("x" * 41,), ("x",) * 33, ("x", 5)],
    "dry_breaker_ids": [5, (5,), ((),), ((5, -1),), (("5",),), ((VOCAB_SIZE,),)],
    "temperature_last": [None, 1, "yes"],
    "bad_words": [5, ("",), ("x" * 257,), ("x", 5)],
    "bad_words_ids": [5, (5,), ((),), ((5, -1),), (("5",),), ((VOCAB_SIZE,),)],
    "allowed_token_ids": [5, "5", (), (5.5,), ("5",), (True,), (-1,), (VOCAB_SIZE,)],
    "stop_regex": [5, ("",), ("a",) * 9, (5,), ("(",)],
    "repetition_detection": [5, "x", {"max_size": 3}],
    "logit_bias": [5, "x", [(5, 1.0)], {"5": 1.0}, {5.5: 1.0}, {True: 1.0}, {VOCAB_SIZE: 1.0}, {-1: 1.0}]
    + [{5: value} for value in ("1", None, True, math.nan, math.inf, 101.0)],
    "stop": [None, 5, "END", ["END"], (5,), (None,), ("",), (b"x",), ("\ud800",)],
    "stop_token_ids": [None, 5, [5], "5", (5.5,), ("5",), (True,), (None,), (-1,), (VOCAB_SIZE,)],
    "ignore_eos": [None, 1, "yes"],
    "logprobs": [1.5, "1", True, -1, 1025],
    "prompt_logprobs": [1.5, "1", True, -1, 1025],
    "prompt_logprobs_start": [None, 1.5, "1", True, -1, 2**40],
    "logprob_token_ids": [None, 5, [5], (5.5,), (True,), (-1,), (VOCAB_SIZE,), (5,), (1,) * 129],
    "skip_special_tokens": [None, 1, "yes"],
    "include_stop_str_in_output": [None, 1, "yes"],
    "speculative": [None, 1, "yes"],
}
USAGE: Final = Usage(6, 1)
OTHERS: Final[dict[str, list[Any]]] = {
    "input_ids": [None, 5, "text", [1, 2], np.arange(3), bytearray(IDS), b"", b"123"],
    "sampling": [None, {}, {"max_new_tokens": 4}, 5, "x"],
    "arrival_s": [None, "1", True, math.nan, math.inf, -math.inf, -1.0, 10**400, []],
    "priority": [None, 1.5, "high", True, math.nan, math.inf, 2**63, -(2**63), []],
    "extra_key": [None, 5, b"x", [], "\ud800"],
    "tenant": [None, 5, b"x", [], "\ud800"],
    "lora_id": [None, 5, b"x", [], "\ud800"],
    "needs_grammar": [None, 1, "yes", []],
    "reports_progress": [None, 1, "yes", []],
    "in_memory": [None, 1, "yes", []],
    "background": [None, 1, "yes", []],
    "group": [None, 5, b"x", [], "\ud800"],
    "session": [None, 5, b"x", [], "\ud800"],
    "queue_timeout_s": ["1", True, math.nan, math.inf, 0, -1.0, 10**400, []],
    "keep_s": ["1", True, math.nan, math.inf, -1.0, 10**400, []],
    "timeout_s": ["1", True, math.nan, math.inf, 0, -1.0, 10**400, []],
    "delivered": [
        *(5, b"abcd", {}, Delivered(b"", USAGE), Delivered(b"123", USAGE), Delivered(IDS, USAGE)),
        *(Delivered(value, USAGE) for value in (None, 5, [1])),  # type: ignore[arg-type]
        *(Delivered(b"\1\0\0\0", value) for value in (None, 5, (6, 1))),  # type: ignore[arg-type]
        Delivered(b"\1\0\0\0", Usage(6, 1, cached_tokens=1.5)),  # type: ignore[arg-type]
        Delivered(b"\1\0\0\0", Usage(6, 1, queue_s=math.nan)),
        Delivered(b"\1\0\0\0", Usage(6, 1, num_retractions=-1)),
        Delivered(b"\1\0\0\0", Usage(6, 1, grammar=1)),  # type: ignore[arg-type]
    ],
    "grammar": [5, "x", {}, []],
    "keep_special_ids": [None, 5, [5], ("5",), (-1,), (True,)],
    "data_parallel_rank": ["1", 1.5, True, -1, []],
    "handoff": [5, "x", {}, KVHandoff(5), KVHandoff("a", None), KVHandoff("a")],  # type: ignore[arg-type]
    "media": [None, 5, "x", [], (5,), ("cat",), (MediaItem(b"", b"", "", (1, 1, 1, 3)),)],
    "pooling": [
        *(5, "embed", {}, PoolingParams()),  # the last one: `max_new_tokens` is not 1
        *(
            PoolingParams(**values)
            for values in (
                {"kind": "embed"},
                {"kind": None},
                {"all_tokens": 1},
                {"normalize": None},
                {"dimensions": -1},
                {"dimensions": 1.5},
                {"label_ids": (5,)},
                {"kind": PoolingKind.LABELS},
                {"kind": PoolingKind.LABELS, "label_ids": [5]},
                {"kind": PoolingKind.LABELS, "label_ids": (VOCAB_SIZE,)},
            )
        ),
    ],
}


def as_params(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(field, value, id=f"{field}-{i}")
        for field, values in table.items()
        for i, value in enumerate(values)
    ]


def check_they_fail_alone(harness: Any, messages: list[GenerateRequest]) -> list[str]:
    """Send them while others run and wait; returns the errors with which they are answered."""
    harness.submit("runs", max_new_tokens=4)
    harness.step()
    harness.submit("waits", max_new_tokens=4)
    texts: list[str] = []
    for message in messages:
        harness.scheduler.handle(message, harness.now_s)

        (answer,) = harness.scheduler.take_outputs()
        (row,) = answer.outputs
        assert row.rid == message.rid
        assert (row.finish.kind, row.finish.status) == (FinishKind.ERROR, 400), message
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=type(answer)) == answer
        texts.append(row.finish.message)

    late = harness.submit("late", max_new_tokens=4)
    harness.run_until_idle()
    assert {harness.answers[rid].finish.kind for rid in ("runs", "waits", late)} == {FinishKind.LENGTH}
    assert harness.pages().held == 0
    return texts


def test_every_field_is_in_the_tables():
    assert set(SAMPLING) == set(SamplingParams.__struct_fields__)
    assert set(OTHERS) == set(GenerateRequest.__struct_fields__) - {"rid"}


@pytest.mark.parametrize("field", SAMPLING)
def test_a_wrong_sampling_parameter_fails_its_request_alone(make_scheduler, field):
    messages = []
    for n, value in enumerate(SAMPLING[field]):
        params = SamplingParams(max_new_tokens=4, seed=1)
        msgspec.structs.force_setattr(params, field, value)
        messages.append(GenerateRequest(f"bad{n}", IDS, params))

    assert all(field in text for text in check_they_fail_alone(make_scheduler(), messages))


@pytest.mark.parametrize("field", OTHERS)
def test_a_wrong_field_fails_its_request_alone(make_scheduler, field):
    messages = []
    for n, value in enumerate(OTHERS[field]):
        max_new_tokens = 1 if field == "pooling" and value != PoolingParams() else 4
        message = GenerateRequest(f"bad{n}", IDS, SamplingParams(max_new_tokens=max_new_tokens, seed=1))
        msgspec.structs.force_setattr(message, field, value)
        messages.append(message)

    texts = check_they_fail_alone(make_scheduler(), messages)
    assert all(field in text or "delivered" in text for text in texts)


def test_a_long_value_is_cut_in_the_error(make_scheduler):
    params = SamplingParams(max_new_tokens=4, seed=1)
    msgspec.structs.force_setattr(params, "temperature", "hot" * 100_000)

    (text,) = check_they_fail_alone(make_scheduler(), [GenerateRequest("bad", IDS, params)])
    assert len(text) < 300


@pytest.mark.parametrize("rid", [None, 5, b"x", ["x"]])
def test_a_request_without_an_id_cannot_be_answered_and_is_dropped(make_scheduler, caplog, rid):
    harness = make_scheduler()
    harness.submit("good")
    harness.scheduler.handle(
        GenerateRequest(rid, IDS, SamplingParams(max_new_tokens=4, seed=1)), harness.now_s
    )

    assert harness.scheduler.take_outputs() == []
    assert "its rid is not a string" in caplog.text
    harness.run_until_idle()
    assert harness.answers["good"].finish.kind is FinishKind.LENGTH


def test_an_id_that_cannot_be_encoded_is_refused(make_scheduler):
    harness = make_scheduler()
    params = SamplingParams(max_new_tokens=4, seed=1)
    harness.answers["\ud800"] = Answer([0] * 6, params)
    harness.scheduler.handle(GenerateRequest("\ud800", IDS, params), harness.now_s)

    harness.collect()
    assert "lone surrogate" in harness.answers["\ud800"].finish.message


@pytest.mark.parametrize(
    ("field", "value"),
    as_params(
        {
            "input_ids": [None, 5, "text", [1], b"123"],
            "ttl_s": [None, "5", True, math.nan, math.inf, -1.0, 10**400],
            "extra_key": [None, 5, b"x", "\ud800"],
        }
    ),
)
def test_a_wrong_pin_is_answered_with_the_reason(make_scheduler, field, value):
    harness = make_scheduler()
    harness.submit("good")
    message = PinPrefix(IDS, 5.0)
    msgspec.structs.force_setattr(message, field, value)

    harness.scheduler.handle(Call(7, message), harness.now_s)

    (done,) = harness.scheduler.take_call_answers()
    assert isinstance(done.answer, PinDone)
    assert (done.call_id, done.answer.pinned_tokens) == (7, 0)
    assert field in done.answer.reason
    harness.run_until_idle()
    assert harness.answers["good"].finish.kind is FinishKind.LENGTH
