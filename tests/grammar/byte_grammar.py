"""`ByteGrammar`: llguidance with a vocabulary of the 256 bytes, which tells exactly which texts a grammar accepts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from engine.grammar.lowering.lark import schema_text
from engine.runtime.grammar_use import GrammarKind, GrammarSpec

llguidance: Any = __import__("llguidance")


class _Bytes:
    """As llguidance wants a tokenizer."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _tokenizer() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


class ByteGrammar:
    """A compiled grammar.

    Attributes:
        error: why it cannot be compiled; "" if it can.
    """

    def __init__(self, spec: GrammarSpec) -> None:
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = json.loads(spec.text)
                text = schema_text(schema, spec.whitespace, spec.whitespace_pattern)
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
            case GrammarKind.REGEX:
                grammar = llguidance.LLMatcher.grammar_from_regex(spec.text)
            case _:
                grammar = llguidance.LLMatcher.grammar_from_lark(spec.text)
        self._matcher = llguidance.LLMatcher(_tokenizer(), grammar, log_level=0)
        self.error: str = self._matcher.get_error() or ""

    def accepts(self, text: str) -> bool:
        """Whether the text is a whole answer."""
        assert not self.error, self.error
        ids = list(text.encode())
        matcher = self._matcher.deep_copy()
        if matcher.validate_tokens(ids) < len(ids):
            return False
        assert matcher.consume_tokens(ids) or not ids, matcher.get_error()
        return bool(matcher.is_accepting())
