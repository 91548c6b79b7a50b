"""`ToyGrammar`, `ToyMatcher`, `ToyMatchers`: grammars over tokens, without a library and without text.

The tokens that a toy grammar allows are a hash of the answer so far, so a mask of any other state is a different one.
An answer ends after a number of tokens, or by an EOS token. A toy can also force tokens for a stretch, leave a stretch
free, and fail at a position in any way that a matcher can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from engine.grammar.backend import MaskRow, Matcher, MatcherErrorCode
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse
from engine.runtime.step_plan import TokenMasks

VOCAB_SIZE = 97
_NO_FAULT = 1 << 30


@dataclass(frozen=True)
class ToyGrammar:
    """A grammar. Positions count the tokens of the answer.

    Attributes:
        seed: of the hash.
        length: the answer is complete after this many tokens.
        eos: tokens that end an answer; allowed where `ends_early` says so, and where tokens are free.
        ends_early: EOS tokens are allowed like others, by the hash.
        free_until: before this position all tokens are allowed, and no mask is wanted.
        forced: (begin, end) of stretches in which each state allows one token.
        fault: how it fails at `fault_at`: "dead" (no token is allowed), "refuse" (`accept` refuses the token), or the
            name of the method that raises.
        fault_at: a position.
        knows_forced: whether `forced()` says so.
    """

    seed: int = 0
    length: int = 1 << 20
    eos: tuple[int, ...] = (0,)
    ends_early: bool = False
    free_until: int = 0
    forced: tuple[tuple[int, int], ...] = ()
    fault: str = ""
    fault_at: int = _NO_FAULT
    knows_forced: bool = True

    @property
    def use(self) -> GrammarUse:
        """What a request carries."""
        text = msgspec.json.encode(self).decode()
        return GrammarUse(spec=GrammarSpec(GrammarKind.REGEX, text), compiles=True)

    @classmethod
    def of(cls, use: GrammarUse) -> ToyGrammar:
        """The grammar of a `use`."""
        assert use.spec is not None
        return msgspec.json.decode(use.spec.text, type=ToyGrammar)

    @property
    def faults_surely(self) -> bool:
        """Whether an answer that gets to `fault_at` fails there; some methods are called only for drafts."""
        return self.fault in ("dead", "refuse", "accept")

    def is_free(self, position: int) -> bool:
        return position < self.free_until

    def is_forced(self, position: int) -> bool:
        return any(begin <= position < end for begin, end in self.forced)

    def forced_token(self, tokens: Sequence[int]) -> int:
        """The token that a forced position allows; never an EOS token."""
        token = _hash(self.seed, *tokens, 7) % VOCAB_SIZE
        while token in self.eos:
            token = (token + 1) % VOCAB_SIZE
        return token

    def allowed(self, tokens: Sequence[int]) -> frozenset[int]:
        """The tokens that may follow an answer."""
        return _allowed(self, tuple(tokens))

    def accepted(self, tokens: Sequence[int]) -> frozenset[int]:
        """The tokens that `validate` and `accept` take: as in llguidance, more than a mask allows in forced text."""
        return _accepted(self, tuple(tokens))

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether an answer of allowed tokens has ended."""
        return len(tokens) >= self.length or (bool(tokens) and tokens[-1] in self.eos)


# Schedulers, runners and the check of an answer ask about the same state; most of the hashes would be repeated.
@lru_cache(maxsize=8192)
def _allowed(grammar: ToyGrammar, tokens: tuple[int, ...]) -> frozenset[int]:
    position = len(tokens)
    if position >= grammar.length or any(token in grammar.eos for token in tokens):
        return frozenset()
    if grammar.is_free(position):
        return frozenset(range(VOCAB_SIZE))
    if grammar.fault == "dead" and position == grammar.fault_at:
        return frozenset()
    only = grammar.forced_token(tokens)
    if grammar.is_forced(position):
        return frozenset([only])
    state = _hash(grammar.seed, *tokens)
    some = {token for token in range(VOCAB_SIZE) if _hash(state, token) % 3 == 0}
    if not grammar.ends_early:
        some -= set(grammar.eos)
    return frozenset(some | {only})


@lru_cache(maxsize=8192)
def _accepted(grammar: ToyGrammar, tokens: tuple[int, ...]) -> frozenset[int]:
    allowed = _allowed(grammar, tokens)
    if not allowed or not grammar.is_forced(len(tokens)) or grammar.is_free(len(tokens)):
        return allowed
    others = (token for token in range(VOCAB_SIZE) if token not in grammar.eos)
    return allowed | {token for token in others if _hash(grammar.seed, *tokens, token) % 4 == 0}


