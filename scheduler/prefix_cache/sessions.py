"""`Sessions`: the keys under which clients send the turns of their conversations.

A session is what a client says belongs together: the conversations of one agent, with those of its subagents.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_SESSIONS: Final = 4096
"""Of more sessions the one without a turn for the longest time is forgotten."""


class Session:
    """One session.

    Attributes:
        key: a digest, see `GenerateRequest`.
        num_turns: requests so far; parallel samples count once.
        last_s: when the last one arrived.
        group: of the last one.
    """

    __slots__ = ("group", "key", "last_s", "num_turns")

    def __init__(self, key: str) -> None:
        self.key = key
        self.num_turns = 0
        self.last_s = 0.0
        self.group = ""


class Sessions:
    """The sessions, by key."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def begin_turn(self, key: str, group: str, now_s: float) -> Session:
        """Count an arriving request; `group`: of its parallel samples, "" for none."""
        session = self._by_key.get(key)
        if session is None:
            session = self._by_key[key] = Session(key)
            if len(self._by_key) > MAX_SESSIONS:
                self._by_key.popitem(last=False)
        self._by_key.move_to_end(key)
        if not (group and group == session.group):
            session.num_turns += 1
        session.group, session.last_s = group, now_s
        return session
