"""`GrammarCache`: compiled grammars by their spec, within a bound of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ..runtime.grammar_use import GrammarSpec, GrammarUse
from .backend import CompiledGrammar, GrammarBackend, Matcher, Vocabulary
from .guided import GuidedMatcher, prepare

MAX_BYTES: Final = 256 << 20


class GrammarCache:
    """Thread-safe: one thread compiles, another one looks up. The least recently used grammars are dropped.

    The library, and the data that it needs about the vocabulary, are loaded by the first compilation.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        make_backend: Callable[[Vocabulary], GrammarBackend],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Take the functions that make vocabulary and library; each is called once."""
        self._make_vocabulary = make_vocabulary
        self._make_backend = make_backend
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._compiled: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()  # guards the two above
        self._compiling = threading.Lock()  # guards the three below
        self._vocabulary: Vocabulary | None = None
        self._backend: GrammarBackend | None = None
        self._prepared: set[tuple[bytes, bytes]] = set()

    def get(self, use: GrammarUse) -> tuple[CompiledGrammar, ...] | None:
        """The compiled grammars of `use.specs`, if nothing is left to compile."""
        if self._vocabulary is None or not self._is_prepared(use):
            return None
        with self._lock:
            found = [self._compiled.get(spec) for spec in use.specs]
            if any(each is None for each in found):
                return None
            for spec in use.specs:
                self._compiled.move_to_end(spec)
        return tuple(each for each in found if each is not None)

    def compile(self, use: GrammarUse) -> tuple[CompiledGrammar, ...]:
        """Compile what is not cached.

        Raises:
            GrammarError: a grammar cannot be compiled.
        """
        with self._compiling:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            if self._backend is None and use.specs:
                self._backend = self._make_backend(self._vocabulary)
            if not self._is_prepared(use):
                prepare(use, self._vocabulary)
                self._prepared.add(_markers(use))
            result = []
            for spec in use.specs:
                with self._lock:
                    compiled = self._compiled.get(spec)
                if compiled is None:
                    assert self._backend is not None
                    compiled = self._backend.compile(spec)
                    self._keep(spec, compiled)
                result.append(compiled)
            return tuple(result)

    def matcher(self, use: GrammarUse, compiled: tuple[CompiledGrammar, ...]) -> Matcher:
        """The matcher of a request, from the compiled grammars of `use.specs`."""
        assert self._vocabulary is not None, "nothing was compiled"
        return GuidedMatcher(use, compiled, self._vocabulary)

    def _is_prepared(self, use: GrammarUse) -> bool:
        return use.reasoning is None or _markers(use) in self._prepared

    def _keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._compiled[spec] = compiled
            self._num_bytes += compiled.num_bytes
            while self._num_bytes > self._max_bytes and len(self._compiled) > 1:
                self._num_bytes -= self._compiled.popitem(last=False)[1].num_bytes


def _markers(use: GrammarUse) -> tuple[bytes, bytes]:
    assert use.reasoning is not None
    return use.reasoning.begin, use.reasoning.end
