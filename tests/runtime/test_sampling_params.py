"""Types and ranges of sampling parameters: what passes can travel to every process."""

from __future__ import annotations

import copy
import enum
import math
from collections import OrderedDict
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from engine.runtime.errors import RequestError
from engine.runtime.sampling_params import (
    MAX_COUNT,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    SamplingParams,
)


@pytest.mark.parametrize("field", ["top_k", "min_new_tokens", "max_new_tokens"])
def test_counts_fit_into_every_message_and_array(field):
    def make(count: int) -> SamplingParams:
        values: dict[str, Any] = {field: count}
        return SamplingParams(**values)

    largest = make(MAX_COUNT)
    largest.verify(100)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(largest), type=SamplingParams) == largest

    for beyond in (MAX_COUNT + 1, 2**64, 2**70):
        with pytest.raises(RequestError, match=f"is {beyond}, but it must be at most {MAX_COUNT}"):
            make(beyond).verify(100)


@pytest.mark.parametrize(
    ("values", "param", "rule"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens", "must be at least 1"),
        ({"min_new_tokens": -1}, "min_new_tokens", "must be 0 or more"),
        (
            {"min_new_tokens": 5, "max_new_tokens": 4},
            "min_new_tokens",
            r"must not exceed max_new_tokens \(4\)",
        ),
        ({"top_k": -2}, "top_k", "must be -1 or 0"),
        ({"temperature": float("nan")}, "temperature", r"must lie in \[0, 100\]"),
        ({"top_p": -0.1}, "top_p", r"must lie in \[0, 1\]"),
        ({"seed": 2**63}, "seed", "must lie in"),
        ({"logprobs": 1025}, "logprobs", r"must lie in \[0, "),
        ({"logit_bias": {100: 1.0}}, "logit_bias", r"token ids in \[0, 100\)"),
        ({"stop": ("",)}, "stop", "an empty string"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_rule(values: dict[str, Any], param: str, rule: str):
    with pytest.raises(RequestError, match=rule) as error:
        SamplingParams(**values).verify(100)
    assert error.value.param == param


@pytest.mark.parametrize("top_k", [-1, 0, 1, 50])
def test_usual_values_pass(top_k):
    SamplingParams(top_k=top_k, max_new_tokens=5, min_new_tokens=5, seed=2**63 - 1).verify(100)


_NO_INTEGER: Final = [
    "5",
    b"5",
    2.5,
    5.0,
    math.nan,
    math.inf,
    True,
    [5],
    (5,),
    {5: 5},
    1j,
    object(),
    np.float64(5),
]
_NO_NUMBER: Final = [
    "0.5",
    b"1",
    True,
    [0.5],
    {},
    1j,
    object(),
    np.bool_(True),
    math.nan,
    math.inf,
    -math.inf,
]
_NO_FLAG: Final = [0, 1, "yes", None, 1.0, [], object()]
BAD_VALUES: Final[dict[str, list[Any]]] = {
    "max_new_tokens": [*_NO_INTEGER, 0, -1, MAX_COUNT + 1, 10**5000],
    "min_new_tokens": [*_NO_INTEGER, None, -1, MAX_COUNT + 1],
    "temperature": [*_NO_NUMBER, None, -0.1, 100.5, 10**400],
    "top_k": [*_NO_INTEGER, None, -2, MAX_COUNT + 1],
    "top_p": [*_NO_NUMBER, None, -0.1, 1.5],
    "min_p": [*_NO_NUMBER, None, -0.5, 1.5],
    "seed": [*_NO_INTEGER, -(2**63) - 1, 2**63],
    "repetition_penalty": [*_NO_NUMBER, None, 0.0, 10.5],
    "frequency_penalty": [*_NO_NUMBER, None, -2.5, 2.5],
    "presence_penalty": [*_NO_NUMBER, None, -2.5, 2.5],
    "top_n_sigma": [*_NO_NUMBER, None, -1.5, 100.5],
    "typical_p": [*_NO_NUMBER, None, -0.1, 1.5],
    "dynatemp_range": [*_NO_NUMBER, None, -0.1, 100.5],
    "dynatemp_exponent": [*_NO_NUMBER, None, -0.1, 100.5],
    "xtc_probability": [*_NO_NUMBER, None, -0.1, 1.5],
    "xtc_threshold": [*_NO_NUMBER, None, -0.1, 1.5],
    "dry_multiplier": [*_NO_NUMBER, None, -0.1, 100.5],
    "dry_base": [*_NO_NUMBER, None, 0.9, 100.5],
    "dry_allowed_length": [*_NO_INTEGER, None, -1, 4097],
    "dry_penalty_last_n": [*_NO_INTEGER, None, -2, 4097],
    "dry_sequence_breakers": [5, ("",), ("x" * 41,), ("x",) * 33, ("x", 5), {"x"}, "\ud800"],
    "dry_breaker_ids": [5, (5,), ((),), ((5, -1),), (("5",),), ((2**40,),)],
    "temperature_last": _NO_FLAG,
    "bad_words": [5, ("",), ("x" * 257,), ("x",) * 1025, ("x", 5), {"x"}, "\ud800"],
    "bad_words_ids": [5, (5,), ((),), ((5, -1),), (("5",),), ((2**40,),)],
    "allowed_token_ids": [5, "5", (), (5.5,), ("5",), (True,), (-1,), (2**40,)],
    "stop_regex": [
        5,
        ("",),
        ("a",) * 9,
        ("a" * 1025,),
        (5,),
        "(",
        "a*",
        r"(a)\1",
        "a(?=b)",
        "a{300}",
        ["a{200}"] * 2,
    ],
    "repetition_detection": [5, "x", [3, 1, 2], {"max_size": 3}],
    "logit_bias": [
        *([(5, 1.0)], "5", 5, object(), {"5": 1.0}, {5.0: 1.0}, {True: 1.0}, {None: 1.0}, {-1: 1.0}),
        *({5: "1"}, {5: None}, {5: True}, {5: math.nan}, {5: math.inf}, {5: 101}, {2**40: 1.0}),
        dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 1.0),
    ],
    "stop": [
        *(5, b"END", object(), {"END": 1}, {"END"}, ("END", 5), ("END", None), ("END", b"x"), [["END"]]),
        *(
            ("",),
            ("END", ""),
            "\ud800",
            ("x" * (MAX_STOP_STRING_CHARS + 1),),
            ("x",) * (MAX_STOP_STRINGS + 1),
        ),
    ],
    "stop_token_ids": [
        *(
            5,
            "5",
            b"5",
            object(),
            {5: 1},
            {5},
            (5, "5"),
            (5, None),
            (5, 2.5),
            (5, True),
            [[5]],
            (-1,),
            (2**40,),
        ),
        np.zeros((2, 2), np.int32),
        np.array([1.5]),
        (5,) * (MAX_STOP_STRINGS + 1),
    ],
    "ignore_eos": _NO_FLAG,
    "logprobs": [*_NO_INTEGER, -1, 1025],
    "prompt_logprobs": [*_NO_INTEGER, -1, 1025],
    "prompt_logprobs_start": [*_NO_INTEGER, None, -1, MAX_COUNT + 1],
    "logprob_token_ids": [5, "5", (5.5,), ("5",), (True,), (-1,), (10**9,), (1,) * 129, (5,)],
    "skip_special_tokens": _NO_FLAG,
    "include_stop_str_in_output": _NO_FLAG,
    "speculative": _NO_FLAG,
}


def named_values() -> list[Any]:
    return [
        pytest.param(field, value, id=f"{field}-{i}")
        for field, values in BAD_VALUES.items()
        for i, value in enumerate(values)
    ]


def test_every_field_is_in_the_table():
    assert set(BAD_VALUES) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("field", "value"), named_values())
def test_a_wrong_value_is_refused_at_construction_by_its_own_name(field, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
    assert error.value.message.startswith(f"{field} ")
    assert error.value.code in ("invalid_type", "invalid_value")
    assert len(error.value.message) < 300


@pytest.mark.parametrize(("field", "value"), named_values())
def test_a_wrong_value_that_was_put_in_later_is_refused_by_verify(field, value):
    params = SamplingParams(max_new_tokens=5)
    msgspec.structs.force_setattr(params, field, value)
    with pytest.raises(RequestError) as error:
        params.verify(100)
    assert error.value.param == field


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"max_pattern_size": "3"}, "max_pattern_size"),
        ({"max_pattern_size": 1025, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 3}, "min_count"),
    ],
)
def test_the_ranges_of_repetition_detection_are_vllm_s(value: Any, param: str):
    with pytest.raises(RequestError, match=r"must (be|lie)") as error:
        SamplingParams(repetition_detection=value)
    assert error.value.param == f"repetition_detection.{param}"
    off: Any = {"max_pattern_size": 0}
    assert SamplingParams(repetition_detection=off).repetition_detection is not None


