"""Workload files of several published kinds: timed requests, and conversations.

The names in the first row determine the kind (`TraceKind`); any other file is refused by name.

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

import contextlib
import csv
import datetime
import enum
import json
import math
from collections.abc import Collection, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from ..runtime.errors import ConfigError

_HEAD_BYTES: Final = 4096
_FIRST_ENTRY_BYTES: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"
_BINARY: Final = {
    b"\x1f\x8b": "compressed with gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it",
    b"BZh": "compressed with bzip2; unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet file; write it as JSON Lines or CSV",
    b"ARROW1": "an Arrow file; write it as JSON Lines or CSV",
}


class PlacedRow(NamedTuple):
    """A row, and its place for messages, `file:line`."""

    place: str
    values: Mapping[str, Any]


def rows_of(path: Path) -> Generator[PlacedRow]:
    """All rows in order; those of JSON Lines and CSV are read one by one.

    Raises:
        ConfigError: the file cannot be read, or a row is no object.
    """
    head = _head(path)
    if head.startswith(b"["):
        yield from _array(path)
    elif head.startswith(b"{"):
        yield from _lines(path)
    elif b"," in head.split(b"\n", 1)[0]:
        yield from _csv(path)
    else:
        raise ConfigError(
            f"{path} is no workload: it must be a trace or conversations, as JSON Lines, a JSON array, or CSV with a "
            f"header"
        )


def first_row(path: Path) -> Mapping[str, Any]:
    """The first row; it determines the kind of the file.

    Raises:
        ConfigError: as for `rows_of`, or there is none.
    """
    head = _head(path, _FIRST_ENTRY_BYTES)
    if head.startswith(b"["):  # an array may be large, and is read again
        with contextlib.suppress(ValueError):
            entry, _ = json.JSONDecoder().raw_decode(head[1:].decode(errors="replace").lstrip())
            return _object(entry, f"{path}, entry 0")
    with contextlib.closing(rows_of(path)) as rows:
        for row in rows:
            return row.values
    raise ConfigError(f"{path} has no rows")


def _head(path: Path, num_bytes: int = _HEAD_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(num_bytes).removeprefix(_BOM).lstrip()
    except OSError as error:
        raise ConfigError(f"cannot read the workload {path}: {error.strerror}") from None
    for magic, what in _BINARY.items():
        if head.startswith(magic):
            raise ConfigError(f"{path} is {what}")
    return head


def _array(path: Path) -> Generator[PlacedRow]:
    try:
        entries = msgspec.json.decode(path.read_bytes().removeprefix(_BOM), type=list[Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a JSON array: {error}") from None
    for number, entry in enumerate(entries):
        yield PlacedRow(f"{path}, entry {number}", _object(entry, f"{path}, entry {number}"))


def _lines(path: Path) -> Generator[PlacedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                entry = msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(f"{place}: not a line of JSON: {error}") from None
            yield PlacedRow(place, _object(entry, place))


def _csv(path: Path) -> Generator[PlacedRow]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, skipinitialspace=True)
        names = [name.strip() for name in next(reader)]
        for number, values in enumerate(reader, 2):
            if not values:
                continue
            if len(values) != len(names):
                raise ConfigError(
                    f"{path}:{number}: {len(values)} columns, but the header has {len(names)}: {', '.join(names)}"
                )
            yield PlacedRow(f"{path}:{number}", dict(zip(names, values, strict=True)))


def _object(entry: object, place: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: a row must be an object, {{...}}")
    return entry


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
        """Unit of a timestamp that is a number."""
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


_SECONDS: Final[dict[TimeUnit, float]] = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_USUAL_BLOCKS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048)
_COLUMNS: Final = {
    TraceKind.MOONCAKE: ("timestamp", "input_length", "output_length"),
    TraceKind.BAILIAN: ("timestamp", "input_length", "output_length"),
    TraceKind.AZURE: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    TraceKind.BURSTGPT: ("Timestamp", "Request tokens", "Response tokens"),
}


class Block(NamedTuple):
    """A part of a prompt.

    Attributes:
        hash_id: equal ids at the same place mean equal tokens up to there; None: no other prompt has it.
        length: in tokens.
    """

    hash_id: int | None
    length: int


class TimedRequest(NamedTuple):
    """One request.

    Attributes:
        arrival_s: after the first one.
        blocks: of its prompt, in order.
        output_len: at least 1.
    """

    arrival_s: float
    blocks: tuple[Block, ...]
    output_len: int

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return sum(block.length for block in self.blocks)


class TraceOptions(NamedTuple):
    """Options for reading a trace; None: as its kind is published.

    Attributes:
        block_size: tokens per hash id.
        time_unit: of timestamps that are numbers.
        time_scale: the times are divided by it: 2 doubles the rate.
    """

    block_size: int | None = None
    time_unit: TimeUnit | None = None
    time_scale: float | None = None

    def check(self, kind: TraceKind, path: Path) -> None:
        """Check the options for a file.

        Raises:
            ConfigError: a value out of range, or one without an effect on this kind.
        """
        if self.time_scale is not None and not (math.isfinite(self.time_scale) and self.time_scale > 0):
            raise ConfigError(f"--time-scale is {self.time_scale:g}, but it must be above 0")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError(f"--trace-block-size is {self.block_size}, but it must be at least 1")
        for flag, value, works, why in (
            ("--trace-block-size", self.block_size, kind.has_hash_ids, "has no hash ids"),
            ("--trace-time-unit", self.time_unit, kind is not TraceKind.AZURE, "has dates"),
        ):
            if value is not None and not works:
                raise ConfigError(f"{flag} has no effect on {path}: {kind.value} {why}; leave it out")


def timed_requests(path: Path, options: TraceOptions = TraceOptions()) -> Iterator[TimedRequest]:  # noqa: B008
    """The requests of a timed trace, in order.

    A request of BurstGPT without an answer failed when the trace was recorded; it is left out.

    Raises:
        ConfigError: another kind of file; a row is incomplete, is before the one above, or has a number of hash ids
            that does not fit its length; or there is none.
    """
    kind = kind_of(path)
    if not kind.is_timed:
        raise ConfigError(f"{path} has {kind.value}, which have no times; give a timed trace")
    options.check(kind, path)
    block_size = options.block_size or kind.default_block_size
    unit_s = _SECONDS[options.time_unit or kind.default_time_unit]
    time_name, input_name, output_name = _COLUMNS[kind]
    start_s: float | None = None
    last_s = -math.inf
    for row in rows_of(path):
        time_s = _date_s(row, time_name) if kind is TraceKind.AZURE else _number(row, time_name) * unit_s
        input_len, output_len = _count(row, input_name, 1), _count(row, output_name, 0)
        if time_s < last_s:
            raise ConfigError(
                f"{row.place}: {time_name} {row.values[time_name]} is before the one above; sort the trace by it"
            )
        last_s = time_s
        if kind is TraceKind.BURSTGPT and output_len == 0:
            continue
        start_s = time_s if start_s is None else start_s
        blocks = _blocks(row, input_len, block_size)
        yield TimedRequest((time_s - start_s) / (options.time_scale or 1.0), blocks, max(output_len, 1))
    if start_s is None:
        raise ConfigError(f"{path} has no requests")


def _blocks(row: PlacedRow, input_len: int, block_size: int) -> tuple[Block, ...]:
    hash_ids: Any = row.values.get("hash_ids") or []
    if not isinstance(hash_ids, list) or not all(type(each) is int and each >= 0 for each in hash_ids):
        raise ConfigError(f"{row.place}: hash_ids must be a list of integers, 0 or more")
    if not hash_ids:
        return (Block(None, input_len),)
    whole, rest = divmod(input_len, block_size)
    if len(hash_ids) not in (whole, whole + (rest > 0)):
        raise ConfigError(
            f"{row.place}: {len(hash_ids)} hash ids for input_length {input_len}, but blocks of {block_size} tokens "
            f"make {whole + (rest > 0)}; {_advice(input_len, len(hash_ids))}"
        )
    blocks = [Block(hash_id, block_size) for hash_id in hash_ids[:whole]]
    if rest:
        blocks.append(Block(hash_ids[whole] if len(hash_ids) > whole else None, rest))
    return tuple(blocks)


def _advice(input_len: int, num_ids: int) -> str:
    for size in _USUAL_BLOCKS:
        if math.ceil(input_len / size) == num_ids:
            return f"--trace-block-size {size} fits"
    return "--trace-block-size sets their size"


def _number(row: PlacedRow, name: str) -> float:
    try:
        value = float(_value(row, name))
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{row.place}: {name} is {row.values[name]!r}, but it must be a number")
    return value


def _count(row: PlacedRow, name: str, low: int) -> int:
    value = _number(row, name)
    if value < low or not value.is_integer():
        raise ConfigError(
            f"{row.place}: {name} is {row.values[name]}, but it must be a whole number of at least {low}"
        )
    return int(value)


def _date_s(row: PlacedRow, name: str) -> float:
    try:
        date = datetime.datetime.fromisoformat(str(_value(row, name)))
    except ValueError:
        raise ConfigError(
            f"{row.place}: {name} is {row.values[name]!r}, but it must be a date such as 2023-11-16 18:17:03.97"
        ) from None
    return (date if date.tzinfo is not None else date.replace(tzinfo=datetime.UTC)).timestamp()


def _value(row: PlacedRow, name: str) -> Any:
    if row.values.get(name) is None:
        raise ConfigError(f"{row.place}: {name} is missing; every row of a trace must have it")
    return row.values[name]


_QUESTIONERS: Final = frozenset({"human", "user"})
_ANSWERERS: Final = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


class Exchange(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


def conversations(path: Path) -> Iterator[list[Exchange]]:
    """The conversations of a file that have at least one question with an answer.

    Messages out of turn and system prompts are left out; so are contents that are not texts.

    Raises:
        ConfigError: the file cannot be read, or it is a timed trace, which has no texts.
    """
    kind = kind_of(path)
    if kind.is_timed:
        raise ConfigError(f"{path} is {kind.value}, which has no texts; replay it as a trace")
    for row in rows_of(path):
        turns = _alpaca(row.values) if kind is TraceKind.ALPACA else _turns(_messages(row.values))
        if turns:
            yield turns


def _alpaca(row: Mapping[str, Any]) -> list[Exchange]:
    parts = [row.get("instruction"), row.get("input") or None]
    question = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    answer = row.get("output")
    return [Exchange(question, answer)] if question and isinstance(answer, str) and answer else []


def _messages(row: Mapping[str, Any]) -> list[Any]:
    for name in ("conversations", "conversation", "messages"):
        if isinstance(row.get(name), list):
            return list(row[name])
    return []


def _turns(messages: list[Any]) -> list[Exchange]:
    turns: list[Exchange] = []
    question: str | None = None
    for message in messages:
        if not isinstance(message, dict):
            continue
        sender = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if not isinstance(text, str) or not text:
            continue
        if sender in _QUESTIONERS:
            question = text
        elif sender in _ANSWERERS and question is not None:
            turns.append(Exchange(question, text))
            question = None
    return turns
