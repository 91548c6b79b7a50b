"""`bench serve`: the settings that name a server, and a run against it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import typer

from ...runtime.config.server_config import ServerConfig
from ...runtime.config.setting_declaration import check_finite
from ...runtime.errors import ConfigError, ServerError
from ...runtime.text import variable
from .load import BenchRequest
from .openai_target import Endpoint, OpenAITarget, RequestOptions, StructuredOutput, check_ready, flush_cache
from .page import offered_rate, write_page
from .result_file import Run
from .runs import OutputSettings, SamplingSettings, measure, plain_settings, report
from .tables import print_sweep
from .workloads.workload import WorkloadSettings, WorkloadTokenizer


def _server(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Server", **more)


_DEFAULT: Final = ServerConfig()
ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    "completions": "completions",
    "chat": "chat",
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "embeddings": "embeddings",
    "/v1/embeddings": "embeddings",
}
BACKENDS: Final[Mapping[str, Endpoint]] = {
    "openai": "completions",
    "vllm": "completions",
    "sglang": "completions",
    "sglang-oai": "completions",
    "openai-chat": "chat",
    "vllm-chat": "chat",
    "sglang-oai-chat": "chat",
    "openai-embeddings": "embeddings",
    "sglang-embedding": "embeddings",
}


def _known(option: str, name: str | None, names: Mapping[str, Endpoint]) -> Endpoint | None:
    if name is not None and name not in names:
        raise ConfigError(f"{option} is {name!r}, but it must be one of {', '.join(names)}")
    return None if name is None else names[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Which server is measured, and how requests are sent."""

    url: Annotated[
        str | None,
        _server(
            f"Server to measure (default: http://{_DEFAULT.host}:{_DEFAULT.port}).", "--url", "--base-url"
        ),
    ] = None
    host: Annotated[str | None, _server("Its address, instead of --url.")] = None
    port: Annotated[int | None, _server("Its port, instead of --url.")] = None
    model: Annotated[str | None, _server("Model to ask for (default: the first that the server lists).")] = (
        None
    )
    endpoint: Annotated[
        str | None,
        _server(
            "Endpoint to call: completions (the default), chat, embeddings (with --dataset-name embed), or its path; "
            "chat takes text prompts (sharegpt, custom) only."
        ),
    ] = None
    backend: Annotated[
        str | None, _server(f"The endpoint by the names of vLLM and SGLang: {', '.join(BACKENDS)}.")
    ] = None
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

    sweep: Annotated[
        str | None,
        _server(
            "Request rates, as 1,2,4,inf: a run for each, with other prompts; --output-file has all of them."
        ),
    ] = None

    @property
    def base_url(self) -> str:
        """The URL without a trailing `/v1`.

        Raises:
            ConfigError: the server is given twice.
        """
        if self.url is not None and self.host is None and self.port is None:
            return self.url.rstrip("/").removesuffix("/v1")
        if self.url is not None:
            raise ConfigError(
                f"the server is given twice, by --url {self.url} and --host or --port; drop one"
            )
        host = (self.host or _DEFAULT.host).removeprefix("http://").rstrip("/")  # vLLM's clients take both
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port or _DEFAULT.port}"

    def check(self) -> None:
        """Report a wrong value before the data set is read.

        Raises:
            ConfigError: an address or a time that cannot be.
        """
        self.base_url  # noqa: B018
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}, but it must lie in [1, 65535]")
        check_finite("--timeout", self.timeout, 0.0, open_end=True)
        check_finite("--ready-check-timeout-sec", self.ready_check_timeout_sec, 0.0, open_end=False)

    @property
    def api(self) -> Endpoint:
        """The endpoint, by `--endpoint` or `--backend`.

        Raises:
            ConfigError: an unknown name, or two different ones.
        """
        named = _known("--endpoint", self.endpoint, ENDPOINTS)
        by_backend = _known("--backend", self.backend, BACKENDS)
        if named and by_backend and named != by_backend:
            raise ConfigError(
                f"--backend {self.backend} calls {by_backend}, and --endpoint is {self.endpoint}; drop one"
            )
        return named or by_backend or "completions"


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
    server.check()
    endpoint = _endpoint(server, workload)
    if endpoint == "chat" and not workload.has_texts:
        raise ConfigError(
            "--endpoint chat needs text prompts: use --dataset-name sharegpt or custom, or --endpoint completions"
        )
    structured = None if server.structured is None else StructuredOutput.read(server.structured)
    if not server.api_key:
        server = dataclasses.replace(server, api_key=variable("ENGINE_API_KEY"))
    workloads = [workload]
    if server.sweep is not None:
        workloads = [
            dataclasses.replace(workload, request_rate=rate, seed=workload.seed + number)
            for number, rate in enumerate(_rates(server.sweep))
        ]
        for each in workloads:
            each.check()
    tokenizer = None if workload.makes_vectors else WorkloadTokenizer.load(server.tokenizer)
    planned = [(each, each.requests(tokenizer)) for each in workloads]
    warmup = [] if endpoint == "chat" else workload.warmup(tokenizer)
    server = dataclasses.replace(server, endpoint=endpoint, backend=None)
    runs: list[Run] = []
    for number, (each, requests) in enumerate(planned):
        own = warmup if number == 0 else []
        output_of_run = dataclasses.replace(output, append=output.append or number > 0)
        runs.append(
            asyncio.run(_measure_server(server, sampling, each, output_of_run, requests, own, structured))
        )
    if server.sweep is not None:
        print_sweep(runs)
    if output.html is not None:
        model = f"{runs[0].client['model']} at {server.base_url}"
        series = {f"{offered_rate(run):g} req/s": [run] for run in runs} if server.sweep else {"run": runs}
        write_page(output.html, model, series, {model: runs})
    return all(run.summary.failed == 0 for run in runs)


