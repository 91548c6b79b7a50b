from __future__ import annotations

import asyncio
import re
import threading
from array import array

import pytest

from engine.runtime.errors import QueueFullError, RequestError
from engine.tokenizer_manager import prompt_encoder
from engine.tokenizer_manager.prompt_encoder import PromptEncoder

from .fake_engine import EOS, TOKENIZER, WAIT_S, make_tokenizer


def encode(prompt: str | list[int]) -> list[int]:
    encoder = PromptEncoder(TOKENIZER, vocab_size=258)

    async def main() -> list[int]:
        [ids] = await encoder.encode([prompt], add_special_tokens=True, param="prompt")
        return list(ids)

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


@pytest.mark.parametrize(("others", "is_cut"), [((), True), (("<|im_end|>\n",), False)])
def test_a_text_is_cut_at_a_special_token_unless_a_longer_one_begins_there(others, is_cut):
    tokenizer = make_tokenizer(others=others)
    encoder = PromptEncoder(tokenizer, vocab_size=300)
    earlier = array("i", [tokenizer.encode("<|im_start|>")[0], *tokenizer.encode("hi"), EOS])
    found = asyncio.run(encoder.encode_after(earlier, "<|im_start|>hi<|im_end|>\nhi", param="prompt"))
    encoder.close()

    assert found == ([*earlier, *tokenizer.encode("\nhi")] if is_cut else None)


def test_tokenizing_a_long_text_leaves_the_event_loop_running():
    """The tokenizer must let go of the GIL; a thread alone does not help."""
    encoder = PromptEncoder(TOKENIZER, vocab_size=258)

    async def main() -> int:
        encoding = asyncio.create_task(
            encoder.encode(["hello " * 200_000], add_special_tokens=True, param="prompt")
        )
        num_turns = 0
        while not encoding.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert [len(ids) for ids in await encoding] == [1_200_000]
        return num_turns

    try:
        assert asyncio.run(main()) > 100
    finally:
        encoder.close()


class SlowTokenizer:
    """Tokenizes when the test lets it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        self.batches.append(texts)
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.go_on.wait(WAIT_S)
        return [[len(text)] for text in texts]

    def token_bytes(self, token_id: int) -> bytes:
        return b"<pad>"


def make_slow() -> tuple[SlowTokenizer, PromptEncoder]:
    tokenizer = SlowTokenizer()
    return tokenizer, PromptEncoder(tokenizer, vocab_size=10**9)  # type: ignore[arg-type]


def start(encoder: PromptEncoder, *texts: str) -> asyncio.Task[object]:
    return asyncio.create_task(encoder.encode(texts, add_special_tokens=True, param="prompt"))


def test_many_short_texts_are_tokenized_on_a_thread_in_one_go():
    tokenizer, encoder = make_slow()

    async def main() -> None:
        encoding = start(encoder, *["x" * 50] * 100)
        while not tokenizer.begun.acquire(blocking=False):
            await asyncio.sleep(0)
        tokenizer.go_on.set()
        assert await encoding == [array("i", [50])] * 100

    asyncio.run(main())
    encoder.close()
    assert [len(batch) for batch in tokenizer.batches] == [100]
    assert "MainThread" not in tokenizer.threads


def test_what_nobody_waits_for_any_more_is_not_tokenized():
    tokenizer, encoder = make_slow()
    text = "x" * 200_000

    async def main() -> None:
        running = [start(encoder, text, text, text) for _ in range(2)]  # three slices each
        queued = start(encoder, "y" * 200_000)
        for _ in running:
            while not tokenizer.begun.acquire(blocking=False):
                await asyncio.sleep(0)
        for encoding in (*running, queued):
            encoding.cancel()
        await asyncio.gather(*running, queued, return_exceptions=True)
        tokenizer.go_on.set()
        assert await start(encoder, "z" * 5000) == [array("i", [5000])]

    asyncio.run(main())
    encoder.close()
    assert tokenizer.batches == [[text], [text], ["z" * 5000]]


def test_too_much_waiting_text_is_refused_for_now(monkeypatch):
    monkeypatch.setattr(prompt_encoder, "_MAX_WAITING_CHARS", 10_000)
    tokenizer, encoder = make_slow()

    async def main() -> None:
        first = start(encoder, "x" * 20_000)  # alone, any size is taken
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="20000 characters wait") as caught:
            await start(encoder, "y" * 5000)
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        tokenizer.go_on.set()
        await first
        await start(encoder, "y" * 5000)

    asyncio.run(main())
    encoder.close()


@pytest.mark.parametrize("prompts", [["hi<|im_end|>"], ["hi", "hi<|im_end|>"]])
def test_tokens_that_the_model_does_not_know_are_refused_in_texts_too(prompts):
    encoder = PromptEncoder(TOKENIZER, vocab_size=256)  # without the two special tokens
    name = "prompt" if len(prompts) == 1 else "prompt[1]"
    message = rf"^{re.escape(name)} has the token '<\|im_end\|>', which is 257 .* \[0, 256\)"
    with pytest.raises(RequestError, match=message) as caught:
        asyncio.run(encoder.encode(prompts, add_special_tokens=True, param="prompt"))
    encoder.close()

    assert caught.value.param == name


def test_a_bad_id_names_the_prompt_of_a_list():
    encoder = PromptEncoder(TOKENIZER, vocab_size=258)
    with pytest.raises(RequestError, match=r"^prompt\[1\] has token id 999 at position 0") as caught:
        asyncio.run(encoder.encode([[1], [999]], add_special_tokens=True, param="prompt"))
    encoder.close()

    assert caught.value.param == "prompt[1]"
