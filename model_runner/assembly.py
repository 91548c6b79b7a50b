"""`assemble_runner`: constructs a `ModelRunner` for a loaded model: reserves memory, records decodes.

`build_facts` describes the result, for the log and for the labels of a metric.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..launch.resolve.stages import WHOLE_MODEL
from ..models.spec.sizes import KV_SCALE_BYTES, max_drafts_of
from ..runtime.config.device_config import KernelConfig, parse_attention_backend
from .adapter_runs import runs_or_none
from .attention.cpu_native import CpuNativeAttention
from .attention.indexed import indexed_backend
from .attention.selection import select_backend
from .batch_builder import BatchBuilder
from .distributed.pp_link import NO_LINK
from .drafting.draft_model import DraftModel
from .drafting.drafter import Drafter, DrafterParts
from .drafting.feature_module import FeatureModule
from .drafting.lag import Lag
from .kernels.avoided import AVOIDED, NOTHING_AVOIDED, AvoidedKernels
from .kernels.cpu.library import loaded_isa
from .layers.decoder import Decoder
from .memory.host_kv_pool import HostKVPool
from .memory.io_buffers import InputBuffers, OutputBuffers
from .memory.kv_pool import KVPool
from .memory.slot_table import SlotTable
from .memory.state_pool import StatePool
from .model_runner import ModelRunner, RunnerSizes
from .pooling.pooler import Pooler
from .recording.eager_executor import EagerExecutor
from .recording.graph_device import CudaGraphDevice
from .recording.graphs.cuda_graph_executor import cuda_graph_executor
from .recording.graphs.graph_sizes import GraphSizes
from .recording.graphs.recorded_forward import RecordedForward, recorded_sampler
from .recording.programs.forward_program import programmed_forward
from .recording.programs.native_executor import native_executor
from .request_states import RequestStates, TokenRelay
from .sampling.sampler import make_sampler
from .sampling.shared_sampler import shared_sampler
from .sampling.token_counts import TokenCounts
from .states.state_planner import StatePlanner
from .states.state_runs import StateLayout
from .vision.encoder_rows import EncoderRows

if TYPE_CHECKING:
    from torch import Tensor

    from ..launch.resolve.stages import Stage
    from ..models.spec.model_spec import ModelSpec
    from ..runtime.config.engine_config import EngineConfig
    from ..runtime.feasibility import Capacity
    from .adapter_runs import AdapterRuns
    from .adapters.adapter_store import AdapterSlots
    from .attention.backend import AttentionBackend
    from .distributed.pp_link import StageLink
    from .distributed.tp_group import TPGroup
    from .drafting.drafter import MakeDrafter
    from .drafting.head_programs import FeatureHead
    from .pooling.head import PoolingHead
    from .recording.eager_executor import Forward
    from .recording.executor import StepExecutor
    from .structures.causal_lm import CausalLM
    from .vision.encoder_rows import ImageEncoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model, and the choices with which its runner is constructed.

    Attributes:
        model: the model with its weights.
        spec, own_spec: spec of the whole model, and of this rank's part.
        dtype, kv_dtype: dtype of activations, and of the KV pool.
        kernels: the configuration of the kernels, with the attention backend.
        pooling_head: the model's layers after pooling; None if it has none.
        adapters: the slots of adapters; None: the server has none.
        max_drafts: of one request in a step.
        link: to other pipeline stages.
        stage: the pipeline stage of this rank; `spec` is that of its layers.
        avoid: the components to do without.
        make_drafter: makes the drafter; None: there is none.
        tower: of a model that sees images, on the first pipeline stage; else None.
        processed_logprobs: see `AnswerConfig.logprobs_mode`.
    """

    model: CausalLM
    spec: ModelSpec
    own_spec: ModelSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    group: TPGroup
    kernels: KernelConfig
    pooling_head: PoolingHead | None = None
    adapters: AdapterSlots | None = None
    max_drafts: int = 0
    link: StageLink = NO_LINK
    stage: Stage = WHOLE_MODEL
    avoid: AvoidedKernels = NOTHING_AVOIDED
    make_drafter: MakeDrafter | None = None
    tower: ImageEncoder | None = None
    processed_logprobs: bool = False

    def page_bytes(self, page_size: int) -> int:
        """Memory of one page on this rank."""
        scale_bytes = KV_SCALE_BYTES if self.kv_dtype == torch.int8 else 0
        return page_size * self.own_spec.kv_bytes_per_token(self.kv_dtype.itemsize, scale_bytes)


