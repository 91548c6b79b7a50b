"""`engine ps`: the servers that run on this machine."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from ..options import CONTEXT_SETTINGS, GroupedCommand

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List this user's servers on this machine: model, address, process id, memory, uptime.

    MEMORY is host memory of all processes of the server, shared pages counted once (PSS). What a killed server has left
    is removed.
    """
    from ...launch.child.process_resources import tree_bytes
    from ...launch.child.socket_dir import running_servers
    from ...launch.startup_display import size_text
    from ..console import print_table

    now_s = time.time()
    rows = [(server, tree_bytes(server.pid)) for server in running_servers()]
    if as_json:
        found = [
            {
                "model": server.model,
                "url": server.url or None,
                "pid": server.pid,
                "memory_bytes": memory,
                "uptime_s": round(now_s - server.started_s, 1),
                "path": server.path,
            }
            for server, memory in rows
        ]
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    if not rows:
        typer.echo("No server runs; `engine serve` starts one.")
        return 0
    print_table(
        ("MODEL", "ADDRESS", "PID", "MEMORY", "UPTIME"),
        [
            (
                server.model,
                server.url or "starting",
                str(server.pid),
                size_text(memory),
                uptime_text(now_s - server.started_s),
            )
            for server, memory in rows
        ],
    )
    return 0


def uptime_text(seconds: float) -> str:
    """`42 s`, `3:07`, `2:03:09`, `5 d 2:03:09`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    days, rest = divmod(whole, 86_400)
    hours, minutes, left = rest // 3600, rest // 60 % 60, rest % 60
    clock = f"{hours}:{minutes:02}:{left:02}" if days or hours else f"{minutes}:{left:02}"
    return f"{days} d {clock}" if days else clock
