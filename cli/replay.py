"""`engine replay FILE`: repeats every decision of a logged run, or reports what other settings would change."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ..runtime.config.config_fields import AUTO, find_setting
from ..runtime.errors import ConfigError, EngineError
from ..runtime.text import counted
from .console import OnProgress, late_progress, output_console
from .exit_codes import ExitCode
from .options import CONTEXT_SETTINGS, GroupedCommand

if TYPE_CHECKING:
    from ..scheduler.journal.log_file import Header
    from ..scheduler.journal.replay import Difference, Replay

_GROUPS: Final = ("scheduler", "cache")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Written by `engine serve --decision-log FILE`.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Run with another value of a setting: --set schedule_policy=lpm. May be repeated.",
        ),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="With --set: a file for the result as a page of pictures, without network.",
        ),
    ] = None,
    run: Annotated[
        int | None,
        typer.Option(
            "--run",
            metavar="N",
            help="Number of the run, from 1, if the file has several  [default: all; with --set the last with results]",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Replay a decision log and compare every decision.

    The same scheduler gets the same messages at the same times, without a model. The exit code is 1 if a decision
    differs, and 4 if none differs but a damaged part of the file could not be compared. With --set the workload of the
    log runs again with other settings and a model of its step times, and the changes in latency and throughput are
    printed.
    """
    if changes:
        return _what_if(file, parse_changes(changes), html_file, run)
    if html_file is not None:
        raise ConfigError("--html shows what other settings change; name one with --set, or leave --html out")
    return _replay_all(file, run)


def parse_changes(changes: list[str]) -> dict[str, str]:
    """The settings that `--set` names, by field name, with values that their fields accept.

    Raises:
        ConfigError: an unknown setting, one that is not the scheduler's, or an invalid value.
    """
    parsed: dict[str, str] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"--set is {change!r}, but it must look like schedule_policy=lpm")
        setting = find_setting(key.strip())
        field = setting.field
        if field.group not in _GROUPS:
            raise ConfigError(
                f"--set {setting.name}: the scheduler does not use it; the settings that can be changed are under "
                "'KV cache' and 'Scheduling' of `engine serve --help`"
            )
        value = setting.check(text.strip())
        if value == AUTO:
            raise ConfigError(f"--set {setting.name}: 'auto' depends on the machine; name a value")
        parsed[field.name] = str(value)
    return parsed


def _replay_all(path: Path, chosen: int | None) -> int:
    from rich.console import Console

    from ..scheduler.journal.log_file import choose_runs, log_bytes
    from ..scheduler.journal.replay import replay as replay_run

    console = Console(highlight=False, soft_wrap=True)
    all_equal = True
    damages: list[str] = []
    size = log_bytes(path)
    # A choice leaves the other runs out, also those that are lost.
    for number, run, is_chosen in choose_runs(path, chosen, damages.append if chosen is None else None):
        if not is_chosen:
            continue
        _print_header(console, number, run.header)
        started_s = time.perf_counter()
        with late_progress() as progress:
            run.on_read = partial(progress, "replaying", total=size)
            result = replay_run(run)
        seconds = time.perf_counter() - started_s
        if run.damage:
            damages.append(run.damage)
        _print_result(console, result, seconds, is_whole=not run.damage)
        all_equal = all_equal and result.is_equal
    for damage in damages:
        console.print(f"note: {damage}", style="yellow", markup=False)
    if not all_equal:
        return ExitCode.FAILED
    return ExitCode.NOT_FOUND if damages else 0


def _print_header(console: Any, number: int, header: Header) -> None:
    from ..runtime.installation import __version__

    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.wall_s))
    settings = header.scheduler_config()  # settings added after the run have their defaults
    console.print(
        f"run {number}, {started}: engine {header.engine_version}, model {header.model}, "
        f"{counted(header.capacity.num_pages, 'page', commas=True)} of {header.capacity.page_size}, "
        f"policy {settings.schedule_policy}, chunks of {settings.chunked_prefill_size}, {settings.phases} steps",
        markup=False,
    )
    if header.engine_version != __version__:
        console.print(
            f"note: this is engine {__version__}; differences may come from the version",
            style="yellow",
            markup=False,
        )


