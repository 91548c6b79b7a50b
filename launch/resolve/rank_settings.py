"""`check_ranks`: whether ranks (`--tp`, `--pp`, `--dp`) can share this model on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.errors import ConfigError
from .rank_spec import check_tp
from .stages import check_stages

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.device_config import ParallelConfig
    from ...runtime.config.engine_config import EngineConfig
    from .host_facts import HostFacts


def check_ranks(config: EngineConfig, spec: ModelSpec, host: HostFacts, device: str, needed: int) -> None:
    """Refuse ranks that cannot share the model, or for which the machine lacks GPUs.

    Args:
        device: cpu or cuda.
        needed: GPUs that this engine uses on this machine.

    Raises:
        ConfigError: with the rule and what to change.
    """
    parallel = config.parallel
    if parallel.executor == "ray":
        _check_ray(parallel)
    if parallel.tp > 1:
        check_tp(spec, parallel.tp)
    _check_one_shot(parallel, device)
    if parallel.pp > 1:
        check_stages(spec, parallel)
        _check_beside_stages(config)
    num_gpus = len(host.gpus)
    hidden = f" ({host.num_hidden_gpus} more are hidden by CUDA_VISIBLE_DEVICES)"
    has = f"{num_gpus}{hidden if host.num_hidden_gpus else ''}"
    if device == "cuda" and needed > num_gpus and parallel.dp > 1:
        what, remedy = f"dp is {parallel.dp}", "lower --dp or"
        if config.scheduler.disaggregation_mode == "both":
            what, remedy = "disaggregation_mode is both", "leave --disaggregation-mode out, or lower"
        raise ConfigError(
            f"{what} and {_ranks_text(parallel)}, so {needed} GPUs are needed, but this machine has {has}; "
            f"{remedy} {_ranks_flags(parallel)}"
        )
    if device == "cuda" and needed > num_gpus and parallel.num_ranks > 1:
        raise ConfigError(
            f"{_ranks_text(parallel)}, so {needed} GPUs are needed on each machine, but this one has {has}; "
            f"lower {_ranks_flags(parallel)}, or share the model among several machines with --nnodes"
        )


def _check_beside_stages(config: EngineConfig) -> None:
    """Refuse settings that contradict pipeline stages."""
    pp, scheduler = config.parallel.pp, config.scheduler
    if scheduler.speculative != "off":
        raise ConfigError(
            f"pp is {pp} with speculative {scheduler.speculative}, but a step with drafts ends before the next one "
            "is planned, and stages need several steps in flight; use --speculative off, or --tp instead of --pp"
        )
    if config.adapters.is_enabled:
        raise ConfigError(
            f"pp is {pp} with lora, but adapters are not divided into stages; merge the adapter into the model "
            "(peft: merge_and_unload) or use --tp instead of --pp"
        )


def _ranks_text(parallel: ParallelConfig) -> str:
    return f"tp is {parallel.tp}" + (f" and pp is {parallel.pp}" if parallel.pp > 1 else "")


def _ranks_flags(parallel: ParallelConfig) -> str:
    return "--tp" if parallel.pp == 1 else "--pp" if parallel.tp == 1 else "--tp or --pp"


def _check_one_shot(parallel: ParallelConfig, device: str) -> None:
    kib = parallel.one_shot_all_reduce_kib
    if kib and (device != "cuda" or parallel.tp == 1):
        why = "tp is 1, so there are no sums" if parallel.tp == 1 else f"the device is {device}, not cuda"
        raise ConfigError(f"one_shot_all_reduce_kib is {kib}, but {why}; leave it out")


def _check_ray(parallel: ParallelConfig) -> None:
    """Refuse settings that contradict `--executor ray`.

    Raises:
        ConfigError: there is no other rank to start, or a setting decides what Ray decides.
    """
    if parallel.tp == 1:
        raise ConfigError(
            "executor is ray, but tp is 1, so there is no other rank for Ray to start; raise --tp, or use --executor "
            "local"
        )
    if parallel.nnodes > 1 or parallel.cluster_key_file is not None:
        raise ConfigError(
            "executor is ray, which finds the machines and makes their key itself; omit --nnodes, --node-rank and "
            "--cluster-key-file, or use --executor local"
        )
