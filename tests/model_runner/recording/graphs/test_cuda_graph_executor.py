"""Recorded decodes against decodes that are launched kernel by kernel: the same tokens, and nobody's memory touched."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.model_runner import assembly, load
from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.model_runner.attention.triton_paged import TritonAttention
from engine.model_runner.distributed.join_group import Place
from engine.model_runner.distributed.tp_group import SINGLE_RANK, TPGroup
from engine.model_runner.op_selection import PROVIDERS, select_ops
from engine.model_runner.recording.eager_executor import EagerExecutor
from engine.model_runner.recording.graphs.graph_sizes import GraphSizes, batch_sizes, sizes_to_record
from engine.model_runner.sampling import native_backend, sampler
from engine.model_runner.sampling.triton_backend import Geometry, TritonSamplerBackend
from engine.models.source import ModelSource
from engine.runtime.config.device_config import KernelConfig
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import RowUpdate
from tests.model_runner.conftest import Driver, Request, TinyModel, engine_config, int32
from tests.model_runner.drafted_steps import step_with_drafts
from tests.model_runner.recording.recording_device import DeviceAttention, RecordingDevice, RerunningDevice
from tests.selection import examples
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

GREEDY = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64)
KINDS = [
    GREEDY,
    replace(GREEDY, temperature=0.9, seed=3),
    replace(
        GREEDY, temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=4
    ),
    replace(GREEDY, logprobs=2, prompt_logprobs=1, seed=5),
]
SMALL = Geometry(chunk=64, group=8, capacity=64, block=32)
ROWS = 14
PLAIN = {op: providers[-1:] for op, providers in PROVIDERS.items()}


def make(
    tiny: TinyModel,
    device: RecordingDevice | None,
    attention: Any = DeviceAttention,
    dtype: Literal["float32", "bfloat16"] = "float32",
    *,
    prompts: bool = False,
    **kernels: Any,
) -> Driver:
    """A driver with poisoned KV memory, with recordings or without; its attention is the same either way.

    Args:
        prompts: record prompts and mixed steps, too.
    """
    with pretended_gpu(None if device is None else lambda: device, attention, prompts=prompts):
        return load_driver(tiny, dtype, **kernels)


@contextmanager
def pretended_gpu(
    make_device: Callable[[], RecordingDevice] | None, attention: Any = DeviceAttention, *, prompts: bool
) -> Iterator[None]:
    """What is loaded records steps on such devices; None: it records nothing, and is the same in all else."""
    cuda = torch.device("cuda")

    def sizes(kernels: KernelConfig, num: int, _device: Any, **more: Any) -> GraphSizes:
        found = sizes_to_record(kernels, num, cuda, **more)
        return found if prompts else found._replace(prompts=())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "select_backend", lambda *_args: attention)
        # Operators of torch, which a device without a GPU can record; other kernels it would not see.
        patch.setattr(load, "select_ops", lambda target: select_ops(target, PLAIN))
        if make_device is not None:
            patch.setattr(load, "sizes_to_record", sizes)
            patch.setattr(assembly, "CudaGraphDevice", lambda _device: make_device())
        yield


def load_driver(
    tiny: TinyModel,
    dtype: Literal["float32", "bfloat16"] = "float32",
    group: TPGroup = SINGLE_RANK,
    adapter_slots: SlotSizes | None = None,
    **kernels: Any,
) -> Driver:
    capacity = Capacity(128, 200, 4, ROWS, tiny.spec.vocab_size)
    config = ModelConfig(dtype=dtype, device="cpu", num_threads=torch.get_num_threads(), seed=1)
    source = ModelSource("hf", str(tiny.folder), "test")
    runner = load.load_model_runner(
        engine_config(config, **kernels), source, tiny.spec, capacity, Place(group, None), adapter_slots
    )
    for pool in (*runner.kv_pool.k, *runner.kv_pool.v):
        pool[4:].fill_(torch.nan)  # the dummy page has what the recordings left there
    return Driver(runner, capacity)


@pytest.fixture
def tiny(make_tiny_llama: Callable[..., TinyModel]) -> TinyModel:
    return make_tiny_llama()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads leave logits in the serving dtype, and the sampler takes it."""
    build = vars(load)["build_model"]

    def built(context: Any) -> Any:
        model: Any = build(context)
        model.head.dtype = context.dtype
        return model

    monkeypatch.setattr(load, "build_model", built)
    monkeypatch.setattr(native_backend, "reasons_against_library", lambda: ["it is for CPUs"])


