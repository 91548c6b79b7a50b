"""Workloads: exact lengths, shared prefixes that are shared, and files that are not what they should be."""

import json

import pytest

from engine import ConfigError
from engine.cli.bench.workloads.datasets import (
    LengthRange,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
    trace_requests,
)
from engine.cli.bench.workloads.workload import DatasetName, WorkloadSettings
from engine.simulator.trace_files import TraceOptions

TOKEN_IDS = range(100, 600)


class WordTokenizer:
    """One token per word."""

    def encode(self, text: str) -> list[int]:
        return list(range(len(text.split())))


class IdTokenizer(WordTokenizer):
    """Has the token ids of these tests."""

    def ordinary_token_ids(self) -> list[int]:
        return [*TOKEN_IDS]


@pytest.mark.parametrize(
    ("text", "ratio", "expected"),
    [
        ("512", 1.0, (512, 512)),
        ("64:512", 1.0, (64, 512)),
        ("64:512", 0.5, (64, 512)),
        ("100", 0.25, (25, 100)),
    ],
)
def test_length_ranges(text, ratio, expected):
    lengths = LengthRange.parse("--random-input-len", text, ratio)

    assert (lengths.low, lengths.high) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "9:3", "1:2:3", "-4"])
def test_a_bad_length_names_its_flag(text):
    with pytest.raises(ConfigError, match="--random-input-len"):
        LengthRange.parse("--random-input-len", text)


def test_random_prompts_have_exact_lengths_within_the_range_and_follow_the_seed():
    requests = random_requests(200, LengthRange(3, 9), LengthRange(2, 4), TOKEN_IDS, seed=5)

    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert all(len(request.prompt) == request.prompt_len for request in requests)
    assert {request.output_len for request in requests} == {2, 3, 4}
    assert {token for request in requests for token in request.prompt} <= set(TOKEN_IDS)
    assert requests == random_requests(200, LengthRange(3, 9), LengthRange(2, 4), TOKEN_IDS, seed=5)


def test_groups_share_their_prefix_and_nothing_else():
    requests = shared_prefix_requests(
        num_groups=3,
        prompts_per_group=4,
        system_prompt_len=50,
        question_len=10,
        output_len=7,
        token_ids=TOKEN_IDS,
        seed=0,
    )

    prefixes = {group: {tuple(r.prompt[:50]) for r in requests if r.group == group} for group in range(3)}
    assert len(requests) == 12
    assert [len(found) for found in prefixes.values()] == [1, 1, 1]
    assert len({tuple(r.prompt[:50]) for r in requests}) == 3
    assert len({tuple(r.prompt[50:]) for r in requests}) == 12


def test_sharegpt_takes_first_questions_and_answer_lengths(tmp_path):
    path = tmp_path / "chats.json"
    rows = [
        {
            "conversations": [
                {"from": "human", "value": "a b c d e"},
                {"from": "gpt", "value": "one two three four"},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "too short"},
                {"from": "gpt", "value": "one two three four"},
            ]
        },
        {"conversations": [{"from": "human", "value": "no answer to this one"}]},
        {"conversations": [{"from": "human", "value": "w " * 900}, {"from": "gpt", "value": "w " * 900}]},
    ]
    path.write_text(json.dumps(rows))

    requests = sharegpt_requests(path, 10, WordTokenizer(), max_total_len=1000, output_len=None, seed=0)

    assert [(r.prompt, r.prompt_len, r.output_len) for r in requests] == [("a b c d e", 5, 4)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read the workload .*: No such file"),
        ("{", "not a line of JSON"),
        ("{}", "a file of rows with no names"),
        ("[]", "has no rows"),
        ('[{"conversations": []}]', "holds no conversation"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "a Mooncake trace, which has no texts"),
    ],
)
def test_a_bad_sharegpt_file_is_named(tmp_path, content, reason):
    path = tmp_path / "chats.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match=reason):
        sharegpt_requests(path, 1, WordTokenizer(), max_total_len=100, output_len=None, seed=0)


TRACE = [
    {"timestamp": 1000, "input_length": 1300, "output_length": 7, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 40, "hash_ids": [1, 2, 9]},
    {"timestamp": 3500, "input_length": 20, "output_length": 0},
    {"timestamp": 3600, "input_length": 20, "output_length": 1},
]


def write_trace(path, rows=TRACE):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_is_replayed_with_its_times_lengths_and_shared_blocks(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl")
    settings = WorkloadSettings(dataset_name=DatasetName.TRACE, dataset_path=path, time_scale=2.0)
    settings.check()
    requests = settings.requests(IdTokenizer())

    one, two, three, four = requests
    assert settings.offsets_s(requests) == [0.0, 1.0, 1.25, 1.3]
    assert [(r.prompt_len, len(r.prompt), r.output_len) for r in requests] == [
        (1300, 1300, 7),
        (1030, 1030, 40),
        (20, 20, 1),
        (20, 20, 1),
    ]
    assert one.prompt[:1024] == two.prompt[:1024]
    assert one.prompt[1024:1030] != two.prompt[1024:]
    assert three.prompt != four.prompt  # without hash ids nothing is shared
    assert settings.requests(IdTokenizer()) == requests
    assert set(one.prompt) <= set(TOKEN_IDS)


def test_only_the_first_requests_of_a_trace_are_read(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [*TRACE[:2], {"broken": True}])
    assert len(trace_requests(path, 2, TraceOptions(), token_ids=TOKEN_IDS, seed=0)) == 2


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (TRACE, {"dataset_name": DatasetName.SHAREGPT}, "is a Mooncake trace; use --dataset-name trace"),
        ([{"messages": []}], {}, "is rows of messages; use --dataset-name sharegpt"),
        ([{"wibble": 1}], {}, "a file of rows with wibble, which is not read"),
        (TRACE, {"request_rate": 5.0}, "a trace has its own times; leave out --request-rate"),
        (TRACE, {"burstiness": 2.0}, "a trace has its own times"),
        (TRACE, {"trace_block_size": 0}, "--trace-block-size is 0"),
        (TRACE, {"dataset_path": None}, "--dataset-name trace needs --dataset-path FILE"),
        (
            TRACE,
            {"dataset_name": DatasetName.RANDOM},
            "--dataset-path has no effect on --dataset-name random",
        ),
        (
            TRACE,
            {"dataset_name": DatasetName.RANDOM, "dataset_path": None, "time_scale": 2.0},
            "--time-scale has no effect on --dataset-name random",
        ),
    ],
)
def test_settings_that_do_not_fit_the_file_are_refused_before_the_run(tmp_path, rows, changes, message):
    path = write_trace(tmp_path / "f", rows)
    settings = WorkloadSettings(**({"dataset_name": DatasetName.TRACE, "dataset_path": path} | changes))

    with pytest.raises(ConfigError, match=message):
        settings.check()


@pytest.mark.parametrize(
    "rows",
    [
        [
            {
                "messages": [
                    {"role": "user", "content": "a b c d e"},
                    {"role": "assistant", "content": "f g h i"},
                ]
            }
        ],
        [{"instruction": "a b c", "input": "d e", "output": "f g h i"}],
    ],
)
def test_other_files_of_texts_are_read_as_sharegpts(tmp_path, rows):
    path = write_trace(tmp_path / "f", rows)
    [request] = sharegpt_requests(path, 10, WordTokenizer(), max_total_len=100, output_len=None, seed=0)

    assert (request.prompt_len, request.output_len) == (5, 4)