def assemble_runner(loaded: LoadedModel, capacity: Capacity, graph_sizes: GraphSizes) -> ModelRunner:
    """Make a runner for a capacity that replays steps of these sizes.

    Raises:
        ConfigError: the requested attention backend cannot run here, or host memory cannot be pinned.
    """
    spec, own_spec, device, group = loaded.spec, loaded.own_spec, loaded.device, loaded.group
    draft_heads, feature_size = own_spec.draft_memory
    kv_pool = KVPool(
        num_layers=spec.num_kv_layers + len(draft_heads),
        num_pages=capacity.num_pages,
        page_size=capacity.page_size,
        num_kv_heads=own_spec.num_kv_heads,
        head_dim=own_spec.head_dim,
        dtype=loaded.kv_dtype,
        device=device,
        layer_ids=() if len(spec.attention_layers) == spec.num_layers else spec.attention_layers,
        keys_hold_values=spec.latent is not None,
        layer_heads=[*(own_spec.heads_of(layer_id) for layer_id in spec.kv_layers), *draft_heads],
        sources=_memory_indices(spec) if spec.streams.kv_sources else (),
        page_states=(feature_size, loaded.dtype) if feature_size else None,
    )
    state_pool = _make_state_pool(loaded, capacity)
    logger.info(
        "kv_pool_tokens=%d kv_pool_mib=%.0f kv_dtype=%s",
        capacity.max_total_tokens,
        kv_pool.num_bytes / (1 << 20),
        kv_pool.k[0].dtype,
    )
    buffers = InputBuffers(device)
    host_kv_pool = None
    if capacity.num_host_pages:
        host_kv_pool = HostKVPool(kv_pool, capacity.num_host_pages, buffers)
        logger.info("host_kv_pool_mib=%.0f", host_kv_pool.num_bytes / (1 << 20))
    slot_table = SlotTable(capacity.max_running_requests, capacity.max_model_len, buffers)
    states = RequestStates(capacity.max_running_requests, capacity.vocab_size)
    counts = TokenCounts(capacity.vocab_size, buffers)
    relay = TokenRelay(capacity.max_running_requests, device)
    attention = _make_attention(loaded, kv_pool, slot_table.req_to_token, buffers)
    encoder_rows = None
    if loaded.tower is not None:
        width = loaded.tower.spec.row_width(spec.hidden_size)
        encoder_rows = EncoderRows(loaded.tower, capacity.num_encoder_rows, width, device)
    executor = _make_executor(
        loaded, graph_sizes, kv_pool, state_pool, attention, slot_table, relay, buffers, encoder_rows
    )
    builder = BatchBuilder(
        states=states,
        counts=counts,
        relay=relay,
        eos_token_ids=spec.eos_token_ids,
        buffers=buffers,
        has_token_types=_has_token_types(spec),
        pools_first=not spec.causal and spec.pooling is not None and spec.pooling.pooling == "cls",
        states_of_layers=None if state_pool is None else StatePlanner(state_pool.layout),
        images_are_whole=capacity.images_are_whole,
        layer_input_id=None if spec.vision is None else spec.vision.layer_input_id,
        processed_logprobs=loaded.processed_logprobs,
    )
    decodes = executor.recorded_decodes
    if decodes is not None and loaded.avoid.reasons("sampler_graphs"):
        logger.info("sampler_graphs=0: %s", AVOIDED)
        decodes = None
    record = None if decodes is None else partial(recorded_sampler, decodes)
    make = partial(make_sampler, counts, device, loaded.model.logits_dtype, record, loaded.avoid)
    sampler = shared_sampler(make, group)
    # Rank 0 alone has compiled the sampler. Without this the others would wait for it in the first step, where the
    # timeout is that of steps.
    group.meet("sampler")
    drafter = None
    if loaded.make_drafter is not None:

        def make_own_attention(own: ModelSpec, pool: KVPool, table: Tensor) -> AttentionBackend:
            # No token depends on drafts, so they need no fixed order.
            kernels = dataclasses.replace(loaded.kernels, deterministic=False)
            drafting = dataclasses.replace(loaded, own_spec=own, kernels=kernels)
            return _make_attention(drafting, pool, table, buffers)

        drafter = loaded.make_drafter(
            DrafterParts(kv_pool, slot_table, states, relay, builder, sampler, buffers, make_own_attention)
        )
    return ModelRunner(
        model=loaded.model,
        executor=executor,
        kv_pool=kv_pool,
        state_pool=state_pool,
        host_kv_pool=host_kv_pool,
        slot_table=slot_table,
        states=states,
        counts=counts,
        relay=relay,
        builder=builder,
        sampler=sampler,
        pooler=_make_pooler(loaded, states, buffers),
        buffers=buffers,
        outputs=OutputBuffers(device),
        capacity=capacity,
        sizes=RunnerSizes(
            executor.recorded_bytes._replace(samplers=sampler.recorded_bytes), attention.gathered_token_bytes
        ),
        drops_steps=group.size == 1 and loaded.stage.count == 1,
        attention_backend=attention.name,
        adapters=loaded.adapters,
        drafter=drafter,
        encoder_rows=encoder_rows,
    )


