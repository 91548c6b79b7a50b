"""The largest step is tried on the loaded model, and the pool follows: on a device that reports what it is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.model_runner import assembly, load, trial
from engine.model_runner.attention.backend import AttentionBackend
from engine.model_runner.attention.split import split_backend
from engine.model_runner.attention.torch_native import TorchNativeAttention
from engine.model_runner.distributed.join_group import Place
from engine.model_runner.distributed.tp_group import SINGLE_RANK, SingleRank, TPGroup
from engine.model_runner.memory import kv_pool
from engine.model_runner.model_runner import ModelRunner
from engine.model_runner.op_selection import PROVIDERS, select_ops
from engine.model_runner.recording.graphs.graph_sizes import sizes_to_record
from engine.model_runner.sampling import sampler
from engine.model_runner.sampling.sampler_backend import SampledTokens
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend
from engine.model_runner.trial import largest_step, prompt_lengths
from engine.models.source import ModelSource
from engine.models.spec.sizes import MIB
from engine.runtime.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from engine.runtime.step_plan import StepPlan, StepResult

from .conftest import TinyModel
from .recording.recording_device import DeviceAttention, RecordingDevice
from .structures.encoder_texts import make_encoder

STEP_BYTES = 30 * MIB
PLANNED = Capacity(max_model_len=64, num_pages=7, page_size=4, max_running_requests=6, vocab_size=96)
MANY = replace(PLANNED, max_running_requests=200)
PAGE_BYTES = 4 * 2 * 2 * 2 * 8 * 4  # tokens, keys and values, layers, heads, head dim, bytes


class Memory:
    """Of a device on which the largest step takes 30 MiB and its own KV pool."""

    def __init__(self) -> None:
        self.pools: list[int] = []
        self.free = 100 * MIB

    def free_bytes(self) -> int:
        return self.free

    def watch_peak(self) -> Callable[[], int]:
        return lambda: STEP_BYTES + self.pools[-1]


class Graphs(RecordingDevice):
    """Of which the first takes 8 MiB and each other one, or other piece, 1 MiB."""

    def free_bytes(self) -> int:
        return 100 * MIB - (7 * MIB + self.num_captured * MIB if self.num_captured else 0)


class SmallNeighbor(SingleRank):
    """Another rank has less memory."""

    def min_over_ranks(self, value: int) -> int:
        return min(value, 99)


class Loading:
    """Loads a tiny model onto a device that reports what it is told.

    Attributes:
        results: of the steps of the last trial.
        runners: as they were made.
    """

    def __init__(self, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tiny, self.memory = tiny, Memory()
        self.results: list[StepResult] = []
        self.plans: list[StepPlan] = []
        self.runners: list[ModelRunner] = []
        assemble, launch = assembly.assemble_runner, ModelRunner.launch

        def watched(*args: Any) -> ModelRunner:
            runner = assemble(*args)
            self.memory.pools.append(runner.kv_pool.num_bytes)
            self.runners.append(runner)
            return runner

        def watched_launch(runner: ModelRunner, plan: StepPlan) -> Any:
            wait = launch(runner, plan).wait

            def watched_wait() -> StepResult:
                self.plans.append(plan)
                self.results.append(wait())
                return self.results[-1]

            return SimpleNamespace(wait=watched_wait)

        # As on a GPU: the trial reads the dummy page as a long context.
        monkeypatch.setattr(kv_pool, "reserve", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        monkeypatch.setattr(load, "make_device_memory", lambda _device: self.memory)
        monkeypatch.setattr(load, "assemble_runner", watched)
        monkeypatch.setattr(ModelRunner, "launch", watched_launch)

    def __call__(
        self,
        *,
        group: TPGroup = SINGLE_RANK,
        planned: Capacity = PLANNED,
        len_is_estimate: bool = False,
        **cache: Any,
    ) -> ModelRunner:
        config = EngineConfig(
            model=ModelConfig(
                dtype="float32",
                device="cpu",
                num_threads=torch.get_num_threads(),
                max_model_len=64,
                len_is_estimate=len_is_estimate,
            ),
            cache=CacheConfig(page_size=4, mem_fraction=0.5, **cache),
            scheduler=SchedulerConfig(
                chunked_prefill_size=40, max_running_requests=planned.max_running_requests
            ),
        )
        source = ModelSource("hf", str(self.tiny.folder), "test")
        return load.load_model_runner(config, source, self.tiny.spec, planned, Place(group, None))


@pytest.fixture
def make(make_tiny_llama: Callable[..., TinyModel], monkeypatch: pytest.MonkeyPatch) -> Loading:
    return Loading(make_tiny_llama(), monkeypatch)


def no_memory(*_args: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")


def test_an_estimated_pool_holds_no_more_than_all_requests_together(make):
    assert make(pool_is_estimate=True).capacity.num_pages == 6 * 16


@pytest.mark.parametrize("gathered_token_bytes", [0, PAGE_BYTES // 8])
def test_an_estimated_pool_takes_its_share_of_what_is_left(make, monkeypatch, gathered_token_bytes):
    """Of 34 MiB less 30, half; where attention gathers, that memory is its pages' as well."""
    monkeypatch.setattr(TorchNativeAttention, "gathered_token_bytes", gathered_token_bytes)
    monkeypatch.setattr(assembly, "select_backend", lambda *_args: TorchNativeAttention)
    make.memory.free = 34 * MIB

    runner = make(planned=MANY, pool_is_estimate=True)

    assert runner.capacity.num_pages == int(2 * MIB / (PAGE_BYTES + 4 * gathered_token_bytes)) - 1