class Level(enum.IntEnum):
    LOW = 3


class Word(enum.StrEnum):
    END = "END"


@pytest.mark.parametrize(
    ("field", "value", "becomes"),
    [
        ("max_new_tokens", np.int64(7), 7),
        ("max_new_tokens", np.uint8(7), 7),
        ("max_new_tokens", np.array(7), 7),
        ("max_new_tokens", Level.LOW, 3),
        ("seed", np.uint32(7), 7),
        ("temperature", 1, 1),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.float64(0.5), 0.5),
        ("top_p", np.int32(1), 1),
        ("ignore_eos", np.bool_(True), True),
        ("stop", "END", ("END",)),
        ("stop", ["END", "STOP"], ("END", "STOP")),
        ("stop", None, ()),
        ("stop", (Word.END, np.str_("x")), ("END", "x")),
        ("stop", np.array(["a", "b"]), ("a", "b")),
        ("stop_token_ids", [5, np.int32(6)], (5, 6)),
        ("stop_token_ids", np.array([5, 6]), (5, 6)),
        ("stop_token_ids", None, ()),
        ("logit_bias", {np.int64(5): np.float32(0.5), 6: 1}, {5: 0.5, 6: 1}),
        ("logit_bias", OrderedDict({5: 1.0}), {5: 1.0}),
        ("logit_bias", {}, {}),
    ],
)
def test_values_that_mean_a_plain_one_become_it(field, value, becomes):
    made = getattr(SamplingParams(**{field: value}), field)
    assert made == becomes
    assert type(made) is type(becomes)
    if isinstance(made, tuple | dict):
        assert {type(item) for item in made} == {type(item) for item in becomes}
    data = msgspec.msgpack.encode(SamplingParams(**{field: value}))
    assert getattr(msgspec.msgpack.decode(data, type=SamplingParams), field) == becomes


