"""GrammarBuilder: compiles on its thread; the scheduler gets each message at the right time."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from engine.grammar.backend import GrammarError
from engine.runtime.grammar_use import GrammarUse
from engine.runtime.messages import AbortRequest, FinishKind, GenerateRequest, GrammarReady
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler.grammar.grammar_builder import GrammarBuilder
from engine.scheduler.journal.recorder import Recorder
from engine.scheduler.pipeline import Pipeline
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.grammar.toy_matcher import ToyGrammar, ToyMatcher
from tests.scheduler.harness import Harness

WAIT_S = 20.0


class ToyCompiled:
    """A compiled grammar."""

    num_bytes = 1

    def __init__(self, grammar: ToyGrammar) -> None:
        self.grammar = grammar

    def matcher(self) -> Any:
        return ToyMatcher(self.grammar)


class ToyCache:
    """Compiles when the test says so.

    Attributes:
        errors: keys of grammars -> what compiling them raises.
        threads: of the calls of `compile`.
        compiled: what is cached.
    """

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.threads: list[int] = []
        self.compiled: dict[str, ToyCompiled] = {}
        self.may_compile = threading.Event()
        self.may_compile.set()

    def get(self, use: GrammarUse) -> Any:
        assert use.spec is not None
        compiled = self.compiled.get(use.spec.key)
        return None if compiled is None else (compiled,)

    def compile(self, use: GrammarUse) -> Any:
        assert use.spec is not None
        self.threads.append(threading.get_ident())
        assert self.may_compile.wait(WAIT_S)
        if use.spec.key in self.errors:
            raise self.errors[use.spec.key]
        self.compiled[use.spec.key] = ToyCompiled(ToyGrammar.of(use))
        return (self.compiled[use.spec.key],)

    def matcher(self, use: GrammarUse, compiled: Any) -> Any:
        return compiled[0].matcher()


class Built:
    """A builder with a pipeline and a scheduler, as in the server."""

    def __init__(self, **settings: Any) -> None:
        self.cache = ToyCache()
        self.builder = GrammarBuilder(self.cache)
        self.harness = Harness(**settings)
        harness, core = self.harness, self.harness.scheduler
        core._matchers = self.builder
        self.pipeline = Pipeline(
            core, harness.runner, Recorder(), lambda: harness.now_s, overlap=False, grammars=self.builder
        )
        pipeline = self.pipeline

        class Through:
            def handle(self, message: Any, _now_s: float) -> None:
                pipeline.handle(message)

            def __getattr__(self, name: str) -> Any:
                return getattr(core, name)

        harness.scheduler = Through()  # type: ignore[assignment]

    def submit(self, rid: str, grammar: ToyGrammar, *, compiles: bool = True, **sampling: Any) -> None:
        use = grammar.use if compiles else GrammarUse(spec=grammar.use.spec)
        self.harness.matchers.grammars[rid] = grammar
        self.harness.submit(rid, message={"grammar": use}, **sampling)

    def ready(self, rid: str, error: str = "") -> None:
        self.pipeline.handle(GrammarReady(rid, error))
        self.harness.collect()

    def advance(self) -> bool:
        self.harness.now_s += 0.01
        advanced = self.pipeline.advance(lambda: False)
        self.harness.collect()
        return advanced

    def run(self) -> None:
        """Until no request and no grammar is left."""
        while self.advance() or self.pipeline.is_preparing:
            if self.pipeline.is_preparing:
                self.builder._done.put(self.builder._done.get(timeout=WAIT_S))
        self.pipeline.idle()
        self.harness.check_answers()

    def finish_of(self, rid: str) -> Any:
        return self.harness.answers[rid].finish


@pytest.fixture
def built():
    built = Built()
    yield built
    built.cache.may_compile.set()
    built.builder.close()
    if built.builder._thread is not None:
        built.builder._thread.join(WAIT_S)
        assert not built.builder._thread.is_alive()


def test_a_proved_grammar_is_compiled_on_the_thread_while_others_run(built):
    built.cache.may_compile.clear()
    built.submit("guided", ToyGrammar(length=5), max_new_tokens=20)
    built.harness.submit("free", max_new_tokens=6)
    assert built.pipeline.is_preparing
    while built.finish_of("free") is None:
        assert built.advance()
    assert built.finish_of("guided") is None
    assert built.harness.scheduler.report(0.0).num_grammar_reqs == 1

    built.cache.may_compile.set()
    built.run()

    assert built.finish_of("guided").matched == "grammar"
    assert built.cache.threads and threading.get_ident() not in built.cache.threads


def test_a_cached_grammar_needs_no_wait(built):
    built.submit("a", ToyGrammar(length=5), max_new_tokens=20)
    built.run()
    built.submit("b", ToyGrammar(length=5), compiles=False, max_new_tokens=20)
    assert built.harness.scheduler.report(0.0).num_grammar_reqs == 0
    built.run()
    assert len(built.cache.threads) == 1 and built.finish_of("b").matched == "grammar"


def test_one_that_is_unknown_waits_for_the_sandbox(built):
    built.submit("a", ToyGrammar(length=5), compiles=False, max_new_tokens=20)
    assert not built.pipeline.is_preparing
    assert not built.advance()
    built.ready("a")
    assert built.pipeline.is_preparing
    built.run()
    assert built.finish_of("a").matched == "grammar"


def test_a_grammar_that_the_sandbox_refuses_ends_the_request(built):
    built.submit("a", ToyGrammar(), compiles=False)
    built.ready("a", "minimum 10 is above maximum 5")
    finish = built.finish_of("a")
    assert (finish.kind, finish.status, finish.message) == (
        FinishKind.ERROR,
        400,
        "minimum 10 is above maximum 5",
    )
    assert not built.cache.threads


def test_unknown_and_repeated_messages_are_ignored(built):
    built.submit("a", ToyGrammar(length=30), compiles=False, max_new_tokens=20)
    built.cache.may_compile.clear()
    built.ready("unknown")
    for _ in range(3):
        built.ready("a")
    built.cache.may_compile.set()
    built.run()
    built.ready("a")
    built.run()
    assert built.finish_of("a").kind is FinishKind.LENGTH and len(built.cache.threads) == 3


def test_a_request_that_was_aborted_meanwhile_gets_no_matcher(built):
    built.cache.may_compile.clear()
    built.submit("a", ToyGrammar())
    built.pipeline.handle(AbortRequest("a", "gone"))
    built.harness.collect()
    built.cache.may_compile.set()
    built.run()
    assert built.finish_of("a").kind is FinishKind.ABORT
    assert built.builder._staged is None and not built.builder._compiled


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(built):
    bad, broken = ToyGrammar(seed=1), ToyGrammar(seed=2)
    assert bad.use.spec is not None and broken.use.spec is not None
    built.cache.errors[bad.use.spec.key] = GrammarError("too large", "schema_too_complex")
    built.cache.errors[broken.use.spec.key] = RuntimeError("a bug of the library")
    for rid, grammar in (("bad", bad), ("broken", broken), ("good", ToyGrammar(length=3))):
        built.submit(rid, grammar, max_new_tokens=9)
    built.run()
    assert built.finish_of("bad").message == "too large"
    assert "the server's log has the cause" in built.finish_of("broken").message
    assert built.finish_of("good").matched == "grammar"


def test_siblings_have_a_matcher_each(built):
    for rid in ("a-0", "a-1", "a-2"):
        built.harness.matchers.grammars[rid] = ToyGrammar(length=12)
        built.harness.submit(
            rid,
            prompt=[1, 2, 3],
            max_new_tokens=20,
            message={"grammar": ToyGrammar(length=12).use, "group": "a"},
        )
    built.run()
    assert {built.finish_of(rid).matched for rid in ("a-0", "a-1", "a-2")} == {"grammar"}


def test_a_matcher_that_cannot_be_made_ends_its_request(built):
    def fail(use: Any, compiled: Any) -> Any:
        raise RuntimeError("no memory")

    built.cache.matcher = fail
    built.harness.submit("a", message={"grammar": ToyGrammar().use})
    built.harness.submit("b", max_new_tokens=3)
    built.run()
    assert (built.finish_of("a").kind, built.finish_of("a").status) == (FinishKind.ERROR, 500)
    assert built.finish_of("b").kind is FinishKind.LENGTH


def test_compilations_and_masks_are_counted_and_timed(built):
    ticks = itertools.count()
    built.builder._clock = lambda: float(next(ticks))
    bad = ToyGrammar(seed=9)
    assert bad.use.spec is not None
    built.cache.errors[bad.use.spec.key] = GrammarError("too large", "schema_too_complex")
    built.submit("a", ToyGrammar(length=5), max_new_tokens=20)
    built.submit("b", bad)
    built.run()
    built.submit("c", ToyGrammar(length=5), max_new_tokens=20)  # cached
    built.run()
    report = built.pipeline.report(7.0)
    assert report.sent_s == 7.0 and report.totals.generation_tokens == 10
    assert (report.grammar.builds, report.grammar.build_s) == (2, 2.0)
    assert (report.grammar.masks, report.grammar.mask_s) == (10, 0.0)


def test_the_time_of_masks_is_that_of_filling_them(built):
    filler = built.pipeline._scheduler.masks
    fill = filler.fill

    def slow(batch: Any, clock: Any) -> Any:
        built.harness.now_s += 0.5
        return fill(batch, clock)

    filler.fill = slow
    built.submit("a", ToyGrammar(length=4), max_new_tokens=20)
    built.run()
    report = built.pipeline.report(0.0)
    assert report.grammar.masks == 4 and report.grammar.mask_s == pytest.approx(2.0)


def test_without_grammars_there_is_no_thread(built):
    built.harness.submit("a", max_new_tokens=3)
    built.run()
    assert built.builder._thread is None and not built.builder.is_building
    assert not built.builder.take_ready()


def test_a_builder_without_a_cache_passes_messages_on():
    none, message = GrammarBuilder(), GenerateRequest("a", b"", SamplingParams())
    assert none.received(message, lambda rid: None) is message
    assert not none.is_building and none.take_ready() == []
    none.stage(GrammarReady("a"), lambda rid: None)
    none.clear()
    none.close()


def test_a_scheduler_without_grammars_refuses_them():
    harness = Harness()
    scheduler: Scheduler = harness.scheduler
    scheduler._matchers = None
    harness.submit("a", grammar=ToyGrammar())
    finish = harness.answers["a"].finish
    assert finish is not None and finish.kind is FinishKind.ERROR
