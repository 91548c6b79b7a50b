"""`Sessions`: the keys under which clients send turns, and where the conversations of each session end in the tree.

A conversation is the path to the end of its last turn. A turn that goes on with all of it moves its end; any other turn
of the session begins a conversation of its own: another agent of the session, or one whose template rewrites old turns.
A node in the middle of a path needs no count: what covers it, too, is another child or another end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Final

from .base import PrefixMatch, Session
from .radix_node import RadixNode, path_to_root

MAX_SESSIONS: Final = 4096
"""Beyond it the session without a turn for the longest time is forgotten."""
MAX_CONVERSATIONS: Final = 256
"""Limit of one session; beyond it its oldest conversation is forgotten."""


class Sessions:
    """The sessions, by key. Writes `Session`."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, Session] = OrderedDict()
        self._by_node: dict[RadixNode, set[Session]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __reversed__(self) -> Iterator[Session]:
        """The one with the latest turn first."""
        return reversed(self._by_key.values())

    def covered(self, session: Session) -> set[RadixNode]:
        """The nodes of its conversations, and their roots."""
        nodes: set[RadixNode] = set()
        for end in session.ends:
            nodes.update(takewhile(lambda node: node not in nodes, path_to_root(end)))
        return nodes

    def find(self, key: str) -> Session | None:
        """The session with this key."""
        return self._by_key.get(key)

    def begin_turn(self, key: str, tenant: str, group: str, now_s: float) -> Session:
        """Count an arriving request; `group`: of its parallel samples, "" for none."""
        session = self._by_key.get(key)
        if session is None:
            session = self._by_key[key] = Session(key)
            if len(self._by_key) > MAX_SESSIONS:
                self.take_ends(self._by_key.popitem(last=False)[1])
        self._by_key.move_to_end(key)
        if not (group and group == session.group):
            session.num_turns += 1
        session.tenant, session.group, session.last_s = tenant, group, now_s
        return session

    def continues(self, session: Session, match: PrefixMatch) -> bool:
        """Whether a prefix has all of a conversation of the session."""
        node: RadixNode | None = match.node
        if node is None or not session.ends:
            return False
        whole = node if match.pages_in_node == len(node.pages) else node.parent
        return whole is not None and any(each in session.ends for each in path_to_root(whole))

    def end_turn(self, session: Session, node: RadixNode) -> None:
        """A turn of an open session has ended at a node."""
        if node.parent is None or self._by_key.get(session.key) is not session:
            return  # nothing of it is cached, or it was forgotten meanwhile
        for each in path_to_root(node):
            if each in session.ends:
                self._drop(session, each)
        self._put(session, node)
        if len(session.ends) > MAX_CONVERSATIONS:
            self._drop(session, next(iter(session.ends)))

    def close(self, session: Session) -> None:
        """Forget a session, whose ends are taken. Turns of it that run end without it."""
        session.closed = True
        self._by_key.pop(session.key, None)

    def take_ends(self, session: Session) -> list[RadixNode]:
        """The nodes at which its conversations ended; none end there any more."""
        ends: list[RadixNode] = list(session.ends)
        for node in ends:
            self._drop(session, node)
        return ends

    def put_ends(self, session: Session, ends: Iterable[RadixNode]) -> None:
        """The inverse of `take_ends`."""
        for node in ends:
            self._put(session, node)

    def ends_at(self, node: RadixNode) -> bool:
        """Whether a conversation ends at a node."""
        return node in self._by_node

    def removed(self, node: RadixNode, parent: RadixNode) -> None:
        """A leaf leaves the tree: what ended there ends at its parent, or nowhere if that is a root."""
        for session in self._by_node.pop(node, ()):
            del session.ends[node]
            if parent.parent is not None:
                self._put(session, parent)

    def _put(self, session: Session, node: RadixNode) -> None:
        session.ends[node] = None
        self._by_node.setdefault(node, set()).add(session)

    def _drop(self, session: Session, node: RadixNode) -> None:
        del session.ends[node]
        sessions = self._by_node[node]
        sessions.remove(session)
        if not sessions:
            del self._by_node[node]

    def verify(self, nodes: Iterable[RadixNode]) -> Iterator[str]:
        """Yield errors: too many sessions or conversations, ends that are not in the tree, or of no session."""
        if len(self) > MAX_SESSIONS or any(
            len(each.ends) > MAX_CONVERSATIONS for each in self._by_key.values()
        ):
            yield f"{len(self)} sessions are kept, or one has too many conversations"
        ends: dict[RadixNode, set[Session]] = {}
        for session in self._by_key.values():
            for node in session.ends:
                ends.setdefault(node, set()).add(session)
        if ends != self._by_node:
            yield f"sessions end at {len(ends)} nodes, but {len(self._by_node)} are known"
        if any(node.parent is None for node in ends) or not ends.keys() <= set(nodes):
            yield "a conversation ends at a node that is not in the tree"
