"""Mamba 2 in plain torch, on any device: token by token, or in chunks of tokens for prompts.

Within a chunk the answers are those of linear attention with decays; between chunks there is the state, as in Dao and
Gu 2024, "Transformers are SSMs".
"""

# Shapes: T tokens, H heads of P elements, G groups of heads, D numbers of state for each element, N chunks of C tokens.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .plain_runs import LEAST_CHUNKED, convolved, decays_between, in_chunks

if TYPE_CHECKING:
    from .layer_states import LayerStates
    from .mamba_weights import MambaWeights
    from .state_runs import StateRuns


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
