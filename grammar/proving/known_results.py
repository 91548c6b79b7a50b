"""`KnownResults`: what is known of the grammars that were compiled last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ..backend import GrammarError
from .refusals import copy_of

MAX_RESULTS: Final = 1024
BAD_RESULT_S: Final = 600.0
"""How long a refused grammar is refused without a new proof."""


class KnownResults:
    """The last `MAX_RESULTS` results by the key of the grammar; those of refused grammars expire."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Know nothing yet; `clock`: seconds."""
        self._clock = clock
        self._entries: OrderedDict[str, tuple[GrammarError | None, float]] = OrderedDict()

    def put(self, key: str, error: GrammarError | None) -> None:
        """Keep a result; `error`: None for a good grammar."""
        self._entries[key] = (error, self._clock() + BAD_RESULT_S)
        self._entries.move_to_end(key)
        if len(self._entries) > MAX_RESULTS:
            self._entries.popitem(last=False)

    def has_good(self, key: str) -> bool:
        """Whether the grammar is known to be good."""
        known = self._entries.get(key)
        return known is not None and known[0] is None

    def check(self, key: str) -> bool:
        """Whether the grammar is known to be good; such a result is kept for longer.

        Raises:
            GrammarError: it is known to be bad.
        """
        known = self._entries.get(key)
        if known is None:
            return False
        error, expires_s = known
        if error is None:
            self._entries.move_to_end(key)
            return True
        if self._clock() < expires_s:
            raise copy_of(error)
        del self._entries[key]
        return False
