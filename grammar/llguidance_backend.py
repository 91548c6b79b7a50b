"""`LLGuidanceBackend`: the `GrammarBackend` of the llguidance library.

The only module that imports llguidance, and only when a backend is made: a server that uses no grammar does not load
it. The library refuses what it cannot enforce, instead of accepting it silently; its limits end a matcher, not the
process. Its time for a compilation has no limit: see `compile/`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ..runtime.errors import ConfigError
from ..runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace
from .backend import GrammarError, Vocabulary
from .closing import shortest_end
from .json_state import JsonState
from .llguidance_matcher import PANIC_MODULE, LLGuidanceMatcher, translate_error
from .lowering.lark import ALLOWED_ESCAPES, json_options
from .markers import allows

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

MAX_LEXER_STATES: Final = 50_000
"""Per grammar; a state has 1 to 2 kB. The library's default, 250,000, is more than the whole cache may hold."""
MAX_SHORT_TOKENS: Final = 256
"""Tokens of a short answer that is searched when a grammar is compiled; the search takes 1 ms, and 50 ms in vain."""
_BASE_BYTES: Final = 64 << 10
_PATTERN_BYTES: Final = 2 << 20
"""Memory of a regex or a grammar: states of its lexer are added while texts are matched, 2.3 MB for `.*a.{200}b`."""
_BYTES_PER_TEXT_BYTE: Final = 40
"""Memory of a compiled grammar per byte of its text: 36 for an enum of 5,000 strings."""
_OPTIONS_KEY: Final = "x-guidance"
_SELF_TEST_SCHEMA: Final = '{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"array"}}}'
_SELF_TEST_TEXTS: Final = (b'{"a"', b': "x y\xc3\xa9', b'", "b": [-1, 2.5e3', b", true, null]", b"}")


