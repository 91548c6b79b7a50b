"""`bench offline`: the engine in this process, without HTTP and sockets: scheduler and model runner only."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...runtime.errors import EngineDeadError, RequestError
from ...runtime.feasibility import reason_against, reason_against_pooling
from ...runtime.messages import GenerateRequest, TextOutput
from ...runtime.pooling import PoolingParams
from ...runtime.sampling_params import SamplingParams
from .load import BenchRequest, RequestRecord
from .page import write_page
from .runs import OutputSettings, SamplingSettings, measure, plain_settings, report
from .workloads.workload import WorkloadSettings, WorkloadTokenizer

if TYPE_CHECKING:
    from ...offline.engine import EngineThread, RowQueue
    from ...runtime.config.config_sources import MergedConfig

TOKEN_ID_BYTES = 4
POOLING_SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=1, seed=0)


class OfflineTarget(AbstractAsyncContextManager["OfflineTarget"]):
    """An engine thread as a load target.

    A separate thread receives the rows, so that arrival times do not wait for the event loop.
    """

    def __init__(
        self,
        engine: EngineThread,
        tokenizer: WorkloadTokenizer,
        sampling: SamplingSettings,
        pooling: PoolingParams | None = None,
    ) -> None:
        """`pooling`: of vectors, for workloads of texts."""
        self._pooling = pooling
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._rows: RowQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RequestRecord, asyncio.Future[None]]] = {}
        self._num_requests = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader = threading.Thread(target=self._read_rows, name="bench rows", daemon=True)

    async def __aenter__(self) -> OfflineTarget:
        self._loop = asyncio.get_running_loop()
        self._reader.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.close()

    async def run(self, request: BenchRequest, record: RequestRecord) -> None:
        """Answer one request; see `load.Target`."""
        assert self._loop is not None
        if request.texts:
            await self._run_texts(request, record)
            return
        token_ids = (
            self._tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        )
        reason = reason_against(len(token_ids), request.output_len, self._engine.capacity)
        if reason is not None:
            record.error, record.refused = reason, True
            return
        sampling = SamplingParams(
            max_new_tokens=request.output_len,
            temperature=self._sampling.temperature,
            ignore_eos=self._sampling.ignore_eos,
            seed=self._num_requests,
        )
        rid = f"bench-{self._num_requests}"
        self._num_requests += 1
        done: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            self._open[rid] = (record, done)
        input_ids = np.asarray(token_ids, dtype="<i4").tobytes()
        try:
            self._engine.submit(
                GenerateRequest(rid, input_ids, sampling, arrival_s=time.monotonic()), self._rows
            )
            await done
        except (EngineDeadError, RequestError) as error:
            record.error = str(error)

    async def _run_texts(self, request: BenchRequest, record: RequestRecord) -> None:
        """Vectors of texts; they are requests of their own."""
        assert self._loop is not None and self._pooling is not None
        parts: list[tuple[RequestRecord, asyncio.Future[None]]] = []
        for token_ids in self._tokenizer.encode_texts(request.texts):
            reason = reason_against_pooling(len(token_ids), self._engine.capacity)
            if reason is not None:
                record.error, record.refused = reason, True
                return
            part = RequestRecord(sent_s=record.sent_s, due_s=record.due_s)
            rid = f"bench-{self._num_requests}"
            self._num_requests += 1
            done: asyncio.Future[None] = self._loop.create_future()
            with self._lock:
                self._open[rid] = (part, done)
            parts.append((part, done))
            input_ids = np.asarray(token_ids, dtype="<i4").tobytes()
            message = GenerateRequest(
                rid, input_ids, POOLING_SAMPLING, arrival_s=time.monotonic(), pooling=self._pooling
            )
            self._engine.submit(message, self._rows)
        try:
            await asyncio.gather(*(done for _, done in parts))
        except (EngineDeadError, RequestError) as error:
            record.error = str(error)
            return
        record.arrivals.append((time.monotonic(), 0))
        record.num_vectors = len(parts)
        record.prompt_tokens = sum(part.prompt_tokens for part, _ in parts)
        record.error = next((part.error for part, _ in parts if part.error), None)

    def _read_rows(self) -> None:
        """Write every row into its record, until the engine has stopped."""
        assert self._loop is not None
        while True:
            row = self._rows.get()
            now_s = time.monotonic()
            if isinstance(row, EngineDeadError):
                self._fail_all(row)
                return
            with self._lock:
                record, done = self._open[row.rid]
            if row.token_ids:
                record.arrivals.append((now_s, len(row.token_ids) // TOKEN_ID_BYTES))
            if row.finish is not None:
                _take_totals(record, row)
                self._loop.call_soon_threadsafe(done.set_result, None)

    def _fail_all(self, error: EngineDeadError) -> None:
        assert self._loop is not None
        with self._lock:
            waiting = [done for _, done in self._open.values() if not done.done()]
        for done in waiting:
            self._loop.call_soon_threadsafe(done.set_exception, EngineDeadError(str(error)))


def run_offline(
    merged: MergedConfig, sampling: SamplingSettings, workload: WorkloadSettings, output: OutputSettings
) -> bool:
    """Start an engine in this process and measure it; returns whether every request succeeded.

    Raises:
        ConfigError: a bad setting or model.
    """
    from ...launch.resolve.prepare import prepare
    from ...launch.startup_display import StartupDisplay
    from ...models.tokenizer.tokenizer import load_tokenizer
    from ...offline.build import start_engine
    from ...tokenizer_manager.pooling.embedding import check_task, embedding_params

    workload.check()
    output.check()
    with StartupDisplay() as display:
        prepared = prepare(merged, on_step=display.step, on_download=display.download)
        check_task(prepared.spec, "embed" if workload.makes_vectors else "generate")
        display.step("tokenizer")
        tokenizer = load_tokenizer(prepared.source, encode_only=workload.makes_vectors)
        engine = start_engine(prepared, tokenizer, on_step=display.step)
    encoder = WorkloadTokenizer(tokenizer)
    pooling = prepared.spec.pooling
    target = OfflineTarget(engine, encoder, sampling, embedding_params(pooling) if pooling else None)
    run = asyncio.run(measure(target, workload.requests(encoder), workload.warmup(encoder), workload))
    config: dict[str, Any] = msgspec.to_builtins(prepared.config)
    config["server"].pop("api_key", None)
    client = {**plain_settings(sampling), **plain_settings(workload)}
    run = dataclasses.replace(run, client_cpu_share=None)  # it includes the engine's work
    title = f"{prepared.model_name} in this process"
    result = report(run, "offline", title, client, {"config": config}, output)
    if output.html is not None:
        write_page(output.html, title, {"run": [result]}, {})
    return result.summary.failed == 0


def _take_totals(record: RequestRecord, row: TextOutput) -> None:
    assert row.finish is not None
    record.prompt_tokens = row.usage.prompt_tokens
    record.output_tokens = row.usage.completion_tokens
    record.cached_tokens = row.usage.cached_tokens
    if row.finish.kind not in ("stop", "length"):
        record.error = row.finish.message or f"finished with {row.finish.kind}"
