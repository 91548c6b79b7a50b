"""State layers in plain torch: Mamba 2, gated delta net and short convolution, request by request."""

# Shapes: T tokens, H heads of P elements, G groups of heads, D numbers of state for each element, N chunks of C
# tokens, K channels, L taps, Hk key heads, Dk and Dv elements of a head, see `DeltaWeights`.

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .state_runs import LayerStates, StateRuns
    from .state_weights import DeltaWeights, MambaWeights


CHUNK: Final = 64
LEAST_CHUNKED: Final = 8
"""With fewer tokens the chunks' matmuls do not pay."""


def convolved(whole: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu of the causal convolution of each channel: [L - 1 + T, K] -> [T, K] float32."""
    windows = whole.to(torch.float32).unfold(0, len(taps), 1)  # [T, K, L]
    sums = (windows * taps.to(torch.float32).T).sum(dim=-1)
    return F.silu(sums if bias is None else sums + bias)


def in_chunks(x: Tensor) -> Tensor:
    """[T, H, ...] -> [N, H, C, ...]; tokens after the last are zeros, which change no state."""
    num_chunks = -(-len(x) // CHUNK)
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, num_chunks * CHUNK - len(x)))
    return torch.unflatten(padded, 0, (num_chunks, CHUNK)).transpose(1, 2)


def decays_between(since: Tensor) -> Tensor:
    """Logarithms of decays since a chunk's begin, [..., C] -> the decay from each token to each later one, [..., C, C].

    Row t has the decays of what tokens up to t have written; the others are zeros.
    """
    between = since.unsqueeze(-1) - since.unsqueeze(-2)
    return between.masked_fill(~torch.ones_like(between, dtype=torch.bool).tril(), -torch.inf).exp()


class MambaInputs(NamedTuple):
    """Inputs of the tokens to the states, all of it in float32 (or float64 for tests).

    Attributes:
        x: [T, H, P], multiplied by the time step.
        b, c: [T, H, D]: where it is added, and where the state is read.
        log_decay: [T, H], not positive: the logarithm of the factor of the state.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    log_decay: Tensor


def mamba2(zxbcdt: Tensor, weights: MambaWeights, states: LayerStates, runs: StateRuns) -> Tensor:
    assert states.recurrent is not None
    _, num_heads, state_dim, head_dim = states.recurrent.shape
    inner, groups = num_heads * head_dim, weights.num_groups * state_dim
    z, xbc, dt = zxbcdt.split((inner, weights.taps.shape[1], num_heads), dim=-1)
    steps = F.softplus(dt.to(torch.float32) + weights.dt_bias).clamp(weights.least_step, weights.most_step)
    log_decay = weights.decay * steps
    answered = torch.empty((len(zxbcdt), num_heads, head_dim), dtype=torch.float32, device=zxbcdt.device)
    # In order, as a run may begin with what another one has stored.
    for load, first, last, store in runs.on_host():
        state = states.recurrent[load]
        whole = torch.cat((states.conv[load], xbc[first:last]))
        if last > first:
            mixed = convolved(whole, weights.taps, weights.bias)
            x, *both = mixed.split((inner, groups, groups), dim=-1)
            x = x.unflatten(-1, (num_heads, head_dim))
            b, c = (
                part.unflatten(-1, (weights.num_groups, state_dim)).repeat_interleave(
                    num_heads // weights.num_groups, dim=1
                )
                for part in both
            )
            inputs = MambaInputs(x * steps[first:last, :, None], b, c, log_decay[first:last])
            answers, state = scan(inputs, state)
            answered[first:last] = answers + x * weights.skip[:, None]
        states.conv[store] = whole[len(whole) - states.conv.shape[1] :]
        states.recurrent[store] = state
    gated = answered.flatten(1) * F.silu(z.to(torch.float32))
    if weights.norm is None:
        return gated
    by_group: Tensor = gated.unflatten(-1, (weights.num_groups, -1))
    factors: Tensor = (by_group.square().mean(dim=-1, keepdim=True) + weights.eps).rsqrt()
    return ((by_group * factors).flatten(1) * weights.norm).to(zxbcdt.dtype)


def scan(inputs: MambaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """[H, D, P] before the tokens -> what they are answered, [T, H, P], and the state after them."""
    return scan_in_chunks(inputs, state) if len(inputs.x) >= LEAST_CHUNKED else one_by_one(inputs, state)


def one_by_one(inputs: MambaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """`scan`, as it is defined."""
    answers = []
    for x, b, c, log_decay in zip(*inputs, strict=True):
        state = state * log_decay.exp()[:, None, None] + b[:, :, None] * x[:, None, :]
        answers.append(torch.einsum("hd,hdp->hp", c, state))
    return torch.stack(answers), state


def scan_in_chunks(inputs: MambaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """`scan` by matmuls."""
    num_tokens = len(inputs.x)
    x, b, c, log_decay = (in_chunks(part) for part in inputs)  # [N, H, C, ...]
    since = log_decay.cumsum(dim=-1)  # the chunk's begin, its first token included
    within = (c @ b.transpose(-1, -2)) * decays_between(since) @ x
    asking = c * since.exp().unsqueeze(-1)
    added = (b * (since[..., -1:] - since).exp().unsqueeze(-1)).transpose(-1, -2) @ x
    remaining = since[..., -1].exp()[..., None, None]
    answers = torch.empty_like(x)
    for n in range(len(x)):
        answers[n] = asking[n] @ state + within[n]
        state = remaining[n] * state + added[n]
    return answers.transpose(1, 2).flatten(0, 1)[:num_tokens], state


_NORM_EPS: Final = 1e-6  # of the lengths of q and k


class DeltaInputs(NamedTuple):
    """Inputs of the tokens to the states, all of it in float32 (or float64 for tests).

    Attributes:
        q, k: [T, H, Dk], normalized; q is scaled.
        v: [T, H, Dv].
        log_decay: [T, H], not positive: the logarithm of the factor of the state.
        beta: [T, H]: how much of the state's answer to k is corrected.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


def gated_delta(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: LayerStates, runs: StateRuns
) -> Tensor:
    assert states.recurrent is not None
    _, num_heads, key_dim, value_dim = states.recurrent.shape
    conv_size = weights.taps.shape[1]
    mixed = torch.empty((len(qkvz), conv_size), dtype=torch.float32, device=qkvz.device)
    attended = torch.empty((len(qkvz), num_heads, value_dim), dtype=torch.float32, device=qkvz.device)
    b, a = ba.to(torch.float32).chunk(2, dim=-1)
    log_decay = weights.decay * F.softplus(a + weights.dt_bias)
    beta = b.sigmoid()
    # In order, as a run may begin with what another one has stored.
    for load, first, last, store in runs.on_host():
        state = states.recurrent[load]
        whole = torch.cat((states.conv[load], qkvz[first:last, :conv_size]))
        if last > first:
            mixed[first:last] = convolved(whole, weights.taps)
            q, k, v = _heads(mixed[first:last], weights.num_key_heads, num_heads, key_dim, value_dim)
            inputs = DeltaInputs(q, k, v, log_decay[first:last], beta[first:last])
            attended[first:last], state = correct(inputs, state)
        states.conv[store] = whole[len(whole) - states.conv.shape[1] :]
        states.recurrent[store] = state
    return _finished(attended, qkvz[:, conv_size:], weights).to(qkvz.dtype)


def correct(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """[H, Dk, Dv] before the tokens -> what they are answered, [T, H, Dv], and the state after them."""
    return correct_in_chunks(inputs, state) if len(inputs.q) >= LEAST_CHUNKED else _one_by_one(inputs, state)


def _one_by_one(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    answers = []
    for q, k, v, log_decay, beta in zip(*inputs, strict=True):
        state = state * log_decay.exp()[:, None, None]
        delta = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * delta[:, None, :]
        answers.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(answers), state


def correct_in_chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same by matmuls."""
    num_tokens = len(inputs.q)
    q, k, v, log_decay, beta = (in_chunks(part) for part in inputs)  # [N, H, C, ...]
    since = log_decay.cumsum(dim=-1)  # the chunk's begin, its first token included
    decays = decays_between(since)
    of_earlier = (k @ k.transpose(-1, -2)) * decays * beta.unsqueeze(-1)  # its diagonal is not read
    written = torch.cat((v, k * since.exp().unsqueeze(-1)), dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(of_earlier, written, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = (q @ k.transpose(-1, -2)) * decays
    asking = q * since.exp().unsqueeze(-1)
    storing = (k * (since[..., -1:] - since).exp().unsqueeze(-1)).transpose(-1, -2)
    remaining = since[..., -1].exp()[..., None, None]
    answers = torch.empty_like(v)
    for n in range(len(q)):
        new = values[n] - keys[n] @ state
        answers[n] = asking[n] @ state + within[n] @ new
        state = remaining[n] * state + storing[n] @ new
    return answers.transpose(1, 2).flatten(0, 1)[:num_tokens], state


def _heads(
    mixed: Tensor, num_key_heads: int, num_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[T, K] -> q, k and v of each value head."""
    key_size = num_key_heads * key_dim
    q, k, v = mixed.split((key_size, key_size, num_heads * value_dim), dim=-1)
    q, k = (
        (part * (part.square().sum(dim=-1, keepdim=True) + _NORM_EPS).rsqrt()).repeat_interleave(
            num_heads // num_key_heads, dim=1
        )
        for part in (q.unflatten(-1, (num_key_heads, key_dim)), k.unflatten(-1, (num_key_heads, key_dim)))
    )
    return q * key_dim**-0.5, k, v.unflatten(-1, (num_heads, value_dim))


def _finished(attended: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """The gated norm of each head: [T, H, Dv] -> [T, H * Dv] float32."""
    gate = F.silu(z.to(torch.float32).view(attended.shape))
    factors: Tensor = (attended.square().mean(dim=-1, keepdim=True) + weights.eps).rsqrt()
    return (attended * factors * weights.norm * gate).flatten(1)


def short_conv(bcx: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, runs: StateRuns) -> Tensor:
    gate_in, gate_out, x = bcx.chunk(3, dim=-1)
    inputs = gate_in * x
    out = torch.empty_like(inputs)
    num_kept, taps = slots.shape[1], weight.float()
    for load, first, last, store in runs.on_host():
        whole = torch.cat((slots[load], inputs[first:last]))
        if last > first:
            # [tokens, K, L] windows times [K, L]
            sums = (whole.float().unfold(0, num_kept + 1, 1) * taps.T).sum(dim=-1)
            if bias is not None:
                sums += bias
            out[first:last] = sums * gate_out[first:last]
        slots[store] = whole[len(whole) - num_kept :]
    return out
