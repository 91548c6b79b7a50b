"""`GrammarBackend`, `CompiledGrammar`, `Matcher`: the interface of a grammar library.

    backend.compile(spec) -> CompiledGrammar     slow: milliseconds to seconds; any thread
    compiled.matcher()    -> Matcher             microseconds; one per request
    matcher.fill(mask); matcher.accept(ids)      microseconds; per token

`llguidance_backend.py` is the product's; `guided.py` adds reasoning blocks and triggers to it. Tests use a DFA over
bytes.
"""

# Shapes: V tokens of the model's vocabulary, W = ceil(V / 32) words of a mask.

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..runtime.grammar_use import GrammarSpec

MaskRow = npt.NDArray[np.int32]
"""[W] int32, contiguous: token t is allowed if bit t % 32 of word t // 32 is set."""


class Vocabulary(Protocol):
    """The tokens that grammars are compiled for; immutable, and hashed by identity.

    Attributes:
        size: V, of the logits. Ids from the tokenizer's size on are never allowed.
        eos_token_ids: tokens that end an answer; allowed where a grammar is complete.
    """

    size: int
    eos_token_ids: tuple[int, ...]

    def __hash__(self) -> int: ...

    @property
    def tokens(self) -> Sequence[bytes]:
        """The bytes of each token of the tokenizer; b"" for none."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens: never a part of text."""
        ...

    def encode(self, data: bytes) -> list[int]:
        """Tokens whose bytes, joined, are `data`, as the tokenizer would split it; no special tokens are added."""
        ...


class GrammarError(Exception):
    """A grammar cannot be compiled.

    Attributes:
        code: the error code for the client: invalid_schema, unsupported_schema, unsatisfiable_schema, invalid_regex,
            invalid_grammar, or schema_too_complex.
        message: the text for the client.
        at: the place in the client's request that `message` begins with, such as
            `response_format.json_schema.schema/properties/age`; "" if it is not known.
    """

    def __init__(self, message: str, code: str, at: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.at = at


class MatcherErrorCode(enum.StrEnum):
    """The error code for the client of an answer that a matcher cannot continue.

    LIMIT: a step goes beyond a limit of the library. BUG: no token is allowed, or a token is refused. TOO_SHORT: the
    limit of tokens is below the shortest answer, which the client can change.
    """

    LIMIT = "grammar_limit"
    BUG = "grammar_bug"
    TOO_SHORT = "max_tokens_too_small"


class Matcher(Protocol):
    """The state of one answer in its grammar. Never raises for what the model generates: see `error`.

    Attributes:
        ended: the answer is complete and nothing may follow it, or an EOS token was accepted.
        error: why the matcher cannot continue; "" while it can.
        error_code: the kind of `error`; None while there is none.
        is_cut: `limit` has left out a part of the answer.
        num_forced: accepted tokens that were the only ones allowed, if a call before them has found that out.
    """

    @property
    def num_forced(self) -> int: ...

    @property
    def is_cut(self) -> bool: ...

    @property
    def ended(self) -> bool: ...

    @property
    def error(self) -> str: ...

    @property
    def error_code(self) -> MatcherErrorCode | None: ...

    @property
    def wants_mask(self) -> bool:
        """Whether the next token is constrained at all; False in free text."""
        ...

    def limit(self, num_tokens: int) -> None:
        """Let the answer become complete within this many further tokens, where the matcher can do so.

        Sets `error` if the shortest answer has more. Called at most once, before the first token.
        """
        ...

    def fill(self, mask: MaskRow) -> None:
        """Write the tokens that may come next. If none may, sets `error` and allows all of them."""
        ...

    def allows(self, token_id: int) -> bool:
        """Whether `fill` would allow this token; much cheaper than `fill`.

        Not the same as `validate`: where only one text may follow, `fill` allows only the tokenizer's split of it.
        """
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over generated tokens; returns how many were accepted.

        It stops after the token that ends the answer. A token that the grammar refuses sets `error`.
        """
        ...

    def validate(self, token_ids: Sequence[int]) -> int:
        """Number of these tokens that may come next, one after the other. No effects."""
        ...

    def end_reasoning(self) -> bool:
        """Let an open reasoning block end with the next token; whether there is one. Call it before `fill`."""
        ...

    def forced(self) -> list[int]:
        """Tokens that come next because the grammar allows no other text; [] for none or if they are not known."""
        ...

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        """Write [1 + k, W] masks: of the next token, and of the token after each of the k drafts.

        All drafts must pass `validate`. Rows after the end of the answer allow all tokens.
        """
        ...

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar.

    Attributes:
        num_bytes: estimated memory, for the bound of the cache.
        short_answer: tokens of a short text of the grammar; None if the search does not find one.
    """

    @property
    def num_bytes(self) -> int: ...

    @property
    def short_answer(self) -> Sequence[int] | None: ...

    def matcher(self) -> Matcher:
        """A matcher at the beginning of the text."""
        ...


class GrammarBackend(Protocol):
    """A grammar library with its data about one vocabulary."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar. May be called on any thread, one call at a time.

        Raises:
            GrammarError: the text is no grammar of its kind, allows no text, or goes beyond a limit.
        """
        ...
