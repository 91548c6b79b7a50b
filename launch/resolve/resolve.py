"""`resolve`: replaces every "auto" by a value, once, at start, with a one-line reason for each.

Pure arithmetic over the model's shape (`ModelSpec`) and the machine (`HostFacts`): no torch, no device, no clock. The
same configuration on the same machine gives the same result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from ...models.families.registry import FAMILIES
from ...models.spec.model_spec import with_quantization
from ...models.spec.quantization import BLOCK_METHODS
from ...runtime.config.adapter_config import AdapterConfig
from ...runtime.config.engine_config import EngineConfig
from ...runtime.config.model_choice import Quantization
from ...runtime.errors import ConfigError
from .host_facts import HostFacts, usable_threads
from .image_limits import image_limits, part_scale, with_image_limits
from .kernel_checks import against_blocks, check_deterministic, runs_kernels
from .kind_settings import encoder_settings, encoder_step_tokens, state_settings
from .pool_size import Device, PoolDecision, PoolSize
from .rank_settings import check_ranks
from .step_settings import StepSettings

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from .nvidia_gpus import GpuFacts

BF16_FLAGS: Final = ("amx_bf16", "avx512_bf16", "bf16")  # the last one is ARM's
BF16_CAPABILITY: Final = (8, 0)  # Ampere
CPU_MEM_FRACTION: Final = 0.4  # other programs use the same memory
CUDA_MEM_FRACTION: Final = 0.94  # of what is left once weights, steps and recordings are measured: `fit_pool`
CUDA_ESTIMATED_FRACTION: Final = 0.88  # of an estimate, before the weights are loaded
MAX_AUTO_GRAPH_BATCH: Final = 256
_MOST_ROWS: Final = 16_384  # of images of any size, if the largest one has no more
MOST_IMAGES: Final = 8  # of the largest size that stay computed: as many as a request may have

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without "auto".

    Attributes:
        config: every value concrete; resolving it again changes nothing.
        notes: setting -> reason for its value, for each setting that `resolve` filled in or changed.
    """

    config: EngineConfig
    notes: Mapping[str, str]


def resolve(config: EngineConfig, spec: ModelSpec, host: HostFacts) -> Resolved:
    """Fill in every "auto".

    Raises:
        ConfigError: the settings contradict the model or the machine (more context than the model supports, too little
            memory for one useful sequence, CUDA without a GPU); the message holds the arithmetic.
    """
    return _Resolver(config, spec, host).run()


