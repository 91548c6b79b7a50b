"""`GrammarBuilder`: compiles the grammars of arriving requests on a thread of the scheduler's process.

The `Scheduler` starts no thread and waits for nothing. The caller of the scheduler (`Pipeline`) passes each message
through the builder first:

    GenerateRequest   its grammars are compiled already: it needs no grammar queue (`needs_grammar` False)
                      otherwise: WAITING_GRAMMAR (`needs_grammar` True); compiled at once if they are known to compile
    GrammarReady      from the tokenizer manager: they compile; do it here now
    (compiled)        `take_ready` returns `GrammarReady` for the scheduler, which then takes the matcher

Before that, the tokenizer manager has had the grammar compiled in a sandbox with limits of time and memory
(`grammar/compile/`). So a compilation here ends.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from ...grammar.backend import CompiledGrammar, GrammarError, Matcher
from ...grammar.cache import GrammarCache
from ...grammar.llguidance_backend import LLGuidanceBackend
from ...grammar.vocabulary import TokenizerVocabulary
from ...models.tokenizer.tokenizer import Tokenizer
from ...runtime.grammar_use import GrammarUse
from ...runtime.messages import GenerateRequest, GrammarReady, SchedulerInput

logger = logging.getLogger(__name__)

_NICENESS: Final = 10
"""Niceness of the thread: on a busy machine a new grammar waits, and the steps of other requests do not."""

Compiled = tuple[CompiledGrammar, ...]
UseOf = Callable[[str], GrammarUse | None]
"""The grammars of a request in WAITING_GRAMMAR; None for any other rid."""


class CompiledGrammars(Protocol):
    """A cache of compiled grammars; `grammar.cache.GrammarCache` implements it. `get` and `compile` are thread-safe."""

    def get(self, use: GrammarUse) -> Compiled | None:
        """The compiled grammars of `use.specs`, if all of them are cached."""
        ...

    def compile(self, use: GrammarUse) -> Compiled:
        """Compile those that are not cached.

        Raises:
            GrammarError: one cannot be compiled.
        """
        ...

    def matcher(self, use: GrammarUse, compiled: Compiled) -> Matcher:
        """The matcher of a request, from the compiled grammars of `use.specs`."""
        ...


class GrammarBuilder:
    """See the module. A `MatcherSource`; the thread starts with the first grammar to compile.

    Attributes:
        num_builds, build_s: compilations that have ended, failed ones included, and their time.
    """

    def __init__(
        self, cache: CompiledGrammars | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take the parts.

        Args:
            cache: of compiled grammars; None for a scheduler without grammars, which refuses a request with one.
            clock: called on the thread, to measure compilations.
        """
        self._cache = cache
        self._clock = clock
        self.num_builds, self.build_s = 0, 0.0
        self._work: queue.SimpleQueue[tuple[str, GrammarUse] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[GrammarReady, Compiled]] = queue.SimpleQueue()
        self._compiled: dict[str, Compiled] = {}  # taken from `_done`, not yet staged
        self._thread: threading.Thread | None = None
        self._num_building = 0
        self._staged: tuple[str, Matcher] | None = None

    @property
    def is_building(self) -> bool:
        """Whether `take_ready` will have something without a further message."""
        return self._num_building > 0

    def received(self, message: SchedulerInput, use_of: UseOf) -> SchedulerInput | None:
        """The message as the scheduler must get it, in the next call; None if it must not get it."""
        match message:
            case GenerateRequest(grammar=GrammarUse() as use) if self._cache is not None:
                compiled = self._cache.get(use)
                if compiled is not None:
                    self._stage(message.rid, use, compiled)
                    return message
                if use.compiles:
                    self._build(message.rid, use)
                return replace(message, needs_grammar=True)
            case GrammarReady(error=""):
                waiting = use_of(message.rid)
                if waiting is not None:
                    self._build(message.rid, waiting)
                return None
            case _:
                return message

    def take_ready(self) -> list[GrammarReady]:
        """The requests with grammars that were compiled since the last call. Call `stage` for each before `handle`."""
        ready: list[GrammarReady] = []
        while self._num_building and not self._done.empty():
            message, compiled = self._done.get()
            self._num_building -= 1
            self.num_builds += 1
            self.build_s += message.compile_s
            self._compiled[message.rid] = compiled
            ready.append(message)
        return ready

    def stage(self, ready: GrammarReady, use_of: UseOf) -> None:
        """Make the matcher of a request that the scheduler is about to take."""
        compiled, use = self._compiled.pop(ready.rid, None), use_of(ready.rid)
        if compiled is not None and use is not None and not ready.error:  # None: it was compiled twice
            self._stage(ready.rid, use, compiled)

    def clear(self) -> None:
        """Drop a matcher that the scheduler has not taken; it has handled the message."""
        self._staged = None

    def take(self, rid: str) -> Matcher:
        if self._staged is None or self._staged[0] != rid:
            raise LookupError(f"there is no matcher for {rid}")
        return self._staged[1]

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            self._work.put(None)

    def _stage(self, rid: str, use: GrammarUse, compiled: Compiled) -> None:
        assert self._cache is not None
        try:
            self._staged = rid, self._cache.matcher(use, compiled)
        except Exception:  # `take` then fails, and with it this request only
            logger.error("making a matcher failed rid=%s", rid, exc_info=True)

    def _build(self, rid: str, use: GrammarUse) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._num_building += 1
        self._work.put((rid, use))

    def _run(self) -> None:
        """The thread's main function."""
        assert self._cache is not None
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (work := self._work.get()) is not None:
            rid, use = work
            compiled: Sequence[CompiledGrammar] = ()
            error = ""
            begin_s = self._clock()
            try:
                compiled = self._cache.compile(use)
            except GrammarError as refused:
                error = f"{use.param}: {refused.message}" if use.param else refused.message
            except Exception:  # one request's grammar must not end the thread
                logger.error("compiling a grammar failed rid=%s", rid, exc_info=True)
                error = "the grammar could not be compiled; the server's log has the cause"
            seconds = self._clock() - begin_s
            self._done.put((GrammarReady(rid, error, seconds), tuple(compiled)))


def make_grammars(
    make_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarBuilder:
    """A builder. Its thread loads tokenizer and library when the first grammar is compiled, not before.

    Args:
        make_tokenizer: makes or returns the model's tokenizer.
        vocab_size: of the model's logits.
        eos_token_ids: tokens that end an answer.
    """
    cache = GrammarCache(
        lambda: TokenizerVocabulary(make_tokenizer(), vocab_size, eos_token_ids), LLGuidanceBackend
    )
    return GrammarBuilder(cache)
