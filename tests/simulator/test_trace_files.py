"""Published kinds of workload files: each is read as it is published, or refused by its name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.errors import ConfigError
from engine.simulator.trace_files import (
    Block,
    Exchange,
    TimedRequest,
    TraceKind,
    TraceOptions,
    conversations,
    kind_of,
    timed_requests,
)

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1300, "output_length": 7, "hash_ids": [1, 2, 3]},
    {"timestamp": 3500, "input_length": 1024, "output_length": 0, "hash_ids": [1, 9]},
]
BAILIAN = [
    {
        "chat_id": 159,
        "parent_chat_id": -1,
        "timestamp": 61.25,
        "input_length": 36,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": [7, 8, 9],
    },
    {
        "chat_id": 160,
        "parent_chat_id": 159,
        "timestamp": 63.5,
        "input_length": 32,
        "output_length": 1,
        "type": "text",
        "turn": 2,
        "hash_ids": [7, 8],
    },
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.2299600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.009930+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,100,0,100,Conversation log
47.5,ChatGPT,1087,230,1317,API log
"""
BURSTGPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,0,ChatGPT,472,18,490,Conversation log
"""
TALK = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "left out"}]},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]
ALPACA = {"instruction": "Sum up.", "input": "Text.", "output": "T.", "text": "all of it"}


def write(path: Path, content: Any) -> Path:
    """A file: text, rows as JSON Lines, or (in a tuple) rows as one array."""
    if isinstance(content, tuple):
        content = json.dumps(content)
    elif not isinstance(content, str):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (MOONCAKE, TraceKind.MOONCAKE),
        (tuple(MOONCAKE), TraceKind.MOONCAKE),
        (BAILIAN, TraceKind.BAILIAN),
        (AZURE, TraceKind.AZURE),
        (AZURE_2024, TraceKind.AZURE),
        ("\ufeff" + AZURE, TraceKind.AZURE),
        (BURSTGPT, TraceKind.BURSTGPT),
        (BURSTGPT_2, TraceKind.BURSTGPT),
        (({"id": "x", "conversations": TALK},), TraceKind.SHAREGPT),
        ([{"conversations": TALK}], TraceKind.SHAREGPT),
        ([{"messages": MESSAGES}], TraceKind.MESSAGES),
        (({"messages": MESSAGES},), TraceKind.MESSAGES),
        ([ALPACA], TraceKind.ALPACA),
        ((ALPACA,), TraceKind.ALPACA),
    ],
)
def test_the_first_row_says_the_kind(tmp_path: Path, content: Any, kind: TraceKind):
    assert kind_of(write(tmp_path / "f", content)) is kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"custom_id": "1", "method": "POST", "body": {}}], "an OpenAI batch file"),
        ([{"prompt": "a"}], "rows of prompts"),
        ([{"question": "q", "answer": "a"}], "rows of question and answer"),
        ([{"timestamp": 0, "input_length": 5}], "a trace without output_length"),
        ([{"wibble": 1, "wobble": 2}], "a file of rows with wibble, wobble"),
        ("time,in,out\n1,2,3\n", "a file of rows with in, out, time"),
        (({},), "a file of rows with no names"),
        ("", "is no workload"),
        ("[]", "has no rows"),
        ("{}", "a file of rows with no names"),
        ("hello", "is no workload"),
        ("[1, 2", "a row must be an object"),
        ('[{"a": 1}', "a file of rows with a"),
        ('{"a": ', r"f:1: not a line of JSON"),
        ("5", "is no workload"),
    ],
)
def test_another_file_is_refused_by_its_name(tmp_path: Path, content: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        kind_of(write(tmp_path / "f", content))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(b"{}", mtime=0), "compressed with gzip; unpack it"),
        (b"PAR1\x15\x04", "a Parquet file; write it as JSON Lines or CSV"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    ],
)
def test_a_binary_file_is_named(tmp_path: Path, data: bytes, message: str):
    path = tmp_path / "f"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        kind_of(path)


def test_a_mooncake_trace_has_milliseconds_and_blocks_of_512(tmp_path: Path):
    assert list(timed_requests(write(tmp_path / "f", MOONCAKE))) == [
        TimedRequest(0.0, (Block(1, 512), Block(2, 512), Block(3, 276)), 7),
        TimedRequest(2.5, (Block(1, 512), Block(9, 512)), 1),
    ]


def test_a_qwen_trace_has_seconds_and_blocks_of_16(tmp_path: Path):
    assert list(timed_requests(write(tmp_path / "f", BAILIAN))) == [
        TimedRequest(0.0, (Block(7, 16), Block(8, 16), Block(9, 4)), 5),
        TimedRequest(2.25, (Block(7, 16), Block(8, 16)), 1),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (AZURE, [(0.0, 4808, 10), (0.25, 110, 27)]),
        (AZURE_2024, [(0.0, 2162, 5), (1.0, 2399, 6)]),
        (BURSTGPT, [(0.0, 472, 18), (42.5, 1087, 230)]),  # the one that failed is left out
        (BURSTGPT_2, [(0.0, 472, 18)]),
    ],
)
def test_csv_traces(tmp_path: Path, content: str, expected: list[tuple[float, int, int]]):
    requests = list(timed_requests(write(tmp_path / "f", content)))

    found = [(request.arrival_s, request.prompt_len, request.output_len) for request in requests]
    assert found == [(pytest.approx(arrival_s), *lens) for arrival_s, *lens in expected]
    assert all(request.blocks[0].hash_id is None for request in requests)


@pytest.mark.parametrize(
    ("length", "num_ids", "block_size", "fits"),
    [
        *(
            (512, 1, None, True),
            (513, 2, None, True),
            (513, 1, None, True),
        ),  # whole blocks alone may have ids
        *((512, 2, None, False), (513, 3, None, False), (36, 3, None, False), (5000, 3, None, False)),
        *((36, 3, 16, True), (36, 2, 16, True), (36, 4, 16, False), (36, 1, 16, False)),
        *((5, 0, None, True), (1, 1, 1, True), (2, 1, 1, False)),
    ],
)
def test_the_number_of_hash_ids_must_fit_the_length(
    tmp_path: Path, length: int, num_ids: int, block_size: int | None, fits: bool
):
    row = {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": [*range(num_ids)]}
    path = write(tmp_path / "f", [row])
    if fits:
        [request] = timed_requests(path, TraceOptions(block_size))
        assert request.prompt_len == length
        return
    with pytest.raises(
        ConfigError, match=rf"f:1: {num_ids} hash ids for input_length {length}, but blocks of"
    ):
        list(timed_requests(path, TraceOptions(block_size)))


def test_the_error_names_the_block_size_that_fits(tmp_path: Path):
    row = {key: value for key, value in BAILIAN[0].items() if key != "chat_id"}
    path = write(tmp_path / "f", [row])
    with pytest.raises(ConfigError, match="blocks of 512 tokens make 1; --trace-block-size 16 fits"):
        list(timed_requests(path))
    [request] = timed_requests(path, TraceOptions(block_size=16, time_unit="s"))
    assert request.blocks == (Block(7, 16), Block(8, 16), Block(9, 4))


@pytest.mark.parametrize(("unit", "seconds"), [("s", 2500.0), ("ms", 2.5), ("us", 0.0025)])
def test_the_unit_of_times_and_their_scale(tmp_path: Path, unit: Any, seconds: float):
    path = write(tmp_path / "f", MOONCAKE)
    *_, last = timed_requests(path, TraceOptions(time_unit=unit))
    assert last.arrival_s == pytest.approx(seconds)
    *_, twice = timed_requests(path, TraceOptions(time_unit=unit, time_scale=2.0))
    assert twice.arrival_s == pytest.approx(seconds / 2)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            AZURE,
            TraceOptions(block_size=16),
            "--trace-block-size has no effect on .* an Azure trace has no hash ids",
        ),
        (
            AZURE,
            TraceOptions(time_unit="ms"),
            "--trace-time-unit has no effect on .* an Azure trace has dates",
        ),
        (BURSTGPT, TraceOptions(block_size=16), "a BurstGPT trace has no hash ids"),
        (MOONCAKE, TraceOptions(block_size=0), "--trace-block-size is 0"),
        (MOONCAKE, TraceOptions(time_scale=0.0), "--time-scale is 0"),
        ([ALPACA], TraceOptions(), "has Alpaca rows, which have no times"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, content: Any, options: TraceOptions, message: str):
    with pytest.raises(ConfigError, match=message):
        list(timed_requests(write(tmp_path / "f", content), options))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"timestamp": 0}, "timestamp 0 is before the one above; sort the trace by it"),
        ({"timestamp": "noon"}, "f:2: timestamp is 'noon', but it must be a number"),
        ({"timestamp": None}, "f:2: timestamp is missing"),
        ({"input_length": 0}, "f:2: input_length is 0, but it must be a whole number of at least 1"),
        ({"input_length": 1.5}, "f:2: input_length is 1.5"),
        ({"output_length": -1}, "f:2: output_length is -1"),
        ({"output_length": None}, "f:2: output_length is missing"),
        ({"hash_ids": "x"}, "f:2: hash_ids must be a list of integers"),
        ({"hash_ids": [1, "2"]}, "f:2: hash_ids must be a list of integers"),
        ({"hash_ids": [-1, 2]}, "f:2: hash_ids must be a list of integers"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, row: dict[str, Any], message: str):
    path = write(tmp_path / "f", [MOONCAKE[0], MOONCAKE[1] | row])
    with pytest.raises(ConfigError, match=message):
        list(timed_requests(path))


def test_a_bad_csv_row_is_named_with_its_line(tmp_path: Path):
    for line, message in [
        ("2023-11-16 18:17:03,5\n", r"f:3: 2 columns, but the header has 3: TIMESTAMP"),
        ("yesterday,5,6\n", r"f:3: TIMESTAMP is 'yesterday', but it must be a date"),
        ("2023-11-16 18:17:05,x,6\n", r"f:3: ContextTokens is 'x', but it must be a number"),
    ]:
        head = "".join(AZURE.splitlines(keepends=True)[:2])
        with pytest.raises(ConfigError, match=message):
            list(timed_requests(write(tmp_path / "f", head + line)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (({"conversations": TALK}, {"conversations": []}), [[Exchange("q", "a")]]),
        (
            [{"conversation": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}],
            [[("q", "a")]],
        ),
        ([{"messages": MESSAGES}], [[("q", "a"), ("q2", "a2")]]),
        (
            [ALPACA, {"instruction": "Hi", "input": "", "output": "Ho"}],
            [[("Sum up.\n\nText.", "T.")], [("Hi", "Ho")]],
        ),
        ([ALPACA, {"instruction": "Hi", "output": ""}], [[("Sum up.\n\nText.", "T.")]]),
    ],
)
def test_conversations(tmp_path: Path, content: Any, expected: Any):
    assert list(conversations(write(tmp_path / "f", content))) == expected


def test_a_timed_trace_has_no_conversations(tmp_path: Path):
    with pytest.raises(ConfigError, match="is an Azure trace, which has no texts; replay it as a trace"):
        list(conversations(write(tmp_path / "f", AZURE)))
