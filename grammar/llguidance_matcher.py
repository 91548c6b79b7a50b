"""`LLGuidanceMatcher`: the state of one answer in a grammar of llguidance; and the library's messages, for clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ..runtime.grammar_use import GrammarKind
from .backend import GrammarError, MaskRow, MatcherErrorCode

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MESSAGE_CHARS: Final = 300
PANIC_MODULE: Final = "pyo3_runtime"
"""A panic in a Rust library is a `BaseException` of this module."""
_TOO_COMPLEX: Final = re.compile(
    r"too (?:large|many|big|complex|deep|long)|toocomplex|fuel|limit|exceed|maximum size|\bmax is\b",
    re.IGNORECASE,
)
_UNSATISFIABLE: Final = re.compile(r"unsatisfiable", re.IGNORECASE)
_TOO_DEEP: Final = re.compile(r"recursion limit|nested too|too deeply", re.IGNORECASE)
_PANIC: Final = re.compile(r"\bpanic|backtrace")
"""A limit of the library that it does not check, such as 65,525 symbols."""
_DUMP: Final = re.compile(r":?\s*\((?:And|Or|Not|Concat|Literal|Regex|SearchRegex)\b.*", re.DOTALL)
"""The library's own form of a regular expression in its message."""
_UNSUPPORTED: Final = re.compile(r"unimplemented|not supported|unknown format|unsupported", re.IGNORECASE)
_NO_TEXT: Final = re.compile(r"noextension", re.IGNORECASE)
_REGEX_ERROR: Final = re.compile(r"regex parse error:\n(?P<body>.*?)error: (?P<cause>[^\n]*)", re.DOTALL)
_SYNTAX: Final = {
    GrammarKind.JSON_SCHEMA: ("invalid_schema", "the schema"),
    GrammarKind.REGEX: ("invalid_regex", "the regular expression"),
    GrammarKind.LARK: ("invalid_grammar", "the grammar"),
}
MAX_FORCED_TOKENS: Final = 64
"""A grammar like `start: "a" start` forces text without end."""


