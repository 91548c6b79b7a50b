"""Prompts that fill in the middle: llama.cpp's order, and cuts that leave the prefix cache its tokens."""

from __future__ import annotations

from itertools import takewhile

import pytest

from engine.models.tokenizer.fim import CUT_TOKENS, Extra, FimTokens, find_fim_tokens

FIM = FimTokens(900, 901, 902, pad=903, rep=904, sep=905)


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_the_order_is_that_of_llama_cpp():
    prompt = FIM.prompt(encode, "ab", "cd", room=100, written="x", bos=1)
    assert prompt == [1, 900, *encode("abx"), 901, *encode("cd"), 902]
    assert FIM.prompt(encode, [7, 8], "cd", room=100, suffix_first=True) == [
        901,
        *encode("cd"),
        900,
        7,
        8,
        902,
    ]
    extra = [Extra("one", "a.py"), Extra("two")]
    prompt = FIM.prompt(encode, "ab", "cd", room=1000, extra=extra)
    files = [905, *encode("a.py\none"), 905, *encode("tmp\ntwo"), 905, *encode("filename\n")]
    assert prompt == [904, *encode("myproject\n"), *files, 900, *encode("ab"), 901, *encode("cd"), 902]
    plain = FimTokens(900, 901, 902).prompt(encode, "ab", "", room=1000, extra=[Extra("one")])
    assert plain == [*encode("\n\n--- snippet ---\n\none"), 900, *encode("ab"), 901, 902]


@pytest.mark.parametrize(("suffix_first", "least"), [(True, 0.9), (False, 0.7)])
@pytest.mark.parametrize("num_before", [10, 3000, 10_000])
@pytest.mark.parametrize("num_after", [0, 500, 10_000])
def test_a_long_file_is_cut_so_that_the_next_keystroke_has_its_prefix(
    num_before, num_after, suffix_first, least
):
    room, num_good = 2048, 0
    before, after = [n % 50_000 for n in range(num_before)], "y" * num_after
    last: list[int] = []
    for n in range(60):
        before.append(60_000 + n)
        prompt = FIM.prompt(encode, before, after, room=room, suffix_first=suffix_first)
        assert len(prompt) <= room
        assert before[-1] in prompt
        if num_before + num_after > 2 * room:
            assert len(prompt) > room - 2 * CUT_TOKENS - 3
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, prompt, strict=False)))
        num_good += common >= least * len(prompt) or common >= len(prompt) - len(after) - 3
        last = prompt
    assert num_good >= 57  # the others move the cut by a block


def test_tokens_are_those_of_the_file_or_of_known_texts():
    vocab = {"<fim_prefix>": 5, "<fim_suffix>": 6, "<fim_middle>": 7, "<|file_sep|>": 8, "<PRE>": 9}
    assert find_fim_tokens(vocab.get, {}) == FimTokens(5, 6, 7, sep=8)
    assert find_fim_tokens(vocab.get, {"pre": 1, "pad": 2}) == FimTokens(1, 6, 7, pad=2, sep=8)
    assert find_fim_tokens({"<PRE>": 1}.get, {}) is None
    assert FIM.ends == (903, 904, 905)