def make_draft_model(loaded: LoadedModel, vocab_size: int, max_drafts: int, parts: DrafterParts) -> Drafter:
    """Make the drafter of a draft model, whose keys and values are the last tensors of the runner's pool.

    Args:
        loaded: the draft model, which each rank has as a whole.
        vocab_size: of the model that samples.
        max_drafts: of one request in a step.
        parts: of the runner.
    """
    spec, tensors = loaded.spec, parts.kv_pool.k
    pool = parts.kv_pool.beyond(len(tensors) - spec.num_kv_layers, spec.kv_layers)
    attention = _make_attention(loaded, pool, parts.slot_table.req_to_token, parts.buffers)
    executor = _make_executor(
        loaded, GraphSizes(), pool, None, attention, parts.slot_table, parts.relay, parts.buffers, None
    )
    stores_only = isinstance(loaded.model, Decoder) and loaded.model.stores_only
    module = DraftModel(executor, spec.vocab_size, vocab_size, stores_only=stores_only)
    return Drafter(module, _lag(max_drafts, parts), parts)


def make_feature_drafter(
    head: FeatureHead,
    layer: ModelSpec,
    vocab_size: int,
    config: EngineConfig,
    group: TPGroup,
    parts: DrafterParts,
) -> Drafter:
    """Make the drafter of a head over the model's features, see `FeatureModule`.

    `group`: the ranks that share the head.
    """
    lag = _lag(max_drafts_of(config.scheduler), parts)
    records = config.kernels.record_steps is not False and group.size == 1
    module = FeatureModule(head, layer, parts, num_places=lag.size, vocab_size=vocab_size, records=records)
    return Drafter(module, lag, parts)


def _lag(max_drafts: int, parts: DrafterParts) -> Lag:
    return Lag(len(parts.slot_table.req_to_token), max_drafts + 1, parts.buffers.put)


def _memory_indices(spec: ModelSpec) -> list[int]:
    """For each layer the index of its KV memory."""
    return [spec.kv_layers.index(spec.kv_source_of(layer_id)) for layer_id in range(spec.num_layers)]


def _make_state_pool(loaded: LoadedModel, capacity: Capacity) -> StatePool | None:
    """The memory of state layers; None: the model has none."""
    state = loaded.own_spec.state
    if state is None:
        return None
    pool = StatePool(
        state,
        layout=StateLayout(capacity.max_running_requests, capacity.num_checkpoints, loaded.max_drafts),
        dtype=loaded.dtype,
        device=loaded.device,
    )
    logger.info(
        "state_rows=%d state_checkpoints=%d state_pool_mib=%.0f",
        *pool.layout[:2],
        pool.num_bytes / (1 << 20),
    )
    return pool


def _has_token_types(spec: ModelSpec) -> bool:
    return spec.encoder is not None and spec.encoder.token_types > 1


