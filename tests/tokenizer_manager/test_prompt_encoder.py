from __future__ import annotations

import asyncio

import pytest

from engine.runtime.errors import RequestError
from engine.tokenizer_manager.prompt_encoder import PromptEncoder

from .fake_engine import TOKENIZER


def encode(prompt: str | list[int]) -> list[int]:
    encoder = PromptEncoder(TOKENIZER, vocab_size=258)

    async def main() -> list[int]:
        return list(await encoder.encode(prompt, add_special_tokens=True, param="prompt"))

    try:
        return asyncio.run(main())
    finally:
        encoder.close()


@pytest.mark.parametrize("length", [1, 4096, 4097, 100_000])
def test_short_and_long_texts_give_the_tokenizers_ids(length):
    assert encode("x" * length) == TOKENIZER.encode("x" * length)


@pytest.mark.parametrize("bad", [-1, 258, 2**31, -(2**63)])
def test_ids_outside_the_vocabulary_are_named(bad):
    with pytest.raises(
        RequestError, match=rf"prompt has token id {bad} at position 2, but ids lie in \[0, 258\)"
    ):
        encode([0, 257, bad])


def test_ids_pass_unchanged():
    assert encode([0, 257, 5]) == [0, 257, 5]


def test_tokenising_a_long_text_leaves_the_event_loop_running():
    """The tokenizer must let go of the GIL; a thread alone does not help."""
    encoder = PromptEncoder(TOKENIZER, vocab_size=258)

    async def main() -> int:
        encoding = asyncio.create_task(
            encoder.encode("hello " * 200_000, add_special_tokens=True, param="prompt")
        )
        num_turns = 0
        while not encoding.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert len(await encoding) == 1_200_000
        return num_turns

    try:
        assert asyncio.run(main()) > 100
    finally:
        encoder.close()
