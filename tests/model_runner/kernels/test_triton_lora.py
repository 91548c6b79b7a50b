"""Triton's kernels for adapters against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model_runner.adapter_runs import AdapterRuns, recorded_plan, runs_of, write_plan
from engine.model_runner.kernels.plain_lora import PlainDeltas
from engine.model_runner.kernels.triton import lora
from engine.model_runner.memory.io_buffers import InputBuffers
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

pytestmark = pytest.mark.usefixtures("poisoned")


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


def filled(device, dtype, inputs, outputs):
    pair = [made.linear(inputs, outputs, 4, 24, dtype, device) for made in (lora.deltas, PlainDeltas())]
    for slot, rank in ((1, 24), (2, 3)):
        missing = (1,) if slot == 2 and len(outputs) > 1 else ()
        for delta in pair:
            delta.put(
                slot, delta.pack(random_parts(inputs, outputs, 24, 99))
            )  # a longer rank was there before
            delta.put(slot, delta.pack(random_parts(inputs, outputs, rank, slot, missing)))
    return pair


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(80, (37,)), (48, (65, 16, 16)), (2100, (20,))])
@pytest.mark.parametrize("slots", [[2], [0, 0], [1, 1, 0, 2, 3], [1] * 35 + [2] * 3])
def test_changes_are_those_of_torch(device, dtype, inputs, outputs, slots):
    triton, plain = filled(device, dtype, inputs, outputs)
    x = torch.randn((len(slots), inputs + 3), device=device).to(dtype)[:, :inputs]
    y = torch.randn((len(slots), sum(outputs)), device=device).to(dtype)
    runs = runs_of(np.array(slots), InputBuffers(device).put)
    found, wanted = (delta.add(x, y.clone(), runs) for delta in (triton, plain))
    atol = 2e-5 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-5 if dtype == torch.float32 else 0.02)
    unchanged = torch.tensor([slot in (0, 3) for slot in slots], device=device)
    assert torch.equal(found[unchanged], y[unchanged])
    assert unchanged.all() or not torch.equal(found, y)


def test_a_replay_reads_the_plan_of_its_step(device):
    triton, plain = filled(device, torch.float32, 48, (20,))
    x, y = torch.randn((6, 48), device=device), torch.randn((6, 20), device=device)
    memory = recorded_plan(6)
    for slots in ([1, 2, 1, 2, 1, 2], [1] * 6, [0, 0, 0, 2, 2, 0]):
        write_plan(memory.numpy(), np.array(slots))
        found = triton.add(x, y.clone(), AdapterRuns.recorded(memory.to(device)))
        wanted = plain.add(x, y.clone(), runs_of(np.array(slots), InputBuffers(device).put))
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


def test_logits_in_float32(device):
    triton, plain = filled(device, torch.bfloat16, 64, (100,))
    x, y = torch.randn((3, 64), device=device).bfloat16(), torch.randn((3, 100), device=device)
    runs = runs_of(np.array([1, 1, 2]), InputBuffers(device).put)
    found, wanted = (delta.add(x, y.clone(), runs) for delta in (triton, plain))
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.01)


def test_a_tokens_bits_do_not_depend_on_the_others(device):
    triton, _ = filled(device, torch.bfloat16, 48, (20, 9))
    slots = [1] * 40 + [2] * 3 + [0] + [1]
    x = torch.randn((len(slots), 48), device=device).bfloat16()
    y = torch.randn((len(slots), 29), device=device).bfloat16()
    put = InputBuffers(device).put
    together = triton.add(x, y.clone(), runs_of(np.array(slots), put))
    for token in (0, 33, 41, 44):
        alone = triton.add(
            x[token : token + 1], y[token : token + 1].clone(), runs_of(np.array([slots[token]]), put)
        )
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings(device, dtype):
    pair = [made.embedding(50, 70, 3, 8, dtype, device) for made in (lora.deltas, PlainDeltas())]
    ids, slots = torch.tensor([4, 49, 4, 0, 7], device=device), [1, 1, 0, 2, 2]
    y = torch.randn((5, 70), device=device).to(dtype)
    for delta in pair:
        for slot, rank in ((1, 8), (2, 3)):
            delta.put(slot, delta.pack(random_parts(50, (70,), rank, slot)))
    runs = runs_of(np.array(slots), InputBuffers(device).put)
    found, wanted = (delta.add(ids, y.clone(), runs) for delta in pair)
    torch.testing.assert_close(found, wanted, atol=0.03 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)
    assert torch.equal(found[2], y[2])