def _make_pooler(loaded: LoadedModel, states: RequestStates, buffers: InputBuffers) -> Pooler:
    pooling = loaded.spec.pooling

    def adapters_of(rows: Sequence[int]) -> AdapterRuns | None:
        return runs_or_none(states.adapter_slot[list(rows)], buffers.put)

    return Pooler(
        loaded.model,
        "last" if pooling is None else pooling.pooling,
        loaded.pooling_head,
        buffers.put,
        adapters_of,
    )


def _make_attention(
    loaded: LoadedModel, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers
) -> AttentionBackend:
    spec, kernels = loaded.own_spec, loaded.kernels
    if kernels.deterministic:  # `check_fixed_order` has accepted the model before the weights were read
        return CpuNativeAttention(spec, kv_pool, req_to_token, buffers, fixed_order=True)
    asked = parse_attention_backend(kernels.attention_backend)
    kv_dtype = kv_pool.k[0].dtype
    attention_type = select_backend(
        spec, loaded.device, loaded.dtype, kv_dtype, asked, kv_pool.page_size, loaded.avoid
    )
    if spec.latent is not None and spec.latent.index is not None:
        attention_type = indexed_backend(attention_type)
    return attention_type(spec, kv_pool, req_to_token, buffers)


def _make_executor(
    loaded: LoadedModel,
    graph_sizes: GraphSizes,
    kv_pool: KVPool,
    state_pool: StatePool | None,
    attention: AttentionBackend,
    slot_table: SlotTable,
    relay: TokenRelay,
    buffers: InputBuffers,
    encoder_rows: EncoderRows | None,
) -> StepExecutor:
    model, kernels, num_ranks = loaded.model, loaded.kernels, loaded.group.size
    forward: Forward = model.forward
    on_cpu = loaded.device.type == "cpu"
    if on_cpu:
        forward = programmed_forward(
            kernels,
            model=model,
            kv_pool=kv_pool,
            attention=attention,
            num_ranks=num_ranks,
            has_token_types=_has_token_types(loaded.spec),
            has_adapters=loaded.adapters is not None,
            state_pool=state_pool,
            link=loaded.link,
        )
    eager = EagerExecutor(
        model=model,
        forward=forward,
        attention=attention,
        kv_pool=kv_pool,
        slot_table=slot_table,
        relay=relay,
        buffers=buffers,
        state_pool=state_pool,
        link=loaded.link,
        keeps_features=loaded.make_drafter is not None,
        encoder_rows=None if encoder_rows is None else encoder_rows.rows,
    )
    if not loaded.spec.causal:
        return eager  # there are no decodes
    if on_cpu and not graph_sizes.text:
        return native_executor(
            kernels,
            eager,
            model=model,
            kv_pool=kv_pool,
            relay=relay,
            slot_table=slot_table,
            num_ranks=num_ranks,
            state_pool=state_pool,
        )
    records_adapters = loaded.adapters is not None and loaded.adapters.layers.are_recordable
    if graph_sizes.text and loaded.adapters is not None and not records_adapters:
        logger.info(
            "steps with adapters are launched kernel by kernel: their products need the host in each step"
        )
    return cuda_graph_executor(
        graph_sizes,
        eager,
        forward=RecordedForward(model, kv_pool, slot_table, relay, loaded.link, state_pool),
        buffers=buffers,
        make_device=partial(CudaGraphDevice, loaded.device),
        group=loaded.group,
        records_adapters=records_adapters,
    )


def build_facts(runner: ModelRunner) -> dict[str, str]:
    """Version of torch, device, attention backend, and the instruction set that the kernels are compiled for."""
    device = runner.kv_pool.k[0].device
    return {
        "torch": str(torch.__version__),  # a subclass of str, which msgspec does not encode
        "device": device.type,
        "backend": runner.attention_backend,
        "instruction_set": _instruction_set(device, runner.attention_backend),
    }


def _instruction_set(device: torch.device, backend: str) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    if backend == CpuNativeAttention.name:  # its library is loaded; loading it only to ask would compile it
        return loaded_isa()
    return torch.backends.cpu.get_cpu_capability().lower()
