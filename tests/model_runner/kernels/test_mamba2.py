"""Mamba 2 of each provider against the plain formula, token by token in float64; states and all."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.states import plain as plain_mamba2
from engine.model_runner.states.state_runs import LayerStates
from engine.model_runner.states.state_weights import MambaWeights

from .test_short_conv import CPU, LAYOUT, SOME, Step, steps

DTYPES = (torch.float32, torch.bfloat16)
HEADS = {"4/1 of 64, 16": (4, 1, 64, 16), "6/3 of 7, 20": (6, 3, 7, 20), "2/2 of 144, 128": (2, 2, 144, 128)}
"""Heads, groups, elements of a head, numbers of state."""


def reference(
    step: Step, zxbcdt: torch.Tensor, weights: MambaWeights, conv: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Token by token, request by request, in float64; moves the states."""
    _, num_heads, state_dim, head_dim = states.shape
    inner, size, groups = num_heads * head_dim, weights.taps.shape[1], weights.num_groups
    out = torch.empty(len(zxbcdt), inner, dtype=torch.float64)
    at = 0
    for row, prefix, length in zip(step.rows, step.prefix_lens, step.extend_lens, strict=True):
        slot = step.loads.get(row, row + 1 if prefix else 0)
        columns, state = list(conv[slot].clone()), states[slot].clone()
        for position in range(prefix + 1, prefix + length + 1):
            z, channels, dt = zxbcdt[at].split((inner, size, num_heads))
            columns = [*columns, channels]
            total = sum(w.double() * c.double() for w, c in zip(weights.taps, columns, strict=True))
            columns = columns[1:]
            if weights.bias is not None:
                total = total + weights.bias.double()
            x, b, c = (total * total.sigmoid()).split((inner, groups * state_dim, groups * state_dim))
            answers = []
            for head in range(num_heads):
                group = head // (num_heads // groups)
                mine = slice(group * state_dim, (group + 1) * state_dim)
                value = x[head * head_dim : (head + 1) * head_dim]
                grown = (1 + (dt[head].double() + weights.dt_bias[head]).exp()).log()
                grown = grown.clamp(weights.least_step, weights.most_step)
                kept = state[head] * (weights.decay[head].double() * grown).exp()
                state[head] = kept + torch.outer(b[mine], grown * value)
                answers.append(c[mine] @ state[head] + weights.skip[head] * value)
            gated = torch.cat(answers) * z.double() * z.double().sigmoid()
            if weights.norm is not None:
                by_group = gated.view(groups, -1)
                norms = (by_group.square().mean(dim=1, keepdim=True) + weights.eps).sqrt()
                gated = (by_group / norms).flatten() * weights.norm
            out[at] = gated
            at += 1
            for save in step.saves:
                if (save.row, save.position) == (row, position):
                    conv[save.slot], states[save.slot] = torch.stack(columns), state
        conv[row + 1], states[row + 1] = torch.stack(columns), state
    return out


def check(
    op: Any,
    step: Step,
    *,
    heads: Any,
    taps: int,
    dtype: torch.dtype,
    bias: bool = True,
    norm: bool = True,
    device: torch.device = CPU,
) -> None:
    """The op's output and states are those of `reference`."""
    num_heads, groups, head_dim, state_dim = heads
    inner, num_tokens = num_heads * head_dim, sum(step.extend_lens)
    size = inner + 2 * groups * state_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    zxbcdt = random(num_tokens, inner + size + num_heads)
    weights = MambaWeights(
        random(taps, size),
        random(size) if bias else None,
        -(torch.rand(num_heads) * 4).exp() / 4,
        torch.randn(num_heads),
        torch.randn(num_heads),
        torch.rand(inner) + 0.5 if norm else None,
        1e-6,
        groups,
        *((0.4, 1.2) if bias else ()),
    )
    conv = random(LAYOUT.num_slots, taps - 1, size)
    states = torch.randn(LAYOUT.num_slots, num_heads, state_dim, head_dim)
    conv[0], states[0] = 0, 0
    expected_conv, expected_states = conv.clone(), states.double()
    expected = reference(step, zxbcdt, weights, expected_conv, expected_states)

    runs = step.runs()
    moved = LayerStates(conv.to(device), states.to(device))
    on_device: Any = (part.to(device) if isinstance(part, torch.Tensor) else part for part in weights)
    out = op(
        zxbcdt.to(device), MambaWeights(*on_device), moved, replace(runs, plan=runs.plan.to(device))
    ).cpu()

    assert moved.recurrent is not None
    assert out.dtype == (dtype if norm else torch.float32)
    rounding = 2**-7 if out.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=max(rounding / 2, 2e-4))
    assert torch.equal(moved.conv.cpu(), expected_conv)
    torch.testing.assert_close(moved.recurrent.cpu().double(), expected_states, rtol=1e-4, atol=1e-4)
    assert not moved.conv[0].any() and not moved.recurrent[0].any()


FEW = settings(SOME, max_examples=12)
SHAPES = {
    "step": steps(),
    "heads": st.sampled_from(list(HEADS.values())),
    "taps": st.sampled_from([2, 4, 5]),
    "dtype": st.sampled_from(DTYPES),
    "bias": st.booleans(),
    "norm": st.booleans(),
}


@FEW
@given(**SHAPES)
def test_plain(step, heads, taps, dtype, bias, norm):
    check(plain_mamba2.mamba2, step, heads=heads, taps=taps, dtype=dtype, bias=bias, norm=norm)


@FEW
@given(**SHAPES)
def test_native(step, heads, taps, dtype, bias, norm):
    from engine.model_runner.kernels.cpu.library import load_library
    from engine.model_runner.kernels.native_states import NativeStateOps

    op = NativeStateOps(load_library()).mamba2
    check(op, step, heads=heads, taps=taps, dtype=dtype, bias=bias, norm=norm)


@pytest.mark.parametrize("num_tokens", [64, 150])
def test_chunks_are_the_tokens_one_by_one(num_tokens):
    shape = (num_tokens, 2)
    b, c = (torch.randn(*shape, 24).double() for _ in range(2))
    inputs = plain_mamba2.MambaInputs(torch.randn(*shape, 40).double(), b, c, -torch.rand(shape).double() * 3)
    state = torch.randn(2, 24, 40).double()
    for ours, theirs in zip(
        plain_mamba2.scan_in_chunks(inputs, state), plain_mamba2.one_by_one(inputs, state), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
