"""Gates of layers' inputs, sparse gates and the streams of AltUp: the C++ kernels and plain torch against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.model_runner.kernels import streams as plain
from engine.model_runner.kernels.cpu.library import load_library, reasons_against_library
from engine.model_runner.kernels.streams import NativeStreamOps
from engine.model_runner.ops.altup import AltUpWeights

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
SHAPES = [(3, 4, 48), (5, 3, 37), (1, 2, 200)]
"""Tokens, streams, hidden size."""
forms = pytest.mark.parametrize("dtype", ROUNDING)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Any:
    """What both have: an object with the operations, and `altup`."""
    if request.param == "torch":
        return type("Plain", (), {**vars(plain), "altup": plain.PlainAltUp()})
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    return NativeStreamOps(load_library())


@pytest.fixture
def normal() -> Callable[..., torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=source)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, times: float = 4.0) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    size = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=times * ROUNDING[dtype] * size)


@forms
@shapes
def test_gates(ops, normal, dtype, shape):
    rows, _, size = shape
    x, wide = normal(rows, size).to(dtype), normal(rows, 3 * size).to(dtype)
    y = wide[:, size : 2 * size]
    expected = F.gelu(x.double(), approximate="tanh") * y.double()
    close(ops.gelu_times(x.clone(), y), expected, dtype)

    gate_up = (2 * normal(rows, 2 * size) + 1).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    cutoff = gate.mean(-1, keepdim=True) + 0.5 * gate.std(-1, correction=0, keepdim=True)
    expected = F.gelu(F.relu(gate - cutoff), approximate="tanh") * up
    found = ops.sparse_gelu_and_mul(gate_up, 0.5)
    close(found, expected, dtype)
    assert (found == 0).float().mean() > 0.4


def test_ids_beyond_a_table(ops):
    ids = torch.tensor([0, 7, 8, 100])
    assert ops.ids_below(ids, 8).tolist() == [0, 7, 0, 0]
    assert ids.tolist() == [0, 7, 8, 100]


@forms
@shapes
def test_streams(ops, normal, dtype, shape):
    """As `Gemma3nTextAltUp` of transformers computes them."""
    tokens, num, size = shape
    weights = AltUpWeights(
        normal(num, size) / size**0.5, normal(num * num, num), normal(num, num), normal(size), num - 1, 1e-6
    )
    x, projected = normal(tokens, size).to(dtype), 3 * normal(tokens, (num - 1) * size).to(dtype)

    def rms(one: torch.Tensor) -> torch.Tensor:
        return one.square().mean(-1, keepdim=True).sqrt()

    def numbers(one: torch.Tensor) -> torch.Tensor:
        return (one / rms(one) @ weights.router.double().T).tanh()

    streams = ops.altup.stack(x.clone(), projected.clone())
    others = projected.double().view(tokens, num - 1, size)
    expected = torch.cat((x.double().unsqueeze(1), others * rms(x.double()).unsqueeze(1) / rms(others)), 1)
    close(streams, expected, dtype)

    predicted, active = ops.altup.predict(streams.clone(), weights)
    wide = streams.double()
    coefs = (numbers(wide[:, -1]) @ weights.predictions.double().T).view(tokens, num, num)
    close(predicted, torch.einsum("tji,tik->tjk", coefs, wide) + wide, dtype)
    assert torch.equal(active, predicted[:, -1])

    activated = normal(tokens, size).to(dtype)
    corrected, scaled = ops.altup.correct(predicted.clone(), activated.clone(), weights)
    wide, new = predicted.double(), activated.double()
    coefs = numbers(new) @ weights.corrections.double().T + 1
    close(corrected, wide + coefs.unsqueeze(-1) * (new - wide[:, -1]).unsqueeze(1), dtype)
    close(scaled, corrected[:, -1].double() * weights.output_scale.double(), dtype)

    spread = ops.altup.spread(activated.clone(), corrected.clone())
    assert torch.equal(spread[:, 0], corrected[:, 0])
    close(spread[:, 1:], corrected[:, 1:].double() + new.unsqueeze(1), dtype)

    first = ops.altup.add_matched(streams, activated.clone(), None)
    matched = new * rms(streams[:, 0].double()) / rms(new)
    close(first, streams[:, 0].double() + matched, dtype)
    again = ops.altup.add_matched(streams, activated.clone(), first.clone())
    close(again, first.double() + matched, dtype)
