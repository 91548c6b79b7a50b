"""`TransferCounts`: totals of the rooms of a scheduler, and the checksum that both sides compare."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferCounts:
    """Totals since the start; see `TransferFigures`."""

    sent_pages: int = 0
    received_pages: int = 0
    transfer_s: float = 0.0
    transfers: int = 0
    failures: Counter[str] = field(default_factory=Counter)


def prompt_crc(token_ids: bytes, namespace: str) -> int:
    """CRC-32 of a prompt and its namespace. The two sides tokenize by themselves; another tokenizer shows here."""
    return zlib.crc32(namespace.encode(errors="surrogatepass"), zlib.crc32(token_ids))
