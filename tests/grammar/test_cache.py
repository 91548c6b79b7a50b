"""`GrammarCache`: order, memory, and the first use."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.cache import GrammarCache
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, Triggered

from .fake_backend import FakeBackend, FakeGrammar, ListVocabulary

VOCABULARY = ListVocabulary([bytes([byte]) for byte in range(256)])


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def use(text: str) -> GrammarUse:
    return GrammarUse(spec=spec(text))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(VOCABULARY)


@pytest.fixture
def make_cache(backend: FakeBackend) -> Callable[..., GrammarCache]:
    def make(max_bytes: int = 1 << 20) -> GrammarCache:
        return GrammarCache(lambda: backend, max_bytes)

    return make


def test_a_grammar_is_compiled_once(make_cache, backend):
    cache = make_cache()

    assert cache.get(use("a")) is None
    compiled = cache.compile(use("a"))

    assert cache.get(use("a")) == compiled
    assert cache.compile(use("a")) == compiled
    assert backend.compiled == [spec("a")]


def test_a_request_has_its_grammars_only_when_all_are_there(make_cache, backend):
    cache = make_cache()
    both = GrammarUse(triggered=(Triggered(b"<a>", spec("a")), Triggered(b"<b>", spec("b"))))
    cache.compile(use("b"))

    assert cache.get(both) is None
    first, second = cache.compile(both)

    assert cache.get(both) == (first, second)
    assert isinstance(second, FakeGrammar)
    assert second.alternatives == [b"b"]
    assert [each.text for each in backend.compiled] == ["b", "a"]


def test_a_request_without_grammars_has_them_all(make_cache):
    assert make_cache().get(GrammarUse()) == ()


def test_the_least_recently_used_grammar_leaves_first(make_cache):
    cache = make_cache(max_bytes=2 * 101)
    cache.compile(use("a"))
    cache.compile(use("b"))
    cache.get(use("a"))

    cache.compile(use("c"))

    assert cache.get(use("b")) is None
    assert cache.get(use("a")) is not None
    assert cache.get(use("c")) is not None
    assert cache.num_bytes == 202


def test_a_grammar_that_is_larger_than_the_cache_is_compiled(make_cache):
    cache = make_cache(max_bytes=10)
    cache.compile(use("a"))
    cache.compile(use("b"))

    assert cache.get(use("a")) is None
    assert cache.get(use("b")) is not None


def test_the_backend_is_made_by_the_first_compilation(backend: FakeBackend) -> None:
    made: list[int] = []

    def factory() -> FakeBackend:
        made.append(1)
        if len(made) == 1:
            raise ImportError("not installed")
        return backend

    cache = GrammarCache(factory)
    assert cache.get(use("a")) is None
    assert made == []
    with pytest.raises(ImportError):
        cache.compile(use("a"))
    cache.compile(use("a"))
    cache.compile(use("b"))
    assert len(made) == 2


def test_an_error_is_not_cached(make_cache, backend):
    cache = make_cache()
    backend.compile_error = GrammarError("bad", "invalid_regex")
    with pytest.raises(GrammarError):
        cache.compile(use("a"))

    backend.compile_error = None

    assert len(cache.compile(use("a"))) == 1


def test_several_threads_compile_a_grammar_once(make_cache, backend):
    cache = make_cache()
    uses = [use("a"), use("b")] * 4
    threads = [threading.Thread(target=cache.compile, args=(each,)) for each in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(each.text for each in backend.compiled) == ["a", "b"]
