"""`fits`: the verdict of `runtime/feasibility.py` as a bool, for tests that compare it with what happens."""

from __future__ import annotations

from engine.runtime.feasibility import Capacity, reason_against


def fits(prompt_len: int, max_new_tokens: int, capacity: Capacity) -> bool:
    """Whether such a request can run when no other does."""
    return reason_against(prompt_len, max_new_tokens, capacity) is None
