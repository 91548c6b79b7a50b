"""`encode_pairs`: two texts as one sequence, as a cross-encoder takes them.

The tokenizer's files say what is put between the texts, and which tokens have the type 1: those of the second text of
a BERT model, none of a RoBERTa model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as CoreTokenizer


class EncodedPair(NamedTuple):
    """Token ids of two texts, special tokens included.

    Attributes:
        ids: of all tokens.
        second_start: index of the first token of type 1, after which all have it; 0: none has.
    """

    ids: list[int]
    second_start: int


def encode_pairs(
    core: CoreTokenizer, pairs: Sequence[tuple[str, str]], max_length: int | None = None
) -> list[EncodedPair]:
    """Encode pairs of texts.

    Args:
        core: the tokenizer, without truncation of its own.
        pairs: the texts.
        max_length: most tokens of a pair; of one that has more, the ends of the texts are left out, of the longer text
            first, as in transformers ("longest_first"). None: nothing is left out.
    """
    encodings = core.encode_batch_fast(pairs)
    encoded = []
    for pair, encoding in zip(pairs, encodings, strict=True):
        if max_length is not None and len(encoding.ids) > max_length:
            encoding = _truncated(core, pair, max_length)
        encoded.append(EncodedPair(encoding.ids, _first_of_type_1(encoding)))
    return encoded


def _truncated(core: CoreTokenizer, pair: tuple[str, str], max_length: int) -> Encoding:
    first, second = core.encode_batch(pair, add_special_tokens=False)
    room = max(0, max_length - core.num_special_tokens_to_add(is_pair=True))
    first_len, second_len = _longest_first(len(first.ids), len(second.ids), room)
    first.truncate(first_len)
    second.truncate(second_len)
    encoding: Encoding = core.post_process(first, second)
    return encoding


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Parts of two lengths that fit into `room`, if the longer one is shortened first, then both alike.

    As in tokenizers:utils/truncation.rs; if both are shortened, the longer one keeps the odd token.
    """
    short, long = sorted((first, second))
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room // 2 + room % 2
    return (short, long) if first <= second else (long, short)


def _first_of_type_1(encoding: Encoding) -> int:
    try:
        return encoding.type_ids.index(1)
    except ValueError:
        return 0
