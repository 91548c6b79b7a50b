"""Endpoints for routers: `/model_info` and `/v1/loads`, with the names that SGLang gave them.

sglang-router, smg and vllm-router register a worker by its model and its capacity, and choose among workers by their
loads: one of each replica (`--dp`), which they call a data-parallel rank.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ....runtime.errors import ConfigError
from ....runtime.feasibility import Capacity
from ....runtime.scheduler_report import SchedulerReport
from ..exchange import Exchange
from ..services import Engine


class ModelInfoBody(msgspec.Struct, kw_only=True):
    """The served model.

    Attributes:
        model_path: a folder, or a GGUF file.
        tokenizer_path: a local folder with tokenizer.json; empty if it cannot be written.
        is_generation: it generates text.
        architectures: classes that its config.json names; empty for a GGUF file.
        max_context_length: tokens of prompt and answer.
        weight_version: weights are never replaced while a server runs.
    """

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    model_type: str
    architectures: list[str]
    max_context_length: int
    weight_version: str = "default"
    preferred_sampling_params: None = None
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


class LoadBody(msgspec.Struct, kw_only=True):
    """The load of one rank.

    Attributes:
        num_waiting_uncached_tokens: of `num_waiting_reqs`; also those that the cache may have: it is asked later.
        num_used_tokens: KV memory that requests hold, in tokens.
        token_usage: of `max_total_num_tokens`, 0 to 1; `utilization` is the same.
        cache_hit_rate: prompt tokens from the prefix cache among all since the scheduler began.
        gen_throughput: tokens per second of time in steps since the scheduler began.
    """

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    utilization: float
    cache_hit_rate: float
    gen_throughput: float


class LoadsBody(msgspec.Struct, kw_only=True):
    """The loads of all ranks; `timestamp` is in ISO 8601: smg drops a report with a number there."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[LoadBody]


class OldLoadBody(msgspec.Struct, kw_only=True):
    """The load of one rank as older routers ask for it; `num_reqs` are running and waiting ones."""

    dp_rank: int = 0
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


async def model_info(exchange: Exchange, engine: Engine) -> None:
    """The model, and the folder of its tokenizer."""
    spec = engine.spec
    await exchange.send_json(
        ModelInfoBody(
            model_path=engine.source.path,
            tokenizer_path=await tokenizer_path(engine),
            served_model_name=engine.served_model,
            is_generation=spec.pooling is None,
            model_type=spec.model_type,
            architectures=await asyncio.to_thread(_architectures, Path(engine.source.path)),
            max_context_length=engine.manager.capacity.max_model_len,
        )
    )


async def loads(exchange: Exchange, engine: Engine) -> None:
    """Requests and tokens, running and waiting."""
    each = all_loads(engine)
    await exchange.send_json(
        LoadsBody(
            timestamp=datetime.now(UTC).isoformat(),
            version=engine.version,
            dp_rank_count=len(each),
            loads=each,
        )
    )


async def old_load(exchange: Exchange, engine: Engine) -> None:
    """Requests and tokens, for older routers."""
    await exchange.send_json(
        [
            OldLoadBody(
                dp_rank=load.dp_rank,
                num_reqs=load.num_total_reqs,
                num_waiting_reqs=load.num_waiting_reqs,
                num_tokens=load.num_used_tokens,
            )
            for load in all_loads(engine)
        ]
    )


def all_loads(engine: Engine) -> list[LoadBody]:
    """Return the load of each replica, from its scheduler's latest report; all zero before the first one."""
    reports = engine.manager.engine.reports
    return [_load_of(rank, report, engine.manager.capacity) for rank, report in enumerate(reports)]


def _load_of(rank: int, report: SchedulerReport | None, capacity: Capacity) -> LoadBody:
    total = capacity.num_pages * capacity.page_size
    used = 0 if report is None else report.kv.used_tokens
    running = 0 if report is None else report.num_running_reqs
    waiting = 0 if report is None else report.num_queue_reqs
    return LoadBody(
        dp_rank=rank,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_waiting_uncached_tokens=0 if report is None else report.num_queue_tokens,
        num_used_tokens=used,
        max_total_num_tokens=total,
        max_running_requests=capacity.max_running_requests,
        token_usage=_share(used, total),
        utilization=_share(used, total),
        cache_hit_rate=0.0
        if report is None
        else _share(report.totals.cached_tokens, report.totals.prompt_tokens),
        gen_throughput=0.0
        if report is None
        else _share(report.totals.generation_tokens, report.totals.step_s),
    )


async def tokenizer_path(engine: Engine) -> str:
    """The folder of the tokenizer, see `TokenizerExport`; empty if it cannot be written."""
    try:
        return str(await asyncio.to_thread(engine.tokenizer_export.folder))
    except (OSError, ConfigError):
        return ""


def internal_states(engine: Engine) -> list[dict[str, Any]]:
    """The load of each replica under the names of SGLang's `internal_states`, with drafts and the report's figures."""
    states = []
    for load, report in zip(all_loads(engine), engine.manager.engine.reports, strict=True):
        state = msgspec.structs.asdict(load) | {"last_gen_throughput": load.gen_throughput}
        if report is not None:
            totals = report.totals
            steps = totals.generation_tokens - totals.accepted_draft_tokens
            state["avg_spec_accept_length"] = _share(totals.generation_tokens, steps)
            state |= report.flat()
        states.append(state)
    return states


def _architectures(folder: Path) -> list[str]:
    """`architectures` of a folder's config.json; empty where there is none."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return []
    names = config.get("architectures") if isinstance(config, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