def test_attention_that_gathers_says_what_it_takes_of_a_token(make):
    make(pool_is_estimate=True)
    runner = make.runners[0]
    members = {"name": "reads", "__init__": lambda self, *_args: None}
    other: Any = type("Reads", (AttentionBackend,), members)
    assert other().gathered_token_bytes == 0
    parts: Any = (make.tiny.spec, runner.kv_pool, runner.slot_table.req_to_token, None)
    native = TorchNativeAttention(*parts)
    assert native.gathered_token_bytes == 2 * (2 * 2 * 8 * 4), "keys, values, heads, head dim, bytes; twice"
    split = split_backend(other, TorchNativeAttention)
    assert split(*parts).gathered_token_bytes == native.gathered_token_bytes


def test_the_trial_asks_for_all_that_clients_can_ask_for(make):
    """Else what they ask for later takes memory that the pool has by then."""
    make(pool_is_estimate=True, planned=replace(PLANNED, num_host_pages=3))

    moving, largest, short, single, shortest, _ = make.plans
    result = make.results[1]
    assert moving.swap_outs and moving.swap_ins and moving.page_copies
    assert largest.total_num_scheduled_tokens == 40 and len(result.logprobs) == 6
    assert all(each is not None and each.top_k == 20 for each in result.logprobs)
    assert {each.top_k for each in result.prompt_logprobs.values()} == {20}
    assert len(make.runners[0].counts.in_prompt) >= 6, "everybody has penalties"
    assert all(not result.errors for result in make.results)
    assert [
        np.frombuffer(plan.num_scheduled_tokens, dtype=np.int32).tolist()
        for plan in (short, single, shortest)
    ] == [
        [7, 7, 7, 7, 6, 6],
        [1] * 6,
        [2] * 6,
    ]
    assert not short.new_reqs[0].prefix_loc, "what this attention gathers is in the sums of the pool"


