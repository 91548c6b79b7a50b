"""`feed_bytes`: a part of a token as input of a grammar; `TriggerSearch`: finds triggers in free text.

A grammar accepts or refuses a text independent of its split into tokens. Thus the rest of a token, after a marker or a
trigger, is fed through the tokens of single bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .backend import Matcher, Vocabulary


class TriggerSearch:
    """Finds the trigger that ends first in a stream of bytes; of several that end there, the longest."""

    def __init__(self, triggers: Sequence[bytes]) -> None:
        self._triggers = triggers
        self._tail_len = max(map(len, triggers), default=1) - 1

    def find(self, text: bytes) -> tuple[int, int] | None:
        """The index of a trigger, and where the text after it begins; None if there is none."""
        found = [
            (start + len(trigger), -len(trigger), index)
            for index, trigger in enumerate(self._triggers)
            if (start := text.find(trigger)) >= 0
        ]
        if not found:
            return None
        end, _, index = min(found)
        return index, end

    def tail(self, text: bytes) -> bytes:
        """The end of a text without a trigger that may be the beginning of one."""
        return text[max(0, len(text) - self._tail_len) :]


def feed_bytes(matcher: Matcher, data: bytes, vocabulary: Vocabulary) -> int:
    """Feed text that is a part of a token; returns the number of bytes that were accepted.

    It stops at the end of the grammar's text. A matcher that has refused a byte has an error.
    """
    singles = single_bytes(vocabulary)
    known = all(byte in singles for byte in data)
    count = 0
    for token_id in [singles[byte] for byte in data] if known else vocabulary.encode(data):
        if matcher.ended:
            break
        token = vocabulary.tokens[token_id]
        if not data.startswith(token, count) or not matcher.accept((token_id,)):
            break
        count += len(token)
    return count


@functools.lru_cache(maxsize=4)
def single_bytes(vocabulary: Vocabulary) -> dict[int, int]:
    """The text token of each byte that is one."""
    special = vocabulary.special_token_ids
    return {
        token[0]: token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if len(token) == 1 and token_id not in special
    }
