from __future__ import annotations

import pytest

from engine.tokenizer_manager.conversation.parsing.reasoning_families import REASONING_FAMILIES
from engine.tokenizer_manager.conversation.reasoning import ReasoningCounter


def count(family: str | None, opened: bool, tokens: list[str]) -> int:
    counter = ReasoningCounter(
        None if family is None else REASONING_FAMILIES[family], opened, lambda index: tokens[index].encode()
    )
    for index in range(len(tokens)):
        counter.add([index])
    return counter.count


@pytest.mark.parametrize(
    ("family", "opened", "tokens", "expected"),
    [
        ("think", True, ["a", " b", "</think>", "\n\n", "c"], 2),
        ("think", False, ["\n", "<think>", "a", " b", "</think>", "c"], 2),
        ("think", False, ["a", "<think>", "b", "</think>"], 0),
        ("think", True, ["a", "</", "think", ">", "c"], 1),  # the end marker has three tokens
        ("think", False, ["<th", "ink>", "a", ".</", "think", ">c", "d"], 2),  # the dot is reasoning
        ("think", True, ["a", "b", "c"], 3),  # no end marker
        ("think", True, ["</", "x", "</think>", "y"], 2),
        ("think", False, [], 0),
        (None, False, ["<think>", "a"], 0),
        (
            "harmony",
            False,
            [
                *("<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>", "assistant"),
                *("<|channel|>", "analysis", "<|message|>", "c", "<|end|>"),
                *("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "d"),
            ],
            3,
        ),
    ],
)
def test_tokens_inside_the_block_are_counted(
    family: str | None, opened: bool, tokens: list[str], expected: int
):
    assert count(family, opened, tokens) == expected


@pytest.mark.parametrize(
    "tokens",
    [
        ["a", " b", "<call>", "<one>", "now"],
        ["a", " b", "<ca", "ll>n", "ow"],
        ["a", " b", "<one>", "now"],  # the model has left out the first marker
    ],
)
def test_a_call_ends_the_count_in_front_of_its_marker(tokens: list[str]):
    counter = ReasoningCounter(
        REASONING_FAMILIES["think"], True, lambda index: tokens[index].encode(), (b"<call>", b"<one>")
    )
    counter.add(range(len(tokens)))
    assert counter.count == len(tokens)
    counter.end_by_call()
    counter.add([0])
    assert counter.count == 2


def test_the_state_does_not_grow_with_the_block():
    counter = ReasoningCounter(REASONING_FAMILIES["think"], True, lambda _: b"word ")
    counter.add([0] * 10_000)

    assert counter.count == 10_000
    assert len(counter._tail) < 32  # what the marker may need
