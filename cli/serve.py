"""`engine serve`: checks the settings and the machine, prepares the model and runs the supervisor.

Standard output carries the ready message (and `--print-config`), standard error the log.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from ..launch.startup_display import StartupDisplay, report_ready
from ..models.spec.encoder_spec import PoolingSpec
from ..runtime.config.config_fields import config_fields
from ..runtime.config.config_sources import MergedConfig
from ..runtime.config.engine_config import EngineConfig
from ..runtime.config.environment import doubtful_variables
from ..runtime.config.presets import PRESETS, preset_origin, preset_reasons
from ..runtime.text import counted
from .options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    ModelArgument,
    PrintConfigOption,
    merge_options,
    takes_config_options,
)
from .preflight import check_start

if TYPE_CHECKING:
    from ..supervisor.standby import Standby
    from ..tokenizer_manager.http.port import LoadingPort

logger = logging.getLogger(__name__)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_STARTED_S: Final = time.monotonic()  # of this import; the interpreter has run for 0.1 s by then
_TITLE: Final = "engine: supervisor"
_QUESTION: Final = "Why is the sky blue?"
_DOCUMENTS: Final = ("Air scatters blue light.", "Cats sleep a lot.")


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_config_options()
def serve(
    context: typer.Context,
    model_argument: ModelArgument = None,
    config_file: ConfigFileOption = None,
    print_config: PrintConfigOption = False,
    *,
    settings: FlagValues,
) -> int:
    """Serve a model over HTTP, compatible with the OpenAI API.

    MODEL is a folder in Hugging Face layout, a .gguf file, a name such as org/repo or org/repo:Q4_K_M, or 'default'
    (SmolLM2-135M-Instruct). A model that is not on this machine is downloaded. Settings given as "auto" are computed
    for this machine; --print-config shows how.

    Example: engine serve ./my-model --port 8000 --max-model-len 4096
    """
    merged = merge_options(settings, config_file=config_file, model=model_argument)
    if print_config:
        from ..launch.resolve.prepare import prepare
        from .print_config import render_config

        with StartupDisplay() as display:
            prepared = prepare(merged, on_step=display.step, on_download=display.download)
        for sentence in doubtful_variables():
            typer.echo(f"engine: {sentence}", err=True)
        typer.echo(render_config(prepared.config, merged, prepared.notes, prepared.sampling_defaults))
        return 0
    check_start(merged.config)
    parallel, standby = merged.config.parallel, context.obj
    if standby is not None and (parallel.node_rank > 0 or parallel.executor == "ray"):
        standby.close()  # other processes are needed, or another environment
    if parallel.node_rank > 0:
        return _run_node(merged)
    if line := preset_line(merged):
        typer.echo(line, err=True)
    return _run(merged, standby)


def _run(merged: MergedConfig, standby: Standby | None) -> int:
    from ..tokenizer_manager.http.port import LoadingPort

    with closing(LoadingPort(merged.config.server)) as port:  # first: the imports take a second
        return _run_behind(port, merged, standby)


def _run_behind(port: LoadingPort, merged: MergedConfig, standby: Standby | None) -> int:
    import setproctitle

    from ..launch.child.crash_report import CrashReports
    from ..launch.resolve.prepare import log_config, prepare
    from ..model_runner.kernels.cpu.build import compile_ahead
    from ..runtime.logs import configure_logging
    from ..supervisor.supervisor import EngineReady, Supervisor
    from .doctor.command import warn_at_start

    configure_logging(merged.config.log, "supervisor")
    for sentence in doubtful_variables():
        logger.warning("%s", sentence)
    setproctitle.setproctitle(_TITLE)  # instead of the command line, which may contain a key
    host = warn_at_start(merged.config)
    with StartupDisplay() as display:
        prepared = prepare(merged, on_step=display.step, on_download=display.download, host=host)
        compile_ahead(prepared.config.model.device, display.step)
    log_config(prepared, merged.origins)

    def on_ready(ready: EngineReady) -> None:
        setproctitle.setproctitle(f"{_TITLE} {ready.url}")
        typer.echo(ready_text(prepared.config, ready.url, prepared.spec.pooling))
        report_ready(f"{prepared.config.model.served_model_name} at {ready.url}")

    with ExitStack() as stack:
        config, make_nodes = prepared.config, None
        if config.parallel.executor == "ray":
            from ..supervisor.ray.executor import ray_machines

            machines = stack.enter_context(ray_machines(config))
            config, make_nodes = machines.config, machines.connect
        supervisor = Supervisor(
            config,
            prepared.source,
            prepared.spec,
            on_ready,
            make_nodes=make_nodes,
            crash_reports=CrashReports(config, _decision_lines),
            started_requests=_started_requests,
            adapters=prepared.adapters,
            listener_fd=port.listener.fileno(),
            before_serving=port.close,
            standby=standby,
        )
        outcome = supervisor.run()
        logger.info("stopped exit_code=%d after_s=%.1f", outcome.exit_code, time.monotonic() - _STARTED_S)
        if outcome.exit_code != 0:
            typer.echo(f"engine: {outcome.message}", err=True)
    return outcome.exit_code


def _decision_lines(folder: Path) -> list[str]:
    from ..scheduler.journal.flight_recorder import decision_lines

    return decision_lines(folder)


def _started_requests(folder: Path) -> set[str] | None:
    from ..scheduler.journal.flight_recorder import started_requests

    return started_requests(folder)


def _run_node(merged: MergedConfig) -> int:
    """The ranks of a machine other than 0."""
    import setproctitle

    from ..launch.child.crash_report import CrashReports
    from ..launch.resolve.prepare import prepare
    from ..model_runner.kernels.cpu.build import compile_ahead
    from ..runtime.logs import configure_logging
    from ..supervisor.node_supervisor import NodeSupervisor

    configure_logging(merged.config.log, "supervisor")
    setproctitle.setproctitle(_TITLE)
    with StartupDisplay() as display:
        prepared = prepare(merged, on_step=display.step, on_download=display.download)
        compile_ahead(prepared.config.model.device, display.step)
    reports = CrashReports(prepared.config, _decision_lines)
    outcome = NodeSupervisor(prepared.config, prepared.source, prepared.spec, crash_reports=reports).run()
    if outcome.exit_code != 0:
        typer.echo(f"engine: {outcome.message}", err=True)
    return outcome.exit_code


def preset_line(merged: MergedConfig) -> str:
    """The flags that the preset stands for: `preset chat: --schedule-policy fcfs ...`; "" without one."""
    preset = merged.config.scheduler.preset
    if preset is None:
        return ""
    flags = (
        f"{config_fields()[name].flag} {PRESETS[preset][name].value}"
        for name in preset_reasons(preset, merged.origins)
    )
    return f"{preset_origin(preset)}: {' '.join(flags)}"


def address_to_open(url: str) -> str:
    """The URL of a server for a client on this machine: a wildcard address is none that can be opened."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def ready_text(config: EngineConfig, url: str, pooling: PoolingSpec | None = None) -> str:
    """The ready message: an address that can be opened, the capacity, the page and an example request.

    `pooling`: of the model; None for one that generates text.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    name = str(model.served_model_name)
    path, fields, page = _example(pooling)
    body = json.dumps({"model": name, **fields}, ensure_ascii=False)
    key = ' -H "Authorization: Bearer $ENGINE_API_KEY"' if config.server.needs_key else ""
    here = address_to_open(url)
    where = (
        f"{model.device}, {counted(model.num_threads, 'thread')}"
        if model.device == "cpu"
        else str(model.device)
    )
    each = f"{config.parallel.dp} replicas, each: " if config.parallel.dp > 1 else ""
    length = counted(model.max_model_len, "token")
    context = (
        f"context {length}, KV pool {counted(cache.max_total_tokens, 'token')}"
        if pooling is None
        else f"texts of at most {length}"
    )
    return "\n".join(
        [
            "",
            f"Ready after {time.monotonic() - _STARTED_S:.1f} s: {name} at {here}",
            *([f"  Listens on every address of this machine ({url})."] if here != url else []),
            *([f"  {_does(pooling)}"] if pooling is not None else []),
            f"  {each}{model.dtype} on {where}; {context}, "
            f"{counted(scheduler.max_running_requests, 'request')} at once",
            *([f"  In a browser, {here}/ {page}."] if config.server.page else []),
            "  Try:",
            f"  curl {here}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
            "  Stop with Ctrl-C.",
            "",
        ]
    )


def _example(pooling: PoolingSpec | None) -> tuple[str, dict[str, Any], str]:
    """The path and the fields of an example request, and what the page is."""
    if pooling is None:
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": _QUESTION}]}
        return "/v1/chat/completions", fields, "is a chat, with settings and live requests"
    compares = "compares texts, and shows live requests"
    if pooling.task == "embed":
        return "/v1/embeddings", {"input": list(_DOCUMENTS)}, compares
    if pooling.size > 1:
        return "/v1/score", {"text_1": _QUESTION, "text_2": list(_DOCUMENTS)}, "shows live requests"
    return "/v1/rerank", {"query": _QUESTION, "documents": list(_DOCUMENTS)}, compares


def _does(pooling: PoolingSpec) -> str:
    """One line about the kind of output of the model."""
    if pooling.task == "embed":
        ending = ", of length 1" if pooling.normalize else ""
        return f"It makes vectors of {counted(pooling.size, 'number')} ({pooling.pooling} pooling{ending})."
    if pooling.size > 1:
        return f"It gives texts {counted(pooling.size, 'score')}."
    return "It scores how relevant a document is to a query."
