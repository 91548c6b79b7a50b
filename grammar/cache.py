"""`GrammarCache`: the compiled grammars of the scheduler's process, by the key of their text.

The builder thread compiles; the scheduler's thread looks grammars up. The backend, and with it the library, is made by
the first compilation.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ..runtime.grammar_use import GrammarSpec, GrammarUse
from .backend import CompiledGrammar, GrammarBackend

MAX_CACHE_BYTES: Final = 256 << 20


class GrammarCache:
    """Least recently used first; bounded by the estimated memory of the grammars. Safe for several threads."""

    def __init__(
        self, backend_factory: Callable[[], GrammarBackend], max_bytes: int = MAX_CACHE_BYTES
    ) -> None:
        """Make an empty cache.

        Args:
            backend_factory: called by the first compilation, and again if it has failed.
            max_bytes: of all grammars; one that is larger is compiled, but evicts all others.
        """
        self._backend_factory = backend_factory
        self._max_bytes = max_bytes
        self._backend: GrammarBackend | None = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()  # of the entries
        self._compile_lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the grammars in the cache."""
        return self._num_bytes

    def get(self, use: GrammarUse) -> tuple[CompiledGrammar, ...] | None:
        """The grammars of a request in the order of `use.specs`, or None if one of them is missing."""
        found = []
        with self._lock:
            for spec in use.specs:
                key = spec.key
                compiled = self._compiled.get(key)
                if compiled is None:
                    return None
                self._compiled.move_to_end(key)
                found.append(compiled)
        return tuple(found)

    def compile(self, use: GrammarUse) -> tuple[CompiledGrammar, ...]:
        """The grammars of a request in the order of `use.specs`; compiles those that are missing.

        May take seconds. Compilations of several threads run one after the other.

        Raises:
            GrammarError: a grammar cannot be compiled.
            ConfigError: the backend cannot be made for this vocabulary.
        """
        return tuple(self._compile(spec) for spec in use.specs)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        key = spec.key
        with self._compile_lock:
            with self._lock:
                compiled = self._compiled.get(key)
                if compiled is not None:
                    self._compiled.move_to_end(key)
                    return compiled
            if self._backend is None:
                self._backend = self._backend_factory()
            compiled = self._backend.compile(spec)
            with self._lock:
                self._compiled[key] = compiled
                self._num_bytes += compiled.num_bytes
                while self._num_bytes > self._max_bytes and len(self._compiled) > 1:
                    self._num_bytes -= self._compiled.popitem(last=False)[1].num_bytes
        return compiled
