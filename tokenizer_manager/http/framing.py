"""JSON values as server-sent events, and as lines of newline-delimited JSON."""

from __future__ import annotations

from typing import Final

import msgspec

_encoder: Final = msgspec.json.Encoder()
_SEPARATORS: Final = ("\x85", "\u2028", "\u2029")
"""Line ends of Unicode that JSON does not escape. Clients that split text into lines end a line at them."""
_ESCAPES: Final = tuple((each.encode(), f"\\u{ord(each):04x}".encode()) for each in _SEPARATORS)


def line(data: object) -> bytes:
    """A JSON value as one line, for every notion of a line."""
    text = _encoder.encode(data)
    if not text.isascii():
        for separator, escape in _ESCAPES:
            text = text.replace(separator, escape)
    return text + b"\n"


DONE: Final = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def error_event(data: object) -> bytes:
    """The event that ends a failed stream; `[DONE]` never follows it."""
    return b"event: error\n" + event(data)
