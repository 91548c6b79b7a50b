"""`run_sections`: a report in sections; each runs in a separate process with a time limit.

An illegal memory access breaks every later CUDA call of its process, and a hang would lose the report. So a section is
a child process that prints each result at once, and a run that is cut off keeps its figures.

    PASS  12.3 s  overlap
          same tokens for 24 requests
    FAIL   3.1 s  graphs
          AssertionError: ...
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

MARK = "@@ "  # before a line of JSON for the parent
_SETTINGS = "ENGINE_GPU_SETTINGS"
_SKIPPED = 77  # exit code of a section that cannot run here
_FAILED = 78  # exit code of a section that has printed the reason
_LAST_LINES = 40  # of a failed section's output
_MIN_SECTION_S = 5.0

Status = Literal["PASS", "FAIL", "SKIP", "NOT RUN"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, its limit (`floor` for times, `ceiling` for rates), and its target."""

    name: str
    value: float
    unit: str
    best: float | None = None
    target: float | None = None
    more_is_better: bool = False

    @property
    def fraction(self) -> float | None:
        """The share of the device's limit: 1 is perfect."""
        if self.best is None or not self.value:
            return None
        return self.value / self.best if self.more_is_better else self.best / self.value

    @property
    def reached(self) -> bool | None:
        """Whether the target is met, if there is one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.more_is_better else self.value <= self.target

    def line(self) -> str:
        """One row of the table."""
        best = "" if self.best is None else f"{self.best:10.4g}"
        fraction = "" if self.fraction is None else f"{self.fraction:6.1%}"
        target = "" if self.target is None else f"{'>=' if self.more_is_better else '<='} {self.target:g}"
        verdict = {None: "", True: "reached", False: "MISSED"}[self.reached]
        return (
            f"{self.name:52} {self.value:10.4g} {self.unit:8} {best:>10} {fraction:>7}  {target:10} {verdict}"
        )


HEADER = f"{'figure':52} {'measured':>10} {'unit':8} {'best':>10} {'of best':>7}  {'target':10}"


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    Attributes:
        run: prints, and reports through `Report`; an exception is a failure.
        limit_s: time limit on a GPU; `--tiny` runs have the whole budget.
        needs_cuda: skip it on other devices.
    """

    name: str
    run: Callable[[Report], None]
    limit_s: float
    needs_cuda: bool = False


@dataclass
class Report:
    """The interface of a section to the report, in its process.

    Attributes:
        device: "cuda" or "cpu".
        tiny: a smoke test with the smallest sizes.
    """

    device: str
    tiny: bool

    def note(self, text: str) -> None:
        """Print a line of text."""
        self._tell({"note": text})

    def figure(self, figure: Figure) -> None:
        """Add a row to the table."""
        self._tell({"figure": asdict(figure)})

    def skip(self, reason: str) -> NoReturn:
        """End the section as skipped: it cannot run on this device."""
        self.note(reason)
        sys.exit(_SKIPPED)

    def fail(self, reason: str) -> NoReturn:
        """End the section as failed."""
        self._tell({"failed": reason})
        sys.exit(_FAILED)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that may fail without ending the section; the section then fails at its end."""
        started_s = time.perf_counter()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._tell({"failed": f"{name}: {type(error).__name__}: {error}"})
        else:
            self.note(f"ok {time.perf_counter() - started_s:6.1f} s  {name}")

    def _tell(self, message: dict[str, Any]) -> None:
        print(MARK + json.dumps(message), flush=True)


class LoggedMessages(logging.Handler):
    """The log messages of the engine in a `with` block: only the log names the chosen kernels."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Self:
        logger = logging.getLogger("engine")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        logging.getLogger("engine").removeHandler(self)

    def starting_with(self, *starts: str) -> list[str]:
        """The messages, each once."""
        return list(dict.fromkeys(message for message in self.messages if message.startswith(starts)))


@dataclass
class Result:
    """The result of a section."""

    name: str
    status: Status
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    output: list[str] = field(default_factory=list)