def _print_result(console: Any, result: Replay, seconds: float, *, is_whole: bool) -> None:
    share = result.num_equal / result.num_passes if result.num_passes else 1.0
    # Never 100 % by rounding.
    percent = "100 %" if result.is_equal else f"{min(share * 100, 99.99):.2f} %"
    if not is_whole:
        percent += " of what could be read"
    console.print(
        f"  {counted(result.num_passes, 'pass', 'passes', commas=True)}, {result.num_equal:,} equal ({percent}), "
        f"digest {result.digest}; {counted(result.num_requests, 'request', commas=True)}, "
        f"{counted(result.num_steps, 'step', commas=True)} in {result.span_s:,.1f} s, "
        f"replayed in {seconds:.2f} s",
        style="red" if not result.is_equal else "green" if is_whole else "yellow",
        markup=False,
    )
    if result.difference is not None:
        _print_difference(console, result.difference)
    elif result.raised:
        console.print(f"  the run ended in an error, and so did the replay: {result.raised}", markup=False)


def _print_difference(console: Any, difference: Difference) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(
        f"  first difference after {counted(difference.num_passes_before, 'equal pass', 'equal passes', commas=True)}, "
        f"at {difference.now_s:.6f} s: {difference.what}",
        markup=False,
    )
    if not difference.fields:
        return
    table = Table()
    for column in ("field", "logged", "replayed"):
        table.add_column(column)
    for field in difference.fields:
        table.add_row(*(Text(cell) for cell in field))
    console.print(table, soft_wrap=False)


def _what_if(path: Path, changes: dict[str, str], html_file: Path | None, chosen: int | None) -> int:
    from ..simulator.what_if import what_if
    from .report_page import check_writable
    from .simulate.tables import page_of

    if html_file is not None:
        check_writable(html_file)
    with late_progress() as progress:
        number, num_runs = _exact_run(path, chosen, progress)
        found = what_if(path, changes, number=number, on_progress=progress)
    console = output_console()
    console.print(found)
    if num_runs > 1:
        console.print(f"of run {number} of {num_runs} (--run N chooses)")
    if html_file is not None:
        title = "what if " + ", ".join(f"{name}={value}" for name, value in changes.items())
        page_of(title, [found.recorded, found.baseline, found.changed], found.lines()).write(html_file)
    return 0


def _exact_run(path: Path, chosen: int | None, progress: OnProgress) -> tuple[int, int]:
    """The number of the run to simulate, and the number of runs: the chosen one, or the last that has a step.

    Raises:
        EngineError: the replay of that run differs, so the log does not show which request each token belongs to.
    """
    from ..scheduler.journal.log_file import choose_runs, log_bytes
    from ..scheduler.journal.replay import replay as replay_run

    size = log_bytes(path)
    result: Replay | None = None
    number = num_runs = 1
    for num_runs, run, is_chosen in choose_runs(path, chosen):
        if is_chosen:
            run.on_read = partial(progress, "replaying", total=size)
            each = replay_run(run)
            if result is None or each.num_steps:
                number, result = num_runs, each
    assert result is not None, "a decision log has a run"
    another = "; --run N chooses another" if num_runs > 1 else ""
    if result.difference is not None:
        raise EngineError(
            f"--set needs a log that this engine replays exactly; run {number} differs after "
            f"{result.num_equal:,} of {counted(result.num_passes, 'pass', 'passes', commas=True)}: "
            f"`engine replay {path}` shows where{another}"
        )
    if result.raised:
        raise EngineError(f"--set needs a run without a bug; run {number} ends in {result.raised}{another}")
    return number, num_runs