def test_short_extends_come_with_a_long_context_and_fit_into_the_pool(make, monkeypatch):
    """FA3's partial outputs of such a step are larger than anything of a step with one long prompt."""
    monkeypatch.setattr(TorchNativeAttention, "gathered_token_bytes", 0)
    make(pool_is_estimate=True, planned=replace(PLANNED, max_running_requests=20))

    *_, short, single, shortest, again = make.plans
    assert [len(new.prefix_loc) // 4 for new in short.new_reqs] == [63 - 2] + [0] * 19
    assert short.total_num_scheduled_tokens == 40
    slots = np.frombuffer(short.out_cache_loc, dtype=np.int32)
    assert slots.max() < 4 * (make.runners[0].capacity.num_pages + 1), "20 extends of 2 take 20 pages"
    assert len(single.rows) // 4 == 8 and len(single.finished_rows) // 4 == 20
    assert shortest.rows == shortest.finished_rows == single.rows
    assert not any(result.errors for result in make.results)
    assert again.rows == again.finished_rows == shortest.rows


def test_a_warning_says_what_a_step_without_a_recording_costs(make, monkeypatch, caplog):
    """Until such steps are recorded the host bounds the first token of short prompts."""
    for launch_s in (0.0005, 0.004):
        assert "kernel by kernel" not in caplog.text
        clock = SimpleNamespace(perf_counter=iter((0.0, launch_s)).__next__)
        monkeypatch.setattr(trial, "time", clock)
        make(pool_is_estimate=True)
    assert "takes the host 4.0 ms: smaller steps wait for it (launch_ms=4.0)" in caplog.text


def record_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record operators of torch: kernels of other kinds would not be seen, and not be replayed."""
    device = torch.device("cuda")
    plain = {op: providers[-1:] for op, providers in PROVIDERS.items()}
    monkeypatch.setattr(load, "select_ops", lambda target: select_ops(target, plain))
    monkeypatch.setattr(
        load, "sizes_to_record", lambda kernels, num, _, **more: sizes_to_record(kernels, num, device, **more)
    )
    monkeypatch.setattr(assembly, "select_backend", lambda *_args: DeviceAttention)
    monkeypatch.setattr(assembly, "CudaGraphDevice", lambda _device: Graphs())


def test_what_recordings_save_the_host_is_logged(make, monkeypatch, caplog):
    """Then there is nothing to warn of; the first step of the new runner is not timed."""
    record_as_a_gpu(monkeypatch)
    clock = SimpleNamespace(perf_counter=iter((0.0, 0.004, 1.0, 1.0015)).__next__)
    monkeypatch.setattr(trial, "time", clock)
    with caplog.at_level("INFO"):
        make(pool_is_estimate=True)
    assert (
        "prompts and mixed steps of up to 40 tokens: launch_ms=1.5; larger ones are launched kernel by kernel: "
        "launch_ms=4.0" in caplog.text
    )
    assert "a step with prompt tokens is launched" not in caplog.text
    assert not any(result.errors for result in make.results)


def test_the_trial_of_an_encoder_samples_nothing(make, tmp_path, monkeypatch):
    encoder: Any = make_encoder(tmp_path / "encoder", "bert")
    loading = Loading(encoder, monkeypatch)
    runner = loading(planned=replace(PLANNED, num_pages=90))

    moving, largest, short, *_ = loading.plans
    assert not short.new_reqs[0].prefix_loc and short.pools == bytes([1]) * 6
    assert largest.samples == bytes(6) and largest.pools == bytes([1]) * 6
    assert sorted(loading.results[1].vectors) == list(range(6)) and not loading.results[1].errors
    assert moving.total_num_scheduled_tokens == 0
    assert runner.capacity.num_pages == 90, "as planned: two steps"


def test_the_largest_step_is_the_schedulers(make, caplog):
    """A token of each that may run, and a page of a prompt."""
    with caplog.at_level("INFO"):
        make(planned=MANY, pool_is_estimate=True)
    assert "tokens=204 requests=200" in caplog.text


def test_a_context_that_nobody_asked_for_becomes_what_fits(make, monkeypatch, caplog):
    monkeypatch.setattr(TorchNativeAttention, "gathered_token_bytes", 0)
    make.memory.free = 30 * MIB + 18 * 2 * PAGE_BYTES
    asked = {"planned": replace(PLANNED, max_model_len=512), "pool_is_estimate": True}
    with pytest.raises(ConfigError, match="max_model_len is 512, but the device holds"):
        make(**asked)
    make.memory.free = 30 * MIB + 66 * 2 * PAGE_BYTES
    with caplog.at_level("INFO"):
        runner = make(len_is_estimate=True, **asked)
    assert (runner.capacity.num_pages, runner.capacity.max_model_len) == (65, 260)
    assert "max_model_len=260, not 512 as planned: (30 MiB free after the weights" in caplog.text
    assert runner.slot_table.req_to_token.shape[1] == 260
    neighbor = make(len_is_estimate=True, group=SmallNeighbor(), **asked)
    assert neighbor.capacity.max_model_len == 99, "as on the rank that has least"


def test_a_pool_that_was_asked_for_stands(make):
    runner = make()
    assert runner.capacity == PLANNED
    assert runner.kv_pool.num_bytes == 8 * PAGE_BYTES


def test_recordings_are_in_the_sums(make, monkeypatch, caplog):
    record_as_a_gpu(monkeypatch)
    with caplog.at_level("INFO"):
        runner = make(pool_is_estimate=True)

    # Prompts of 40, 32 and 16 tokens in three pieces take 10 + 3 + 3 MiB, six decodes 1 MiB each.
    assert "(100 MiB free after the weights - 30 MiB largest step - 22 MiB recordings)" in caplog.text
    recorded = runner.sizes.recorded_bytes
    assert (len(recorded.prompts), len(recorded.decodes)) == (3, 6), "all sizes, in the end"


class Recordable(TorchSamplerBackend):
    """A sampler that can be recorded."""

    table_width = 1

    def capturable(self) -> Recordable:  # type: ignore[override]
        return self

    def results(self, num_rows: int) -> SampledTokens:
        return SampledTokens(torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows, dtype=torch.bool))

    def write_table(self, table: Any, batch: Any) -> None:
        table[:] = 0

    def sample_rows(self, logits: torch.Tensor, table: torch.Tensor | None, results: SampledTokens) -> None:
        results.token_ids.copy_(logits.argmax(-1))


def test_recordings_of_the_sampler_are_in_the_sums_too(make, monkeypatch, caplog):
    record_as_a_gpu(monkeypatch)
    monkeypatch.setattr(sampler, "select_sampler_backend", lambda counts, *_: Recordable(counts))
    with caplog.at_level("INFO"):
        runner = make(pool_is_estimate=True)

    assert "34 MiB recordings)" in caplog.text, "two more for each of the six decodes"
    assert list(runner.sizes.recorded_bytes.samplers) == [2 * MIB] * 6


def test_the_rank_with_the_least_memory_decides(make):
    assert make(group=SmallNeighbor(), pool_is_estimate=True).capacity.num_pages == 96
    assert make(group=SmallNeighbor(), pool_is_estimate=True).kv_pool.num_bytes == 97 * PAGE_BYTES


class MeetingPlaces(SingleRank):
    """Writes down where the ranks meet."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def meet(self, place: str) -> None:
        self.events.append(f"meet {place}")


def test_the_ranks_meet_after_the_sampler_is_compiled_and_before_any_step(make, monkeypatch):
    """Rank 0 alone compiles it; the others would wait in the first step, for as long as a step may take."""
    places, launch, made = MeetingPlaces(), ModelRunner.launch, vars(assembly)["make_sampler"]

    def watched_sampler(*args: Any) -> Any:
        places.events.append("compile")
        return made(*args)

    def watched_launch(runner: ModelRunner, plan: StepPlan) -> Any:
        places.events.append("step")
        return launch(runner, plan)

    monkeypatch.setattr(assembly, "make_sampler", watched_sampler)
    monkeypatch.setattr(ModelRunner, "launch", watched_launch)
    make(group=places, pool_is_estimate=True)

    prepared = ["compile", "meet sampler"]
    steps = places.events.count("step")
    assert places.events == ["meet weights", *prepared, *["step"] * steps, *prepared]


def test_a_step_that_does_not_fit_beside_the_weights_is_an_error(make, monkeypatch):
    monkeypatch.setattr(ModelRunner, "_forward", no_memory)
    with pytest.raises(
        ConfigError,
        match="the device has 100 MiB free, too little for the largest step besides the weights, 40 tokens of 6 "
        "requests: CUDA out of memory.*lower --chunked-prefill-size or --max-running-requests",
    ):
        make(pool_is_estimate=True)


def test_weights_that_do_not_fit_are_an_error(make, monkeypatch):
    monkeypatch.setattr(load, "build_model", no_memory)
    with pytest.raises(ConfigError, match="100 MiB free, too little for the weights: CUDA out.*lower"):
        make(pool_is_estimate=True)


@pytest.mark.parametrize(
    ("num_before", "message"),
    [
        (0, "too little for the largest step besides the weights, 40 tokens .*--chunked-prefill-size"),
        (1, "too little for recorded decodes of 6 requests and prompts of 40 tokens: .*--max-recorded-bs"),
        (
            2,
            "too little for a KV pool of 384 tokens and recorded decodes of 6.*: .*--mem-fraction, --max-total",
        ),
    ],
)
def test_a_runner_that_cannot_be_made_is_an_error_with_a_way_out(make, monkeypatch, num_before, message):
    record_as_a_gpu(monkeypatch)
    honest = vars(load)["assemble_runner"]
    calls: list[None] = []

    def assemble(*args: Any) -> ModelRunner:
        calls.append(None)
        if len(calls) > num_before:
            no_memory()
        runner: ModelRunner = honest(*args)
        return runner

    monkeypatch.setattr(load, "assemble_runner", assemble)
    with pytest.raises(ConfigError, match=message):
        make(pool_is_estimate=True)


@pytest.mark.parametrize("tokens", [1, 3, 6, 40, 63 + 5, 200, 6 * 63])
def test_the_largest_step_is_full_and_everybody_samples(tokens):
    lengths = prompt_lengths(tokens, PLANNED)
    plan = largest_step(lengths, PLANNED)

    assert sum(lengths) == plan.total_num_scheduled_tokens == tokens
    assert len(lengths) == min(6, tokens) and max(lengths) < 64
    slots = np.frombuffer(plan.out_cache_loc, dtype=np.int32)
    assert len(set(slots.tolist())) == tokens and slots.min() >= 4
    assert plan.samples == bytes([1]) * len(lengths)


def test_on_the_cpu_the_plan_stands(make_tiny_llama, make_driver):
    tiny = make_tiny_llama()
    assert make_driver(tiny.spec, tiny.folder).runner.capacity.num_pages == 512
