"""Settings that a kind of model (encoders, state layers) or of engine (`--disaggregation-mode`) needs or refuses.

Settings for what a kind does not have are refused if a user gave them and their absence would surprise; defaults are
changed with a note.

Encoder: a text is computed in one step and answered by a vector or scores: it has no chunks, no decodes, and no
KV that outlives a step, hence no prefix cache, no swapping and no drafts.

State layers: such a layer keeps one state of a request, which is exact at the last computed token only. KV that returns
from the host would need the state at its end, which is not copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ...models.spec.model_spec import ModelSpec
from ...models.weight_files.weight_memory import num_parameters
from ...runtime.config.engine_config import EngineConfig, SchedulerConfig
from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.engine_config import EngineConfig

CPU_STEP_TOKENS: Final = 2048
"""Most tokens of a step on the CPU: intermediate results of a small model stay in the caches, and a query that arrives
meanwhile waits for some 100 ms."""
CPU_LEAST_STEP_TOKENS: Final = 512
"""Fewer do not use the matmuls fully."""
_CPU_STEP_FLOP: Final = 1e11
"""Work of each thread: half a second of bfloat16 matmuls."""


def encoder_settings(config: EngineConfig, spec: ModelSpec) -> tuple[EngineConfig, Mapping[str, str]]:
    """The configuration with the values that an encoder needs, and setting -> reason for those that were changed.

    Raises:
        ConfigError: a setting asks for something that an encoder does not have.
    """
    assert spec.encoder is not None
    for name, contradicts, why, way_out in _contradictions(config):
        if contradicts:
            raise ConfigError(f"{name}, but {spec.model_type} is an encoder: {why}; {way_out}")
    notes = {
        "chunked_prefill_size": "an encoder computes a text whole",
        "multi_step_ms": "an encoder does not decode",
        "preemption_mode": "an encoder keeps nothing between steps",
        "swap_space": "an encoder's requests are not swapped",
    }
    if config.cache.radix_cache:
        notes["radix_cache"] = "an encoder's tokens depend on those after them, so no prefix can be reused"
    cache = replace(config.cache, radix_cache=False, swap_space=0.0)
    scheduler = replace(
        config.scheduler,
        chunked_prefill_size=-1,
        multi_step_ms=0.0,
        in_batch_prefix_caching=False,
        preemption_mode="recompute",
    )
    return replace(config, cache=cache, scheduler=scheduler), notes


def encoder_step_tokens(config: EngineConfig, spec: ModelSpec, device: str, num_threads: int) -> int:
    """`max_prefill_tokens`, if it has its default, for a device: on the CPU a step should not take long."""
    asked = config.scheduler.max_prefill_tokens
    if device != "cpu" or asked != SchedulerConfig().max_prefill_tokens:
        return asked
    assert spec.encoder is not None
    tables = (spec.vocab_size + spec.encoder.position_rows) * spec.hidden_size
    flop_per_token = 2 * max(1, num_parameters(spec) - tables)
    tokens = int(_CPU_STEP_FLOP * num_threads / flop_per_token)
    tokens = min(max(tokens, CPU_LEAST_STEP_TOKENS), CPU_STEP_TOKENS)
    page_size = config.cache.page_size
    return max(page_size, tokens // page_size * page_size)


def _contradictions(config: EngineConfig) -> list[tuple[str, bool, str, str]]:
    """The setting as the user gave it, whether it contradicts, why, and the way out."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    chunk, swap, multi_step = scheduler.chunked_prefill_size, cache.swap_space, scheduler.multi_step_ms
    return [
        (
            f"chunked_prefill_size is {chunk}",
            chunk not in ("auto", -1) and scheduler.preset is None,
            "each token attends to all others, so a text is computed whole",
            "omit --chunked-prefill-size",
        ),
        (
            f"speculative is {scheduler.speculative}",
            scheduler.speculative != "off",
            "it generates no tokens that could be drafted",
            "omit --speculative",
        ),
        (
            f"swap_space is {swap}",
            swap not in ("auto", 0.0),
            "its keys and values do not outlive a step, so there is nothing to swap",
            "omit --swap-space",
        ),
        (
            f"kv_host_size is {cache.kv_host_size:g}",
            cache.kv_host_size > 0,
            "its keys and values do not outlive a step, so there is nothing to keep",
            "omit --kv-host-size",
        ),
        (
            f"kv_{cache.kv_tier} is {cache.kv_tier_place!r}",
            bool(cache.kv_tier),
            "its keys and values do not outlive a step, so there is nothing to keep",
            f"omit --kv-{cache.kv_tier}",
        ),
        (
            "preemption_mode is swap",
            scheduler.preemption_mode == "swap",
            "its keys and values do not outlive a step, so there is nothing to swap",
            "omit --preemption-mode",
        ),
        (
            f"multi_step_ms is {multi_step}",
            multi_step not in ("auto", 0.0),
            "it does not decode",
            "omit --multi-step-ms",
        ),
        (
            f"kv_cache_dtype is {cache.kv_cache_dtype}",
            cache.kv_cache_dtype not in ("auto", model.dtype),
            "its keys and values take the memory of one layer, in the dtype of the model",
            "omit --kv-cache-dtype",
        ),
        (
            f"kv_events is {config.server.kv_events!r}",
            config.server.kv_events is not None,
            "it keeps no prefixes that could be published",
            "omit --kv-events",
        ),
        (
            "model_impl is transformers",
            model.model_impl == "transformers",
            "only decoders run in transformers",
            "omit --model-impl",
        ),
        (
            f"quantization is {model.quantization}",
            model.quantization not in (None, "none"),
            "its weights stay in bfloat16 or float32",
            "omit --quantization",
        ),
        (
            f"tp is {config.parallel.tp}",
            config.parallel.tp > 1,
            "it runs on one device",
            "omit --tp, and start one server for each device",
        ),
        (
            f"pp is {config.parallel.pp}",
            config.parallel.pp > 1,
            "it runs on one device",
            "omit --pp, and start one server for each device",
        ),
    ]