# ------------------------------------------------------------ sizes


def test_sizes_grow_with_the_batch():
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 3, 4, 5, 6]
    assert batch_sizes(35) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 35]
    assert batch_sizes(256)[-5:] == [128, 160, 192, 224, 256]
    assert len(batch_sizes(256)) == 28


@pytest.mark.parametrize("largest", [9, 64, 255, 1000])
def test_at_most_a_fifth_of_a_step_is_padding(largest):
    sizes = batch_sizes(largest)
    padding = [
        (size - num) / size for num in range(1, largest + 1) for size in [min(s for s in sizes if s >= num)]
    ]
    assert max(padding) < 0.2


# ------------------------------------------------------------ who is replayed


def test_decodes_of_every_size_are_replayed_and_give_the_same_tokens(tiny):
    device = RecordingDevice()
    recorded, eager = make(tiny, device), make(tiny, None)
    prompts = [[(7 * n + 5 * k) % 96 for k in range(3 + 2 * n)] for n in range(ROWS)]
    for num in (1, 3, 8, 9, ROWS):
        kinds = [KINDS[n % 4] for n in range(num)]
        outputs = recorded.generate(prompts[:num], kinds, num=4)
        assert outputs == eager.generate(prompts[:num], kinds, num=4)

    assert device.num_captured == len(batch_sizes(ROWS))
    assert device.num_replayed == recorded.runner.executor.num_replayed == 5 * 3


