"""Adapters: the C++ and the Triton kernels against plain torch, and the bits of a token in different company."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model_runner.adapter_runs import AdapterRuns, Run, plan_of, recorded_plan, runs_of, write_plan
from engine.model_runner.kernels import plain_lora
from engine.model_runner.kernels.cpu.library import load_library
from engine.model_runner.kernels.native_linear import NativeLinear
from engine.model_runner.kernels.native_lora import native_deltas
from engine.model_runner.kernels.plain import silu_and_mul
from engine.model_runner.kernels.triton import lora
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.ops.deltas import DeltaShape
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

pytestmark = pytest.mark.usefixtures("poisoned")

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)


class Pair:
    """The same adapters in the memory of a provider and of plain torch."""

    def __init__(self, provider: str, device: torch.device) -> None:
        self.device = CPU if provider == "native" else device
        self._made = native_deltas(load_library()) if provider == "native" else lora.deltas, plain_lora.DELTAS

    def linear(self, dtype, inputs, outputs, *, max_rank=24, ranks=(16, 3, 24)):
        shape = DeltaShape(inputs, outputs, 1 + len(ranks), max_rank, dtype, self.device)
        return self._filled([made.linear(shape) for made in self._made], inputs, outputs, ranks)

    def embedding(self, dtype, vocab_size, size, ranks):
        shape = DeltaShape(vocab_size, (size,), 1 + len(ranks), 8, dtype, self.device)
        return self._filled([made.embedding(shape) for made in self._made], vocab_size, (size,), ranks)

    def _filled(self, deltas, inputs, outputs, ranks):
        for slot, rank in enumerate(ranks, start=1):
            missing = (1,) if slot == 2 and len(outputs) > 1 else ()
            for delta in deltas:  # a longer rank was there before
                delta.put(slot, delta.pack(random_parts(inputs, outputs, max(ranks), 99)))
                delta.put(slot, delta.pack(random_parts(inputs, outputs, rank, slot, missing)))
        return deltas

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def runs(self, slots: list[int]) -> AdapterRuns:
        return runs_of(np.array(slots, dtype=np.int64), InputBuffers(self.device).put)


def random_parts(inputs, outputs, rank, seed, missing=()):
    generator = torch.Generator().manual_seed(seed)
    return [
        None
        if number in missing
        else (
            torch.randn((rank, inputs), generator=generator) / inputs**0.5,
            torch.randn((size, rank), generator=generator) / rank**0.5,
        )
        for number, size in enumerate(outputs)
    ]


@pytest.fixture
def native(device: torch.device) -> Pair:
    return Pair("native", device)


@pytest.fixture
def triton(device: torch.device) -> Pair:
    return Pair("triton", device)


@pytest.fixture(params=["native", "triton"])
def pair(request: pytest.FixtureRequest, device: torch.device) -> Pair:
    return Pair(request.param, device)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_changes(pair: Pair, dtype, inputs, outputs, slots, float32_atol) -> None:
    delta, plain = pair.linear(dtype, inputs, outputs)
    x = pair.random(len(slots), inputs + 2, dtype=dtype)[:, :inputs]  # rows apart
    y = pair.random(len(slots), sum(outputs), dtype=dtype)
    found, wanted = (one.add(x, y.clone(), pair.runs(slots)) for one in (delta, plain))
    atol, rtol = (float32_atol, 1e-5) if dtype == torch.float32 else (0.04, 0.02)
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol)
    is_base = torch.tensor(slots, device=pair.device) == 0
    assert torch.equal(found[is_base], y[is_base])
    assert is_base.all() or not torch.equal(found, y)


@pytest.mark.fast_cases(24)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, (48, 16, 16)), (80, (37,)), (6, (5, 9))])
@pytest.mark.parametrize("slots", [[1], [2, 2, 0, 3, 3, 3, 3, 3], [0, 0], [1] * 70 + [0] * 3 + [2] * 40])
@pytest.mark.usefixtures("threads")
def test_native_changes_are_those_of_torch(native, dtype, inputs, outputs, slots, num_threads):
    torch.set_num_threads(num_threads)
    check_changes(native, dtype, inputs, outputs, slots, 1e-5)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(80, (37,)), (48, (65, 16, 16)), (2100, (20,))])
@pytest.mark.parametrize("slots", [[2], [0, 0], [1, 1, 0, 2, 3], [1] * 35 + [2] * 3])
def test_triton_changes_are_those_of_torch(triton, dtype, inputs, outputs, slots):
    check_changes(triton, dtype, inputs, outputs, slots, 2e-5)


def test_a_replay_reads_the_plan_of_its_step(triton):
    delta, plain = triton.linear(torch.float32, 48, (20,))
    x, y = triton.random(6, 48), triton.random(6, 20)
    memory = recorded_plan(6)
    for slots in ([1, 2, 1, 2, 1, 2], [1] * 6, [0, 0, 0, 2, 2, 0]):
        write_plan(memory.numpy(), np.array(slots))
        found = delta.add(x, y.clone(), AdapterRuns.recorded(memory.to(triton.device)))
        torch.testing.assert_close(found, plain.add(x, y.clone(), triton.runs(slots)), atol=2e-5, rtol=1e-5)


def test_logits_are_changed_without_rounding(pair):
    delta, plain = pair.linear(torch.bfloat16, 48, (100,))
    x, y = pair.random(3, 48, dtype=torch.bfloat16), pair.random(3, 100)
    found, wanted = (one.add(x, y.clone(), pair.runs([1, 1, 3])) for one in (delta, plain))
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.01)
    assert not torch.equal(found.bfloat16().float(), found)


def test_gates_are_changed_before_the_activation(native):
    delta, plain = native.linear(torch.bfloat16, 48, (64, 64))
    weight = torch.randn((128, 48)).bfloat16() / 7
    fused, whole = (NativeLinear(load_library(), weight) for _ in range(2))
    assert fused.fuse_silu_and_mul()
    slots = [1, 1, 0, 2, 3, 3, 3, 3, 3]
    x = torch.randn((len(slots), 48)).bfloat16()
    found = delta.add_gated(x, fused.ungated(x), native.runs(slots))
    wanted = silu_and_mul(plain.add(x, whole(x), native.runs(slots)))
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.03)
    assert torch.equal(found[2], fused(x)[2]), "the base model's bits"


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_changed(pair, dtype):
    delta, plain = pair.embedding(dtype, 50, 70, ranks=(8, 3))
    ids, slots = torch.tensor([4, 49, 4, 0, 7], device=pair.device), [1, 1, 0, 2, 2]
    y = pair.random(5, 70, dtype=dtype)
    found, wanted = (one.add(ids, y.clone(), pair.runs(slots)) for one in (delta, plain))
    torch.testing.assert_close(found, wanted, atol=0.03 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)
    assert torch.equal(found[2], y[2]) and not torch.equal(found[0], y[0])


def check_bits(pair: Pair, dtype, outputs, slots, tokens) -> None:
    delta, _ = pair.linear(dtype, 96, outputs)
    x = pair.random(len(slots), 96, dtype=dtype)
    y = pair.random(len(slots), sum(outputs), dtype=dtype)
    together = delta.add(x, y.clone(), pair.runs(slots))
    for token in tokens:
        alone = delta.add(x[token : token + 1], y[token : token + 1].clone(), pair.runs([slots[token]]))
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.usefixtures("threads")
def test_bits_of_a_token_do_not_depend_on_the_others(native, dtype, num_threads):
    torch.set_num_threads(num_threads)
    check_bits(native, dtype, (48, 33), [1] * 37 + [2] * 3 + [0] + [3] * 5, (0, 3, 36, 38, 40, 45))


def test_bits_of_a_token_do_not_depend_on_the_others_in_triton(triton):
    check_bits(triton, torch.bfloat16, (20, 9), [1] * 40 + [2] * 3 + [0] + [1], (0, 33, 41, 44))


def test_a_slot_takes_another_adapter(pair):
    delta, plain = pair.linear(torch.float32, 16, (32,))
    x, y = pair.random(2, 16), torch.zeros((2, 32), device=pair.device)
    for one in (delta, plain):
        one.put(1, one.pack(random_parts(16, (32,), 2, 77)))
        one.put(3, None)
    slots = pair.runs([1, 3])
    found = delta.add(x, y.clone(), slots)
    torch.testing.assert_close(found, plain.add(x, y.clone(), slots))
    assert not found[1].any()


def test_long_runs_are_cut(native):
    assert native.runs([1] * 70 + [0, 2]).runs == (
        Run(1, 0, 32),
        Run(1, 32, 64),
        Run(1, 64, 70),
        Run(0, 70, 71),
        Run(2, 71, 72),
    )
    assert plan_of(np.array([3])).tolist() == [1, 3, 0, 1]
