"""`engine list`: the models on this machine."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ..options import CONTEXT_SETTINGS, GroupedCommand

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("list", cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the models on this machine: name, quantization or precision, size, commit, last use.

    Models that other tools have put into the hub's cache are listed, too. `incomplete`: a start downloads the rest.
    """
    from ...launch.startup_display import size_text
    from ...models.local_models import ago, local_models, unfinished_bytes
    from ..console import print_table

    models = local_models()
    if as_json:
        rows = [
            {
                "name": model.name,
                "quantization": model.quantization or None,
                "size_bytes": model.size_bytes,
                "commit": model.commit or None,
                "last_used": model.last_used_s or None,
                "path": str(model.path),
                "complete": model.complete,
            }
            for model in models
        ]
        json.dump(rows, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    if not models:
        typer.echo("There are no models on this machine; `engine pull smollm2` downloads a small one.")
    else:
        print_table(
            ("NAME", "WEIGHTS", "SIZE", "COMMIT", "LAST USED"),
            [
                (
                    model.name,
                    model.quantization if model.complete else "incomplete",
                    size_text(model.size_bytes),
                    model.commit[:12],
                    ago(model.last_used_s),
                )
                for model in models
            ],
        )
    if unfinished := unfinished_bytes():
        hint = "`engine pull NAME` downloads the rest, `engine rm NAME` frees them"
        typer.echo(f"Interrupted downloads hold {size_text(unfinished)}; {hint}.", err=True)
    return 0
