"""`HeaderEntry`: one tensor in the header of a safetensors file, or the part of one that is an expert's own."""

from __future__ import annotations

from typing import NamedTuple


class HeaderEntry(NamedTuple):
    """One tensor."""

    dtype_name: str  # as in the header
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int
    strides: tuple[int, ...] = ()  # in numbers; empty: contiguous
