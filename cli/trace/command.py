"""`engine trace`: reads a decision log, writes a page or a trace file."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from ...runtime.errors import ConfigError, EngineError
from ...runtime.text import counted
from ...scheduler.journal.log_file import LoggedRun, choose_runs
from ..options import CONTEXT_SETTINGS, GroupedCommand, RunOption
from .html import Origin, render_page
from .perfetto import write_trace_events
from .story import Timeline
from .timeline import EmptyLogError, read_timeline

STDOUT: Final = Path("-")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Format(enum.StrEnum):
    """The output format."""

    HTML = "html"
    PERFETTO = "perfetto"


_SUFFIXES: Final = {Format.HTML: ".html", Format.PERFETTO: ".perfetto.json"}


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def trace(
    log: Annotated[
        Path, typer.Argument(metavar="FILE", help="Decision log, written by --decision-log FILE.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write; - is stdout  [default: FILE.html]",
            show_default=False,
        ),
    ] = None,
    output_format: Annotated[
        Format,
        typer.Option("--format", help="A page for the browser, or JSON for ui.perfetto.dev."),
    ] = Format.HTML,
    rid: Annotated[
        list[str] | None,
        typer.Option("--request", metavar="ID", help="Only this request; may be repeated."),
    ] = None,
    from_s: Annotated[
        float | None,
        typer.Option(
            "--from", metavar="S", help="Start of the timeline, in seconds since the start of the run."
        ),
    ] = None,
    to_s: Annotated[
        float | None,
        typer.Option("--to", metavar="S", help="End of the timeline, in seconds since the start of the run."),
    ] = None,
    run: RunOption = None,
) -> None:
    """Draw a timeline from a decision log: scheduler passes and requests, with the reasons."""
    timeline, origin = read_log(log, run)
    timeline = _select(timeline, rid, from_s, to_s)
    target = output if output is not None else log.with_name(log.name + _SUFFIXES[output_format])
    try:
        if target == STDOUT:
            _write(timeline, origin, output_format, sys.stdout.buffer)
            return
        with target.open("wb") as file:
            _write(timeline, origin, output_format, file)
    except BrokenPipeError:
        raise  # the reader closed the pipe: `main` handles it
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}; choose another with -o") from None
    typer.echo(
        f"{target}: {counted(len(timeline.requests), 'request', commas=True)}, "
        f"{counted(len(timeline.passes), 'pass', 'passes', commas=True)}"
        + (f", of run {origin.run} of {origin.num_runs} (--run N chooses)" if origin.num_runs > 1 else "")
    )


def read_log(path: Path, run: int | None) -> tuple[Timeline, Origin]:
    """The timeline of one run of a file, by default of the last.

    Raises:
        LogFileError: not a decision log, or not one for this engine.
        ConfigError: there is no such run.
        EmptyLogError: it has no pass.
    """
    chosen: tuple[int, LoggedRun, Timeline | EmptyLogError] | None = None
    num_runs = 0
    for num_runs, logged, is_chosen in choose_runs(path, run):
        # The last run is known only after it has been read, and a run can be read once.
        if is_chosen:
            try:
                timeline = read_timeline(logged.decisions, origin_s=logged.header.now_s)
            except EmptyLogError as error:
                chosen = num_runs, logged, error
            else:
                chosen = num_runs, logged, timeline
    assert chosen is not None, "a decision log has a run"
    number, logged, result = chosen
    if isinstance(result, EmptyLogError):
        raise _empty(path, number, num_runs)
    header = logged.header
    origin = Origin(
        name=path.name,
        run=number,
        num_runs=num_runs,
        started_s=header.wall_s,
        model=header.model,
        device=header.device,
        page_size=header.capacity.page_size,
        damage=logged.damage,
    )
    return result, origin


def _empty(path: Path, number: int, num_runs: int) -> EngineError:
    which = f"run {number} of {path}" if num_runs > 1 else str(path)
    way_out = "; choose another with --run" if num_runs > 1 else ""
    return EmptyLogError(f"{which} has no scheduling pass: its server had nothing to do{way_out}")


def _select(timeline: Timeline, rids: list[str] | None, from_s: float | None, to_s: float | None) -> Timeline:
    """The part of the timeline that the options select.

    Raises:
        ConfigError: the part is empty.
    """
    if from_s is not None or to_s is not None:
        part = timeline.window(from_s, to_s)
        if not len(part.passes):
            begin, end = (each - timeline.origin_s for each in timeline.extent_s)
            raise ConfigError(
                f"there is no pass from {from_s or 0:g} s to {'the end' if to_s is None else f'{to_s:g} s'}; "
                f"the run has passes from {begin:.3f} s to {end:.3f} s"
            )
        timeline = part
    if rids:
        known = {story.rid for story in timeline.requests}
        for each in rids:
            if each not in known:
                raise ConfigError(f"there is no request {each!r} among the {len(known):,} of this log")
        timeline = timeline.only(set(rids))
    return timeline


def _write(timeline: Timeline, origin: Origin, output_format: Format, file: BinaryIO) -> None:
    if output_format is Format.PERFETTO:
        write_trace_events(timeline, file, model=origin.model)
    else:
        file.write(render_page(timeline, origin).encode())
