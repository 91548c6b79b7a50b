"""`make_grammars`: the `GrammarBuilder` of a process, with the product's grammar library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...grammar.cache import GrammarCache
from ...grammar.llguidance_backend import LLGuidanceBackend
from ...grammar.vocabulary import TokenizerVocabulary
from ...models.tokenizer.tokenizer import Tokenizer
from .grammar_builder import GrammarBuilder


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
    return GrammarBuilder(cache, cache.matcher)
