"""A token table for tests: ids stand for bytes chosen by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


class FakeTokens:
    """Ids 0..n-1 are the given pieces; `eos` and `tool` are control tokens; other ids have no bytes."""

    eos = 1000
    tool = 1001

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.bytes_of = {**dict(enumerate(pieces)), self.eos: b"<eos>", self.tool: b"<tool>"}

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes_of.get(token_id, b"")

    def is_special(self, token_id: int) -> bool:
        return token_id in (self.eos, self.tool)


MakeTokens = Callable[[Sequence[bytes]], FakeTokens]


@pytest.fixture(scope="session")
def make_tokens() -> MakeTokens:
    """Builds a table from the pieces of ids 0, 1, ..."""
    return FakeTokens
