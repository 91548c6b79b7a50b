"""`Message` and `Record`: the bases of all that crosses a process border; and `Logprobs`, which many messages carry."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """Base of all messages between processes; the tag is the class name. New fields go last, with a default."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of what travels nested inside a message, so it needs no tag."""


class Logprobs(Record, frozen=True):
    """Log-probabilities of n consecutive tokens, natural logarithm, before temperature (the model's own).

    Attributes:
        token_logprobs: [n] float32, each token's own.
        top_ids: [n, k] int32, the k likeliest tokens, descending; empty for k = 0.
        top_logprobs: [n, k] float32.
        top_k: k.
    """

    token_logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    top_k: int = 0
