"""The gated delta net in plain torch, on any device: token by token, or in chunks of tokens for prompts.

A chunk of C tokens is computed at once, as in Yang et al. 2024, "Gated Delta Networks": what its tokens write is the
solution of a triangular system, which is found for all chunks of a prompt before the states are known.
"""

# Shapes: T tokens, H value heads, Hk key heads, Dk and Dv elements of a head, N chunks of C tokens; see `DeltaWeights`.

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .plain_runs import LEAST_CHUNKED, convolved, decays_between, in_chunks

if TYPE_CHECKING:
    from .delta_weights import DeltaWeights
    from .layer_states import LayerStates
    from .state_runs import StateRuns

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