def test_recorded_logits_are_in_the_serving_dtype_and_the_head_writes_them_in_place(tiny, as_on_a_gpu):
    """A copy in float32 and one into the shared memory made it five passes through memory."""
    device = RecordingDevice()
    recorded, eager = make(tiny, device, dtype="bfloat16"), make(tiny, None, dtype="bfloat16")
    prompts, kinds = [[5 + n, 9, 2 * n] for n in range(4)], KINDS
    assert recorded.generate(prompts, kinds, num=4) == eager.generate(prompts, kinds, num=4)

    of_one_request = device.recordings[-1]
    shape = (1, tiny.spec.vocab_size)
    written = [
        (operation.func, result.dtype)
        for operation in of_one_request
        for result in operation.results
        if result.shape == shape
    ]
    assert written == [(torch.ops.aten.mm.out, torch.bfloat16)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("window", [None, 9])
def test_drafts_are_verified_by_the_recording_of_as_many_tokens(make_tiny_model, window):
    """They were launched kernel by kernel, which a small model's drafts do not make up for."""
    tiny = make_tiny_model("mistral", sliding_window=window)
    device = RecordingDevice()
    recorded, eager = make(tiny, device), make(tiny, None)
    prompts = [list(range(3 + n, 30 + 4 * n)) for n in range(3)]
    drafting = [KINDS[0], KINDS[1], replace(KINDS[1], top_k=20, seed=9)]  # without penalties
    alone = [
        eager.generate([prompt], kind, num=20)[0] for prompt, kind in zip(prompts, drafting, strict=True)
    ]
    reqs = [recorded.start(prompt, kind) for prompt, kind in zip(prompts, drafting, strict=True)]
    recorded.step([(req, len(req.tokens)) for req in reqs])
    assert device.num_replayed == 0

    counts = []
    for wrong in (9, 0, 2, 1):  # which draft of the first request is wrong
        work = []
        for n, (req, text) in enumerate(zip(reqs, alone, strict=True)):
            drafts = text[len(req.output) :][: 3 - n]
            if n == 0 and wrong < len(drafts):
                drafts[wrong] = (drafts[wrong] + 1) % 96
            work.append((req, drafts))
        counts.append(step_with_drafts(recorded, work))
        recorded.step([(req, 1) for req in reqs])

    assert counts == [[4, 3, 2], [1, 3, 2], [3, 3, 2], [2, 3, 2]]
    assert [req.output for req in reqs] == [
        text[: len(req.output)] for req, text in zip(reqs, alone, strict=True)
    ]
    assert device.num_replayed == 8


def test_chunks_run_as_they_are_and_the_last_token_of_a_prompt_by_a_recording(tiny):
    device = RecordingDevice()
    driver = make(tiny, device)
    req = driver.start(list(range(1, 12)))
    driver.step([(req, 4)])
    driver.step([(req, 1)])  # one token, and nobody samples
    driver.step([(req, 5)])
    assert device.num_replayed == 0

    driver.step([(req, 1)])  # the last of the prompt
    assert device.num_replayed == 1
    newcomer = driver.start([5, 6, 7])
    driver.step([(newcomer, 3), (req, 1)])
    assert device.num_replayed == 1
    driver.step([(newcomer, 1), (req, 1)])
    assert device.num_replayed == 2
    assert req.output == tiny.greedy(list(range(1, 12)), 3)
    assert newcomer.output == tiny.greedy([5, 6, 7], 2)


def test_batches_beyond_the_largest_recording_run_as_they_are(tiny, caplog):
    device = RecordingDevice()
    driver = make(tiny, device, max_recorded_bs=3)
    prompts = [[n + 1, n + 2] for n in range(4)]

    with caplog.at_level("INFO"):
        outputs = driver.generate(prompts, num=3)

    assert outputs == [tiny.greedy(prompt, 3) for prompt in prompts]
    assert (device.num_captured, device.num_replayed) == (3, 0)
    assert caplog.text.count("decodes of 4 requests are not replayed as a whole: --max-recorded-bs is 3") == 1


# ------------------------------------------------------------ memory


def test_padding_writes_nothing_but_the_dummy_page(tiny):
    """Nine requests run in a recording for ten; whoever is not among them keeps his KV, and free pages their poison."""
    driver = make(tiny, RecordingDevice())
    reqs = [driver.start([n + 1, n + 2, n + 3]) for n in range(10)]
    driver.step([(req, 3) for req in reqs])
    bystander, others = reqs[0], reqs[1:]
    pools = [*driver.runner.kv_pool.k, *driver.runner.kv_pool.v]
    table = driver.runner.slot_table.req_to_token
    before, table_before = [pool.clone() for pool in pools], table.clone()

    driver.step([(req, 1) for req in others])

    written = {driver.slots(req.pages, 3, 4)[0] for req in others}
    untouched = sorted(set(range(4, len(pools[0]))) - written)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[untouched].nan_to_num(7e7), old[untouched].nan_to_num(7e7))
        assert pool[sorted(written)].isfinite().all()
    changed = (table != table_before).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted(req.row for req in others)
    assert torch.equal(table[-1], torch.zeros_like(table[-1])), "the dummy row has slots of the dummy page"
    while len(bystander.output) < 5:
        driver.step([(bystander, 1)])
    assert bystander.output == tiny.greedy(bystander.tokens[:3], 5)


def test_cached_prefixes_and_moved_pages_reach_a_recorded_step(tiny):
    device = RecordingDevice()
    driver = make(tiny, device)
    donor = driver.start(list(range(1, 10)))
    driver.step([(donor, 9)])
    req = driver.start([*range(1, 9), 77], prefix=(donor, 8))
    driver.step([(req, 1)])

    copies = [driver.pages.pop() for _ in req.pages]
    driver.step([], page_copies=[*zip(req.pages, copies, strict=True)])
    for pool in (*driver.runner.kv_pool.k, *driver.runner.kv_pool.v):
        pool.view(-1, 4, *pool.shape[1:])[req.pages] = torch.nan
    req.pages = copies
    driver.step([(req, 1)], row_updates=(RowUpdate(req.row, 0, int32(driver.slots(copies, 0, 9))),))

    assert req.output == tiny.greedy([*range(1, 9), 77], 2)
    assert device.num_replayed == 2