def test_tensors_of_one_value_are_numbers():
    torch = pytest.importorskip("torch")
    params = SamplingParams(max_new_tokens=torch.tensor(7), stop_token_ids=torch.tensor([5, 6]))
    assert (params.max_new_tokens, params.stop_token_ids) == (7, (5, 6))
    with pytest.raises(RequestError, match=r"max_new_tokens is 7\.5, but it must be an integer"):
        SamplingParams(max_new_tokens=torch.tensor(7.5))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tempreature", "did you mean 'temperature'"),
        ("beams", "the fields are max_new_tokens, "),
    ],
)
def test_an_unknown_field_is_a_type_error_that_names_the_right_one(name, hint):
    values: dict[str, Any] = {name: 4}
    with pytest.raises(TypeError, match=f"no field '{name}'; {hint}"):
        SamplingParams(**values)
    with pytest.raises(TypeError, match="keyword arguments only"):
        SamplingParams(4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("max_tokens", "max_new_tokens", 4),
        ("max_completion_tokens", "max_new_tokens", 4),
        ("min_tokens", "min_new_tokens", 2),
        ("repeat_penalty", "repetition_penalty", 1.1),
        ("num_predict", "max_new_tokens", 4),
        ("stop_sequences", "stop", ("END",)),
        ("top_logprobs", "logprobs", 3),
    ],
)
def test_a_field_may_have_its_name_elsewhere(name, field, value):
    given: dict[str, Any] = {name: value}
    assert SamplingParams(**given) == SamplingParams(**{field: value})
    with pytest.raises(TypeError, match=f"{field} and {name} are the same field; give one of them"):
        SamplingParams(**given, **{field: value})
    with pytest.raises(RequestError, match=f"^{name} is -5, but|^{name} is -5, "):
        SamplingParams(**(given | {name: -5}))


def test_a_wrong_value_in_a_message_is_found_by_verify_and_not_by_the_decoder():
    """An error in the decoder would drop the message, and its request would never be answered."""
    params = SamplingParams()
    msgspec.structs.force_setattr(params, "temperature", math.nan)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert math.isnan(decoded.temperature)
    with pytest.raises(RequestError, match="temperature is nan"):
        decoded.verify(100)


def test_copies_are_equal():
    params = SamplingParams(max_new_tokens=5, stop=("a",), logit_bias={5: 1.0})
    assert copy.copy(params) == copy.deepcopy(params) == params
