"""`FakeBackend`: a grammar backend for tests, a finite automaton over bytes; and `ListVocabulary`, its vocabulary.

The language of a spec of kind REGEX is a list of alternatives, separated by "|". An alternative is literal text; one
that ends in "*" may be repeated any number of times, also none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine.grammar.backend import GrammarError, MaskRow, MatcherErrorCode
from engine.grammar.markers import mask_of
from engine.runtime.grammar_use import GrammarKind, GrammarSpec

State = frozenset[tuple[int, int]]
"""Pairs of an alternative and the number of its bytes that have been read."""


class ListVocabulary:
    """A vocabulary given as a list of bytes.

    Attributes:
        tokens: by id.
        special_token_ids: control and EOS tokens.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        eos_token_ids: tuple[int, ...] = (),
        special_token_ids: Iterable[int] = (),
        size: int | None = None,
    ) -> None:
        self.tokens = list(tokens)
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset((*eos_token_ids, *special_token_ids))
        self.size = len(tokens) if size is None else size

    def encode(self, data: bytes) -> list[int]:
        """The longest token at each position; a byte that no token begins with is left out."""
        texts = {token: i for i, token in enumerate(self.tokens) if token and i not in self.special_token_ids}
        token_ids = []
        while data:
            token = max((text for text in texts if data.startswith(text)), key=len, default=b"")
            token_ids += [texts[token]] if token else []
            data = data[max(1, len(token)) :]
        return token_ids

    def text(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of tokens."""
        return b"".join(self.tokens[i] for i in token_ids)


class FakeBackend:
    """Compiles tiny regular expressions. The failures below hold for all grammars that it compiles.

    Attributes:
        compiled: the specs in the order of their compilation.
    """

    def __init__(
        self,
        vocabulary: ListVocabulary,
        *,
        dead_end_after: int | None = None,
        limit_after: int | None = None,
        refused: Iterable[int] = (),
        compile_error: GrammarError | None = None,
    ) -> None:
        """Make a backend.

        Args:
            vocabulary: of the masks.
            dead_end_after: number of tokens after which no token is allowed.
            limit_after: number of tokens after which a step goes beyond a limit.
            refused: tokens that masks allow, but that `accept` refuses.
            compile_error: raised by each `compile`.
        """
        self.vocabulary = vocabulary
        self.dead_end_after = dead_end_after
        self.limit_after = limit_after
        self.refused = frozenset(refused)
        self.compile_error = compile_error
        self.compiled: list[GrammarSpec] = []

    def compile(self, spec: GrammarSpec) -> FakeGrammar:
        self.compiled.append(spec)
        if self.compile_error is not None:
            raise self.compile_error
        if spec.kind is not GrammarKind.REGEX:
            raise GrammarError(f"the fake backend has no {spec.kind}", "invalid_grammar")
        return FakeGrammar(self, spec.text)


class FakeGrammar:
    """The alternatives of one spec."""

    def __init__(self, backend: FakeBackend, text: str) -> None:
        self.backend = backend
        self.alternatives = [part.removesuffix("*").encode() for part in text.split("|")]
        self.repeats = [part.endswith("*") for part in text.split("|")]
        self.num_bytes = 100 + len(text)
        self.short_answer: list[int] | None = None

    def matcher(self) -> FakeMatcher:
        return FakeMatcher(self)

    def start(self) -> State:
        return frozenset((index, 0) for index in range(len(self.alternatives)))

    def advance(self, state: State, data: bytes) -> State:
        """The state after some bytes; empty if they are refused."""
        for byte in data:
            after = set()
            for index, offset in state:
                text = self.alternatives[index]
                if self.repeats[index] and offset == len(text):
                    offset = 0
                if offset < len(text) and text[offset] == byte:
                    after.add((index, offset + 1))
            state = frozenset(after)
        return state

    def accepts(self, state: State) -> bool:
        return any(
            offset == len(self.alternatives[index]) or (self.repeats[index] and offset == 0)
            for index, offset in state
        )

    def may_go_on(self, state: State) -> bool:
        return any(offset < len(self.alternatives[i]) or self.repeats[i] for i, offset in state)


class FakeMatcher:
    """A `Matcher` of a `FakeGrammar`."""

    wants_mask = True
    is_cut = False
    num_forced = 0

    def __init__(self, grammar: FakeGrammar) -> None:
        self._grammar = grammar
        self._backend = grammar.backend
        self._state = grammar.start()
        self._count = 0
        self.ended = False
        self.error = ""
        self.error_code: MatcherErrorCode | None = None

    def limit(self, num_tokens: int) -> None:
        pass

    def fill(self, mask: MaskRow) -> None:
        mask.fill(-1)
        if self.ended or self.error:
            return
        vocabulary = self._backend.vocabulary
        allowed = [i for i in range(len(vocabulary.tokens)) if self._allows(i)]
        if self._backend.dead_end_after is not None and self._count >= self._backend.dead_end_after:
            allowed = []
        if self._backend.limit_after is not None and self._count >= self._backend.limit_after:
            self._fail("the fake limit of a step is exceeded", MatcherErrorCode.LIMIT)
        elif not allowed:
            self._fail("no token is allowed")
        else:
            mask.fill(0)
            row = mask_of(allowed, vocabulary.size)
            mask[: row.size] = row

    def allows(self, token_id: int) -> bool:
        mask = np.zeros(-(-self._backend.vocabulary.size // 32), np.int32)
        self.copy().fill(mask)
        return bool(mask[token_id // 32] >> token_id % 32 & 1)

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if self.ended or self.error:
                return count
            if token_id in self._backend.refused or not self._allows(token_id):
                self._fail(f"token {token_id} is refused")
                return count
            self._count += 1
            if token_id in self._backend.vocabulary.eos_token_ids:
                self.ended = True
            else:
                self._state = self._grammar.advance(self._state, self._backend.vocabulary.tokens[token_id])
                self.ended = not self._grammar.may_go_on(self._state)
        return len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        return self.copy().accept(token_ids)

    def end_reasoning(self) -> bool:
        return False

    def forced(self) -> list[int]:
        """Single bytes, where only one byte is possible."""
        forced: list[int] = []
        state = self._state
        vocabulary = self._backend.vocabulary
        singles = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
        while not self.ended and not self.error and not self._grammar.accepts(state):
            next_bytes = {b for b in range(256) if self._grammar.advance(state, bytes([b]))}
            if len(next_bytes) != 1 or (byte := bytes(next_bytes)) not in singles:
                break
            forced.append(singles[byte])
            state = self._grammar.advance(state, byte)
        return forced

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        self.fill(masks[0])
        ahead = self.copy()
        for index, token_id in enumerate(draft_ids):
            ahead.accept([token_id])
            ahead.fill(masks[1 + index])

    def copy(self) -> FakeMatcher:
        twin = FakeMatcher.__new__(FakeMatcher)
        twin.__dict__.update(self.__dict__)
        return twin

    def _allows(self, token_id: int) -> bool:
        vocabulary = self._backend.vocabulary
        if token_id in vocabulary.eos_token_ids:
            return self._grammar.accepts(self._state)
        if not 0 <= token_id < len(vocabulary.tokens) or token_id in vocabulary.special_token_ids:
            return False
        token = vocabulary.tokens[token_id]
        return bool(token) and bool(self._grammar.advance(self._state, token))

    def _fail(self, text: str, code: MatcherErrorCode = MatcherErrorCode.BUG) -> None:
        self.error, self.error_code = text, code
