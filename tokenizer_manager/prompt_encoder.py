"""`PromptEncoder`: text to token ids without blocking the event loop.

Long texts, and many, are tokenized on threads; a few short ones on the event loop: tokenization takes about 0.2 ms per
KiB, a thread hop 0.1 ms. The text that waits for the threads is bounded, and a canceled request is not tokenized.
Ids are kept as `array("i")`, which is the messages' int32 and needs no numpy (0.1 s of start-up).
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from ..models.tokenizer.pairs import EncodedPair
from ..models.tokenizer.tokenizer import Tokenizer
from ..runtime.errors import QueueFullError, RequestError
from .generation import Prompt

_IN_PLACE_CHARS: Final = 4096  # 0.8 ms
_CHARS_PER_TEXT: Final = 48  # fixed cost of a text, as characters: 10 us
_SLICE_CHARS: Final = 256 << 10  # tokenized between two checks for cancellation: 50 ms
_MAX_WAITING_CHARS: Final = 64 << 20  # 6 s
_IN_PLACE_IDS: Final = 4096  # decoding takes 0.1 us per id
_IDS_AT_ONCE: Final = 64 << 10  # by one step of C code
_IN_PLACE_CHECKED_IDS: Final = 128 << 10  # 5 ms
_NUM_THREADS: Final = 2

assert array("i").itemsize == 4 and sys.byteorder == "little"  # the format of the messages


class PromptEncoder:
    """Tokenizes prompts and checks token ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Use `tokenizer`; ids must be below `vocab_size`, the model's."""
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")
        self._num_waiting_chars = 0

    async def encode(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool, param: str
    ) -> list[array[int]]:
        """Token ids of prompts.

        Args:
            prompts: texts, or ids, which are only checked.
            add_special_tokens: whether a text gets its BOS.
            param: the request's field, for errors.

        Raises:
            RequestError: an id is not in the vocabulary, or a text cannot be tokenized.
            QueueFullError: too much text waits to be tokenized.
        """
        if sum(len(prompt) for _, prompt in _ids_in(prompts)) <= _IN_PLACE_CHECKED_IDS:
            ids = self._arrays(prompts, param)
        else:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._threads, self._arrays, prompts, param)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        job = _Job(self.tokenizer, texts, add_special_tokens)
        encoded = iter(job.run() if job.num_chars <= _IN_PLACE_CHARS else await self._run_on_thread(job))
        result = [ids[i] if i in ids else next(encoded) for i in range(len(prompts))]
        highest = iter(job.highest)
        for i in range(len(prompts)):
            if i not in ids and next(highest) >= self._vocab_size:
                raise unknown_to_model(
                    self.tokenizer, result[i], prompt_name(prompts, i, param), self._vocab_size
                )
        return result

    async def encode_after(self, earlier: array[int], text: str, *, param: str) -> list[int] | None:
        """Token ids of a text that begins with the text of earlier tokens: these, then those of the rest.

        The tokens of an answer that a tokenizer makes of its text are often others than those that were generated,
        and only equal ones are found in the prefix cache.

        Returns:
            None if the text does not begin so (the tokens may be another model's), or if no special token is before or
            after its end, where a text can be cut.

        Raises:
            RequestError: the text cannot be tokenized.
        """
        if max(earlier) >= self._vocab_size:
            return None
        ids, special = list(earlier), self.tokenizer.is_special
        begin = await self.decode(ids, skip_special_tokens=False, param=param)
        if not text.startswith(begin):
            return None
        mark = self.tokenizer.decode(ids[-1:], skip_special_tokens=False) if special(ids[-1]) else ""
        [rest] = await self.encode([mark + text[len(begin) :]], add_special_tokens=False, param=param)
        if mark:
            return ids + rest[1:].tolist() if rest[0] == ids[-1] else None
        return ids + rest.tolist() if rest and special(rest[0]) else None

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_len: int | None) -> list[EncodedPair]:
        """Token ids of pairs of texts, and the position of the second text's first token; see `Tokenizer.encode_pairs`.

        Args:
            max_len: most tokens of a pair; None: any number.

        Raises:
            RequestError: a text cannot be tokenized.
        """
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        if num_chars + _CHARS_PER_TEXT * len(pairs) <= _IN_PLACE_CHARS:
            return self.tokenizer.encode_pairs(pairs, max_len)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.tokenizer.encode_pairs, pairs, max_len)

    async def decode(self, ids: list[int], *, skip_special_tokens: bool, param: str) -> str:
        """Text of token ids.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        self._checked(ids, [ids], 0, param)
        if len(ids) <= _IN_PLACE_IDS:
            return self.tokenizer.decode(ids, skip_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.tokenizer.decode, ids, skip_special_tokens)

    async def left_out(self, text: str, ids: array[int]) -> dict[str, int]:
        """Characters that the tokens of a text leave out, and how often; see `Tokenizer.left_out`."""
        if len(text) <= _IN_PLACE_CHARS:
            return self.tokenizer.left_out(text, ids)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.tokenizer.left_out, text, ids)

    async def json_of(self, ids: array[int]) -> bytes:
        """Token ids as a JSON list."""
        if len(ids) <= _IDS_AT_ONCE:
            return _json_of(ids)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _json_of, ids)

    def close(self) -> None:
        """End the threads, after the work that they have begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run_on_thread(self, job: _Job) -> list[array[int]]:
        if self._num_waiting_chars and self._num_waiting_chars + job.num_chars > _MAX_WAITING_CHARS:
            raise QueueFullError(
                f"{self._num_waiting_chars} characters wait to be tokenized, the limit is {_MAX_WAITING_CHARS}; retry "
                f"later, or send less text at once",
                retry_after_s=1,
            )
        self._num_waiting_chars += job.num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, job.run)
        finally:
            # Cancellation itself removes a job that has not begun from the threads' queue.
            job.wanted = False
            self._num_waiting_chars -= job.num_chars

    def _arrays(self, prompts: Sequence[Prompt], param: str) -> dict[int, array[int]]:
        """The prompts that are ids, checked, by index."""
        return {i: array("i", self._checked(p, prompts, i, param)) for i, p in _ids_in(prompts)}

    def _checked(self, ids: list[int], prompts: Sequence[Prompt], index: int, param: str) -> list[int]:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            name = prompt_name(prompts, index, param)
            position, value = next(
                (i, value) for i, value in zip(itertools.count(), ids) if not 0 <= value < self._vocab_size
            )
            raise RequestError(
                f"{name} has token id {value} at position {position}, but ids lie in [0, {self._vocab_size})",
                param=name,
                code="invalid_value",
            )
        return ids


