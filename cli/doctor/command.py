"""`engine doctor [MODEL]`: whether the model can be served here, one verdict and one fix per line.

It takes the options of `engine serve`, and checks whether that command would work. It starts nothing and
downloads nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from ...launch.resolve.host_facts import HostFacts
from ...launch.startup_display import StartupDisplay, shows_live
from ...runtime.config.config_sources import DEFAULT_ORIGIN, MergedConfig
from ...runtime.config.engine_config import EngineConfig
from ..exit_codes import ExitCode, ends_at_interrupt
from ..options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    ModelArgument,
    merge_options,
    takes_config_options,
)
from .check import Check, CheckStatus, will_serve

logger = logging.getLogger(__name__)

_STYLES: Final = {
    CheckStatus.OK: "green",
    CheckStatus.WARN: "yellow",
    CheckStatus.FAIL: "bold red",
    CheckStatus.SKIP: "dim",
}
_CODE_COLUMNS: Final = 10

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_config_options()
def doctor(
    model_argument: ModelArgument = None,
    config_file: ConfigFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums/--no-checksums", help="Read the weights and compare them with known checksums."
        ),
    ] = True,
    schema: Annotated[
        Path | None,
        typer.Option(help="Check a JSON Schema for answers instead: what of it is enforced.", metavar="FILE"),
    ] = None,
    *,
    settings: FlagValues,
) -> int:
    """Check whether a model can be served here, and print what to fix.

    Takes the options of `engine serve` and checks that command; starts and downloads nothing. With `--kv-disk` or
    `--kv-store` it measures that disk or server for 2 s. The exit code is 1 if a check fails, otherwise 0.

    With `--schema` it reports what is enforced of a JSON Schema, keyword by keyword; the exit code is 1 if the schema
    cannot be used. `--strict` refuses what cannot be enforced.

    Example: engine doctor ./my-model --port 8000
    """
    merged = merge_options(settings, config_file=config_file, model=model_argument)
    if schema is not None:
        return _check_schema(schema, merged.config, as_json=as_json)
    checks: list[Check] = []
    with StartupDisplay(quiet=as_json) as display, ends_at_interrupt():
        for check in examine(merged, with_checksums=checksums, display=display):
            checks.append(check)
            if not (as_json or shows_live()):  # no spinner shows that it works
                print_check(check)
    if as_json:
        typer.echo(json_text(checks))
    else:
        if shows_live():
            for check in checks:
                print_check(check)
        typer.echo(summary(checks))
    return 0 if will_serve(checks) else ExitCode.FAILED


def _check_schema(path: Path, config: EngineConfig, *, as_json: bool) -> int:
    from . import schema

    body = schema.check_schema_file(path, config)
    for line in [schema.json_text(body)] if as_json else schema.lines(body):
        typer.echo(line)
    return 0 if body.ok else ExitCode.FAILED


def examine(merged: MergedConfig, *, with_checksums: bool, display: StartupDisplay) -> Iterator[Check]:
    """Gather the facts, and run the checks."""
    config = merged.config
    from .compute import check_compute, gather_torch, uses_gpu
    from .disk import check_disk, check_kv_store
    from .machine import check_machine
    from .machine_facts import gather_machine
    from .model import check_images, check_model, kept_in_blocks
    from .model_facts import gather_model

    display.step("machine")
    machine = gather_machine(config.server)
    yield from check_machine(machine, config, port_given=merged.origins["port"] != DEFAULT_ORIGIN)
    display.step("torch and kernels, in a separate process")
    torch = gather_torch()
    yield from check_compute(torch, machine.host, config)
    model = gather_model(
        config.model,
        with_torch=not torch.error,
        with_checksums=with_checksums,
        in_blocks=lambda spec: kept_in_blocks(spec, config, machine.host),
        on_step=display.step,
    )
    kv_token_bytes = 0
    for check in check_model(model, config, machine.host):
        yield check
        kv_token_bytes = check.details.get("kv_token_bytes", kv_token_bytes)
    if model.spec is not None and model.spec.vision is not None:
        flops = 0.0 if uses_gpu(machine.host, config) else torch.product_flops
        yield check_images(model.spec, config, machine.host, flops)
    if config.cache.kv_disk is not None:
        display.step("disk")
        limit_bytes = int(config.cache.kv_disk_size * (1 << 30))
        yield check_disk(Path(config.cache.kv_disk).expanduser(), limit_bytes, kv_token_bytes)
    if config.cache.kv_store is not None:
        display.step("store")
        yield check_kv_store(config.cache, kv_token_bytes)


def json_text(checks: Sequence[Check]) -> str:
    """For programs: `{"will_serve": true, "checks": [{"code": ..., "verdict": ..., ...}]}`."""
    return json.dumps(
        {"will_serve": will_serve(checks), "checks": [check._asdict() for check in checks]},
        indent=2,
        ensure_ascii=False,
    )


def print_check(check: Check) -> None:
    """One line; colors on a terminal."""
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(
        (f"{check.verdict.value:<5}", _STYLES[check.verdict]), f"{check.code:<{_CODE_COLUMNS}} {check.text}"
    )
    if check.fix:
        line.append(f" -> {check.fix}", style="bold")
    Console(highlight=False, soft_wrap=True).print(line)
    sys.stdout.flush()


def summary(checks: Sequence[Check]) -> str:
    """The overall verdict."""
    failed = [check.code for check in checks if check.verdict is CheckStatus.FAIL]
    warned = [check.code for check in checks if check.verdict is CheckStatus.WARN]
    if failed:
        return f"It will not serve: {', '.join(failed)}."
    return f"It will serve, but see {', '.join(warned)}." if warned else "It will serve."


def warn_at_start(config: EngineConfig) -> HostFacts:
    """Run the checks of a start of `engine serve`, which take milliseconds; each that is not OK is logged as a warning.

    Returns:
        the facts about the machine, so that the caller need not gather them again.
    """
    from .machine import check_at_start
    from .machine_facts import gather_machine

    facts = gather_machine(config.server, at_start=True)
    for check in check_at_start(facts, config):
        if not check.is_well:
            logger.warning("check=%s %s -> %s", check.code, check.text, check.fix)
    return facts.host