def state_settings(config: EngineConfig, spec: ModelSpec) -> tuple[EngineConfig, Mapping[str, str]]:
    """The configuration with the values that state layers need, and setting -> reason for those that were changed.

    Raises:
        ConfigError: a setting asks for something that is not implemented for state layers.
    """
    assert spec.state is not None
    scheduler, cache = config.scheduler, config.cache
    for name, contradicts, why, way_out in (
        (
            "preemption_mode is swap",
            scheduler.preemption_mode == "swap",
            "states are not copied to the host",
            "omit --preemption-mode",
        ),
        (
            f"swap_space is {cache.swap_space}",
            cache.swap_space not in ("auto", 0.0),
            "states are not copied to the host",
            "omit --swap-space",
        ),
        (
            f"kv_host_size is {cache.kv_host_size:g}",
            cache.kv_host_size > 0,
            "states are not copied to the host, and KV is of no use without the state at its end",
            "omit --kv-host-size; --kv-disk keeps both",
        ),
        (
            "model_impl is transformers",
            config.model.model_impl == "transformers",
            "only the engine's own model keeps its states",
            "omit --model-impl",
        ),
    ):
        if contradicts:
            raise ConfigError(f"{name}, but {spec.model_type} has layers with a state: {why}; {way_out}")
    notes = {
        "preemption_mode": "states are not copied to the host",
        "swap_space": "states are not copied to the host",
    }
    return replace(
        config,
        cache=replace(cache, swap_space=0.0),
        scheduler=replace(scheduler, preemption_mode="recompute"),
    ), notes


def pair_settings(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The configuration; a pair of a prefill and a decode engine in one server is two replicas.

    Raises:
        ConfigError: something cannot be handed over.
    """
    mode, parallel = config.scheduler.disaggregation_mode, config.parallel
    if mode == "null":
        return config
    if spec.state is not None:
        raise ConfigError(
            f"disaggregation_mode is {mode}, but layers of this model keep a state besides KV, which is not handed "
            "over; leave it out"
        )
    if spec.encoder is not None:
        raise ConfigError(
            f"disaggregation_mode is {mode}, but an encoder generates nothing after its prompt; leave it out"
        )
    for name, value, usual in (
        ("dp", parallel.dp, 1),
        ("nnodes", parallel.nnodes, 1),
        ("executor", parallel.executor, "local"),
    ):
        if value != usual:
            raise ConfigError(
                f"disaggregation_mode is {mode} with {name} {value}, but such an engine has one scheduler, and its "
                f"ranks are on one machine; leave --{name} out, and start several engines behind a router"
            )
    if mode != "both":
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(parallel, dp=2))
