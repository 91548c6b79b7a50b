"""A small driver that plays the scheduler: lists of tokens in, `StepPlan`s to a real `ModelRunner`, tokens out."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from engine.model_runner import load
from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.model_runner.input_batch import InputBatch
from engine.model_runner.load import load_model_runner
from engine.model_runner.memory.host_kv_pool import HostKVPool
from engine.model_runner.recording.eager_executor import EagerExecutor
from engine.model_runner.recording.executor import RecordedBytes, StepExecutor, StepOutput
from engine.model_runner.recording.programs.native_executor import NativeExecutor
from engine.models.hf.hf_config import read_hf_spec
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.device_config import KernelConfig
from engine.runtime.config.engine_config import (
    CacheConfig,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    SchedulerConfig,
    SpeculativeName,
)
from engine.runtime.config.model_choice import Quantization
from engine.runtime.feasibility import Capacity, pages_for
from engine.runtime.pooling import PoolingParams
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import Encode, ForwardMode, NewReq, RowUpdate, StepPlan, StepResult
from engine.runtime.transport.message_base import Logprobs

GREEDY = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64)
MIXTURE = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
"""Of a tiny mixture of experts, `qwen3_moe`."""
LATENT_MIXTURE = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
"""Of a tiny mixture of experts with latent attention, `deepseek_v3`."""


def int32(values: Iterable[int]) -> bytes:
    return np.fromiter(values, dtype=np.int32).tobytes()


@dataclass
class Request:
    """One request as the driver sees it; `tokens` grows with every sampled token."""

    row: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    prefix_len: int = 0
    announced: bool = False
    pooling: PoolingParams | None = None
    adapter_slot: int = 0
    media: bytes = b""
    rope: bytes = b""

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Hands out rows and randomly ordered pages, and makes plans."""

    def __init__(self, runner: Any, capacity: Capacity, seed: int = 0) -> None:
        self.runner, self.capacity = runner, capacity
        self.random = random.Random(seed)
        self.rows = list(range(capacity.max_running_requests))
        self.pages = list(range(1, capacity.num_pages + 1))
        self.finished: list[int] = []
        self.step_id = 0

    def run_eagerly(self) -> None:
        """From now on every step is launched kernel by kernel."""
        if not isinstance(self.runner.executor, EagerExecutor):
            self.runner.executor = self.runner.executor.eager

    @property
    def native(self) -> NativeExecutor:
        """The runner's executor, which records decodes."""
        executor = self.runner.executor
        assert isinstance(executor, NativeExecutor), executor
        return executor

    def slots(self, pages: Sequence[int], start: int, stop: int) -> list[int]:
        size = self.capacity.page_size
        return [pages[p // size] * size + p % size for p in range(start, stop)]

    def start(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        prompt_len: int | None = None,
        prefix: tuple[Request, int] | None = None,
        pooling: PoolingParams | None = None,
        adapter_slot: int = 0,
    ) -> Request:
        """A new request; `prefix`: share the pages of another one's first tokens (whole pages of them)."""
        row = self.rows.pop(self.random.randrange(len(self.rows)))
        length = len(tokens) if prompt_len is None else prompt_len
        req = Request(row, list(tokens), length, sampling, pooling=pooling)
        req.adapter_slot = adapter_slot
        if prefix is not None:
            donor, length = prefix
            assert length % self.capacity.page_size == 0 and donor.computed >= length
            assert donor.tokens[:length] == req.tokens[:length]
            req.pages = donor.pages[: length // self.capacity.page_size]
            req.computed = req.prefix_len = length
        return req

    def finish(self, req: Request, *, free: bool = True) -> None:
        self.rows.append(req.row)
        self.finished.append(req.row)
        if free:
            self.pages += req.pages[req.prefix_len // self.capacity.page_size :]

    def plan(
        self,
        work: Sequence[tuple[Request, int]],
        row_updates: tuple[RowUpdate, ...] = (),
        encodes: tuple[Encode, ...] = (),
        **pages: Sequence[tuple[int, int]],
    ) -> StepPlan:
        """Compute so many more tokens of each request; extends must come first.

        Args:
            pages: page_copies, swap_outs, swap_ins, adapter_loads.
        """
        self.step_id += 1
        new_reqs, out_loc, samples, pools = [], [], [], []
        for req, count in work:
            stop = req.computed + count
            while len(req.pages) < pages_for(stop, self.capacity.page_size):
                req.pages.append(self.pages.pop(self.random.randrange(len(self.pages))))
            if not req.announced:
                prefix_loc = int32(self.slots(req.pages, 0, req.prefix_len))
                new_reqs.append(
                    NewReq(
                        f"r{req.row}",
                        req.row,
                        int32(req.tokens),
                        req.prompt_len,
                        prefix_loc,
                        req.sampling,
                        req.pooling,
                        adapter_slot=req.adapter_slot,
                        media=req.media,
                        rope=req.rope,
                    )
                )
                req.announced = True
            out_loc += self.slots(req.pages, req.computed, stop)
            samples.append(stop == len(req.tokens) and req.pooling is None)
            pools.append(stop == len(req.tokens) and req.pooling is not None)
        counts = [count for _, count in work]
        mode = ForwardMode.DECODE if all(count == 1 for count in counts) else ForwardMode.MIXED
        tables = {name: int32(itertools.chain(*pairs)) for name, pairs in pages.items()}
        plan = StepPlan(
            step_id=self.step_id,
            mode=mode if work else ForwardMode.IDLE,
            rows=int32(req.row for req, _ in work),
            num_computed_tokens=int32(req.computed for req, _ in work),
            num_scheduled_tokens=int32(counts),
            out_cache_loc=int32(out_loc),
            samples=bytes(samples),
            total_num_scheduled_tokens=sum(counts),
            new_reqs=tuple(new_reqs),
            row_updates=row_updates,
            finished_rows=int32(self.finished),
            page_copies=tables.get("page_copies", b""),
            swap_outs=tables.get("swap_outs", b""),
            swap_ins=tables.get("swap_ins", b""),
            pools=bytes(pools) if any(pools) else b"",
            adapter_loads=tables.get("adapter_loads", b""),
            encodes=encodes,
        )
        self.finished = []
        return plan

    def step(self, work: Sequence[tuple[Request, int]], **options: Any) -> StepResult:
        result: StepResult = self.runner.launch(self.plan(work, **options)).wait()
        sampled = iter(np.frombuffer(result.next_token_ids, dtype=np.int32).tolist())
        for req, count in work:
            req.computed += count
            if req.computed == len(req.tokens) and req.pooling is None:
                req.tokens.append(next(sampled))
        assert next(sampled, None) is None
        return result

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        num: int,
        chunk: int = 1 << 30,
        slots: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """All prompts in one batch, `num` tokens each; `slots`: their adapter slots."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        reqs = [
            self.start(prompt, one, adapter_slot=slot)
            for prompt, one, slot in zip(prompts, params, slots or [0] * len(prompts), strict=True)
        ]
        while any(len(req.output) < num for req in reqs):
            work = [
                (req, min(chunk, len(req.tokens) - req.computed)) for req in reqs if len(req.output) < num
            ]
            self.step(sorted(work, key=lambda item: item[1] == 1))
        for req in reqs:
            self.finish(req)
        return [req.output for req in reqs]


class SeeingExecutor:
    """In the place of a driver's executor, by which it runs steps: keeps the batch and the logits of each.

    Before each step it poisons what recordings work in: nothing of one step may be read by the next.
    """

    recorded_bytes = RecordedBytes()

    def __init__(self, driver: Driver) -> None:
        self.inner: StepExecutor = driver.runner.executor
        self.batches: list[InputBatch] = []
        self.logits: list[torch.Tensor] = []
        driver.runner.executor = self

    def run(self, batch: InputBatch) -> StepOutput:
        if isinstance(self.inner, NativeExecutor):
            self.inner.arena.fill(0xFF)  # NaN
        output = self.inner.run(batch)
        self.batches.append(batch)
        if output.logits is not None:
            self.logits.append(output.logits.clone())
        return output

    @property
    def recorded_sizes(self) -> list[int]:
        """Of a `NativeExecutor`; none of others."""
        return self.inner.recorded_sizes if isinstance(self.inner, NativeExecutor) else []

    @property
    def num_recorded(self) -> int:
        """Steps that a `NativeExecutor` recorded or replayed."""
        num_replayed = self.inner.num_replayed if isinstance(self.inner, NativeExecutor) else 0
        return num_replayed + len(self.recorded_sizes)


@dataclass(frozen=True)
class TinyModel:
    """A random model of transformers, saved to a folder, and the facts our reader finds there."""

    reference: Any
    folder: Path
    spec: ModelSpec

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of what follows each token: [len, vocab] float32."""
        logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0].float()
        return logits.log_softmax(-1)

    @torch.inference_mode()
    def greedy(self, tokens: Sequence[int], num: int) -> list[int]:
        """Greedy continuation without any cache."""
        out = list(tokens)
        for _ in range(num):
            out.append(int(self.reference(torch.tensor([out])).logits[0, -1].argmax()))
        return out[len(tokens) :]


@pytest.fixture
def make_tiny_model(tmp_path: Path) -> Callable[..., TinyModel]:
    """A tiny random model of an architecture; keyword arguments are those of its configuration in transformers."""

    def make(
        model_type: str,
        *,
        dtype: str = "float32",
        max_shard_size: str = "1GB",
        seed: int = 0,
        **options: Any,
    ) -> TinyModel:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings: dict[str, Any] = {
            "vocab_size": 96,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **{**settings, **options})
        reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:  # large enough that logits differ clearly
                    parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5)
            for name, buffer in reference.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.6, 1.2)
        reference = reference.to(getattr(torch, dtype))
        folder = tmp_path / f"{model_type}{seed}"
        reference.save_pretrained(folder, max_shard_size=max_shard_size)
        return TinyModel(reference, folder, read_hf_spec(folder))

    return make


@pytest.fixture
def make_tiny_llama(make_tiny_model: Callable[..., TinyModel]) -> Callable[..., TinyModel]:
    """A tiny random Llama; see `make_tiny_model`."""
    return functools.partial(make_tiny_model, "llama")


def engine_config(model: ModelConfig, *, page_size: int = 4, **kernels: Any) -> EngineConfig:
    """Settings around those of a model, complete enough for a device that is measured."""
    return EngineConfig(
        model=model,
        cache=CacheConfig(page_size=page_size, mem_fraction=0.5),
        kernels=KernelConfig(**kernels),
        scheduler=SchedulerConfig(chunked_prefill_size=64, max_running_requests=8),
    )


@pytest.fixture(autouse=True, scope="package")
def no_huge_pages() -> Iterator[None]:
    """Loading a model moves all memory of the process into huge pages, which is slow in one with all of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "collapse_resident_memory", lambda: 0)
        yield


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    """A runner from a folder, a GGUF file or (path None) dummy weights, behind a driver."""

    def make(
        spec: ModelSpec,
        path: Path | None = None,
        *,
        kind: Literal["hf", "gguf"] = "hf",
        dtype: Literal["bfloat16", "float32"] = "float32",
        page_size: int = 4,
        num_pages: int = 512,
        num_host_pages: int = 0,
        max_model_len: int = 256,
        rows: int = 40,
        poison: bool = True,
        seed: int = 0,
        model_impl: Literal["auto", "engine", "transformers"] = "auto",
        kv_cache_dtype: KVCacheDType = "auto",
        quantization: Quantization | None = None,
        deterministic: bool = False,
        speculative: SpeculativeName = "off",
        num_threads: int | None = None,
        max_recorded_bs: int | Literal["auto"] = "auto",
        adapter_slots: SlotSizes | None = None,
        avoid_kernels: tuple[str, ...] = (),
        num_encoder_rows: int = 0,
        tower: str = "",
    ) -> Driver:
        capacity = Capacity(
            max_model_len,
            num_pages,
            page_size,
            rows,
            spec.vocab_size,
            num_host_pages,
            num_encoder_rows=num_encoder_rows,
            encoder_tile_rows=0 if spec.vision is None else spec.vision.rows_per_tile,
            encoder_row_pixels=0 if spec.vision is None else spec.vision.row_pixels,
            has_rope_axes=spec.vision is not None and bool(spec.vision.rope_sections),
            images_are_whole=spec.vision is not None and spec.vision.sees_whole,
        )
        config = ModelConfig(
            dtype=dtype,
            device="cpu",
            num_threads=num_threads or torch.get_num_threads(),
            load_format="auto" if path else "dummy",
            model_impl=model_impl,
            quantization=quantization,
            seed=1,
        )
        source = ModelSource(kind, str(path or "dummy"), "test", tower)
        cache = CacheConfig(page_size=page_size, kv_cache_dtype=kv_cache_dtype)
        kernels = KernelConfig(
            deterministic=deterministic, max_recorded_bs=max_recorded_bs, avoid_kernels=avoid_kernels
        )
        scheduler = SchedulerConfig(speculative=speculative)
        whole = EngineConfig(model=config, cache=cache, kernels=kernels, scheduler=scheduler)
        runner = load_model_runner(whole, source, spec, capacity, adapter_slots=adapter_slots)
        if poison:  # whoever reads a slot that nobody wrote gets NaN
            for pool in (*runner.kv_pool.k, *runner.kv_pool.v):
                pool.fill_(torch.nan if pool.is_floating_point() else 0x7F)
            for scales in (*runner.kv_pool.k_scale, *runner.kv_pool.v_scale):
                scales.fill_(torch.nan)
            if isinstance(runner.host_kv_pool, HostKVPool):
                for pages in runner.host_kv_pool.pages:
                    pages.fill_(torch.nan if pages.is_floating_point() else 0x7F)  # NaN as an 8-bit float
        return Driver(runner, capacity, seed)

    return make


@pytest.fixture
def driver(make_driver: Callable[..., Driver], make_tiny_llama: Callable[..., TinyModel]) -> Driver:
    """A tiny random model in float32 with poisoned KV memory."""
    tiny = make_tiny_llama()
    return make_driver(tiny.spec, tiny.folder)


@pytest.fixture
def unpack() -> Callable[[Logprobs], tuple[Any, Any, Any]]:
    """`Logprobs` to arrays: token_logprobs [n], top_ids [n, k], top_logprobs [n, k]."""

    def unpack_logprobs(packed: Logprobs) -> tuple[Any, Any, Any]:
        token = np.frombuffer(packed.token_logprobs, dtype=np.float32)
        top_ids = np.frombuffer(packed.top_ids, dtype=np.int32).reshape(len(token), packed.top_k)
        top = np.frombuffer(packed.top_logprobs, dtype=np.float32).reshape(len(token), packed.top_k)
        return token, top_ids, top

    return unpack_logprobs
