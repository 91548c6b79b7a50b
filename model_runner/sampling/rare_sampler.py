"""`sample_rare` and `processed_logits`: filter logits row by row with torch's operations, on any device.

The first is for rows with rare samplers, the second for log-probabilities after the filters.

The samplers are llama.cpp's (`llama-sampler.cpp`), in its order: top_n_sigma, top_k, typical_p, top_p, min_p, XTC. The
temperature is first, as in the sampler backends, or last (`SamplingParams.temperature_last`), as in llama.cpp. As in
the backends, filters are lower bounds of a logit, so that equal logits are kept or dropped together; XTC's coin is a
function of seed and position, like the noise, with which the sampler backend then draws. Nothing waits for the device.

References: top-n-sigma (Tang et al. 2024), locally typical sampling (Meister et al. 2022), XTC (p-e-w 2024).
"""

# Shapes: V tokens of the vocabulary, n rows with a rare sampler.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...runtime.sampling_params import GREEDY_TEMPERATURE, MAX_XTC_THRESHOLD, SamplingParams
from ..kernels import plain
from .logits import process_logits
from .sampling_batch import SamplingBatch

if TYPE_CHECKING:
    from .sampler_backend import SamplerBackend
    from .sampling_batch import RareRows
    from .token_counts import TokenCounts

_NEVER: Final = -1e30
"""The logit of a dropped token for the backend, which takes infinite ones for a fault of the model."""


def sample_rare(logits: Tensor, rare: RareRows, counts: TokenCounts, backend: SamplerBackend) -> Tensor:
    """Sample a token for each row.

    Args:
        logits: [n, V] the model's own; not modified.
        rare: the settings of the rows.
        counts: get the tokens of rows with penalties.
        backend: draws from the filtered logits.

    Returns:
        [n] int64, on the device.
    """
    processed = process_logits(logits.float(), rare.batch, counts, counts.buffers)
    rows = [
        filtered(row[None], sampling, coin)
        for row, sampling, coin in zip(processed, rare.params, rare.coins, strict=True)
    ]
    left = (rows[0] if len(rows) == 1 else torch.cat(rows)).clamp_min(_NEVER)
    token_ids = backend.sample(left, SamplingBatch(len(rows), draw=rare.draw)).token_ids
    penalties = rare.batch.penalties
    if penalties is not None:
        indices, slots = counts.buffers.put_all([penalties.indices, penalties.slots])
        counts.observe(slots, token_ids.index_select(0, indices))
    return token_ids


def processed_logits(logits: Tensor, rows: RareRows, token_ids: Tensor) -> Tensor:
    """The logits whose softmax is the distribution that each row's token is sampled from; -inf where it cannot be.

    Of a greedy row they are the changed logits, as vLLM's `processed_logprobs`: the distribution has one token.

    Args:
        logits: [n, V] after `process_logits`.
        rows: the settings of the rows.
        token_ids: [n] int64, the sampled tokens. A sampler backend bounds its filters by other sums, so that a token at
            the bound may be kept there and dropped here: the sampled one is always kept.

    Returns:
        [n, V].
    """
    parts = []
    for row, token_id, p, coin in zip(
        logits.split(1), token_ids[:, None].split(1), rows.params, rows.coins, strict=True
    ):
        if p.has_rare_sampler:
            parts.append(filtered(row, p, coin))
        elif p.temperature < GREEDY_TEMPERATURE:
            parts.append(row)
        else:
            own = row.gather(1, token_id) / p.temperature
            parts.append(filtered(row, p, coin).scatter(1, token_id, own))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def filtered(logits: Tensor, p: SamplingParams, coin: float) -> Tensor:
    """The logits of one row, [1, V], divided by its temperature; -inf where a token is dropped."""
    x = logits if p.temperature_last else _tempered(logits, p)
    if p.top_n_sigma > 0:
        kept = x > -torch.inf
        num = kept.sum()
        mean = torch.where(kept, x, 0.0).sum() / num
        deviation = (torch.where(kept, x - mean, 0.0).square().sum() / num).sqrt()
        x = _above(x, x.amax() - p.top_n_sigma * deviation)
    if 0 < p.top_k < x.shape[1]:
        x = _above(x, plain.largest(x, p.top_k)[:, -1:])
    if p.typical_p < 1.0:
        x = _typical(x, p.typical_p)
    if p.top_p < 1.0:
        descending = plain.largest(x, x.shape[1])
        mass = descending.softmax(dim=-1).cumsum(dim=-1)
        last = (mass < p.top_p).sum(dim=-1, keepdim=True).clamp_max_(x.shape[1] - 1)
        x = _above(x, descending.gather(1, last))
    if p.min_p > 0:
        x = _above(x, x.amax() + torch.tensor(p.min_p, device=x.device).log())
    if p.xtc_probability > 0 and p.xtc_threshold <= MAX_XTC_THRESHOLD and coin <= p.xtc_probability:
        likely = x.softmax(dim=-1) >= p.xtc_threshold
        least = torch.where(
            likely, x, torch.inf
        ).amin()  # inf without a likely token: then nothing is dropped
        x = x.masked_fill(likely & (x > least), -torch.inf)
    return _tempered(x, p) if p.temperature_last else x


def _tempered(x: Tensor, p: SamplingParams) -> Tensor:
    """The logits divided by the temperature, which may depend on their entropy relative to the largest possible."""
    if p.dynatemp_range > 0:
        low, high = max(0.0, p.temperature - p.dynatemp_range), p.temperature + p.dynatemp_range
        largest = (x > -torch.inf).sum().log()
        entropy = torch.special.entr(x.softmax(dim=-1)).sum()
        relative = torch.where(largest > 0, entropy / largest, 0.0)
        return x / (low + (high - low) * relative.pow(p.dynatemp_exponent)).clamp_min(GREEDY_TEMPERATURE)
    return x if p.temperature < GREEDY_TEMPERATURE else x / p.temperature


def _typical(x: Tensor, mass: float) -> Tensor:
    """Keep the tokens whose log-probability is nearest to its mean, until their mass exceeds the wanted one."""
    logp = x.log_softmax(dim=-1)
    p = logp.exp()
    distances = (-logp - torch.special.entr(p).sum()).abs()  # inf for dropped tokens
    order = plain.argsort(distances)
    last = (p.gather(1, order).cumsum(dim=-1) <= mass).sum(dim=-1, keepdim=True).clamp_max_(x.shape[1] - 1)
    return x.masked_fill(distances > distances.gather(1, order.gather(1, last)), -torch.inf)


def _above(x: Tensor, floor: Tensor) -> Tensor:
    return x.masked_fill(x < floor, -torch.inf)
