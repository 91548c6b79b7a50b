"""`MatcherSource`: where the scheduler gets the matcher of a request.

The server's source compiles grammars on a thread (`grammar_builder.py`); a replay has those of
`logged_matcher.py`.
"""

from __future__ import annotations

from typing import Protocol

from ...grammar.backend import Matcher


class MatcherSource(Protocol):
    """Has the matchers of requests with a compiled grammar."""

    def take(self, rid: str) -> Matcher:
        """The matcher of a request, at the beginning of its answer.

        Called once per request: when it arrives with `needs_grammar` False, or when its `GrammarReady` arrives.
        """
        ...


class NoMatchers:
    """For schedulers without grammars."""

    __slots__ = ()

    def take(self, rid: str) -> Matcher:
        """A request with a grammar is a bug of the caller."""
        raise LookupError(f"{rid} has a grammar, but this scheduler has no grammars")
