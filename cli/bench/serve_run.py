"""`bench serve`: the settings that name a server, and a run against it."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import typer

from ...runtime.errors import ConfigError, ServerError
from ...runtime.unicode_text import variable
from .openai_target import OpenAITarget, RequestOptions, check_ready, flush_cache
from .records import BenchRequest
from .runs import OutputSettings, SamplingSettings, measure, plain_settings, report
from .structured import StructuredOutput
from .workload import DatasetName, WorkloadSettings, WorkloadTokenizer


def _server(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Server", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Which server is measured, and how requests are sent."""

    url: Annotated[str, _server("Server to measure.", "--url", "--base-url")] = "http://127.0.0.1:30000"
    model: Annotated[str | None, _server("Model to ask for (default: the first that the server lists).")] = (
        None
    )
    endpoint: Annotated[
        Literal["completions", "chat"], _server("Endpoint to call; chat takes text prompts (sharegpt) only.")
    ] = "completions"
    tokenizer: Annotated[
        str, _server("Model with the tokenizer of the prompts: folder, .gguf file or name.")
    ] = "default"
    api_key: Annotated[str | None, _server("API key of the server (or set ENGINE_API_KEY).")] = None
    stream: Annotated[bool, _server("Stream the responses; without streaming there are no token times.")] = (
        True
    )
    timeout: Annotated[float, _server("Seconds that one request may take.")] = 3600.0
    ready_check_timeout_sec: Annotated[float, _server("Seconds to wait for the server.")] = 10.0
    flush_cache: Annotated[
        bool, _server("Empty the server's prefix cache before the run.", "--flush-cache")
    ] = False
    structured: Annotated[
        Path | None,
        _server("Ask for answers that match the JSON Schema in this file, and count those that do."),
    ] = None

    @property
    def base_url(self) -> str:
        """The URL without a trailing `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")


def run_serve(
    server: ServerSettings, sampling: SamplingSettings, workload: WorkloadSettings, output: OutputSettings
) -> bool:
    """Measure a server; returns whether every request succeeded.

    Raises:
        ConfigError: a bad setting.
        RequestError: the server refuses.
        ServerError: no server answers.
    """
    workload.check()
    output.check()
    if server.endpoint == "chat" and workload.dataset_name is not DatasetName.SHAREGPT:
        raise ConfigError(
            "--endpoint chat needs text prompts: use --dataset-name sharegpt, or --endpoint completions"
        )
    structured = None if server.structured is None else StructuredOutput.read(server.structured)
    if not server.api_key:
        server = dataclasses.replace(server, api_key=variable("ENGINE_API_KEY"))
    tokenizer = WorkloadTokenizer.load(server.tokenizer)
    requests = workload.requests(tokenizer)
    warmup = [] if server.endpoint == "chat" else workload.warmup(tokenizer)
    return asyncio.run(_measure_server(server, sampling, workload, output, requests, warmup, structured))


async def _measure_server(
    server: ServerSettings,
    sampling: SamplingSettings,
    workload: WorkloadSettings,
    output: OutputSettings,
    requests: list[BenchRequest],
    warmup: list[BenchRequest],
    structured: StructuredOutput | None,
) -> bool:
    served_model = await check_ready(server.base_url, server.api_key, server.ready_check_timeout_sec)
    options = RequestOptions(
        model=server.model or served_model,
        endpoint=server.endpoint,
        temperature=sampling.temperature,
        ignore_eos=sampling.ignore_eos,
        stream=server.stream,
        seed=workload.seed,
        structured=structured,
    )
    facts = await _server_info(server)

    async def before_run() -> None:
        if server.flush_cache:
            await flush_cache(server.base_url, server.api_key)

    target = OpenAITarget(server.base_url, server.api_key, options, server.timeout)
    run = await measure(target, requests, warmup, workload, before_run=before_run, failure=ServerError)
    client = {
        **plain_settings(server),
        **plain_settings(sampling),
        **plain_settings(workload),
        "model": options.model,
    }
    return report(run, "serve", f"{options.model} at {server.base_url}", client, facts, output)


async def _server_info(server: ServerSettings) -> dict[str, Any] | None:
    """The configuration that the server reports; None if it has no such endpoint."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(f"{server.base_url}/server_info") as response,
        ):
            return await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