class LLGuidanceMatcher:
    """A `Matcher` around one `LLMatcher`. Not for use by several threads at once.

    Attributes:
        ended: see `Matcher`.
        error: see `Matcher`.
        error_code: see `Matcher`.
        num_forced: see `Matcher`.
        library_error: the text of llguidance for `error`.
    """

    wants_mask = True
    is_cut = False

    def __init__(self, matcher: LLMatcher, eos_token_ids: tuple[int, ...], num_tokens: int) -> None:
        """Wrap a matcher at the beginning of the text.

        Args:
            matcher: belongs to this object.
            eos_token_ids: of the vocabulary; empty if the library has a token of its own instead.
            num_tokens: of the library, which writes masks of exactly that many bits.
        """
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_tokens = num_tokens
        self._num_bytes = -(-num_tokens // 32) * 4
        self._num_accepted = 0
        self._num_forced_next = 0  # tokens from here on that are known to be forced
        self.num_forced = 0
        self.ended = False
        self.error = ""
        self.error_code: MatcherErrorCode | None = None
        self.library_error = ""
        self._check()

    def limit(self, num_tokens: int) -> None:
        """`CompletingMatcher` does it for this class."""

    def fill(self, mask: MaskRow) -> None:
        """Write the tokens that may come next; see `Matcher.fill`."""
        if self._is_over():
            mask.fill(-1)
            return
        if mask.nbytes == self._num_bytes:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self._num_bytes)
        elif mask.nbytes > self._num_bytes:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self._num_bytes)
            mask[self._num_bytes // 4 :] = 0
        else:  # without an EOS token the library has one token more than the vocabulary
            whole = np.empty(self._num_bytes // 4, np.int32)
            self._matcher.unsafe_compute_mask_ptr(whole.ctypes.data, self._num_bytes)
            mask[:] = whole[: mask.size]
        if not self._eos_token_ids and (self._num_tokens - 1) // 32 < mask.size:
            last = self._num_tokens - 1
            mask.view(np.uint32)[last // 32] &= np.uint32(~(1 << last % 32) & 0xFFFFFFFF)
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        else:
            self._look_at_number(mask)
        if self.error:
            mask.fill(-1)

    def allows(self, token_id: int) -> bool:
        """Whether `fill` would allow this token; see `Matcher.allows`. 15 us, and 200 us in forced text."""
        if self._is_over():
            return True
        forced = self._forced()
        return token_id == forced[0] if forced else self.validate((token_id,)) == 1

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over generated tokens; see `Matcher.accept`."""
        for count, token_id in enumerate(token_ids):
            if self._is_over():
                return count
            if token_id in self._eos_token_ids:
                if not self._matcher.is_accepting():
                    self._fail(f"EOS token {token_id} is refused before the end of the text")
                    return count
                self.ended = True
            elif not 0 <= token_id < self._num_tokens:
                self._fail(f"token {token_id} is not a token of the tokenizer")
                return count
            elif not self._matcher.consume_token(token_id):
                self._fail(self._matcher.get_error() or f"token {token_id} is refused")
                return count
            else:
                self._check()
            self._num_accepted += 1
            if self._num_forced_next:
                self._num_forced_next -= 1
                self.num_forced += 1
        return len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        """Number of these tokens that may come next. No effects."""
        if self._is_over():
            return 0
        ids = list(token_ids)
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < self._num_tokens:  # of the model's padding; the library would raise
                del ids[index:]
                break
        return self._matcher.validate_tokens(ids) if ids else 0

    def end_reasoning(self) -> bool:
        return False

    def forced(self) -> list[int]:
        """The tokens of forced text that are certain to be split like that."""
        if self._is_over():
            return []
        return self._forced()[:MAX_FORCED_TOKENS]

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        """Write the masks before, between and after drafts; see `Matcher.fill_drafts`."""
        self.fill(masks[0])
        if not draft_ids:
            return
        ahead = self.copy()
        for index, token_id in enumerate(draft_ids):
            ahead.accept((token_id,))
            ahead.fill(masks[1 + index])

    def copy(self) -> LLGuidanceMatcher:
        """An independent matcher in the same state; 1 us."""
        copy = LLGuidanceMatcher.__new__(LLGuidanceMatcher)
        copy.__dict__.update(self.__dict__)
        copy._matcher = self._matcher.deep_copy()
        return copy

    def _forced(self) -> list[int]:
        forced = self._matcher.compute_ff_tokens()
        if forced:
            self._num_forced_next = len(forced)
        return forced

    def _look_at_number(self, mask: MaskRow) -> None:
        """Notice a mask without a token, and one with a single token."""
        words = mask[mask != 0]
        if not words.size:
            self._fail("no token is allowed")
        elif words.size == 1 and (int(words[0]) & 0xFFFFFFFF).bit_count() == 1:
            self._num_forced_next = max(self._num_forced_next, 1)

    def _is_over(self) -> bool:
        return self.ended or self.error != ""

    def _check(self) -> None:
        """Read the state after a token."""
        if self._matcher.is_stopped():
            if self._matcher.is_error():
                self._fail(self._matcher.get_error())
            else:
                self.ended = True

    def _fail(self, text: str) -> None:
        self.library_error = text
        limit = is_limit(text, self._matcher.stop_reason())
        self.error_code = MatcherErrorCode.LIMIT if limit else MatcherErrorCode.BUG
        self.error = f"the grammar cannot continue after {self._num_accepted} tokens: {clean_message(text)}"


def translate_error(kind: GrammarKind, text: str, source: str = "") -> GrammarError:
    """The error for a client.

    Args:
        kind: of the grammar.
        text: of the library.
        source: the text of the grammar; its size is part of the message if it is too complex.
    """
    code, noun = _SYNTAX[kind]
    cause = clean_message(text)
    if _NO_TEXT.search(text):
        return GrammarError(
            f"{noun} allows no text", "unsatisfiable_schema" if kind is GrammarKind.JSON_SCHEMA else code
        )
    if match := _REGEX_ERROR.search(text):
        if kind is GrammarKind.JSON_SCHEMA and _UNSUPPORTED.search(match["cause"]):
            code = "unsupported_schema"
        return GrammarError(f"{noun} has an invalid pattern: {_regex_cause(match)}", code)
    if _PANIC.search(text):
        text = f"{noun} has {len(source):,} characters and is too complex for the library; simplify it"
        return GrammarError(text, "schema_too_complex")
    if _TOO_DEEP.search(text):
        return GrammarError(
            f"{noun} is nested too deep; make it flatter, as with $defs", "schema_too_complex"
        )
    if _UNSATISFIABLE.search(text):
        if "Regex is empty" in text:
            cause = "a pattern, a format, lengths, bounds or listed values contradict each other"
        return GrammarError(
            f"{noun} allows no text: {cause.removeprefix('Unsatisfiable schema: ')}",
            "unsatisfiable_schema" if kind is not GrammarKind.REGEX else code,
        )
    if _UNSUPPORTED.search(text) and kind is GrammarKind.JSON_SCHEMA:
        return GrammarError(f"{noun} cannot be enforced: {cause}", "unsupported_schema")
    if _TOO_COMPLEX.search(text):
        return GrammarError(
            f"{noun} has {len(source):,} characters and is too complex: {cause}", "schema_too_complex"
        )
    return GrammarError(f"{noun} is not valid: {cause}", code)


def is_limit(text: str, stop_reason: str) -> bool:
    """Whether an error of a matcher is one of the library's limits."""
    return stop_reason in {"ParserTooComplex", "LexerTooComplex"} or _TOO_COMPLEX.search(text) is not None


def clean_message(text: str) -> str:
    """The library's text in one line, without excerpts of the source and dumps."""
    text = _DUMP.sub("", text.replace("<non-verbose/>", ""))
    lines = [line.strip() for line in text.splitlines() if not re.match(r"\s*(?:\d+ \||\^)", line)]
    line = " ".join(filter(None, lines))
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]}..."


def _regex_cause(match: re.Match[str]) -> str:
    """The cause, and the position if the library marks one in a pattern of one line."""
    lines = match["body"].splitlines()
    if len(lines) >= 2 and lines[1].strip("^ ") == "" and "^" in lines[1]:
        indent = len(lines[0]) - len(lines[0].lstrip(" "))
        position = lines[1].index("^") - min(indent, 4)
        return f"{match['cause']} (at position {position})"
    return match["cause"]
