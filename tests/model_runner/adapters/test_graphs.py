"""Recorded steps with adapters as on a GPU: Triton's kernels in its interpreter, recordings that are run again."""

from __future__ import annotations

import pytest
import torch

from engine.model_runner import assembly, load
from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.model_runner.kernels.triton import lora
from engine.model_runner.op_selection import PROVIDERS, Provider, select_ops
from engine.model_runner.recording.graphs.graph_sizes import sizes_to_record
from tests.model_runner.conftest import SeeingExecutor
from tests.model_runner.recording.recording_device import DeviceAttention, RerunningDevice
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

PROMPTS = [[5, 60, 33, 7], [71, 12, 44, 8, 90], [9, 2, 3], [1, 4]]
SLOTS = [2, 0, 1, 2]
TRITON = {
    **{op: providers[-1:] for op, providers in PROVIDERS.items()},
    "deltas": (Provider("triton", lambda _target: [], lambda _target: lora.deltas),),
}


@pytest.mark.slow
def test_replays_with_other_adapters_in_each_step(make_adapted, make_driver, monkeypatch):
    adapted = make_adapted(2)
    device = RerunningDevice()
    monkeypatch.setattr(assembly, "select_backend", lambda *_args: DeviceAttention)
    monkeypatch.setattr(load, "select_ops", lambda target: select_ops(target, TRITON))
    cuda, found, reqs = torch.device("cuda"), [], []
    for is_recorded in (True, False):
        if is_recorded:
            monkeypatch.setattr(
                load,
                "sizes_to_record",
                lambda kernels, num, _, spec, **_more: sizes_to_record(
                    kernels, min(num, 4), cuda, spec=spec, step_tokens=lambda: 24
                ),
            )
            monkeypatch.setattr(assembly, "CudaGraphDevice", lambda _device: device)
        driver = make_driver(
            adapted.tiny.spec,
            adapted.tiny.folder,
            adapter_slots=SlotSizes(2, 8),
            max_recorded_bs=4,
            poison=False,
        )
        if not is_recorded:
            driver.run_eagerly()
        for n, spec in enumerate(adapted.specs, start=1):
            driver.runner.adapters.store.read(n, spec)
        driver.step([], adapter_loads=[(1, 1), (2, 2)])
        seen = SeeingExecutor(driver)
        reqs = [driver.start(prompt, adapter_slot=slot) for prompt, slot in zip(PROMPTS, SLOTS, strict=True)]
        driver.step([(req, len(req.tokens)) for req in reqs])
        for order in ([0, 1, 2, 3], [3, 2, 1], [1], [2, 0]):
            driver.step([(reqs[n], 1) for n in order])
        late = [driver.start(prompt, adapter_slot=slot) for prompt, slot in (([7] * 9, 1), ([5] * 7, 2))]
        driver.step([(late[0], 9), (reqs[0], 1), (reqs[1], 1)])
        driver.step([(late[1], 4), (reqs[3], 1), (late[0], 1)])
        found.append(torch.cat(seen.logits))
        if is_recorded:
            num_pieces = adapted.tiny.spec.num_layers + 1
            assert device.num_captured == 2 * (4 + 2 * num_pieces), "with and without adapters"
            assert device.num_replayed == 4 + 3 * num_pieces
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    wanted = adapted.adapters[1].logits(reqs[0].tokens)
    torch.testing.assert_close(found[0][4], wanted[len(PROMPTS[0])], atol=5e-5, rtol=5e-5)
