"""The result file: one JSON object with a schema name and a list of runs, each with its full configuration."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from ...runtime.errors import ConfigError
from .load import RequestRecord
from .summary import Summary

SCHEMA = "engine-bench/1"


class RequestRow(msgspec.Struct, frozen=True):
    """One request of a run, times in seconds relative to its start; `arrivals` only with --details."""

    sent_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    error: str | None = None
    arrivals: list[tuple[float, int]] | None = None

    @classmethod
    def of(cls, record: RequestRecord, origin_s: float, details: bool) -> RequestRow:
        """The row of one record."""
        return cls(
            sent_s=record.sent_s - origin_s,
            ttft_s=record.ttft_s if record.ok else None,
            tpot_s=record.tpot_s if record.ok else None,
            e2e_s=record.e2e_s if record.ok else None,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            cached_tokens=record.cached_tokens,
            error=record.error,
            arrivals=[(moment - origin_s, count) for moment, count in record.arrivals] if details else None,
        )


class Run(msgspec.Struct, frozen=True):
    """One benchmark run.

    Attributes:
        kind: "serve" or "offline".
        started_at: wall clock, ISO 8601 with offset.
        client: every setting of the command.
        server: what the server reports (`/server_info`), or the resolved configuration of the in-process engine.
        machine: CPU, cores, operating system, Python.
        git_revision: of the engine's checkout, None outside one.
    """

    kind: str
    started_at: str
    client: dict[str, Any]
    server: dict[str, Any] | None
    machine: dict[str, Any]
    git_revision: str | None
    summary: Summary
    requests: list[RequestRow]


class ResultFile(msgspec.Struct, frozen=True):
    """The content of the file."""

    schema: str
    runs: list[Run]


def read_results(path: Path) -> ResultFile:
    """Read a result file.

    Raises:
        ConfigError: it cannot be read, or is no result file.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a result file of 'engine bench' ({error})") from None
    if results.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {results.schema!r}, this version reads {SCHEMA!r}")
    if not results.runs:
        raise ConfigError(f"{path} holds no run")
    return results


def write_results(path: Path, run: Run, append: bool) -> None:
    """Write one run, or add it to the runs of the file; the file is replaced in one step."""
    runs = [*read_results(path).runs, run] if append and path.exists() else [run]
    body = msgspec.json.format(
        msgspec.json.encode(ResultFile(SCHEMA, runs)), indent=1 if len(runs) == 1 else 0
    )
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(body + b"\n")
    partial.replace(path)


def machine_facts() -> dict[str, Any]:
    """Facts about the client's machine."""
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def git_revision() -> str | None:
    """The checkout's revision, with '+' when files differ from it."""
    root = Path(__file__).resolve().parents[2]
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
