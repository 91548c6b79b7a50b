"""Workloads: exact lengths, shared prefixes that are shared, and files that are not what they should be."""

import json

import pytest

from engine import ConfigError
from engine.cli.bench.datasets import LengthRange, random_requests, shared_prefix_requests, sharegpt_requests

TOKEN_IDS = range(100, 600)


class WordTokenizer:
    """One token per word."""

    def encode(self, text: str) -> list[int]:
        return list(range(len(text.split())))


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
    [(None, "cannot be read"), ("{", "not JSON"), ("{}", "JSON list"), ("[]", "no conversation")],
)
def test_a_bad_sharegpt_file_is_named(tmp_path, content, reason):
    path = tmp_path / "chats.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match=reason):
        sharegpt_requests(path, 1, WordTokenizer(), max_total_len=100, output_len=None, seed=0)