class _Job:
    """Texts to tokenize.

    Attributes:
        num_chars: its cost, as characters.
        highest: token id of each text so far.
        wanted: False once its request is canceled; written by the event loop, read by the thread.
    """

    def __init__(self, tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> None:
        self.num_chars = sum(map(len, texts)) + _CHARS_PER_TEXT * (len(texts) - 1)
        self.highest: list[int] = []
        self.wanted = True
        self._tokenizer = tokenizer
        self._texts = texts
        self._add_special_tokens = add_special_tokens

    def run(self) -> list[array[int]]:
        """The ids of each text; fewer once they are not wanted any more."""
        encoded: list[array[int]] = []
        for texts in _slices(self._texts):
            if not self.wanted:
                break
            for ids in self._tokenizer.encode_batch(texts, self._add_special_tokens):
                encoded.append(array("i", ids))
                self.highest.append(_highest(encoded[-1]))
        return encoded


def _highest(ids: array[int]) -> int:
    """The highest id, or 0: a part at a time, so that a thread gives up the GIL between."""
    return max(
        (max(ids[begin : begin + _IDS_AT_ONCE]) for begin in range(0, len(ids), _IDS_AT_ONCE)), default=0
    )


def _json_of(ids: array[int]) -> bytes:
    parts = [ids[begin : begin + _IDS_AT_ONCE].tolist() for begin in range(0, len(ids), _IDS_AT_ONCE)]
    return b"[" + b",".join(msgspec.json.encode(part)[1:-1] for part in parts) + b"]"


def unknown_to_model(tokenizer: Tokenizer, ids: Iterable[int], name: str, vocab_size: int) -> RequestError:
    """The error for a text with a token that the tokenizer has and the model does not."""
    token_id = next(token_id for token_id in ids if token_id >= vocab_size)
    token = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
    return RequestError(
        f"{name} has the token {token!r}, which is {token_id} for the tokenizer, but the model's ids lie in "
        f"[0, {vocab_size}); leave it out",
        param=name,
        code="invalid_value",
    )


NO_BOS: Final = "send add_special_tokens: false"
"""The fix for a second BOS in APIs that have this field."""


def second_bos(
    tokenizer: Tokenizer, prompts: Sequence[object], encoded: Iterable[Sequence[int]], param: str, fix: str
) -> list[str]:
    """Warnings for texts that begin with the BOS that tokenization has put before them: the model sees two.

    Args:
        tokenizer: of the model.
        prompts: as they were sent; those that are token ids are left out.
        encoded: the token ids of each, with special tokens added.
        param: the request's field.
        fix: what to do, as an imperative.
    """
    added = tokenizer.encode("")
    if not added:
        return []
    bos = tokenizer.token_bytes(added[0]).decode(errors="replace")
    return [
        f"{prompt_name(prompts, i, param)} begins with {bos}, and tokenization adds another one; {fix}"
        for i, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True))
        if isinstance(prompt, str) and list(ids[:2]) == [added[0]] * 2
    ]


def prompt_name(prompts: Sequence[object], index: int, param: str) -> str:
    """The name of one prompt of the field `param` in errors."""
    return f"{param}[{index}]" if len(prompts) > 1 else param


def _ids_in(prompts: Sequence[Prompt]) -> Iterator[tuple[int, list[int]]]:
    return ((i, prompt) for i, prompt in enumerate(prompts) if isinstance(prompt, list))


def _slices(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order, a few at a time."""
    begin, num_chars = 0, 0
    for i, text in enumerate(texts):
        if i > begin and num_chars + len(text) > _SLICE_CHARS:
            yield texts[begin:i]
            begin, num_chars = i, 0
        num_chars += len(text)
    if begin < len(texts):
        yield texts[begin:]
