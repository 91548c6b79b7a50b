"""Operations of torch that are recorded as calls of the library: the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.model_runner.kernels.cpu.library import load_library, reasons_against_library
from engine.model_runner.recording.programs.arena import Arena
from engine.model_runner.recording.programs.native_program import record

pytestmark = pytest.mark.skipif(bool(reasons_against_library()), reason="there are no native kernels here")
INDICES = torch.tensor([3, 0, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: x + y,
        lambda x, y: x + x,
        lambda x, y: x * 0.37,
        lambda x, y: 3 * x,
        lambda x, y: x / 8,
        lambda x, y: x.index_select(0, INDICES),
        lambda x, y: (x + y).float(),
        lambda x, y: torch.cat((x, y, x + y), dim=-1),
        lambda x, y: F.relu(x),
        lambda x, y: (x + y) * 2 + x,
    ],
)
def test_replays_compute_what_torch_does(compute, dtype):
    with torch.inference_mode():
        x, y = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype)
        recorded = record(load_library(), Arena(), lambda: compute(x, y))
        assert recorded.program is not None, recorded.reason_against
        assert torch.equal(recorded.result, compute(x, y))

        x.copy_(torch.randn(5, 48))  # other values at the same addresses
        recorded.program.run()

        assert torch.equal(recorded.result, compute(x, y))


@pytest.mark.parametrize("kind", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh")])
def test_activations_are_equal_up_to_rounding(kind):
    with torch.inference_mode():
        x = torch.randn(5, 48)
        before = x.clone()
        recorded = record(load_library(), Arena(), lambda: kind(x))
        assert recorded.program is not None
        torch.testing.assert_close(recorded.result, kind(x), atol=1e-6, rtol=1e-5)
        assert torch.equal(x, before)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: x + y.t().contiguous().t(),
        lambda x, y: x + y[:1],
        lambda x, y: x * y,
        lambda x, y: x / 3,
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x + 1,
        lambda x, y: x.index_select(1, INDICES),
        lambda x, y: x.double(),
    ],
)
def test_others_are_reasons_against_a_recording(compute):
    with torch.inference_mode():
        x, y = torch.randn(5, 48), torch.randn(5, 48)
        recorded = record(load_library(), Arena(), lambda: compute(x, y))
        assert recorded.program is None
        assert "aten." in recorded.reason_against
        torch.testing.assert_close(recorded.result, compute(x, y))