def test_recording_touches_only_the_dummy_page(tiny):
    driver = make(tiny, RecordingDevice())
    runner = driver.runner
    assert not runner.slot_table.req_to_token.any()
    assert not runner.relay._last.any()


# ------------------------------------------------------------ lives


class Life:
    """One random life, driven ahead of the results: nobody on the host knows a token before its step is waited for."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver, self.random = driver, random.Random(seed)
        self.live: list[Request] = []
        self.sampled: dict[int, list[int]] = {}
        self.names: dict[int, int] = {}
        self.pending: list[tuple[Any, list[int]]] = []

    def shares_nothing(self, req: Request) -> bool:
        return sum(other.pages[:1] == req.pages[:1] for other in self.live) == 1

    def start(self, name: int) -> None:
        tokens = [self.random.randrange(96) for _ in range(self.random.randint(1, 14))]
        prefix = None
        donors = [req for req in self.live if req.computed >= 4 and req.prompt_len > 4 and not req.prefix_len]
        if donors and self.random.random() < 0.3:
            donor = self.random.choice(donors)
            tokens = [*donor.tokens[:4], *tokens]
            prefix = (donor, 4)
        req = self.driver.start(tokens, KINDS[name % 4], prefix=prefix)
        self.live.append(req)
        self.names[id(req)] = name
        self.sampled[name] = []

    def step(self) -> None:
        work = []
        for req in self.live:
            left = len(req.tokens) - req.computed
            work.append((req, left if left == 1 else self.random.randint(1, left)))
        if self.random.random() < 0.3:
            work = self.random.sample(work, self.random.randint(1, len(work)))
        work.sort(key=lambda item: item[1] == 1)
        pending = self.driver.runner.launch(self.driver.plan(work))
        who = []
        for req, count in work:
            req.computed += count
            if req.computed == len(req.tokens):
                req.tokens.append(-1)  # there is one, but nobody on the host knows which
                who.append(self.names[id(req)])
        self.pending.append((pending, who))
        if len(self.pending) > 1:
            self.settle()

    def settle(self) -> None:
        pending, who = self.pending.pop(0)
        result = pending.wait()
        assert not result.errors
        for name, token in zip(
            who, np.frombuffer(result.next_token_ids, dtype=np.int32).tolist(), strict=True
        ):
            self.sampled[name].append(token)

    def run(self) -> dict[int, list[int]]:
        for n in range(24):
            if len(self.live) < ROWS - 2 and (not self.live or self.random.random() < 0.4):
                self.start(n)
            leaving = [req for req in self.live if len(req.output) > 3 and self.shares_nothing(req)]
            if leaving and self.random.random() < 0.3:
                gone = self.random.choice(leaving)
                self.live.remove(gone)
                self.driver.finish(gone)
            if self.live:
                self.step()
        while self.pending:
            self.settle()
        return self.sampled


@settings(
    max_examples=examples(9),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 1 << 30), largest=st.sampled_from([2, 5, ROWS]))
def test_replayed_or_not_everybody_gets_the_same_tokens(tiny, seed, largest):
    """Rows join and leave, share pages, compute chunks in between, are launched ahead of each other's results."""
    device = RecordingDevice()
    recorded = Life(make(tiny, device, max_recorded_bs=largest), seed).run()
    eager = Life(make(tiny, None), seed).run()

    assert recorded == eager
    if largest == ROWS:  # with smaller sizes a random life may have no step that is recorded
        assert device.num_replayed


@pytest.mark.slow
def test_decodes_by_the_triton_kernels_can_be_recorded(tiny):
    device = RerunningDevice()
    driver = make(tiny, device, TritonAttention, max_recorded_bs=3)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1]]

    outputs = driver.generate(prompts, num=4)

    assert outputs == [tiny.greedy(prompt, 4) for prompt in prompts]
    assert device.num_replayed == 3