class _Resolver:
    """One resolution: collects values and notes; each method decides one setting from those decided before."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, host: HostFacts) -> None:
        self.config, self.spec, self.host = config, spec, host
        self.notes: dict[str, str] = {}
        self.page_size = config.cache.page_size

    def run(self) -> Resolved:
        self.set_speculative()
        if self.spec.encoder is not None:
            self.config, notes = encoder_settings(self.config, self.spec)
            self.notes.update(notes)
        if self.spec.state is not None:
            self.config, notes = state_settings(self.config, self.spec)
            self.notes.update(notes)
        device = self.device()
        model_impl = self.model_impl()
        dtype = self.dtype(device, model_impl)
        num_threads = self.num_threads()
        if self.spec.encoder is not None:
            self.set_encoder_step(device, num_threads)
        gpu_bytes = min(gpu.total_bytes for gpu in self.used_gpus()) if device == "cuda" else 0
        steps = StepSettings(self.config, gpu_bytes, device)
        chunk = steps.chunked_prefill_size()
        fraction = self.mem_fraction(device)
        quantization = self.quantization(device, dtype, model_impl)
        self.spec = with_quantization(self.spec, quantization)
        check_ranks(self.config, self.spec, self.host, device, self.num_gpus_needed())
        media, notes = image_limits(
            self.config.media,
            self.spec,
            device=device,
            dtype=dtype,
            num_threads=num_threads,
            cpu_flags=self.host.cpu_flags,
        )
        self.config = replace(self.config, media=media)
        self.notes.update(notes)
        if self.spec.vision is not None and self.spec.vision.row_pixels:
            # its rows and working memory are limited, too
            self.spec = with_image_limits(self.spec, media, part_scale(device, num_threads))
        self.set_encoder_rows()
        pool = self.pool(device, dtype, num_threads, chunk, fraction)
        config = replace(
            self.config,
            model=replace(
                self.config.model,
                task=self.task(),
                device=device,
                dtype=dtype,
                model_impl=model_impl,
                quantization=quantization,
                num_threads=num_threads,
                max_model_len=pool.max_model_len,
                len_is_estimate=self.config.model.len_is_estimate
                or self.config.model.max_model_len == "auto",
            ),
            cache=replace(
                self.config.cache,
                mem_fraction=fraction,
                max_total_tokens=pool.max_total_tokens,
                # An encoder's pool is as large as its steps need, not as memory allows.
                pool_is_estimate=self.spec.causal
                and (self.config.cache.pool_is_estimate or self.config.cache.max_total_tokens == "auto"),
                kv_cache_dtype=self.kv_cache_dtype(dtype, device),
                swap_space=pool.swap_gib,
            ),
            adapters=self.adapters(model_impl),
            kernels=replace(
                self.config.kernels,
                record_steps=self.record_steps(device, model_impl),
                max_recorded_bs=self.max_recorded_bs(pool.max_running_requests),
            ),
            scheduler=replace(
                self.config.scheduler,
                chunked_prefill_size=chunk,
                target_step_ms=steps.target_step_ms(chunk),
                max_running_requests=pool.max_running_requests,
                max_num_batched_tokens=steps.max_num_batched_tokens(chunk, pool.max_running_requests),
                long_prefill_token_threshold=steps.long_prefill_token_threshold(pool.max_model_len),
                overlap=steps.overlap(),
                multi_step_ms=steps.multi_step_ms(),
            ),
        )
        self.notes.update(steps.notes)
        _assert_no_auto(config)
        check_deterministic(config, self.spec)
        _check_kv_events(config)
        return Resolved(config, self.notes)

    def set_speculative(self) -> None:
        """Decide `speculative`, on which the sizes of pools and steps depend."""
        if self.config.scheduler.speculative != "auto":
            return
        against = ""
        if self.spec.pooling is not None or self.spec.encoder is not None:
            against = "the model generates no text"
        elif self.config.parallel.pp > 1:
            against = f"pp is {self.config.parallel.pp}, and stages need several steps in flight"
        reason = against or "drafts from the text so far, where a step's measured time says that they pay"
        value: Literal["off", "suffix"] = "off" if against else "suffix"
        scheduler = replace(self.config.scheduler, speculative=self.note("speculative", value, reason))
        self.config = replace(self.config, scheduler=scheduler)

    # ---------------------------------------------------------------- task

    def task(self) -> Literal["generate", "embed", "score"]:
        """The task of the model's files or of the user, which reading the files has checked."""
        pooling = self.spec.pooling
        if pooling is None:
            if self.config.model.matryoshka:
                raise ConfigError(
                    "matryoshka is true, but the task is generate; vectors are made with --task embed only"
                )
            if self.config.model.task == "auto":
                self.notes["task"] = "the model generates text"
            return "generate"
        self.notes["task"] = pooling.reason
        return pooling.task

    # ---------------------------------------------------------------- ranks, device and threads

    def num_gpus_needed(self) -> int:
        """GPUs that this engine uses on this machine, the first ones; Ray finds those of the other ranks itself."""
        parallel = self.config.parallel
        return 1 if parallel.executor == "ray" else parallel.ranks_on_one_host

    def used_gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs of this machine's ranks."""
        return self.host.gpus[: self.num_gpus_needed()]

    def device(self) -> Any:
        gpus, asked = self.host.gpus, self.config.model.device
        if asked == "cuda":
            if not gpus and self.host.num_hidden_gpus:
                raise ConfigError(
                    f"device is cuda, but CUDA_VISIBLE_DEVICES hides all {self.host.num_hidden_gpus} GPUs; name one in "
                    "it or use --device cpu"
                )
            if not gpus:
                raise ConfigError("device is cuda, but no NVIDIA driver or GPU is visible; use --device cpu")
            if not self.host.torch_has_cuda:
                raise ConfigError(
                    f"device is cuda, but the installed torch {self.host.torch_version or '(none)'} is not a CUDA "
                    f"build; install the engine with its cuda extra or use --device cpu"
                )
        if asked != "auto":
            return asked
        if gpus and self.host.torch_has_cuda:
            return self.note("device", "cuda", f"{gpus[0].name} is visible and torch is a CUDA build")
        if gpus:
            return self.note(
                "device", "cpu", f"torch {self.host.torch_version} has no CUDA, though a GPU is visible"
            )
        hidden = self.host.num_hidden_gpus
        reason = f"CUDA_VISIBLE_DEVICES hides all {hidden} GPUs" if hidden else "no NVIDIA GPU is visible"
        return self.note("device", "cpu", reason)

    def dtype(self, device: str, model_impl: str) -> Any:
        if self.config.model.dtype != "auto":
            return self.config.model.dtype
        if device == "cuda":
            # Models run in one dtype on all ranks, so the oldest GPU decides.
            gpu = min(self.used_gpus(), key=lambda gpu: gpu.compute_capability or BF16_CAPABILITY)
            if gpu.compute_capability and gpu.compute_capability < BF16_CAPABILITY:
                major, minor = gpu.compute_capability
                reason = f"{gpu.name} (compute capability {major}.{minor}) has no bfloat16 instructions"
                return self.note("dtype", "float32", reason)
            return self.note("dtype", "bfloat16", "native on GPUs since Ampere")
        if self.config.kernels.deterministic:
            return self.note("dtype", "bfloat16", "the deterministic matmuls are in bfloat16")
        native = [flag for flag in BF16_FLAGS if flag in self.host.cpu_flags]
        if native:
            return self.note("dtype", "bfloat16", f"the CPU multiplies bfloat16 ({native[0]})")
        ours = model_impl == "engine" and self.host.has_cpu_kernels
        if ours and runs_kernels(self.host):
            return self.note("dtype", "bfloat16", "half the memory; the engine multiplies it in float32")
        return self.note("dtype", "float32", "the CPU has no bfloat16 instructions, emulating them is slower")

    def num_threads(self) -> int:
        if self.config.model.num_threads != "auto":
            return self.config.model.num_threads
        threads, ranks = usable_threads(self.host), self.config.parallel.ranks_on_one_host
        if threads < self.host.num_cores:
            reason = f"the cgroup grants {self.host.cpu_quota:g} CPUs of {self.host.num_cores} cores"
        else:
            reason = f"{self.host.num_cores} physical cores in the affinity mask ({self.host.num_cpus} logical CPUs)"
        if ranks > 1:
            threads = max(1, threads // ranks)
            dp = self.config.parallel.dp
            reason += f", shared by {ranks} ranks" if dp == 1 else f", shared by {dp} replicas"
        return self.note("num_threads", threads, reason)

    def set_encoder_step(self, device: str, num_threads: int) -> None:
        tokens = encoder_step_tokens(self.config, self.spec, device, num_threads)
        if tokens != self.config.scheduler.max_prefill_tokens:
            reason = f"keeps a step of the encoder short on {num_threads} CPU threads"
            self.note("max_prefill_tokens", tokens, reason)
            scheduler = replace(self.config.scheduler, max_prefill_tokens=tokens)
            self.config = replace(self.config, scheduler=scheduler)

    # ---------------------------------------------------------------- memory

    def set_encoder_rows(self) -> None:
        """Decide `mm_encoder_cache_tokens`, in rows of whole tiles."""
        asked, vision = self.config.cache.mm_encoder_cache_tokens, self.spec.vision
        if vision is None:
            if asked not in ("auto", 0):
                raise ConfigError(
                    f"mm_encoder_cache_tokens is {asked}, but the model sees no images; omit --mm-encoder-cache-tokens"
                )
            rows = 0
        elif asked == "auto":
            rows, reason = MOST_IMAGES * vision.most_rows, f"{MOST_IMAGES} of the largest images"
            if vision.row_pixels and rows > _MOST_ROWS:
                most = _MOST_ROWS // vision.rows_per_tile * vision.rows_per_tile
                rows, reason = (
                    max(vision.most_rows, most),
                    "an image of the most pixels, or several smaller ones",
                )
            self.note("mm_encoder_cache_tokens", rows, reason)
        else:
            unit, what = vision.rows_per_tile, "blocks" if vision.row_pixels else "tiles"
            # Up for images of any size: one with exactly as many rows as the user has asked for has room.
            rows = -(-asked // unit) * unit if vision.row_pixels else asked // unit * unit
            if not rows:
                raise ConfigError(
                    f"mm_encoder_cache_tokens is {asked}, but a tile of an image takes {unit}; raise "
                    "--mm-encoder-cache-tokens, or serve text with --language-model-only"
                )
            if rows != asked:
                self.note("mm_encoder_cache_tokens", rows, f"{asked} in whole {what} of {unit}")
        self.config = replace(self.config, cache=replace(self.config.cache, mm_encoder_cache_tokens=rows))

    def mem_fraction(self, device: str) -> float:
        asked = self.config.cache.mem_fraction
        if asked != "auto":
            return asked
        if device == "cuda":
            return self.note(
                "mem_fraction", CUDA_MEM_FRACTION, "the largest steps are measured; the rest is slack"
            )
        return self.note("mem_fraction", CPU_MEM_FRACTION, "leaves memory to other programs on this machine")

    def pool(self, device: str, dtype: str, num_threads: int, chunk: int, fraction: float) -> PoolDecision:
        host_free_bytes = self.host.mem_usable_bytes // self.config.parallel.ranks_on_one_host
        facts = Device(
            name=device,
            dtype=dtype,
            num_threads=num_threads,
            free_bytes=(
                min(gpu.free_bytes for gpu in self.used_gpus()) if device == "cuda" else host_free_bytes
            ),
            host_free_bytes=host_free_bytes,
        )
        if device == "cuda" and self.config.cache.mem_fraction == "auto":
            fraction = CUDA_ESTIMATED_FRACTION
        decision = PoolSize(self.config, self.spec, facts, chunk=chunk, fraction=fraction).decide()
        self.notes.update(decision.notes)
        return decision

    # ---------------------------------------------------------------- model and kernels

    def adapters(self, model_impl: str) -> AdapterConfig:
        group = self.config.adapters
        if group.is_enabled and model_impl == "transformers":
            raise ConfigError(
                f"lora is set, but {self.spec.model_type} is computed by transformers, which applies no adapters here; "
                "merge the adapter into the model (peft: merge_and_unload)"
            )
        return replace(group, max_lora_rank=1) if group.max_lora_rank == "auto" else group

    def model_impl(self) -> Any:
        asked, model_type = self.config.model.model_impl, self.spec.model_type
        is_known = model_type in FAMILIES
        if asked == "engine" and not is_known:
            raise ConfigError(
                f"model_impl is engine, but the engine has no model for {model_type}, only for "
                f"{', '.join(FAMILIES)}; use --model-impl transformers"
            )
        chosen = asked if asked != "auto" else "engine" if is_known else "transformers"
        parallel = self.config.parallel
        for name, value in (("tp", parallel.tp), ("pp", parallel.pp)):
            if chosen == "transformers" and value > 1:
                raise ConfigError(
                    f"{name} is {value}, but {model_type} is computed by transformers, on one device only; "
                    f"use --{name} 1" + (" or --model-impl engine" if is_known else "")
                )
        if chosen == "transformers" and self.spec.latent is not None:
            raise ConfigError(
                f"model_impl is transformers, but {model_type} has latent attention, for which only the engine's own "
                "model has a KV pool; use --model-impl engine"
            )
        if asked != "auto":
            return chosen
        reason = "the engine has a model for {}" if is_known else "the engine has no model for {} of its own"
        return self.note("model_impl", chosen, reason.format(model_type))

    def quantization(self, device: str, dtype: str, model_impl: str) -> Quantization | None:
        """The form of the weights; None: as in the checkpoint, which every device can load."""
        asked, found = self.config.model.quantization, self.spec.quantization
        against, fix = against_blocks(self.config.model, self.host, device, dtype, model_impl)
        if asked in BLOCK_METHODS and against:
            raise ConfigError(f"quantization is {asked}, but {against}; {fix} or --quantization none")
        if asked is not None or found is None:
            return asked
        becomes_blocks = device == "cpu" and found.is_in_blocks and self.config.model.load_format != "dummy"
        if against and (found.method == "gguf" or becomes_blocks):
            return self.note("quantization", "none", against)
        if found.method != "gguf":
            return None
        return self.note(
            "quantization", "gguf", "the file's quantized values, which this CPU multiplies directly"
        )

    def kv_cache_dtype(self, dtype: Any, device: str) -> Any:
        asked = self.config.cache.kv_cache_dtype
        if asked == "int8" and device != "cpu":
            raise ConfigError(
                f"kv_cache_dtype is int8, but only the CPU supports it, not {device}; use --kv-cache-dtype fp8 or auto"
            )
        if self.spec.latent is not None and self.spec.latent.index is not None:
            if device != "cpu":
                raise ConfigError(
                    f"device is {device}, but {self.spec.model_type} has sparse attention (index_topk), which the "
                    "engine computes on CPUs only; use --device cpu"
                )
            if self.config.kernels.deterministic:
                raise ConfigError(
                    f"deterministic is on, but {self.spec.model_type} has sparse attention (index_topk), which "
                    "keeps no order of sums; omit --deterministic"
                )
        if self.spec.latent is not None and asked not in ("auto", dtype):
            raise ConfigError(
                f"kv_cache_dtype is {asked}, but {self.spec.model_type} has latent attention, whose rows are kept in "
                f"{dtype} like its activations; use --kv-cache-dtype auto"
            )
        return dtype if asked == "auto" else asked

    def record_steps(self, device: str, model_impl: str) -> bool:
        asked, theirs = self.config.kernels.record_steps, model_impl == "transformers"
        if asked is True and theirs:
            raise ConfigError(
                f"record_steps is on, but {self.spec.model_type} is computed by transformers, and its models may wait "
                "for the device within a step; use --no-record-steps"
            )
        if asked != "auto":
            return asked
        if theirs:
            return self.note(
                "record_steps", False, "transformers' models may wait for the device within a step"
            )
        return self.note("record_steps", True, "replaying a step costs the host less than launching it")

    def max_recorded_bs(self, max_running: int) -> int:
        asked = self.config.kernels.max_recorded_bs
        if asked != "auto":
            return min(asked, max_running)
        return min(MAX_AUTO_GRAPH_BATCH, max_running)

    def note(self, name: str, value: T, reason: str) -> T:
        if reason:
            self.notes[name] = reason
        return value


def _check_kv_events(config: EngineConfig) -> None:
    if config.server.kv_events is not None and not config.cache.radix_cache:
        raise ConfigError(
            f"kv_events is {config.server.kv_events!r}, but without the prefix cache there is nothing to publish; omit "
            "--no-radix-cache, or --kv-events"
        )


def _assert_no_auto(config: EngineConfig) -> None:
    """Every "auto" must be resolved; a missing one is a bug.

    `load_format` is decided with the model's files, and the parsers of answers with the chat template.
    """
    for group in dataclasses.fields(config):
        if group.name == "answers":
            continue
        values = getattr(config, group.name)
        for field in dataclasses.fields(values):
            assert getattr(values, field.name) != "auto" or field.name == "load_format", field.name