class LLGuidanceBackend:
    """llguidance with one vocabulary.

    Attributes:
        vocabulary: as given.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build the library's trie of tokens (0.1 s for 50,000 tokens), and test it.

        Raises:
            ConfigError: the library's masks are wrong for this vocabulary.
        """
        import llguidance

        self.vocabulary = vocabulary
        self._library = llguidance
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=2_000,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=500_000,
            precompute_large_lexemes=True,
            verbose_errors=False,
        )
        wrapper = _TokenizerWrapper(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(
            wrapper,  # type: ignore[arg-type]  # duck-typed: the library's own class drops the ids of other EOS tokens
            n_vocab=len(wrapper.tokens),
            eos_token=wrapper.eos_token_ids,
        )
        self._num_tokens = len(wrapper.tokens)
        self._lock = threading.Lock()
        self._self_test()

    def compile(self, spec: GrammarSpec) -> LLGuidanceGrammar:
        """Compile a grammar and compute its first mask; see `GrammarBackend.compile`.

        Raises:
            GrammarError: the text is no grammar of its kind, allows no text, or goes beyond a limit.
        """
        try:
            with self._lock:
                matcher = self._library.LLMatcher(
                    self._tokenizer, self._library_grammar(spec), log_level=0, limits=self._limits
                )
        except (GrammarError, MemoryError):
            raise
        except BaseException as error:  # a panic of the library is no `Exception`
            if not isinstance(error, Exception) and type(error).__module__ != PANIC_MODULE:
                raise
            raise translate_error(spec.kind, str(error), spec.text) from None
        if matcher.is_error():
            raise translate_error(spec.kind, matcher.get_error(), spec.text)
        compiled = LLGuidanceGrammar(matcher, self.vocabulary, self._num_tokens, len(spec.text))
        if spec.kind is not GrammarKind.JSON_SCHEMA:
            compiled.num_bytes += _PATTERN_BYTES
        first = compiled.matcher()
        first.fill(np.zeros(-(-self.vocabulary.size // 32), np.int32))
        if first.library_error:
            raise translate_error(spec.kind, first.library_error, spec.text)
        compiled.short_answer = shortest_end(first, self.vocabulary, JsonState(), MAX_SHORT_TOKENS)
        return compiled

    def _library_grammar(self, spec: GrammarSpec) -> str:
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                return self._library.LLMatcher.grammar_from_json_schema(
                    _checked_schema(spec.text), overrides=_json_options(spec)
                )
            case GrammarKind.REGEX:
                return self._library.LLMatcher.grammar_from_regex(spec.text)
            case GrammarKind.LARK:
                return self._library.LLMatcher.grammar_from_lark(spec.text)

    def _self_test(self) -> None:
        """Walk a known document, each token of which must be allowed.

        A wrong encode function is not an error for the library; its masks are silently wrong then.

        Raises:
            ConfigError: a token is not allowed, or a special token is allowed in a string.
        """
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, _SELF_TEST_SCHEMA, Whitespace.ANY)
        matcher = self.compile(spec).matcher()
        mask = np.zeros(-(-self.vocabulary.size // 32), np.int32)
        for text in _SELF_TEST_TEXTS:
            for token_id in self.vocabulary.encode(text):
                matcher.fill(mask)
                if matcher.error or not allows(mask, token_id) or matcher.accept([token_id]) != 1:
                    raise ConfigError(
                        f"grammars cannot be used with this tokenizer: token {token_id} "
                        f"({self.vocabulary.tokens[token_id]!r}) is refused in a valid document; "
                        "check that tokenizer.json belongs to this model"
                    )
            if text == _SELF_TEST_TEXTS[1]:
                matcher.fill(mask)
                special = [i for i in self.vocabulary.special_token_ids if allows(mask, i)]
                if special:
                    raise ConfigError(
                        f"grammars cannot be used with this tokenizer: special tokens {special[:8]} are allowed "
                        "in a string; check that tokenizer.json belongs to this model"
                    )
        if not matcher.ended:
            raise ConfigError(
                "grammars cannot be used with this tokenizer: it does not reproduce a JSON document; "
                "check that tokenizer.json belongs to this model"
            )


class LLGuidanceGrammar:
    """A compiled grammar: a matcher at the beginning, which is copied for each request."""

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, num_tokens: int, num_text_chars: int
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_tokens = num_tokens
        self.short_answer: list[int] | None = None
        self.num_bytes = _BASE_BYTES + _BYTES_PER_TEXT_BYTE * num_text_chars
        self._lock = threading.Lock()  # the library forbids two calls of one object at a time

    def matcher(self) -> LLGuidanceMatcher:
        """A matcher at the beginning of the text; 1 us, and 27 us for an enum of 50,000 strings."""
        with self._lock:
            copy = self._matcher.deep_copy()
        return LLGuidanceMatcher(copy, self._vocabulary.eos_token_ids, self._num_tokens)


class _TokenizerWrapper:
    """Interface that `LLTokenizer` needs of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.eos_token_ids = list(vocabulary.eos_token_ids)
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        if not self.eos_token_ids:  # the library needs one; its bit is cleared in every mask
            self.eos_token_ids = [len(self.tokens)]
            self.special_token_ids.append(len(self.tokens))
            self.tokens = [*self.tokens, b"<end of text>"]
        self.eos_token_id = self.eos_token_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._vocabulary.encode(text.encode() if isinstance(text, str) else text)


def _json_options(spec: GrammarSpec) -> JsonCompileOptions:
    options: JsonCompileOptions = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": False,
        "whitespace_pattern": None,
        "coerce_one_of": False,
        "lenient": False,
        "json_allowed_escapes": ALLOWED_ESCAPES,
    }
    return {**options, **json_options(spec.whitespace, spec.whitespace_pattern)}  # type: ignore[typeddict-item]


def _checked_schema(text: str) -> str:
    """The schema as the library takes it: an object, and without options of the library.

    Raises:
        GrammarError: it is no JSON, no schema, or allows nothing.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}", "invalid_schema") from None
    if schema is True:
        return "{}"
    if schema is False:
        raise GrammarError("the schema false allows no document", "unsatisfiable_schema")
    if not isinstance(schema, dict):
        kind = "null" if schema is None else type(schema).__name__
        raise GrammarError(f"the schema is {kind}, but it must be an object or a boolean", "invalid_schema")
    if _OPTIONS_KEY in schema:
        del schema[_OPTIONS_KEY]  # would change how keywords are enforced; a keyword that no standard knows
        return json.dumps(schema)
    return text
