"""`load_model_runner`: from a resolved configuration and model files to a `ModelRunner` that is ready to serve."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from msgspec.structs import replace

from ..launch.resolve.adapters import adapted_names
from ..launch.resolve.drafter import draft_config, read_drafter
from ..launch.resolve.measured_pool import fit_pool
from ..launch.resolve.pool_size import largest_step, largest_step_of
from ..launch.resolve.rank_spec import rank_spec
from ..launch.resolve.stages import WHOLE_MODEL, is_of_other_stages, stage_spec
from ..models.eagle3_head import Eagle3Spec
from ..models.spec.model_spec import ModelSpec
from ..models.spec.sizes import kv_dtype_of, max_drafts_of
from ..models.weight_files.qwen_vision_tensors import QWEN_FORMS
from ..runtime.errors import ConfigError
from ..runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from .adapters.adapter_layers import AdapterLayers
from .adapters.adapter_store import AdapterSlots, AdapterStore, SlotSizes
from .assembly import LoadedModel, assemble_runner, make_draft_model, make_feature_drafter
from .attention import selection as attention_selection
from .distributed.join_group import ALONE, Place
from .distributed.pp_link import NO_LINK, WiredLink
from .distributed.tp_group import SINGLE_RANK
from .drafting.eagle3 import load_eagle3_head
from .drafting.mtp import MTPHead
from .fixed_order import PROVIDERS_IN_FIXED_ORDER, check_fixed_order
from .hf_backend.transformers_load import load_transformers_model
from .kernels import plain, quantized
from .kernels.avoided import AvoidedKernels
from .kernels.blocks.native_blocks import NO_TILES, TILES_FROM
from .kernels.native_linear import PackReport
from .layers.decoder import Decoder
from .memory.device_memory import explained, make_device_memory
from .memory.huge_pages import collapse_resident_memory
from .model_context import ModelContext
from .op_selection import PROVIDERS, Target, select_ops
from .pooling.head import PoolingHead, load_pooling_head
from .recording.graphs.graph_sizes import sizes_to_record
from .recording.programs.program_planes import MAX_TOKENS
from .sampling import backend_selection as sampler_selection
from .structures.causal_lm import build_model
from .trial import measure
from .vision.gemma4 import Gemma4Embedder, Gemma4Tower
from .vision.pixtral import PixtralTower
from .vision.qwen_vit import QwenTower
from .vision.tower import Tower
from .weights.dummy import DummyStore
from .weights.format_selection import make_linear_format
from .weights.gguf import GGUFStore
from .weights.reader import TensorStore, WeightReader
from .weights.safetensors import SafetensorsStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..launch.resolve.stages import Stage
    from ..models.source import ModelSource
    from ..models.spec.vision_spec import VisionFamily, VisionSpec
    from ..runtime.config.engine_config import EngineConfig, ModelConfig
    from ..runtime.feasibility import Capacity
    from .distributed.pp_link import StageLink
    from .distributed.tp_group import TPGroup
    from .drafting.drafter import MakeDrafter
    from .memory.device_memory import DeviceMemory
    from .model_runner import ModelRunner
    from .ops.ops import Ops
    from .recording.graphs.graph_sizes import GraphSizes
    from .structures.causal_lm import CausalLM
    from .vision.encoder_rows import ImageEncoder

logger = logging.getLogger(__name__)

_STATE_OPS: Final = ("short_conv", "gated_delta", "mamba2")
_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def load_model_runner(
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    capacity: Capacity,
    place: Place = ALONE,
    adapter_slots: SlotSizes | None = None,
) -> ModelRunner:
    """Load the weights, reserve the KV pool and assemble the runner.

    The runner's capacity is the valid one: on a GPU it is measured, elsewhere it is the given one.

    Args:
        config: resolved: dtype, device and num_threads are concrete. Sets torch's number of threads.
        source: the files with the weights.
        spec: the model's architecture.
        capacity: the planned capacity.
        place: the ranks that share the model, and the device of this rank.
        adapter_slots: the memory for adapters; None: what the configuration and the capacity say.

    Raises:
        ConfigError: the checkpoint is incomplete, damaged, or of another architecture; memory does not suffice; the
            device does not support the requested kernels.
    """
    settings, group, avoid = config.model, place.group, AvoidedKernels(config.kernels.avoided)
    avoid.check(avoidable_components())
    assert settings.dtype != "auto" and settings.device != "auto" and settings.num_threads != "auto"
    assert config.cache.page_size == capacity.page_size
    if settings.model_impl == "transformers":  # its code scales the queries
        spec = replace(spec, attention=replace(spec.attention, query_scale=None))
    if settings.device == "cpu":
        torch.set_num_threads(settings.num_threads)
    device, dtype = place.device or torch.device(settings.device), _DTYPES[settings.dtype]
    kv_dtype = _DTYPES[kv_dtype_of(config.cache.kv_cache_dtype, settings.dtype)]
    if config.kernels.deterministic:
        check_fixed_order(spec, device, dtype, kv_dtype)
    memory = make_device_memory(device)
    whole_spec, stage = spec, place.stage
    spec = stage_spec(whole_spec, stage)
    started_s = time.perf_counter()
    slot_sizes = adapter_slots or _slot_sizes(config, spec, capacity.num_adapter_slots)
    layers = None
    if slot_sizes is not None:
        max_slots, max_rank, targets = slot_sizes
        layers = AdapterLayers(
            spec, max_slots=max_slots, max_rank=max_rank, dtype=dtype, device=device, targets=targets
        )
    with explained("the weights", memory, "lower --max-model-len, quantize the model, or shard it with --tp"):
        model, pooling_head, make_drafter, tower, reason = _load_model(
            config, source, whole_spec, capacity, group, dtype, device, layers, stage, avoid
        )
        if spec.drafter is not None:
            make_drafter = _load_drafter(config, spec, model, capacity, dtype, kv_dtype, device, avoid)
    if device.type == "cpu":
        # Now, while the process holds little other memory, and beside the rest of the start: 1 GB takes 0.4 s, or 2 s
        # in a virtual machine whose host has yet to allocate it.
        threading.Thread(target=collapse_resident_memory, name="huge-pages", daemon=True).start()
    logger.info(
        "weights_loaded_s=%.2f dtype=%s device=%s", time.perf_counter() - started_s, settings.dtype, device
    )
    group.meet("weights")  # later operations may be steps, with a timeout too short for a slow disk

    loaded = LoadedModel(
        model=model,
        spec=spec,
        own_spec=rank_spec(spec, group.size),
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        group=group,
        kernels=config.kernels,
        pooling_head=pooling_head,
        adapters=None if layers is None else AdapterSlots(layers, AdapterStore(layers)),
        max_drafts=max_drafts_of(config.scheduler),
        link=_make_link(config, place, spec, capacity, dtype, device),
        stage=stage,
        avoid=avoid,
        make_drafter=make_drafter,
        tower=tower,
        processed_logprobs=config.answers.processed_logprobs,
    )
    if make_drafter is not None:
        reason = reason or "a drafter reads features of all tokens"
    if not group.min_over_ranks(int(not reason)):
        reason = reason or "steps of another rank cannot be recorded, see its log"
    sizes = sizes_to_record(
        config.kernels,
        capacity.max_running_requests,
        device,
        spec=rank_spec(whole_spec, group.size),  # for all pipeline stages the same sizes
        step_tokens=partial(_largest_step, config, capacity),
        max_drafts=0 if spec.state is not None else loaded.max_drafts,
        avoid=avoid,
        reason_against=reason,
    )
    if memory is not None:
        capacity = _measured_capacity(loaded, config, capacity, sizes, memory)
    what = f"a KV pool of {capacity.max_total_tokens} tokens" + (f" and {sizes.text}" if sizes.text else "")
    way_out = "lower --mem-fraction, --max-total-tokens or --max-recorded-bs, or use --no-record-steps"
    with explained(what, memory, way_out):
        runner = assemble_runner(loaded, capacity, sizes)
    avoid.log_unused(device.type)
    return runner


def avoidable_components() -> dict[str, list[str]]:
    """The names for `--avoid-kernels`, in groups; what comes last in a selection computes everything else."""
    names = [(item.name, f"{item.name}:{op}") for op, items in PROVIDERS.items() for item in items[:-1]]
    names += [(item.name, f"{item.name}:{sampler_selection.OP}") for item in sampler_selection.PROVIDERS[:-1]]
    names += [attention_selection.names_of(backend) for backend in attention_selection.BACKENDS[:-1]]
    names += [
        quantized.names_of(item.name, kind.name)
        for kind in quantized.KINDS.values()
        for item in kind.providers
    ]
    groups = {"packages": list(dict.fromkeys(package for package, _ in names))}
    for package, name in dict.fromkeys(names):
        groups.setdefault(f"of {package}", []).append(name)
    return groups | {"of the runner": ["prompt_graphs", "decode_graphs", "sampler_graphs", "pdl"]}


def _make_link(
    config: EngineConfig,
    place: Place,
    spec: ModelSpec,
    capacity: Capacity,
    dtype: torch.dtype,
    device: torch.device,
) -> StageLink:
    if place.wire is None:
        return NO_LINK
    most_tokens = _largest_step(config, capacity)
    if device.type == "cpu":
        most_tokens = max(most_tokens, MAX_TOKENS)  # for which programs are traced
    return WiredLink(place.wire, most_tokens, spec.hidden_size, dtype, device)


def _largest_step(config: EngineConfig, capacity: Capacity) -> int:
    """Tokens of the largest step of a planned capacity."""
    chunk = config.scheduler.chunked_prefill_size
    assert chunk != "auto", "the configuration is not resolved"
    return largest_step(config, chunk, capacity.max_running_requests, capacity.max_model_len)


def _slot_sizes(config: EngineConfig, spec: ModelSpec, num_slots: int) -> SlotSizes | None:
    """The memory for adapters; None: the server has none, and its steps are as if there were no such thing."""
    if not num_slots:
        return None
    max_rank = config.adapters.max_lora_rank
    assert max_rank != "auto", "the configuration is not resolved"
    return SlotSizes(num_slots, max_rank, adapted_names(config.adapters, spec))


def _measured_capacity(
    loaded: LoadedModel,
    config: EngineConfig,
    capacity: Capacity,
    graph_sizes: GraphSizes,
    memory: DeviceMemory,
) -> Capacity:
    """The measured capacity, equal on all ranks: they execute the same plans, so the smallest pool is used."""
    assert config.cache.mem_fraction != "auto"
    measured = measure(
        partial(assemble_runner, loaded),
        capacity,
        step_tokens=largest_step_of(config),
        graph_sizes=graph_sizes,
        memory=memory,
        samples=loaded.spec.causal,
    )
    capacity = fit_pool(
        capacity,
        measured,
        config.cache.mem_fraction,
        page_bytes=loaded.page_bytes(capacity.page_size),
        is_estimate=config.cache.pool_is_estimate,
        len_is_estimate=config.model.len_is_estimate,
    )
    least = loaded.group.min_over_ranks
    return replace(capacity, num_pages=least(capacity.num_pages), max_model_len=least(capacity.max_model_len))


class _Loaded(NamedTuple):
    """The model; its parts, None if it has none; why recordings cannot hold its steps, or ""."""

    model: CausalLM
    pooling_head: PoolingHead | None
    make_drafter: MakeDrafter | None = None
    tower: ImageEncoder | None = None
    reason: str = ""


def _load_model(
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    capacity: Capacity,
    group: TPGroup,
    dtype: torch.dtype,
    device: torch.device,
    layers: AdapterLayers | None,
    stage: Stage,
    avoid: AvoidedKernels,
) -> _Loaded:
    """`spec` is that of the whole model."""
    if config.model.model_impl != "transformers":
        return _load_own_model(config, source, spec, capacity, group, dtype, device, layers, stage, avoid)
    model = load_transformers_model(
        config.model,
        source,
        spec,
        max_model_len=capacity.max_model_len,
        dtype=dtype,
        device=device,
        # On GPUs the time goes to kernel launches, of which transformers' code would still make most.
        ops=select_ops(Target(spec, device, dtype, avoid=avoid)) if device.type == "cpu" else None,
    )
    weights = WeightReader(_open_store(config.model, source, spec), dtype, device)
    return _Loaded(model, _load_pooling_head(config, source, spec, weights, device))


def _load_own_model(
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    capacity: Capacity,
    group: TPGroup,
    dtype: torch.dtype,
    device: torch.device,
    layers: AdapterLayers | None,
    stage: Stage,
    avoid: AvoidedKernels,
) -> _Loaded:
    weights = WeightReader(_open_store(config.model, source, spec), dtype, device)
    spec = stage_spec(spec, stage)
    if stage.count > 1:
        weights.ignore_where(is_of_other_stages(spec, stage))
    target = Target(rank_spec(spec, group.size), device, dtype, avoid=avoid)
    ops = select_ops(target, PROVIDERS_IN_FIXED_ORDER) if config.kernels.deterministic else select_ops(target)
    report = PackReport(ops.pack_linear)
    ops = dataclasses.replace(ops, pack_linear=report)
    context = ModelContext(
        spec=spec,
        weights=weights,
        linear_format=make_linear_format(
            config.model.quantization, spec, ops, device, dtype, _tiles_from(config), avoid
        ),
        ops=ops,
        max_model_len=capacity.max_model_len,
        device=device,
        group=group,
        adapters=layers,
        stage=stage,
    )
    model = build_model(context)
    pooling_head = _load_pooling_head(config, source, spec, weights, device)
    make_drafter = drafter_of(config, context, model, rank_spec(spec, group.size))
    tower = None if spec.vision is None else _tower_class(spec.vision.family)(context, spec.vision)
    weights.finish()
    report.log()
    changes_experts = layers is not None and layers.change_experts
    reason = reason_against_graphs(ops, spec, dtype, device, changes_experts)
    return _Loaded(model, pooling_head, make_drafter, tower, reason)


def _tower_class(family: VisionFamily) -> Callable[[ModelContext, VisionSpec], ImageEncoder]:
    if family in QWEN_FORMS:
        return QwenTower
    others: dict[VisionFamily, Callable[[ModelContext, VisionSpec], ImageEncoder]] = {
        "pixtral": PixtralTower,
        "gemma4": Gemma4Tower,
        "gemma4_unified": Gemma4Embedder,
    }
    return others.get(family, Tower)


def drafter_of(
    config: EngineConfig, context: ModelContext, model: CausalLM, own_spec: ModelSpec
) -> MakeDrafter | None:
    """The drafter that is a part of the model's files, with its weights; None: the configuration names none.

    `own_spec`: of this rank.
    """
    if config.scheduler.speculative != "mtp":
        return None
    assert isinstance(model, Decoder), "only decoders have layers that predict further tokens"
    head, layer = MTPHead(context, model), own_spec.mtp_layer
    assert layer is not None
    return partial(make_feature_drafter, head, layer, context.spec.vocab_size, config, context.group)


def _load_drafter(
    config: EngineConfig,
    spec: ModelSpec,
    target: CausalLM,
    capacity: Capacity,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    avoid: AvoidedKernels,
) -> MakeDrafter:
    """The maker of the drafter with files of its own; each rank has the whole of it."""
    files, max_drafts = read_drafter(config, spec), max_drafts_of(config.scheduler)
    if isinstance(files.spec, Eagle3Spec):
        if not isinstance(target, Decoder):
            raise ConfigError(
                f"{files.source.path}: the engine computes {spec.model_type} without features of its layers, which "
                "EAGLE-3 heads need; use --speculative suffix"
            )
        target.feature_layers = tuple(layer - 1 for layer in files.spec.feature_layers)
        head = load_eagle3_head(
            Path(files.source.path),
            files.spec,
            target,
            max_model_len=capacity.max_model_len,
            dtype=dtype,
            device=device,
            avoid=avoid,
        )
        target.combine_features = head.state
        return partial(make_feature_drafter, head, files.spec.layer, capacity.vocab_size, config, SINGLE_RANK)
    is_gguf = files.spec.quantization is not None and files.spec.quantization.method == "gguf"
    settings = dataclasses.replace(
        draft_config(config.model, files.source), quantization="gguf" if is_gguf else None
    )
    kernels = dataclasses.replace(config.kernels, deterministic=False)
    whole = dataclasses.replace(config, model=settings, kernels=kernels)
    model, *_ = _load_own_model(
        whole, files.source, files.spec, capacity, SINGLE_RANK, dtype, device, None, WHOLE_MODEL, avoid
    )
    loaded = LoadedModel(
        model=model,
        spec=files.spec,
        own_spec=files.spec,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        group=SINGLE_RANK,
        kernels=whole.kernels,
        avoid=avoid,
    )
    return partial(make_draft_model, loaded, capacity.vocab_size, max_drafts)


def reason_against_graphs(
    ops: Ops, spec: ModelSpec, dtype: torch.dtype, device: torch.device, changes_experts: bool = False
) -> str:
    """Why no CUDA graph can hold the model's steps: ops that read on the host what only the device knows; or "".

    `changes_experts`: adapters may change experts, so that torch computes them.
    """
    if device.type != "cuda":
        return ""
    on_host = set(_STATE_OPS) if spec.state is not None else set()
    if spec.experts is not None and plain.groups_need_host(dtype, device):
        on_host.add("pack_experts")
    found = [choice for choice in ops.choices if choice.op in on_host and choice.provider == "torch"]
    names = ", ".join(f"{choice.op} (passed over: {choice.why})" for choice in found)
    if changes_experts and "pack_experts" in on_host and "pack_experts" not in names:
        names = f"{names}, pack_experts (adapters may change experts)".removeprefix(", ")
    if not names:
        return ""
    return f"in {str(dtype).removeprefix('torch.')} on this GPU torch needs the host in each layer: {names}"


def _load_pooling_head(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, weights: WeightReader, device: torch.device
) -> PoolingHead | None:
    seed = config.model.seed if config.model.load_format == "dummy" else None
    return load_pooling_head(spec.pooling, weights, Path(source.path), device, seed=seed)


def _tiles_from(config: EngineConfig) -> int:
    """Number of tokens from which block weights may use the tiled kernels, which give other bits."""
    if config.kernels.deterministic:
        return NO_TILES
    if config.scheduler.speculative != "off":
        return MAX_DRAFT_STEP_TOKENS + 1  # drafts are verified with the kernels of decodes
    return TILES_FROM


def _open_store(config: ModelConfig, source: ModelSource, spec: ModelSpec) -> TensorStore:
    load_format = config.load_format
    if load_format == "auto":
        load_format = "gguf" if source.kind == "gguf" else "safetensors"
    path = Path(source.path)
    if load_format == "dummy":
        return DummyStore(config.seed)
    if load_format == "gguf":
        if source.kind != "gguf":
            raise ConfigError(
                f"{path}: load_format is gguf, but this is a folder; give the path of the .gguf file as the model"
            )
        return GGUFStore(path, spec, source.tower)
    if source.kind != "hf":
        raise ConfigError(
            f"{path}: load_format is safetensors, but this is a GGUF file; use --load-format gguf or auto"
        )
    return SafetensorsStore(path, spec)
