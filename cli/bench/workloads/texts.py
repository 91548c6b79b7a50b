"""`text_requests`: texts for requests of vectors. Any model can tokenize them, so no tokenizer is needed.

The words are so common that a word is one token for BERT's word pieces and for most other vocabularies. What a server
counts is in the summary.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ....runtime.errors import ConfigError
from ..records import BenchRequest
from .datasets import LengthRange

SPECIAL_TOKENS: Final = 2
"""That an encoder adds to a text: [CLS] and [SEP]."""
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
