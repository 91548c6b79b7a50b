"""The cache of compiled grammars: what is compiled once, what is dropped, and requests without grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.grammar.cache import GrammarCache
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, ReasoningBlock


class Grammar:
    num_bytes = 100
    short_answer = None

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec

    def matcher(self) -> Any:
        return None


class Backend:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def compile(self, spec: GrammarSpec) -> Any:
        self.texts.append(spec.text)
        return Grammar(spec)


class Vocabulary:
    size = 2
    eos_token_ids: tuple[int, ...] = (1,)
    tokens: Sequence[bytes] = (b"a", b"")
    special_token_ids = frozenset({1})

    def encode(self, data: bytes) -> list[int]:
        return [0] * len(data)


def use_of(text: str) -> GrammarUse:
    return GrammarUse(spec=GrammarSpec(GrammarKind.REGEX, text))


def make(max_bytes: int = 1000) -> tuple[GrammarCache, Backend, list[str]]:
    backend, made = Backend(), []

    def make_vocabulary() -> Vocabulary:
        made.append("vocabulary")
        return Vocabulary()

    def make_backend(vocabulary: Any) -> Any:
        made.append("backend")
        return backend

    return GrammarCache(make_vocabulary, make_backend, max_bytes), backend, made


def test_equal_grammars_are_compiled_once():
    cache, backend, made = make()
    assert cache.get(use_of("a")) is None

    first = cache.compile(use_of("a"))

    assert cache.compile(use_of("a")) == cache.get(use_of("a")) == first
    assert backend.texts == ["a"]
    assert made == ["vocabulary", "backend"]


def test_the_least_recently_used_grammar_is_dropped():
    cache, _, _ = make(max_bytes=200)
    cache.compile(use_of("a"))
    cache.compile(use_of("b"))
    assert cache.get(use_of("a")) is not None

    cache.compile(use_of("c"))

    assert cache.get(use_of("b")) is None
    assert cache.get(use_of("a")) is not None and cache.get(use_of("c")) is not None


def test_one_grammar_above_the_bound_is_kept_while_it_is_the_only_one():
    cache, _, _ = make(max_bytes=10)
    cache.compile(use_of("a"))

    assert cache.get(use_of("a")) is not None


def test_a_reasoning_budget_alone_loads_no_grammar_library():
    cache, _, made = make()
    use = GrammarUse(reasoning=ReasoningBlock(b"a", b"a", opened=True, budget=3))
    assert cache.get(use) is None

    assert cache.compile(use) == cache.get(use) == ()
    assert made == ["vocabulary"]
