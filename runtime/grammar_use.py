"""`GrammarSpec` and `GrammarUse`: what a request's answer is constrained to, as the processes pass it on.

The tokenizer manager makes them from the fields of a request; the scheduler's process compiles them. Compiled grammars
never cross a process border.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec


class GrammarKind(enum.StrEnum):
    """The language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Whitespace(enum.StrEnum):
    """Whitespace between the parts of a JSON value.

    COMPACT: none. PRETTY: at most one blank, or one newline with up to 32 blanks. ANY: unbounded.
    """

    COMPACT = "compact"
    PRETTY = "pretty"
    ANY = "any"


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One grammar. Equal specs have equal grammars, so compiled ones are cached by `key`.

    Attributes:
        kind: the language of `text`.
        text: a JSON Schema as JSON, a regular expression that the whole text must match, or a Lark grammar in
            llguidance's dialect, whose rule `start` is the whole text.
        whitespace: for JSON Schema.
        whitespace_pattern: a regular expression that replaces `whitespace`; "" for none.
    """

    kind: GrammarKind
    text: str
    whitespace: Whitespace = Whitespace.PRETTY
    whitespace_pattern: str = ""

    @property
    def key(self) -> str:
        """Digest of all fields."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()


class Triggered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A grammar for the text that follows a trigger.

    Attributes:
        trigger: bytes of the output after which the grammar begins.
        spec: of the text after the trigger; when it is complete, free text follows again.
    """

    trigger: bytes
    spec: GrammarSpec


class ReasoningBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The reasoning in front of the answer; grammars begin after it.

    Attributes:
        begin: bytes of the marker that opens it.
        end: bytes of the marker that closes it.
        opened: the prompt ends inside the block. If not, the answer may begin with `begin`, and has no block otherwise.
        budget: most tokens in the block; after that many the only tokens allowed are those of `end`. None: no limit.
        ends: once the tokens that were delivered are read, an open block ends with the next token.
        calls: markers of calls; a call of the grammar that follows one ends the block, without `end`.
    """

    begin: bytes
    end: bytes
    opened: bool
    budget: int | None = None
    calls: tuple[bytes, ...] = ()
    ends: bool = False


class GrammarUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Use of grammars by one request.

    Attributes:
        spec: of the whole answer after the reasoning; None: free text, in which `triggered` may begin grammars.
        triggered: grammars inside free text.
        reasoning: None: there is no reasoning block.
        ends_after_first: the answer ends with the first complete triggered grammar.
        compiles: the grammars have been compiled in the sandbox, or the caller trusts them; if not, the scheduler
            waits for `GrammarReady`.
        complete: `spec` is a JSON schema, and the answer must be complete when it ends by its limit of tokens.
        shortest: a short text of `spec`; "" if none is known. A limit of tokens below its tokens is refused.
        param: begins the error about a grammar that does not compile in the scheduler's process: the caller's field.
    """

    spec: GrammarSpec | None = None
    triggered: tuple[Triggered, ...] = ()
    reasoning: ReasoningBlock | None = None
    ends_after_first: bool = False
    compiles: bool = False
    complete: bool = False
    shortest: str = ""
    param: str = ""

    @property
    def specs(self) -> tuple[GrammarSpec, ...]:
        """All grammars to compile."""
        first = () if self.spec is None else (self.spec,)
        return first + tuple(each.spec for each in self.triggered)