def _rates(text: str) -> list[float]:
    """The rates of `--sweep`.

    Raises:
        ConfigError: no list of numbers above 0.
    """
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise ConfigError(f"--sweep is {text!r}, but it must be request rates above 0, as 1,2,4,inf")
    return rates


def _endpoint(server: ServerSettings, workload: WorkloadSettings) -> Endpoint:
    """The endpoint, which the data set names, too.

    Raises:
        ConfigError: they do not go together.
    """
    is_given = server.endpoint is not None or server.backend is not None
    if workload.makes_vectors and server.structured is not None:
        raise ConfigError("--structured has no effect on --dataset-name embed; leave it out")
    if workload.makes_vectors and not is_given:
        return "embeddings"
    if workload.makes_vectors != (server.api == "embeddings"):
        raise ConfigError(
            f"--endpoint {server.api} does not go with --dataset-name {workload.dataset_name}; "
            "embeddings goes with embed"
        )
    return server.api


async def _measure_server(
    server: ServerSettings,
    sampling: SamplingSettings,
    workload: WorkloadSettings,
    output: OutputSettings,
    requests: list[BenchRequest],
    warmup: list[BenchRequest],
    structured: StructuredOutput | None,
) -> Run:
    served_model = await check_ready(server.base_url, server.api_key, server.ready_check_timeout_sec)
    options = RequestOptions(
        model=server.model or served_model,
        endpoint=server.api,
        temperature=sampling.temperature,
        ignore_eos=sampling.ignore_eos,
        stream=server.stream,
        seed=workload.seed,
        structured=structured,
    )
    facts = await _server_info(server)

    async def before_run() -> None:
        if server.flush_cache:
            await flush_cache(server.base_url, variable("ENGINE_ADMIN_API_KEY") or server.api_key)

    target = OpenAITarget(server.base_url, server.api_key, options, server.timeout)
    run = await measure(target, requests, warmup, workload, before_run=before_run, failure=ServerError)
    client = {
        **plain_settings(server),
        **plain_settings(sampling),
        **plain_settings(workload),
        "model": options.model,
        "url": server.base_url,
        "endpoint": options.endpoint,
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