def settings_that_passed() -> dict[str, Any]:
    """The settings of the engine that `--triage` names; none without it."""
    found: dict[str, Any] = json.loads(os.environ.get(_SETTINGS, "{}"))
    return found


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags of `engine serve`: `avoid_kernels`, a list of names, and `overlap`."""
    flags = ["--avoid-kernels", ",".join(names)] if (names := settings.get("avoid_kernels")) else []
    return flags + ([] if settings.get("overlap", True) else ["--no-overlap"])


def run_sections(module: str, title: str, sections: Sequence[Section], budget_s: float) -> NoReturn:
    """Run the command: parse arguments, run all or one section, print, write JSON, exit with 1 if one failed.

    Args:
        module: name of the calling module; each section starts it again.
        budget_s: seconds for all sections.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: a test of this program")
    parser.add_argument(
        "--only", default="", help=f"comma-separated, of: {', '.join(s.name for s in sections)}"
    )
    parser.add_argument("--budget", type=float, default=budget_s, help="seconds for all")
    parser.add_argument("--json", type=Path, default=None, help="file for all results")
    parser.add_argument(
        "--triage", type=Path, default=None, help="triage.json: run with the settings that it found"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    by_name = {section.name: section for section in sections}
    if args.triage:
        settings = json.loads(args.triage.read_text()).get("settings")
        if settings is None:
            parser.error(f"{args.triage} has no settings with which everything passed")
        os.environ[_SETTINGS] = json.dumps(settings)  # for the sections' processes
    if args.section:
        by_name[args.section].run(Report(args.device, args.tiny))
        sys.exit(0)
    names = [name for name in args.only.split(",") if name] or list(by_name)
    if unknown := sorted(set(names) - set(by_name)):
        parser.error(f"no such section: {', '.join(unknown)}")

    deadline_s = time.monotonic() + args.budget
    options = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    results: list[Result] = []
    print(HEADER)
    for name in names:
        section = by_name[name]
        if args.tiny:  # on a machine of any speed
            section = replace(section, limit_s=args.budget)
        results.append(_run_section(module, section, options, args.device, deadline_s))
        _print_result(results[-1])
        if args.json:  # after each section: a run that is cut off keeps its results
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(
                json.dumps({"title": title, "sections": [asdict(r) for r in results]}, indent=1)
            )
    _print_summary(results)
    sys.exit(1 if any(result.status in ("FAIL", "NOT RUN") for result in results) else 0)


def _run_section(module: str, section: Section, options: list[str], device: str, deadline_s: float) -> Result:
    result = Result(section.name, "FAIL")
    left_s = deadline_s - time.monotonic()
    limit_s = min(section.limit_s, left_s)
    if section.needs_cuda and device != "cuda":
        result.status = "SKIP"
        result.notes.append("needs a GPU")
        return result
    if left_s < _MIN_SECTION_S:
        result.status = "NOT RUN"
        result.failures.append("no time left; see --budget and --only")
        return result
    command = [sys.executable, "-P", "-m", module, "--section", section.name, *options]
    started_s = time.monotonic()
    code = run_child(command, limit_s, partial(_take_line, result))
    result.seconds = time.monotonic() - started_s
    if code is None:
        result.failures.append(f"ended after {limit_s:.0f} s, its limit")
    elif code not in (0, _SKIPPED, _FAILED):
        result.failures.append(f"exit code {code}")
    result.status = "FAIL" if result.failures else "SKIP" if code == _SKIPPED else "PASS"
    return result


def run_child(
    command: Sequence[str],
    limit_s: float,
    take_line: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """Run a command and pass on each line of its output; it ends, with its own children, at a time limit.

    Returns:
        its exit code; None: the limit passed.
    """
    deadline_s = time.monotonic() + limit_s
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=None if environment is None else {**os.environ, **environment},
        start_new_session=True,  # so that its own children end with it
    )
    ended = False
    try:
        ended = _read(process, take_line, deadline_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    return code if ended else None


def _read(process: subprocess.Popen[bytes], take_line: Callable[[str], None], deadline_s: float) -> bool:
    """Read its output until it ends (returns True) or its time is over (False)."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline_s - time.monotonic())):
            part = os.read(fd, 1 << 16)
            if not part:
                return True
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                take_line(line.decode(errors="replace"))
    return False


def _take_line(result: Result, line: str) -> None:
    if not line.startswith(MARK):
        result.output = [*result.output[1 - _LAST_LINES :], line]
        return
    message = json.loads(line.removeprefix(MARK))
    if "figure" in message:
        result.figures.append(Figure(**message["figure"]))
        print(result.figures[-1].line(), flush=True)
    elif "failed" in message:
        result.failures.append(message["failed"])
        print(f"      FAILED {message['failed']}", flush=True)
    else:
        result.notes.append(message["note"])
        print(f"      {message['note']}", flush=True)


def _print_result(result: Result) -> None:
    print(f"{result.status:7} {result.seconds:6.1f} s  {result.name}", flush=True)
    if result.status in ("FAIL", "NOT RUN"):
        for line in (*result.output, *result.failures):
            print(f"      {line}")
        sys.stdout.flush()


def _print_summary(results: Sequence[Result]) -> None:
    print()
    for result in results:
        why = result.failures[0] if result.failures else result.notes[-1] if result.status == "SKIP" else ""
        print(f"{result.status:7} {result.seconds:6.1f} s  {result.name:20} {why[:120]}")
