"""A launch never waits for the device, and `wait` waits for its own step: shown by devices that cannot be waited for.

A tensor on torch's "meta" device has a shape and no data: whoever asks for a value (`.item()`, `.tolist()`, `.cpu()`,
`bool()`, a mask, `nonzero`) gets an error. What can be launched there waits for no value on a GPU either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model_runner import assembly, model_runner
from engine.model_runner.load import load_model_runner
from engine.model_runner.model_runner import ModelRunner
from engine.model_runner.sampling.sampler import Sampler
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import RowUpdate

from .conftest import Driver, Request, engine_config, int32

GREEDY = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64)
KINDS = {
    "greedy": GREEDY,
    "seeded": replace(GREEDY, temperature=1.0, seed=3),
    "filtered": replace(GREEDY, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=4),
    "penalized": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    "edited": replace(GREEDY, min_new_tokens=8, logit_bias={5: 2.0, 7: -100.0}, stop_token_ids=(9,)),
    "logprobs": replace(GREEDY, logprobs=3, prompt_logprobs=2),
}
SPEC = ModelSpec(
    model_type="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    torch_dtype="float32",
    eos_token_ids=(2,),
)


class NoHost:
    """Results that never arrive."""

    def __init__(self, device: torch.device) -> None:
        pass

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fetch_pair(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first, second


class NoHostPages:
    """Swapping on a device without data; what it queues is tested with the pool itself."""

    def copy_out(self, pages: Any, host_pages: Any) -> None:
        pass

    def copy_in(self, host_pages: Any, pages: Any) -> None:
        pass


class UploadsDoNotWait(TorchDispatchMode):
    """A copy from memory that is not pinned, or one that is not told to go on, waits for the device.

    That all of them go through pinned memory is the matter of `InputBuffers`, which alone says `non_blocking`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy):
            if self.is_upload(args[0], result):
                self.num_uploads += 1
                assert given.get("non_blocking"), "an upload that waits for the device"
        elif func.overloadpacket is torch.ops.aten.copy_:
            assert not self.is_upload(args[1], args[0]), "an upload beside the InputBuffers"
        return result

    @staticmethod
    def is_upload(source: torch.Tensor, target: torch.Tensor) -> bool:
        return source.device.type == "cpu" and target.device.type != "cpu"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver whose device has no data."""
    monkeypatch.setattr(assembly, "OutputBuffers", NoHost)
    capacity = Capacity(256, 512, 4, 40, SPEC.vocab_size)
    config: Any = ModelConfig(dtype="float32", load_format="dummy", seed=1)
    object.__setattr__(config, "device", "meta")
    object.__setattr__(config, "num_threads", 1)
    source = ModelSource("hf", "dummy", "test")
    runner = load_model_runner(engine_config(config), source, SPEC, capacity)
    runner.host_kv_pool = NoHostPages()  # type: ignore[assignment]
    return Driver(runner, capacity)


def launch(driver: Driver, work: list[tuple[Request, int]], **options: Any) -> None:
    """Launch, and go on as a scheduler does that has not seen the tokens."""
    with UploadsDoNotWait() as uploads:
        driver.runner.launch(driver.plan(work, **options))
    assert uploads.num_uploads
    for req, count in work:
        req.computed += count
        if req.computed == len(req.tokens):
            req.tokens.append(-1)


def prompt_of(length: int) -> list[int]:
    return [(7 * n * n + 3 * n) % 96 for n in range(length)]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("sampling", KINDS.values(), ids=list(KINDS))
def test_no_launch_looks_at_the_device(nowhere, sampling):
    first, second = nowhere.start(prompt_of(37), sampling), nowhere.start(prompt_of(9), sampling)
    launch(nowhere, [(first, 20), (second, 9)])
    launch(nowhere, [(first, 17), (second, 1)])
    launch(nowhere, [(first, 1), (second, 1)])
    launch(nowhere, [(second, 1)])
    launch(nowhere, [(first, 1)])


def test_no_launch_of_all_kinds_together_looks_at_the_device(nowhere):
    reqs = [nowhere.start(prompt_of(5 + 3 * n), kind) for n, kind in enumerate(KINDS.values())]
    launch(nowhere, [(req, len(req.tokens)) for req in reqs])
    for _ in range(3):
        launch(nowhere, [(req, 1) for req in reqs])


def test_neither_prefixes_nor_moved_copied_or_swapped_pages_make_it_wait(nowhere):
    donor = nowhere.start(prompt_of(24))
    launch(nowhere, [(donor, 24)])
    req = nowhere.start(prompt_of(30), KINDS["penalized"], prefix=(donor, 20))
    update = RowUpdate(donor.row, 0, int32(nowhere.slots(donor.pages, 0, 8)))
    launch(nowhere, [(req, 10), (donor, 1)], row_updates=(update,), page_copies=[(1, 2), (3, 4)])
    launch(nowhere, [(req, 1)], swap_outs=[(5, 0)])
    nowhere.finish(donor)
    launch(nowhere, [(req, 1)], swap_ins=[(0, 5)])


@pytest.mark.parametrize(
    "look",
    [
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: bool(tensor[0] > 0),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor.copy_(torch.zeros(len(tensor), dtype=tensor.dtype)),
        lambda tensor: torch.zeros(3).to(tensor.device),
    ],
    ids=["item", "tolist", "cpu", "bool", "mask", "nonzero", "copy_", "to"],
)
def test_whoever_looks_is_caught(nowhere, monkeypatch, look):
    sample = Sampler.sample

    def curious(*args: Any) -> Any:
        sampled = sample(*args)
        look(sampled.token_ids)
        return sampled

    monkeypatch.setattr(Sampler, "sample", curious)
    req = nowhere.start(prompt_of(9))

    with pytest.raises((NotImplementedError, RuntimeError, AssertionError)):
        launch(nowhere, [(req, 9)])


class LateDevice:
    """Stands for `OutputBuffers` and makes timers: copies to the host arrive when a timer behind them is waited for."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_arrived = 0

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.zeros_like(tensor)  # plausible, and wrong: nothing is finite, each token is 0
        self.copies.append((host, tensor.clone()))
        return host

    def fetch_pair(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fetch(first), self.fetch(second)

    def run_until(self, num: int) -> None:
        for host, tensor in self.copies[self.num_arrived : num]:
            host.copy_(tensor)
        self.num_arrived = max(num, self.num_arrived)


class LateTimer:
    """A `DeviceTimer` for it."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.end = 0

    def __enter__(self) -> LateTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end = len(self.device.copies)

    def wait_for_seconds(self) -> float:
        self.device.run_until(self.end)
        return 0.25


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    device = LateDevice()
    monkeypatch.setattr(assembly, "OutputBuffers", lambda _device: device)
    monkeypatch.setattr(model_runner, "DeviceTimer", lambda _device: LateTimer(device))
    with torch.inference_mode():  # its tensors are written here
        yield device


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("sampling", KINDS.values(), ids=list(KINDS))
def test_waiting_brings_the_tokens_of_the_own_step_and_no_more(
    make_tiny_llama: Callable[..., Any],
    make_driver: Callable[..., Driver],
    driver: Driver,
    sampling: SamplingParams,
    late: LateDevice,
) -> None:
    expected = driver.generate([prompt_of(37)], sampling, num=6)[0]
    tiny = make_tiny_llama()
    ahead = make_driver(tiny.spec, tiny.folder)
    req = ahead.start(prompt_of(37), sampling)
    pending, ends = [], []
    for count in (20, 17, 1, 1, 1, 1, 1):
        pending.append(ahead.runner.launch(ahead.plan([(req, count)])))
        ends.append(len(late.copies))
        req.computed += count
        if req.computed == len(req.tokens):
            req.tokens.append(-1)
    assert late.num_arrived == 0, "a launch waited"

    tokens = []
    for step, end in zip(pending, ends, strict=True):
        result = step.wait()
        assert late.num_arrived == end, "waited for a step that was launched later"
        assert (result.errors, result.forward_s) == ({}, 0.25)
        tokens += np.frombuffer(result.next_token_ids, dtype=np.int32).tolist()
    assert tokens == expected


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", KINDS.values(), ids=list(KINDS))
def test_on_a_gpu_torch_itself_sees_no_wait(sampling):
    """`set_sync_debug_mode` knows calls that a device without data does not: copies from memory that is not pinned."""
    capacity = Capacity(256, 512, 4, 40, SPEC.vocab_size)
    config = ModelConfig(
        dtype="float32", load_format="dummy", seed=1, device="cuda", num_threads=1, max_model_len=256
    )
    source = ModelSource("hf", "dummy", "test")
    runner: ModelRunner = load_model_runner(engine_config(config), source, SPEC, capacity)
    tokens: list[bytes] = []
    for mode in ("default", "error"):  # the first time memory is allocated and kernels are loaded
        driver = Driver(runner, capacity)
        driver.step_id = runner_steps = len(tokens) * 10
        req = driver.start(prompt_of(37), sampling)
        pending = []
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for count in (20, 17, 1, 1, 1):
                pending.append(runner.launch(driver.plan([(req, count)])))
                req.computed += count
                if req.computed == len(req.tokens):
                    req.tokens.append(-1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results = [step.wait() for step in pending]
        assert [result.step_id for result in results] == list(range(runner_steps + 1, runner_steps + 6))
        tokens.append(b"".join(result.next_token_ids for result in results))
        driver.finish(req)
        runner.launch(driver.plan([])).wait()
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4 * 4
