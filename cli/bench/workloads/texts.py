"""`text_requests`: texts for requests of vectors. Any model can tokenize them, so no tokenizer is needed.

The words are so common that a word is one token for BERT's word pieces and for most other vocabularies. What a server
counts is in the summary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from ....runtime.errors import ConfigError
from ....runtime.text import decode_utf8, is_unicode
from ..load import BenchRequest
from .datasets import LengthRange, TextEncoder

SPECIAL_TOKENS: Final = 2
"""Tokens that an encoder adds to a text: [CLS] and [SEP]."""
_WORDS: Final = (  # noqa: SIM905
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "even most made after also well before years must through back where much your way down should because long each "
    "just state those people too world year day life hand part child eye woman place work week case point government "
    "company number group problem fact water room mother area money story month lot right study book word business "
    "issue side kind head house service friend father power hour game line end member law car city community name"
).split()


def text_requests(num_requests: int, batch: int, length: LengthRange, seed: int) -> list[BenchRequest]:
    """Requests of `batch` texts each.

    Args:
        length: tokens of a text, with those that an encoder adds.

    Raises:
        ConfigError: a text would have no word, or a request no text.
    """
    if batch < 1:
        raise ConfigError(f"--embed-batch is {batch}, but it must be at least 1")
    if length.low <= SPECIAL_TOKENS:
        raise ConfigError(
            f"--embed-len begins with {length.low}, but a text has {SPECIAL_TOKENS} special tokens and a word; "
            f"use {SPECIAL_TOKENS + 1} or more"
        )
    rng = np.random.default_rng(seed)
    words = np.asarray(_WORDS)
    requests = []
    for _ in range(num_requests):
        lengths = length.draw(rng, batch)
        texts = tuple(" ".join(rng.choice(words, size=n - SPECIAL_TOKENS)) for n in lengths)
        requests.append(BenchRequest(prompt="", prompt_len=sum(lengths), output_len=0, texts=texts))
    return requests


def custom_requests(
    path: Path, num_prompts: int, tokenizer: TextEncoder, *, output_len: int
) -> list[BenchRequest]:
    """The first `num_prompts` rows, in the order of the file.

    Args:
        output_len: tokens to generate for a row without `output_tokens`.

    Raises:
        ConfigError: the file cannot be read or has no row, or a row is no prompt, with its line.
    """
    try:
        lines = decode_utf8(path.read_bytes(), f"--dataset-path {path}").split("\n")
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror}") from None
    requests: list[BenchRequest] = []
    for number, line in enumerate(lines, 1):
        if len(requests) == num_prompts:
            break
        if line.strip():
            prompt, wanted = _row(line, f"{path}:{number}", output_len)
            requests.append(
                BenchRequest(prompt=prompt, prompt_len=len(tokenizer.encode(prompt)), output_len=wanted)
            )
    if not requests:
        raise ConfigError(f"--dataset-path {path} has no row; write one JSON object per line")
    return requests


def _row(line: str, place: str, output_len: int) -> tuple[str, int]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}; write one JSON object per line") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt or not is_unicode(prompt):
        raise ConfigError(f'{place}: no prompt; a row is {{"prompt": "...", "output_tokens": 64}}')
    wanted = row.get("output_tokens", output_len)
    if type(wanted) is not int or wanted < 1:
        raise ConfigError(f"{place}: output_tokens is {wanted!r}, but it must be a whole number from 1")
    return prompt, wanted
