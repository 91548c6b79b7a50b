"""`TraceKind`: which kind of workload file a file is, by the names in its first row; any other one is refused by name.

Timed kinds have a time and two lengths for each request; the others have texts without times.

| kind | file | a row |
|---|---|---|
| Mooncake (FAST 2025) | JSON Lines | timestamp (ms), input_length, output_length, hash_ids (of 512 tokens) |
| Qwen, Bailian (2025) | JSON Lines | the same with chat_id, timestamp in seconds, hash_ids of 16 tokens |
| Azure LLM inference (2023, 2024) | CSV | TIMESTAMP (a date), ContextTokens, GeneratedTokens |
| BurstGPT | CSV | Timestamp (s), Request tokens, Response tokens |
| ShareGPT | JSON | conversations: from, value |
| OpenAI's messages | JSON or JSON Lines | messages: role, content |
| Alpaca | JSON or JSON Lines | instruction, input, output |
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal

from ...runtime.errors import ConfigError
from .rows import first_row

TimeUnit = Literal["s", "ms", "us"]


class TraceKind(enum.Enum):
    """A kind of file; the value is its name in messages."""

    MOONCAKE = "a Mooncake trace"
    BAILIAN = "a Qwen (Bailian) trace"
    AZURE = "an Azure trace"
    BURSTGPT = "a BurstGPT trace"
    SHAREGPT = "ShareGPT conversations"
    MESSAGES = "rows of messages"
    ALPACA = "Alpaca rows"

    @property
    def is_timed(self) -> bool:
        """Whether each request has its time and its lengths."""
        return self in _TIMED

    @property
    def has_hash_ids(self) -> bool:
        """Whether its rows may say which blocks of prompts are equal."""
        return self in _DEFAULTS

    @property
    def default_block_size(self) -> int:
        """Tokens of a block with a hash id."""
        return _DEFAULTS[self][0] if self in _DEFAULTS else 0

    @property
    def default_time_unit(self) -> TimeUnit:
        """Of a timestamp that is a number."""
        return _DEFAULTS[self][1] if self in _DEFAULTS else "s"


_TIMED: Final = frozenset({TraceKind.MOONCAKE, TraceKind.BAILIAN, TraceKind.AZURE, TraceKind.BURSTGPT})
_DEFAULTS: Final[dict[TraceKind, tuple[int, TimeUnit]]] = {
    TraceKind.MOONCAKE: (512, "ms"),
    TraceKind.BAILIAN: (16, "s"),
}
_BY_NAMES: Final[tuple[tuple[frozenset[str], TraceKind], ...]] = (
    (frozenset({"timestamp", "input_length", "output_length", "chat_id"}), TraceKind.BAILIAN),
    (frozenset({"timestamp", "input_length", "output_length"}), TraceKind.MOONCAKE),
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), TraceKind.AZURE),
    (frozenset({"Timestamp", "Request tokens", "Response tokens"}), TraceKind.BURSTGPT),
    (frozenset({"conversations"}), TraceKind.SHAREGPT),
    (frozenset({"conversation"}), TraceKind.SHAREGPT),
    (frozenset({"messages"}), TraceKind.MESSAGES),
    (frozenset({"instruction", "output"}), TraceKind.ALPACA),
)
_REFUSED: Final[tuple[tuple[frozenset[str], str], ...]] = (
    (frozenset({"custom_id", "body"}), "an OpenAI batch file, which has no answers and no times"),
    (frozenset({"timestamp", "input_length"}), "a trace without output_length"),
    (frozenset({"question", "answer"}), "rows of question and answer"),
    (frozenset({"prompt"}), "rows of prompts"),
    (frozenset({"text"}), "rows of texts"),
)
_MAX_SHOWN: Final = 8


def kind_of(path: Path) -> TraceKind:
    """The kind of a file.

    Raises:
        ConfigError: no such file, or another kind.
    """
    names = first_row(path).keys()
    for known, kind in _BY_NAMES:
        if known <= names:
            return kind
    raise ConfigError(f"{path} is {_description(names)}, which is not read; convert it to one of {_known()}")


def _description(names: Collection[str]) -> str:
    for known, what in _REFUSED:
        if known <= set(names):
            return what
    shown = ", ".join(sorted(map(str, names))[:_MAX_SHOWN])
    return f"a file of rows with {shown or 'no names'}"


def _known() -> str:
    return ", ".join(kind.value for kind in TraceKind)
