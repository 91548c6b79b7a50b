"""The CPU's kernels for adapters against plain torch, and the bits of a token in different company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model_runner.adapter_runs import AdapterRuns, Run, plan_of, runs_of
from engine.model_runner.kernels.cpu.library import load_library
from engine.model_runner.kernels.native_linear import NativeLinear
from engine.model_runner.kernels.native_lora import NativeDeltas
from engine.model_runner.kernels.plain import silu_and_mul
from engine.model_runner.kernels.plain_lora import PlainDeltas
from engine.model_runner.memory.io_buffers import InputBuffers

CPU = torch.device("cpu")
BUFFERS = InputBuffers(CPU)
DTYPES = (torch.bfloat16, torch.float32)


def runs(slots: list[int]) -> AdapterRuns:
    return runs_of(np.array(slots, dtype=np.int64), BUFFERS.put)


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


def filled(dtype, inputs, outputs, *, num_slots=4, max_rank=24, ranks=(16, 3, 24)):
    """The same adapters in both implementations."""
    pair = [
        deltas.linear(inputs, outputs, num_slots, max_rank, dtype, CPU)
        for deltas in (NativeDeltas(load_library()), PlainDeltas())
    ]
    for slot, rank in enumerate(ranks, start=1):
        missing = (1,) if slot == 2 and len(outputs) > 1 else ()
        for delta in pair:
            delta.put(slot, delta.pack(random_parts(inputs, outputs, rank, slot, missing)))
    return pair


@pytest.mark.fast_cases(24)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(48, (48, 16, 16)), (80, (37,)), (6, (5, 9))])
@pytest.mark.parametrize("slots", [[1], [2, 2, 0, 3, 3, 3, 3, 3], [0, 0], [1] * 70 + [0] * 3 + [2] * 40])
def test_changes_are_those_of_torch(dtype, inputs, outputs, slots, num_threads):
    native, plain = filled(dtype, inputs, outputs)
    x = torch.randn((len(slots), inputs + 2)).to(dtype)[:, :inputs]  # rows apart
    y = torch.randn((len(slots), sum(outputs))).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = native.add(x, y.clone(), runs(slots))
    finally:
        torch.set_num_threads(before)
    wanted = plain.add(x, y.clone(), runs(slots))
    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (0.04, 0.02)
    torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol)
    is_base = torch.tensor(slots) == 0
    assert torch.equal(found[is_base], y[is_base])
    assert is_base.all() or not torch.equal(found, y)


def test_logits_are_changed_without_rounding():
    native, plain = filled(torch.bfloat16, 48, (100,))
    x, y = torch.randn((3, 48)).bfloat16(), torch.randn((3, 100))
    slots = runs([1, 1, 3])
    torch.testing.assert_close(
        native.add(x, y.clone(), slots), plain.add(x, y.clone(), slots), atol=2e-2, rtol=1e-2
    )
    assert not torch.equal(native.add(x, y.clone(), slots).bfloat16().float(), native.add(x, y, slots))


def test_gates_are_changed_before_the_activation():
    native, plain = filled(torch.bfloat16, 48, (64, 64))
    weight = torch.randn((128, 48)).bfloat16() / 7
    fused, whole = (NativeLinear(load_library(), weight) for _ in range(2))
    assert fused.fuse_silu_and_mul()
    slots = [1, 1, 0, 2, 3, 3, 3, 3, 3]
    x = torch.randn((len(slots), 48)).bfloat16()
    found = native.add_gated(x, fused.ungated(x), runs(slots))
    wanted = silu_and_mul(plain.add(x, whole(x), runs(slots)))
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.03)
    assert torch.equal(found[2], fused(x)[2]), "the base model's bits"


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_changed(dtype):
    pair = [
        deltas.embedding(50, 37, 3, 8, dtype, CPU) for deltas in (NativeDeltas(load_library()), PlainDeltas())
    ]
    ids, slots = torch.tensor([4, 49, 4, 0, 7]), runs([1, 1, 0, 2, 2])
    y = torch.randn((5, 37)).to(dtype)
    for delta in pair:
        for slot, rank in ((1, 8), (2, 3)):
            delta.put(slot, delta.pack(random_parts(50, (37,), rank, slot)))
    native, plain = (delta.add(ids, y.clone(), slots) for delta in pair)
    torch.testing.assert_close(native, plain, atol=0.03 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)
    assert torch.equal(native[2], y[2]) and not torch.equal(native[0], y[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_a_tokens_bits_do_not_depend_on_the_others(dtype, num_threads):
    native, _ = filled(dtype, 96, (48, 33))
    slots = [1] * 37 + [2] * 3 + [0] + [3] * 5
    x, y = torch.randn((len(slots), 96)).to(dtype), torch.randn((len(slots), 81)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = native.add(x, y.clone(), runs(slots))
        for token in (0, 3, 36, 38, 40, 45):
            alone = native.add(x[token : token + 1], y[token : token + 1].clone(), runs([slots[token]]))
            assert torch.equal(alone[0], together[token])
    finally:
        torch.set_num_threads(before)


def test_a_slot_takes_another_adapter():
    native, plain = filled(torch.float32, 16, (32,))
    x, y = torch.randn((2, 16)), torch.zeros((2, 32))
    for delta in (native, plain):
        delta.put(1, delta.pack(random_parts(16, (32,), 2, 77)))
        delta.put(3, None)
    slots = runs([1, 3])
    found = native.add(x, y.clone(), slots)
    torch.testing.assert_close(found, plain.add(x, y.clone(), slots))
    assert not found[1].any()


def test_long_runs_are_cut():
    assert runs([1] * 70 + [0, 2]).runs == (
        Run(1, 0, 32),
        Run(1, 32, 64),
        Run(1, 64, 70),
        Run(0, 70, 71),
        Run(2, 71, 72),
    )
    assert plan_of(np.array([3])).tolist() == [1, 3, 0, 1]
