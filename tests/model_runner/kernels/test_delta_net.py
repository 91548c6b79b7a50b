"""The gated delta net of each provider against the plain formula, token by token in float64; states and all."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model_runner.states import plain as plain_delta_net
from engine.model_runner.states.state_runs import LayerStates
from engine.model_runner.states.state_weights import DeltaWeights

from .test_short_conv import CPU, LAYOUT, SOME, Step, steps

DTYPES = (torch.float32, torch.bfloat16)
HEADS = {"2/4 of 16, 32": (2, 4, 16, 32), "1/3 of 20, 7": (1, 3, 20, 7), "2/2 of 128, 144": (2, 2, 128, 144)}
"""Key heads, value heads, elements of each."""


def reference(
    step: Step,
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    weights: DeltaWeights,
    conv: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """Token by token, request by request, in float64; moves the states."""
    _, num_heads, key_dim, value_dim = states.shape
    keys, conv_size = weights.num_key_heads, weights.taps.shape[1]
    out = torch.empty(len(qkvz), num_heads, value_dim, dtype=torch.float64)
    at = 0
    for row, prefix, length in zip(step.rows, step.prefix_lens, step.extend_lens, strict=True):
        slot = step.loads.get(row, row + 1 if prefix else 0)
        columns, state = list(conv[slot].clone()), states[slot].clone()
        for position in range(prefix + 1, prefix + length + 1):
            mixed, z = qkvz[at].split((conv_size, num_heads * value_dim))
            columns = [*columns, mixed]
            total = sum(w.double() * c.double() for w, c in zip(weights.taps, columns, strict=True))
            columns = columns[1:]
            silu = total * total.sigmoid()
            q, k, v = silu.split((keys * key_dim, keys * key_dim, num_heads * value_dim))
            b, a = ba[at].double().chunk(2)
            for head in range(num_heads):
                key_head = head // (num_heads // keys)
                mine = slice(key_head * key_dim, (key_head + 1) * key_dim)
                unit = [x[mine] / (x[mine].square().sum() + 1e-6).sqrt() for x in (q, k)]
                grown = (1 + (a[head] + weights.dt_bias[head]).exp()).log()
                decay = (weights.decay[head].double() * grown).exp()
                value = v[head * value_dim : (head + 1) * value_dim]
                kept = decay * state[head]
                kept += torch.outer(unit[1], b[head].sigmoid() * (value - unit[1] @ kept))
                state[head] = kept
                answer = unit[0] @ kept / key_dim**0.5
                norm = (answer.square().mean() + weights.eps).sqrt()
                gate = z[head * value_dim : (head + 1) * value_dim].double()
                out[at, head] = answer / norm * weights.norm * gate * gate.sigmoid()
            at += 1
            for save in step.saves:
                if (save.row, save.position) == (row, position):
                    conv[save.slot], states[save.slot] = torch.stack(columns), state
        conv[row + 1], states[row + 1] = torch.stack(columns), state
    return out.flatten(1)


def check(
    op: Any, step: Step, *, heads: Any, taps: int, dtype: torch.dtype, device: torch.device = CPU
) -> None:
    """The op's output and states are those of `reference`."""
    num_keys, num_heads, key_dim, value_dim = heads
    value_size = num_heads * value_dim
    conv_size, num_tokens = 2 * num_keys * key_dim + value_size, sum(step.extend_lens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    qkvz, ba = random(num_tokens, conv_size + value_size), random(num_tokens, 2 * num_heads)
    weights = DeltaWeights(
        random(taps, conv_size),
        -(torch.rand(num_heads) * 4).exp() / 4,
        torch.randn(num_heads),
        torch.rand(value_dim) + 0.5,
        1e-6,
        num_keys,
    )
    conv = random(LAYOUT.num_slots, taps - 1, conv_size)
    states = torch.randn(LAYOUT.num_slots, num_heads, key_dim, value_dim)
    conv[0], states[0] = 0, 0
    expected_conv, expected_states = conv.clone(), states.double()
    expected = reference(step, qkvz, ba, weights, expected_conv, expected_states)

    runs = step.runs()
    moved = LayerStates(conv.to(device), states.to(device))
    out = op(
        qkvz.to(device),
        ba.to(device),
        weights._replace(
            taps=weights.taps.to(device),
            decay=weights.decay.to(device),
            dt_bias=weights.dt_bias.to(device),
            norm=weights.norm.to(device),
        ),
        moved,
        replace(runs, plan=runs.plan.to(device)),
    ).cpu()

    assert moved.recurrent is not None
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=max(rounding / 2, 2e-4))
    assert torch.equal(moved.conv.cpu(), expected_conv)
    torch.testing.assert_close(moved.recurrent.cpu().double(), expected_states, rtol=1e-4, atol=1e-4)
    assert not moved.conv[0].any() and not moved.recurrent[0].any()


SHAPES = {
    "step": steps(),
    "heads": st.sampled_from(list(HEADS.values())),
    "taps": st.sampled_from([2, 4, 5]),
    "dtype": st.sampled_from(DTYPES),
}


@SOME
@given(**SHAPES)
def test_plain(step, heads, taps, dtype):
    check(plain_delta_net.gated_delta, step, heads=heads, taps=taps, dtype=dtype)


@SOME
@given(**SHAPES)
def test_native(step, heads, taps, dtype):
    from engine.model_runner.kernels.cpu.library import load_library
    from engine.model_runner.kernels.native_states import NativeStateOps

    check(NativeStateOps(load_library()).gated_delta, step, heads=heads, taps=taps, dtype=dtype)


@pytest.mark.parametrize("num_tokens", [64, 150])
def test_chunks_are_the_tokens_one_by_one(num_tokens):
    shape = (num_tokens, 2)
    q, k = (torch.nn.functional.normalize(torch.randn(*shape, 24), dim=-1).double() for _ in range(2))
    inputs = plain_delta_net.DeltaInputs(
        q, k, torch.randn(*shape, 40).double(), -torch.rand(shape).double() * 3, torch.rand(shape).double()
    )
    state = torch.randn(2, 24, 40).double()
    for ours, theirs in zip(
        plain_delta_net.correct_in_chunks(inputs, state),
        plain_delta_net._one_by_one(inputs, state),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