def test_the_sampling_after_recorded_decodes_is_recorded_too(tiny, monkeypatch):
    """For greedy rows and unfiltered draws; with a filter or penalties in the batch it is launched as ever."""
    monkeypatch.setattr(
        sampler, "select_sampler_backend", lambda counts, *_: TritonSamplerBackend(counts, SMALL)
    )
    prompts = [[5 + n, 9, 2 * n] for n in range(4)]
    device = RerunningDevice()
    recorded, eager = make(tiny, device, max_recorded_bs=3), make(tiny, None)
    backend: Any = recorded.runner.sampler._backend
    num_decodes = num_samplings = 0
    for kinds in ([KINDS[0], KINDS[1], KINDS[3]], KINDS[1:3], [KINDS[0]] * 4):
        num = len(kinds)
        assert recorded.generate(prompts[:num], kinds, num=3) == eager.generate(prompts[:num], kinds, num=3)
        num_decodes += 2 * (num <= 3)
        num_samplings += 2 * (num <= 3 and KINDS[2] not in kinds)
        assert recorded.runner.executor.num_replayed == num_decodes
        assert backend.num_replayed == num_samplings
    assert device.num_replayed == num_decodes + num_samplings


@pytest.mark.parametrize("avoided", ["decode_graphs", "prompt_graphs", "sampler_graphs"])
def test_each_kind_of_recording_can_be_avoided_alone(tiny, monkeypatch, caplog, avoided):
    """Without recorded decodes these steps are replayed in pieces, and the sampling after them is launched."""
    monkeypatch.setattr(
        sampler, "select_sampler_backend", lambda counts, *_: TritonSamplerBackend(counts, SMALL)
    )
    prompts = [[5, 9, 2], [8, 7]]
    with caplog.at_level("INFO"):
        driver = make(tiny, RerunningDevice(), prompts=True, max_recorded_bs=2, avoid_kernels=(avoided,))
    assert driver.generate(prompts, num=3) == make(tiny, None).generate(prompts, num=3)
    kinds = ["prompt_graphs", "decode_graphs", "sampler_graphs"]
    lost = {avoided, "sampler_graphs"} if avoided == "decode_graphs" else {avoided}
    made = {kind for kind in kinds for line in caplog.messages if re.match(rf"{kind}=[1-9]", line)}
    assert made == {*kinds} - lost
    assert f"{avoided}=0: avoided (--avoid-kernels)" in caplog.messages


def test_a_recorded_step_whose_sampling_finds_no_memory_is_dropped(tiny, monkeypatch):
    device = RecordingDevice()
    driver = make(tiny, device)
    req = driver.start([5, 6, 7])
    driver.step([(req, 3)])
    honest = driver.runner.sampler.sample

    def failing(*_args: Any) -> Any:
        monkeypatch.setattr(driver.runner.sampler, "sample", honest)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(driver.runner.sampler, "sample", failing)
    result = driver.runner.launch(driver.plan([(req, 1)])).wait()

    assert result.out_of_memory == "CUDA out of memory. Tried to allocate 2.00 MiB."
    assert device.num_replayed == 1
    driver.finish(req)
    again = driver.start(req.tokens, prompt_len=3)
    driver.step([(again, 4)])
    for _ in range(2):
        driver.step([(again, 1)])
    assert again.output == tiny.greedy([5, 6, 7], 4)


def on_gpu(tiny: TinyModel, *, recorded: bool) -> Driver:
    runner = load.load_model_runner(
        engine_config(
            ModelConfig(dtype="float32", device="cuda", num_threads=1, max_model_len=128),
            page_size=16,
            record_steps=recorded,
        ),
        ModelSource("hf", str(tiny.folder), "test"),
        tiny.spec,
        Capacity(128, 100, 16, ROWS, tiny.spec.vocab_size),
    )
    assert len(runner.sizes.recorded_bytes.decodes) == (len(batch_sizes(ROWS)) if recorded else 0)
    return Driver(runner, runner.capacity)


