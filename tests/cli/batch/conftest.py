"""A served fake engine, as in the tests of the tokenizer manager."""

from __future__ import annotations

from tests.tokenizer_manager.conftest import serve, stopped_servers

__all__ = ["serve", "stopped_servers"]