class ToyMatcher:
    """A `Matcher` of a `ToyGrammar`.

    Attributes:
        grammar: the grammar.
        tokens: the accepted ones.
        calls: names of the methods that were called.
    """

    def __init__(self, grammar: ToyGrammar, tokens: Sequence[int] = ()) -> None:
        self.grammar = grammar
        self.tokens = list(tokens)
        self.error = ""
        self.calls: list[str] = []

    @property
    def ended(self) -> bool:
        return self.grammar.is_complete(self.tokens)

    @property
    def error_code(self) -> MatcherErrorCode | None:
        return MatcherErrorCode.BUG if self.error else None

    is_cut = False
    num_forced = 0

    @property
    def wants_mask(self) -> bool:
        return not self.grammar.is_free(len(self.tokens))

    def limit(self, num_tokens: int) -> None:
        pass

    def fill(self, mask: MaskRow) -> None:
        self._called("fill")
        assert not self.ended and not self.error, "nothing is filled after an end"
        allowed = self.grammar.allowed(self.tokens)
        if not allowed:
            self._fail("no token is allowed")
        fill_row(mask, allowed)

    def allows(self, token_id: int) -> bool:
        self._called("allows")
        return token_id in self.grammar.allowed(self.tokens)

    def accept(self, token_ids: Sequence[int]) -> int:
        self._called("accept")
        for count, token_id in enumerate(token_ids):
            if self.ended or self.error:
                return count
            if len(self.tokens) == self.grammar.fault_at:
                if self.grammar.fault == "accept":
                    raise RuntimeError("accept failed")
                if self.grammar.fault == "refuse":
                    self._fail(f"token {token_id} is refused")
                    return count
            if token_id not in self.grammar.accepted(self.tokens):
                self._fail(f"token {token_id} is not allowed")
                return count
            self.tokens.append(token_id)
        return len(token_ids)

    def _fail(self, cause: str) -> None:
        self.error = f"the grammar cannot continue after {len(self.tokens)} tokens: {cause}"

    def validate(self, token_ids: Sequence[int]) -> int:
        self._called("validate")
        if self.error:
            return 0
        tokens = list(self.tokens)
        for count, token_id in enumerate(token_ids):
            if self.grammar.is_complete(tokens) or token_id not in self.grammar.accepted(tokens):
                return count
            tokens.append(token_id)
        return len(token_ids)

    def end_reasoning(self) -> bool:
        return False

    def forced(self) -> list[int]:
        self._called("forced")
        tokens = list(self.tokens)
        grammar = self.grammar
        while grammar.knows_forced and not self.error and not grammar.is_complete(tokens):
            if not grammar.is_forced(len(tokens)) or not grammar.allowed(tokens):
                break
            tokens.append(grammar.forced_token(tokens))
        return tokens[len(self.tokens) :]

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        self._called("fill_drafts")
        assert self.validate(draft_ids) == len(draft_ids), "a draft that the grammar refuses"
        assert len(masks) == 1 + len(draft_ids)
        tokens = list(self.tokens)
        for idx, mask in enumerate(masks):
            fill_row(mask, frozenset() if self.grammar.is_complete(tokens) else self.grammar.allowed(tokens))
            tokens += draft_ids[idx : idx + 1]

    def copy(self) -> Matcher:
        """A copy, which looks ahead over drafts, raises for no mask."""
        self._called("copy")
        grammar = self.grammar
        if grammar.fault in ("allows", "fill", "fill_drafts"):
            grammar = replace(grammar, fault="")
        return ToyMatcher(grammar, self.tokens)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.grammar.fault and name != "accept" and len(self.tokens) == self.grammar.fault_at:
            raise RuntimeError(f"{name} failed")


class ToyMatchers:
    """A `MatcherSource`.

    Attributes:
        grammars: rid -> its grammar; a rid that is missing here has no matcher.
        matchers: those that were taken.
    """

    def __init__(self) -> None:
        self.grammars: dict[str, ToyGrammar] = {}
        self.matchers: dict[str, ToyMatcher] = {}

    def take(self, rid: str) -> Matcher:
        self.matchers[rid] = ToyMatcher(self.grammars[rid])
        return self.matchers[rid]


class FixedMasks:
    """A `GetMasks` that has been asked already; `tell`: its `unmasked`."""

    def __init__(
        self, masks: TokenMasks | None, tell: Callable[[npt.NDArray[np.int64]], None] | None = None
    ) -> None:
        self.masks = masks
        self.tell = tell

    def __call__(self) -> TokenMasks | None:
        return self.masks

    def before(self) -> TokenMasks | None:
        return self.masks

    def drafted(self, draft_ids: bytes) -> None:
        raise AssertionError("there is no drafter")

    def unmasked(self, token_ids: npt.NDArray[np.int64]) -> None:
        if self.tell is not None:
            self.tell(token_ids)

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        return None


def fill_row(mask: MaskRow, allowed: frozenset[int]) -> None:
    """Write a mask; no tokens at all: allow all of them, as after an end or an error."""
    if not allowed:
        mask.fill(-1)
        return
    bits = np.zeros(mask.size * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


def allowed_by(mask: MaskRow) -> frozenset[int]:
    """The tokens of a mask."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


def _hash(*values: int) -> int:
    result = 1469598103934665603
    for value in values:
        result = ((result ^ (value + 11)) * 1099511628211) & ((1 << 64) - 1)
    return result >> 17
