"""`engine route`: one address for several servers of the same model.

It checks the workers and becomes the router smg: signals reach it, and its output is the command's.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from ...runtime.config.server_config import ServerConfig
from ...runtime.counted import counted
from ...runtime.errors import ConfigError
from ...runtime.unicode_text import variable
from ..options import CONTEXT_SETTINGS, GroupedCommand
from ..port import check_address
from .smg import RouterAddress, find_smg, smg_command
from .workers import WorkerProbe, check_together, parse_workers

DEFAULT_METRICS_PORT: Final = 29_000
_SERVER: Final = ServerConfig()
_PREFILL: Final = "--prefill"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Policy(enum.StrEnum):
    """How the router chooses a worker."""

    CACHE_AWARE = "cache_aware"
    LEAST_LOAD = "least_load"
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    CONSISTENT_HASHING = "consistent_hashing"
    PREFIX_HASH = "prefix_hash"


class RouteCommand(GroupedCommand):
    """Takes `--prefill URL PORT`, where an option of typer takes one value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with URL and port in one value."""
        return super().parse_args(ctx, joined(args))


def joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--prefill URL PORT` as `--prefill 'URL PORT'`."""
    result: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        result.append(argument)
        if argument == "--":
            break
        if argument == _PREFILL and rest:
            result.append(rest.pop(0))
        elif not argument.startswith(f"{_PREFILL}="):
            continue
        if rest and (rest[0].isdigit() or rest[0] == "none"):
            result[-1] += f" {rest.pop(0)}"
    return result + rest


@app.command(cls=RouteCommand, context_settings=CONTEXT_SETTINGS)
def route(
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", metavar="URL", help="A server of the model; once for each."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            _PREFILL,
            metavar="URL PORT",
            help="A server that computes prompts only, and its bootstrap port; once for each.",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option("--decode", metavar="URL", help="A server that only continues them; once for each."),
    ] = None,
    policy: Annotated[
        Policy, typer.Option("--policy", help="How a worker is chosen; cache_aware: by common prefixes.")
    ] = Policy.CACHE_AWARE,
    host: Annotated[str, typer.Option("--host", metavar="TEXT", help="Address to listen on.")] = _SERVER.host,
    port: Annotated[int, typer.Option("--port", metavar="INT", help="Port to listen on.")] = _SERVER.port,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", metavar="INT", help="Port of the router's Prometheus metrics.")
    ] = DEFAULT_METRICS_PORT,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="TEXT",
            help="API key of the workers, which clients of the router need as well (or set ENGINE_API_KEY).",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="NUMBER", help="Seconds to wait until all workers are ready."),
    ] = 600.0,
    smg_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENT",
            help="After --: options of smg, which replace ours; `smg launch --help` lists them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Route requests to several servers of one model: a prompt goes to the worker that has its prefix in the cache.

    Waits until the workers are ready, checks that they serve the same model, and becomes the router smg, with short
    health intervals and on loopback. `pip install '.[route]'` in the repository installs it.

    Example: engine route --worker http://127.0.0.1:30001 --worker http://127.0.0.1:30002
    """
    more = list(smg_options or ())
    if more and not more[0].startswith("-"):
        raise ConfigError(
            f"the argument {more[0]!r} is no option; name a server by --worker URL, and put options of smg after --"
        )
    if not 0 <= timeout < float("inf"):
        raise ConfigError(f"--timeout is {timeout:g}, but it must be 0 seconds or more")
    workers = parse_workers(worker or (), prefill or (), decode or ())
    address = RouterAddress(host, port, metrics_port)
    _check_address(address)
    smg = find_smg()
    key = api_key or variable("ENGINE_API_KEY")
    with WorkerProbe(key, timeout_s=timeout, say=_say) as probe:
        facts = [probe.wait(each) for each in workers]
    for note in check_together(workers, facts):
        _say(note)
    command = smg_command(
        smg,
        workers,
        address,
        policy=policy.value,
        tokenizer_path=facts[0].tokenizer_path,
        api_key=key,
        more=more,
    )
    _say(
        f"routing http://{host}:{port} to {counted(len(workers), 'worker')} of {facts[0].model}, {policy.value}"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # smg's own handler takes SIGINT; Python's, which an ignored signal keeps away, would add a traceback at its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execv(smg, command)


def _check_address(address: RouterAddress) -> None:
    for option, port in (("--port", address.port), ("--metrics-port", address.metrics_port)):
        if not 0 < port <= 65_535:
            raise ConfigError(f"{option} is {port}, but it must lie in [1, 65535]")
        check_address(address.host, port, option=option)
    if address.port == address.metrics_port:
        raise ConfigError(f"--port and --metrics-port are both {address.port}; use two ports")


def _say(line: str) -> None:
    typer.echo(f"engine: {line}", err=True)