@pytest.mark.gpu
def test_on_a_gpu_recorded_decodes_give_the_same_tokens(tiny):
    outputs = []
    for recorded in (True, False):
        driver = on_gpu(tiny, recorded=recorded)
        prompts = [[(7 * n + 5 * k) % 96 for k in range(3 + 2 * n)] for n in range(9)]
        outputs.append(driver.generate(prompts, [KINDS[n % 4] for n in range(9)], num=12))
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_on_a_gpu_drafts_are_verified_by_recordings(tiny):
    prompts = [list(range(3 + n, 30 + 4 * n)) for n in range(3)]
    alone = on_gpu(tiny, recorded=False).generate(prompts, num=30)
    driver = on_gpu(tiny, recorded=True)
    reqs = [driver.start(prompt) for prompt in prompts]
    driver.step([(req, len(req.tokens)) for req in reqs])
    for _ in range(4):
        counts = step_with_drafts(
            driver, [(req, text[len(req.output) :][:3]) for req, text in zip(reqs, alone, strict=True)]
        )
        assert counts == [4, 4, 4]
    assert driver.runner.executor.num_replayed == 4
    assert [req.output for req in reqs] == [text[:17] for text in alone]


# ------------------------------------------------------------ settings


def test_recordings_can_be_switched_off(tiny):
    device = RecordingDevice()
    driver = make(tiny, device, record_steps=False)
    assert isinstance(driver.runner.executor, EagerExecutor)
    assert device.num_captured == 0


def test_on_a_cpu_there_are_no_graphs(tiny):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    more: Any = {"spec": tiny.spec, "step_tokens": lambda: 100}
    assert sizes_to_record(KernelConfig(record_steps=True), 4, cpu, **more) == ((), ())
    assert sizes_to_record(KernelConfig(record_steps=True), 4, cuda, **more).decodes == [1, 2, 3, 4]


def test_recordings_reach_as_far_as_the_tokens_of_steps_with_drafts(tiny):
    """Eight requests with three drafts each are 32 rows; sizes up to eight would leave them to launches."""

    def largest(num_rows: int, **settings: Any) -> int:
        cuda, kernels = torch.device("cuda"), KernelConfig(record_steps=True, **settings)
        more: Any = {"spec": tiny.spec, "step_tokens": lambda: 100, "max_drafts": 3}
        return sizes_to_record(kernels, num_rows, cuda, **more).decodes[-1]

    assert [largest(num) for num in (8, 40, 200)] == [32, 64, 200]
    assert largest(8, max_recorded_bs=8) == 32
    assert largest(8, max_recorded_bs=4) == 4, "as asked"


def test_attention_that_needs_the_host_cannot_be_recorded(tiny, monkeypatch, caplog):
    monkeypatch.delattr(DeviceAttention, "capturable")
    driver = make(tiny, RecordingDevice(), record_steps=True)
    assert isinstance(driver.runner.executor, EagerExecutor)
    assert "decode_graphs=0: attention by torch_decode needs the host in each step" in caplog.text


def test_what_was_recorded_is_logged(tiny, caplog):
    with caplog.at_level("INFO"):
        make(tiny, RecordingDevice(), max_recorded_bs=10)
    assert "decode_graphs=9 batch_sizes=1..10 record_s=" in caplog.text


# ------------------------------------------------------------ the fake is strict


def test_the_fake_device_replays_numbers_of_the_host_as_they_were():
    memory, step = torch.zeros(1), 1

    def run() -> None:
        memory.add_(step)

    replay = RecordingDevice().capture(run)
    step = 100
    replay()
    assert memory.item() == 3.0, "the warm-up, the recording and a replay"


def test_the_fake_device_catches_a_look_at_its_memory():
    memory = torch.ones(3)

    def run() -> None:
        memory.mul_(memory.sum().item())

    with pytest.raises(AssertionError, match="looks at the device's memory"):
        RecordingDevice().capture(run)
