"""The requests of a timed trace: when each arrives, how long it is, and which blocks of its prompt others have."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...runtime.errors import ConfigError
from .kinds import TimeUnit, TraceKind, kind_of
from .rows import PlacedRow, rows_of

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
    """How a trace is read; None: as its kind is published.

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
