"""Workloads: what they share, what they draw, and what is said about a broken file."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from engine.runtime.errors import ConfigError
from engine.simulator.file_workloads import file_requests
from engine.simulator.generated_workloads import GENERATED, Arrival, Batch, Chat, given_lengths, with_medians
from engine.simulator.sim_request import EOS_TOKEN, Segment, answer_ids, prompt_ids, segment_ids
from engine.simulator.trace_files import TraceOptions


def ids(data: bytes) -> list[int]:
    return [int(each) for each in np.frombuffer(data, dtype=np.int32)]


def common(one: bytes, other: bytes) -> int:
    pairs = zip(ids(one), ids(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---------------------------------------------------------------- tokens


def test_equal_segments_are_equal_tokens_and_others_differ_at_once():
    one, same, other = (
        segment_ids(Segment(5, 100)),
        segment_ids(Segment(5, 100)),
        segment_ids(Segment(6, 100)),
    )
    assert one == same
    assert len(ids(one)) == 100
    assert common(one, other) == 0
    assert common(segment_ids(Segment(5, 40)), one) == 40
    far = segment_ids(Segment(5 + 32_766, 100))  # the low part is equal: the second token tells them apart
    assert common(one, far) == 1


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_short_segments_have_their_length(length):
    assert len(ids(segment_ids(Segment(7, length)))) == length


def test_an_answer_in_a_history_is_what_the_model_said():
    assert ids(answer_ids(3)) == [1, 1, EOS_TOKEN]
    assert ids(answer_ids(1)) == [EOS_TOKEN]


# ---------------------------------------------------------------- generated


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_a_workload_is_a_function_of_its_seed(name):
    def made(seed: int):
        return list(GENERATED[name].requests(Arrival(num_requests=200, rate=20.0, seed=seed)))

    one = made(1)
    assert one == made(1)
    assert one != made(2)
    assert len({request.rid for request in one}) == 200
    assert [request.arrival_s for request in one] == sorted(request.arrival_s for request in one)
    assert all(1 <= request.output_len <= request.max_new_tokens for request in one)
    assert all(min(ids(request.input_ids)) >= 0 for request in one[:20])


def test_workloads_come_lazily():
    endless = GENERATED["chat"].requests(Arrival(num_requests=10**9, rate=1000.0))
    assert len(list(itertools.islice(endless, 1000))) == 1000


def test_a_turn_brings_the_history_of_its_conversation():
    requests = list(Chat(num_systems=1).requests(Arrival(num_requests=400, rate=5.0)))
    system_len = Chat().system_len
    # A later turn's prompt begins with an earlier one's prompt and answer.
    with_history = 0
    for idx, later in enumerate(requests[:150]):
        for earlier in requests[:idx]:
            whole = earlier.input_ids + answer_ids(earlier.output_len)
            if later.input_ids.startswith(whole):
                with_history += 1
                break
    assert with_history > 30
    assert all(common(request.input_ids, requests[0].input_ids) >= system_len for request in requests)


def test_chat_has_the_mean_turns_and_rate_that_it_says():
    requests = list(Chat().requests(Arrival(num_requests=20_000, rate=100.0)))
    # Conversations start at a third of the rate; once the first ones have ended, requests come at the whole.
    late = [request.arrival_s for request in requests if 80 <= request.arrival_s < 160]
    assert len(late) / 80 == pytest.approx(100, rel=0.15)


def test_batches_are_there_at_once_and_share_their_instructions():
    requests = list(Batch().requests(Arrival(num_requests=50, rate=1.0)))
    assert {request.arrival_s for request in requests} == {0.0}
    assert all(common(each.input_ids, requests[0].input_ids) >= 100 for each in requests)


def test_medians_can_be_changed():
    workload = with_medians(GENERATED["batch"], 2000, 20)
    requests = list(workload.requests(Arrival(num_requests=2000)))
    assert np.median([request.prompt_len - 100 for request in requests]) == pytest.approx(2000, rel=0.1)
    assert np.median([request.output_len for request in requests]) == pytest.approx(20, rel=0.1)
    with pytest.raises(ConfigError, match="--output-len is 0, but it must be at least 1"):
        with_medians(GENERATED["batch"], None, 0)


def test_given_lengths_go_round():
    requests = list(given_lengths([10, 20], [3], Arrival(num_requests=3, rate=math.inf)))
    assert [request.prompt_len for request in requests] == [10, 20, 10]
    assert common(requests[0].input_ids, requests[2].input_ids) == 0


@pytest.mark.parametrize(
    ("arrival", "message"),
    [
        ({"num_requests": 0}, "--num-requests is 0, but it must be at least 1"),
        ({"rate": 0.0}, "--rate is 0, but it must be above 0"),
        ({"burstiness": -1.0}, "--burstiness is -1, but it must be above 0"),
    ],
)
def test_impossible_arrivals_are_refused(arrival, message):
    with pytest.raises(ConfigError, match=message):
        Arrival(**arrival)


# ---------------------------------------------------------------- traces


def write_lines(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_trace_shares_what_its_hashes_share(tmp_path):
    path = write_lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 1000, "input_length": 1300, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1030, "output_length": 4000, "hash_ids": [1, 2, 9]},
        {"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": [4, 2]},
    )
    one, two, three = file_requests(path, Arrival(), TraceOptions(time_scale=2.0))
    assert [each.arrival_s for each in (one, two, three)] == [0.0, 1.0, 1.0]
    assert [each.prompt_len for each in (one, two, three)] == [1300, 1030, 600]
    assert common(one.input_ids, two.input_ids) == 1024
    assert common(one.input_ids, three.input_ids) == 0
    assert (one.output_len, one.max_new_tokens) == (7, 2048)
    assert (two.output_len, two.max_new_tokens) == (4000, 4000)
    assert three.output_len == 1


def test_a_trace_without_hashes_shares_nothing(tmp_path):
    entry = {"timestamp": 0, "input_length": 50, "output_length": 5}
    one, two = file_requests(write_lines(tmp_path / "t", entry, entry, entry), Arrival(num_requests=2))
    assert common(one.input_ids, two.input_ids) == 0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"timestamp": 0, "input_length": 5}], r"a trace without output_length"),
        (
            [
                {"timestamp": 5, "input_length": 5, "output_length": 1},
                {"timestamp": 4, "input_length": 5, "output_length": 1},
            ],
            r"t:2: timestamp 4 is before the one above; sort the trace by it",
        ),
        ([{"timestamp": 0, "input_length": 0, "output_length": 1}], r"t:1: input_length is 0"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path, entries, message):
    path = write_lines(tmp_path / "t", *entries)
    with pytest.raises(ConfigError, match=message):
        list(file_requests(path, Arrival()))


def test_what_is_no_workload_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ConfigError, match="notes.txt is no workload: it must be a trace"):
        file_requests(path, Arrival())
    with pytest.raises(ConfigError, match="cannot read the workload .*: No such file"):
        file_requests(tmp_path / "nowhere", Arrival())
    path = write_lines(tmp_path / "t", {"timestamp": 0, "input_length": 5, "output_length": 1})
    with pytest.raises(ConfigError, match="--time-scale is 0, but it must be above 0"):
        file_requests(path, Arrival(), TraceOptions(time_scale=0.0))


def test_conversations_are_measured_by_their_letters(tmp_path):
    path = tmp_path / "sharegpt.json"
    conversation = [
        {"from": "system", "value": "left out"},
        {"from": "human", "value": "a" * 40},
        {"from": "gpt", "value": "b" * 80},
        {"from": "human", "value": "c" * 20},
        {"from": "gpt", "value": "d" * 4},
        {"from": "human", "value": "without an answer"},
    ]
    path.write_text(json.dumps([{"conversations": conversation}, {"conversations": []}]))
    requests = list(file_requests(path, Arrival(num_requests=2, rate=0.001)))
    first, second = requests
    assert (first.prompt_len, first.output_len) == (10, 20)
    assert (second.prompt_len, second.output_len) == (10 + 20 + 5, 1)
    assert second.input_ids.startswith(first.input_ids + answer_ids(20))


def test_conversations_without_answers_are_no_workload(tmp_path):
    path = tmp_path / "empty.json"
    path.write_text('[{"conversations": [{"from": "human", "value": "hello"}]}]')
    with pytest.raises(ConfigError, match="no conversation with a question and an answer"):
        file_requests(path, Arrival())
    path.write_text("[1, 2")
    with pytest.raises(ConfigError, match="a row must be an object"):
        file_requests(path, Arrival())


def test_prompts_are_their_segments():
    assert len(ids(prompt_ids([Segment(1, 3), Segment(2, 4)]))) == 7
