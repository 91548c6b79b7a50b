"""`Results`: everything measured so far, in one JSON file that is written after every measurement.

An interrupted run is resumed from it: existing measurements are kept if they were made with the same settings. Failures
are recorded, and measured again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.ceilings import Ceiling
from benchmarks.peers.limits import ServedModel
from benchmarks.peers.machine import Memory, Share

SCHEMA: Final = "cpu-vs-peers/1"
START, MEMORY = "start", "memory"


class Measurement(msgspec.Struct, frozen=True):
    """One run of one workload against one side.

    Attributes:
        round: counted from 0; the same round has the same prompts on all sides.
        wall_s: of the whole measurement, including the client's start.
        figures: by their names.
        summary: of `engine bench serve`.
    """

    side: str
    workload: str
    round: int
    at: str
    wall_s: float
    figures: dict[str, float]
    share: Share
    summary: dict[str, Any]


class Start(msgspec.Struct, frozen=True):
    """Time from a command to its first completion."""

    side: str
    first_completion_s: float
    share: Share


class Resident(msgspec.Struct, frozen=True):
    """A server's memory with so many tokens of KV."""

    side: str
    kv_tokens: int
    memory: Memory


class Failure(msgspec.Struct, frozen=True):
    """A failed measurement, and the reason."""

    side: str
    what: str
    at: str
    reason: str


class Results(msgspec.Struct):
    """The content of the file.

    Attributes:
        settings: settings that affect all figures; a file with other settings is refused.
        model: the model for the limits; None in older files without it.
        sides: for each side, the settings that affect its figures.
        ceilings_disturbed: CPU cores that other processes used at each measurement of the ceilings.
    """

    schema: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    sides: dict[str, dict[str, Any]]
    model: ServedModel | None = None
    ceilings: list[Ceiling] = []
    ceilings_disturbed: list[float] = []
    starts: list[Start] = []
    residents: list[Resident] = []
    measurements: list[Measurement] = []
    failures: list[Failure] = []

    def has(self, side: str, workload: str, round_idx: int) -> bool:
        """Whether this measurement exists."""
        return any((m.side, m.workload, m.round) == (side, workload, round_idx) for m in self.measurements)

    def values(self, side: str, workload: str, figure: str) -> dict[int, float]:
        """A figure by round; for "start" and "memory" in order of measurement."""
        if workload == START:
            return dict(enumerate(start.first_completion_s for start in self.starts if start.side == side))
        if workload == MEMORY:
            sizes = (float(r.memory.proportional_bytes) for r in self.residents if r.side == side)
            return dict(enumerate(sizes))
        return {
            m.round: m.figures[figure]
            for m in self.measurements
            if m.side == side and m.workload == workload and figure in m.figures
        }

    def last_wall_s(self, side: str, workload: str) -> float | None:
        """Seconds of the last measurement of this kind."""
        walls = [m.wall_s for m in self.measurements if (m.side, m.workload) == (side, workload)]
        return walls[-1] if walls else None

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        partial.replace(path)


class MismatchError(Exception):
    """A file has figures that were measured with other settings; the message names them."""


def open_results(
    path: Path,
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    sides: Mapping[str, dict[str, Any]],
    model: ServedModel | None = None,
) -> Results:
    """The results in this file, or none yet.

    Args:
        settings, sides, model: of this run. New sides are added; one that is in the file must be equal.

    Raises:
        MismatchError: the file was measured with other settings.
    """
    fresh = Results(SCHEMA, _as_json(settings), _as_json(machine), _as_json(sides), model)
    if not path.exists():
        return fresh
    results = read_results(path)
    pairs: list[tuple[str, Any, Any]] = [
        (key, results.settings.get(key), fresh.settings.get(key))
        for key in sorted({*results.settings, *fresh.settings})
    ]
    pairs += [(f"side {n}", results.sides[n], fresh.sides[n]) for n in fresh.sides if n in results.sides]
    pairs.append(("model", results.model, model))
    changed = [f"{what}: {old!r}, now {new!r}" for what, old, new in pairs if old != new]
    if changed:
        raise MismatchError(
            f"{path} was measured with other settings; give another --output, or remove it:\n  "
            + "\n  ".join(changed)
        )
    results.sides = {**results.sides, **fresh.sides}
    return results


def read_results(path: Path) -> Results:
    """Read a file.

    Raises:
        MismatchError: it is not a result file.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise MismatchError(f"{path} is not a result file of cpu_vs_peers ({error})") from None
    if results.schema != SCHEMA:
        raise MismatchError(f"{path} has schema {results.schema!r}, this version reads {SCHEMA!r}")
    return results


def _as_json(value: Any) -> Any:
    """The value after encoding and decoding, for a comparison with the file."""
    return msgspec.json.decode(msgspec.json.encode(value))
