"""One benchmark run from settings to printed tables and result file; serve and offline differ only in their target."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...runtime.errors import ConfigError, EngineError
from .load import LoadRun, Target, run_load
from .openai_target import OpenAITarget, RequestOptions, check_ready, flush_cache
from .records import BenchRequest, RequestRecord
from .result_file import RequestRow, Run, git_revision, machine_facts, write_results
from .summary import parse_goodput, summarise
from .tables import print_summary
from .workload import DatasetName, WorkloadSettings, WorkloadTokenizer


def _server(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Server", **more)


def _sampling(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Sampling")


def _output(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Which server is measured, and how it is asked."""

    url: Annotated[str, _server("Server to measure.", "--url", "--base-url")] = "http://127.0.0.1:30000"
    model: Annotated[str | None, _server("Model to ask for (default: the first that the server lists).")] = (
        None
    )
    endpoint: Annotated[
        Literal["completions", "chat"], _server("Endpoint to call; chat takes text prompts (sharegpt) only.")
    ] = "completions"
    tokenizer: Annotated[
        str, _server("Model whose tokenizer makes the prompts: folder, .gguf file or name.")
    ] = "default"
    api_key: Annotated[str | None, _server("Bearer token.", envvar="ENGINE_API_KEY")] = None
    stream: Annotated[bool, _server("Stream the answers; without, there are no token times.")] = True
    timeout: Annotated[float, _server("Seconds that one request may take.")] = 3600.0
    ready_check_timeout_sec: Annotated[float, _server("Seconds to wait for the server.")] = 10.0
    flush_cache: Annotated[
        bool, _server("Empty the server's prefix cache before the run.", "--flush-cache")
    ] = False

    @property
    def base_url(self) -> str:
        """The URL without the path that people paste along."""
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are chosen."""

    ignore_eos: Annotated[bool, _sampling("Generate the full output length, whatever the model says.")] = True
    temperature: Annotated[float, _sampling("0 is greedy.")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """What becomes of the figures."""

    goodput: Annotated[str | None, _output("Limits in milliseconds: 'ttft:500 tpot:50 e2el:9000'.")] = None
    output_file: Annotated[Path | None, _output("Write the run to this JSON file.")] = None
    append: Annotated[bool, _output("Add the run to those in --output-file.", "--append")] = False
    details: Annotated[bool, _output("Write the arrival of every token, too.", "--details")] = False

    def check(self) -> None:
        """Fail before the run, not after it.

        Raises:
            ConfigError: a bad goodput, or a folder that does not exist.
        """
        parse_goodput(self.goodput)
        if self.output_file is not None and not self.output_file.parent.is_dir():
            raise ConfigError(
                f"--output-file {self.output_file}: the folder {self.output_file.parent} does not exist"
            )


def run_serve(
    server: ServerSettings, sampling: SamplingSettings, workload: WorkloadSettings, output: OutputSettings
) -> bool:
    """Measure a server; returns whether every request succeeded.

    Raises:
        ConfigError: a bad setting.
        EngineError: no server is there.
    """
    workload.check()
    output.check()
    if server.endpoint == "chat" and workload.dataset_name is not DatasetName.SHAREGPT:
        raise ConfigError(
            "--endpoint chat needs text prompts: use --dataset-name sharegpt, or --endpoint completions"
        )
    tokenizer = WorkloadTokenizer(server.tokenizer)
    return asyncio.run(_measure_server(server, sampling, workload, output, tokenizer))


async def _measure_server(
    server: ServerSettings,
    sampling: SamplingSettings,
    workload: WorkloadSettings,
    output: OutputSettings,
    tokenizer: WorkloadTokenizer,
) -> bool:
    served_model = await check_ready(server.base_url, server.api_key, server.ready_check_timeout_sec)
    options = RequestOptions(
        model=server.model or served_model,
        endpoint=server.endpoint,
        temperature=sampling.temperature,
        ignore_eos=sampling.ignore_eos,
        stream=server.stream,
        seed=workload.seed,
    )
    facts = await _server_info(server)
    warmup = [] if server.endpoint == "chat" else workload.warmup(tokenizer)

    async def before_run() -> None:
        if server.flush_cache:
            await flush_cache(server.base_url, server.api_key)

    target = OpenAITarget(server.base_url, server.api_key, options, server.timeout)
    run = await measure(target, workload.requests(tokenizer), warmup, workload, before_run=before_run)
    client = {**_settings(server), **_settings(sampling), **_settings(workload), "model": options.model}
    return report(run, "serve", f"{options.model} at {server.base_url}", client, facts, output)


async def measure(
    target_context: AbstractAsyncContextManager[Target],
    requests: Sequence[BenchRequest],
    warmup: Sequence[BenchRequest],
    workload: WorkloadSettings,
    before_run: Any = None,
) -> LoadRun:
    """Warm up within the concurrency limit, then run the workload with a progress bar.

    Raises:
        EngineError: a warm-up request failed; the run would only repeat it many times.
    """
    async with target_context as target:
        warm = await run_load(target, warmup, [0.0] * len(warmup), workload.max_concurrency, lambda _: None)
        for record in warm.records:
            if not record.ok:
                raise EngineError(f"the warm-up request failed: {record.error}")
        if before_run is not None:
            await before_run()
        with _progress() as progress:
            bar = progress.add_task("requests", total=len(requests), status="")
            tokens, failed = 0, 0

            def on_progress(record: RequestRecord) -> None:
                nonlocal tokens, failed
                tokens += record.output_tokens
                failed += not record.ok
                rate = tokens / max(progress.tasks[0].elapsed or 0.0, 1e-3)
                status = f"{rate:,.0f} tok/s" + (f", {failed} failed" if failed else "")
                progress.update(bar, advance=1, status=status)

            return await run_load(
                target, requests, workload.offsets_s(requests), workload.max_concurrency, on_progress
            )


def report(
    run: LoadRun,
    kind: Literal["serve", "offline"],
    title: str,
    client: dict[str, Any],
    server: dict[str, Any] | None,
    output: OutputSettings,
) -> bool:
    """Print the figures and write the result file; returns whether every request succeeded."""
    summary = summarise(run, parse_goodput(output.goodput))
    print_summary(Console(), summary, title)
    if output.output_file is not None:
        rows = [RequestRow.of(record, run.start_s, output.details) for record in run.records]
        result = Run(
            kind=kind,
            started_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            client={**client, "goodput": output.goodput},
            server=server,
            machine=machine_facts(),
            git_revision=git_revision(),
            summary=summary,
            requests=rows,
        )
        write_results(output.output_file, result, output.append)
    return summary.failed == 0


async def _server_info(server: ServerSettings) -> dict[str, Any] | None:
    """What the server says of its configuration; None where it has no such endpoint."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(f"{server.base_url}/server_info") as response,
        ):
            return await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


def _settings(group: Any) -> dict[str, Any]:
    """A group of settings as plain values, without secrets and infinities that JSON cannot carry."""
    values = dataclasses.asdict(group)
    values.pop("api_key", None)
    return {key: str(value) if isinstance(value, Path | float) else value for key, value in values.items()}


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=Console(stderr=True),
        transient=True,
    )
