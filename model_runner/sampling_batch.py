"""`SamplingBatch`: what the sampler has to do in one step, decided once on the host, tensors on the device.

A part that no request of the batch asks for is None, and the sampler does not visit it.
"""

# Shapes: S requests that sample in this step, n of them concerned by one part, V tokens of the vocabulary.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .noise import noise_keys
from .row_states import RowStates, SamplingFlag

if TYPE_CHECKING:
    from .input_buffers import InputBuffers
    from .token_counts import TokenCounts

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Requests with penalties.

    Attributes:
        indices: [n] int64 into the S rows.
        slots: [n] int64 into `TokenCounts`.
        repetition, frequency, presence: [n, 1] float32.
    """

    indices: Tensor
    slots: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Single logits to change: `values` [m] float32 are added at (`rows`, `token_ids`), [m] int64 each."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class TopK:
    """Requests that keep k tokens.

    Attributes:
        indices: [m] int64 into the n drawing rows.
        last: [m, 1] int64, k - 1.
        max_k: the largest k among them.
    """

    indices: Tensor
    last: Tensor
    max_k: int


@dataclass(frozen=True, slots=True)
class TopP:
    """Requests that keep a probability mass: [m] int64 `indices` into the n drawing rows, [m, 1] float32 `mass`."""

    indices: Tensor
    mass: Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """Requests that draw instead of taking the argmax.

    Attributes:
        indices: [n] int64 into the S rows; None: all of them.
        keys: [n, 2] int32 for `gumbel_noise`.
        temperature: [n, 1] float32.
        top_k, top_p: filters.
        log_min_p: [n, 1] float32, -inf for requests without.
    """

    indices: Tensor | None
    keys: Tensor
    temperature: Tensor
    top_k: TopK | None
    top_p: TopP | None
    log_min_p: Tensor | None


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Requests that want log-probabilities: their `indices` among the S rows and the `top_k` of each, on the host."""

    indices: Tensor
    sampled_idx: tuple[int, ...]
    top_k: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One step's sampling. All parts None: every request takes the argmax of the model's logits."""

    num_rows: int
    penalties: Penalties | None = None
    edits: LogitEdits | None = None
    draw: Draw | None = None
    logprobs: LogprobRequest | None = None


def plan_sampling(
    rows: Int64s,
    positions: Int64s,
    states: RowStates,
    counts: TokenCounts,
    eos_token_ids: tuple[int, ...],
    buffers: InputBuffers,
) -> SamplingBatch:
    """Decide what the sampler does.

    Args:
        rows: [S] pool rows that sample.
        positions: [S] position of the token to be sampled, which is the number of tokens before it.
    """
    flags = states.flags[rows]
    union = int(np.bitwise_or.reduce(flags)) if len(rows) else 0
    if union & ~SamplingFlag.PROMPT_LOGPROBS == 0:
        return SamplingBatch(len(rows))
    planner = _Planner(rows, positions, flags, states, buffers)
    edits = union & (SamplingFlag.LOGIT_BIAS | SamplingFlag.MIN_NEW_TOKENS)
    return SamplingBatch(
        num_rows=len(rows),
        penalties=planner.penalties(counts) if union & SamplingFlag.PENALTIES else None,
        edits=planner.edits(eos_token_ids) if edits else None,
        draw=planner.draw(union) if union & SamplingFlag.DRAW else None,
        logprobs=planner.logprobs() if union & SamplingFlag.LOGPROBS else None,
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    rows: Int64s
    positions: Int64s
    flags: npt.NDArray[np.int32]
    states: RowStates
    buffers: InputBuffers

    def having(self, flag: SamplingFlag) -> Int64s:
        """Indices among the S rows."""
        return np.flatnonzero(self.flags & flag)

    def penalties(self, counts: TokenCounts) -> Penalties:
        indices = self.having(SamplingFlag.PENALTIES)
        rows = self.rows[indices].tolist()
        params = [self.states[row].sampling for row in rows]
        put = self.buffers.put
        return Penalties(
            indices=put(indices),
            slots=put(counts.slots(rows)),
            repetition=put(_column([p.repetition_penalty for p in params])),
            frequency=put(_column([p.frequency_penalty for p in params])),
            presence=put(_column([p.presence_penalty for p in params])),
        )

    def edits(self, eos_token_ids: tuple[int, ...]) -> LogitEdits | None:
        """Biases, and -inf for whatever would end an output that has to go on."""
        rows: list[int] = []
        token_ids: list[int] = []
        values: list[float] = []
        for idx in self.having(SamplingFlag.LOGIT_BIAS | SamplingFlag.MIN_NEW_TOKENS).tolist():
            state = self.states[int(self.rows[idx])]
            sampling = state.sampling
            ends: set[int] = set()
            if int(self.positions[idx]) - state.prompt_len < sampling.min_new_tokens:
                ends = {*eos_token_ids, *sampling.stop_token_ids}
            changes = {**(sampling.logit_bias or {}), **dict.fromkeys(ends, -np.inf)}
            rows += [idx] * len(changes)
            token_ids += changes.keys()
            values += changes.values()
        if not rows:
            return None
        put = self.buffers.put
        return LogitEdits(
            rows=put(np.array(rows, dtype=np.int64)),
            token_ids=put(np.array(token_ids, dtype=np.int64)),
            values=put(np.array(values, dtype=np.float32)),
        )

    def draw(self, union: int) -> Draw:
        indices = self.having(SamplingFlag.DRAW)
        rows, flags = self.rows[indices], self.flags[indices]
        put, states = self.buffers.put, self.states
        top_k = top_p = log_min_p = None
        if union & SamplingFlag.TOP_K:
            limited = np.flatnonzero(flags & SamplingFlag.TOP_K)
            k = states.top_k[rows[limited]]
            top_k = TopK(put(limited), put((k - 1)[:, None]), int(k.max()))
        if union & SamplingFlag.TOP_P:
            limited = np.flatnonzero(flags & SamplingFlag.TOP_P)
            top_p = TopP(put(limited), put(states.top_p[rows[limited]][:, None]))
        if union & SamplingFlag.MIN_P:
            with np.errstate(divide="ignore"):
                log_min_p = put(np.log(states.min_p[rows])[:, None])
        return Draw(
            indices=None if len(indices) == len(self.rows) else put(indices),
            keys=put(noise_keys(states.seed[rows], self.positions[indices])),
            temperature=put(states.temperature[rows][:, None]),
            top_k=top_k,
            top_p=top_p,
            log_min_p=log_min_p,
        )

    def logprobs(self) -> LogprobRequest:
        indices = self.having(SamplingFlag.LOGPROBS)
        params = [self.states[row].sampling for row in self.rows[indices].tolist()]
        return LogprobRequest(
            self.buffers.put(indices), tuple(indices.tolist()), tuple(p.logprobs or 0 for p in params)
        )


def _column(values: list[float]) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)[:, None]
