"""`SamplingBatch`: what the sampler has to do in one step, decided once on the host.

A part that no request of the batch asks for is None. The arrays are on the host. The sampler backend uploads what its
kernels need, in one copy or without any (`torch_backend`, `triton_backend`).
"""

# Shapes: S requests that sample in this step, n of them with a certain part, V tokens of the vocabulary.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...runtime.sampling_params import GREEDY_TEMPERATURE
from ...runtime.step_plan import TokenMasks
from ..request_states import RequestStates, SamplingFlag
from .noise import coins, noise_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...runtime.sampling_params import SamplingParams
    from .token_counts import TokenCounts

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


_FOR_SAMPLER: Final = np.int32(~SamplingFlag.PROMPT_LOGPROBS)
"""Flags with which the sampler has to do more than take the argmax."""
_EDITS: Final = SamplingFlag.LOGIT_BIAS | SamplingFlag.MIN_NEW_TOKENS | SamplingFlag.HISTORY
_CHANGES: Final = np.int32(_EDITS | SamplingFlag.PENALTIES | SamplingFlag.ALLOWED)
"""Flags of changes to the logits, which a row with a rare sampler has besides it."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Requests with penalties.

    Attributes:
        indices: [n] into the S rows.
        slots: [n] into `TokenCounts`.
        repetition, frequency, presence: [n].
    """

    indices: Int64s
    slots: Int64s
    repetition: Float32s
    frequency: Float32s
    presence: Float32s


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Single logits to change: `values` [m] are added at (`rows`, `token_ids`), [m] each, sorted by row, no repeats."""

    rows: Int64s
    token_ids: Int64s
    values: Float32s

    def of_rows(self, rows: Int64s) -> LogitEdits | None:
        """The edits of some rows, which are then numbered from 0."""
        kept = np.isin(self.rows, rows)
        if not kept.any():
            return None
        return LogitEdits(np.searchsorted(rows, self.rows[kept]), self.token_ids[kept], self.values[kept])


@dataclass(frozen=True, slots=True)
class Draw:
    """Requests that draw a token instead of taking the argmax.

    Attributes:
        indices: [n] into the S rows, ascending.
        keys: [n, 2] for `gumbel_noise`.
        temperature: [n].
        top_k: [n], 0 for requests without; None without any.
        top_p: [n], 1 for requests without; None without any.
        log_min_p: [n], -inf for requests without; None without any.
    """

    indices: Int64s
    keys: Int32s
    temperature: Float32s
    top_k: Int64s | None
    top_p: Float32s | None
    log_min_p: Float32s | None

    def of_rows(self, rows: Int64s) -> Draw | None:
        """The draws of some rows, which are then numbered from 0."""
        kept = np.isin(self.indices, rows)
        if not kept.any():
            return None
        return Draw(
            indices=np.searchsorted(rows, self.indices[kept]),
            keys=self.keys[kept],
            temperature=self.temperature[kept],
            top_k=None if self.top_k is None else self.top_k[kept],
            top_p=None if self.top_p is None else self.top_p[kept],
            log_min_p=None if self.log_min_p is None else self.log_min_p[kept],
        )

    @property
    def filtered(self) -> bool:
        """Whether any request has a filter."""
        return self.top_k is not None or self.top_p is not None or self.log_min_p is not None

    def filtering(self) -> npt.NDArray[np.bool_]:
        """[n] whether a request has a filter."""
        found = np.zeros(len(self.indices), dtype=np.bool_)
        for values, off in ((self.top_k, 0), (self.top_p, 1.0), (self.log_min_p, -np.inf)):
            if values is not None:
                found |= values != off
        return found


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Requests with log-probabilities.

    Attributes:
        sampled_idx: their indices into the S rows.
        top_k: the number of likeliest tokens of each.
        chosen: the further tokens that each wants, see `SamplingParams.logprob_token_ids`.
        processed: the changes and filters after which the log-probabilities are taken; None: they are the model's own.
    """

    sampled_idx: tuple[int, ...]
    top_k: tuple[int, ...]
    chosen: tuple[tuple[int, ...], ...]
    processed: RareRows | None = None

    def chosen_ids(self) -> npt.NDArray[np.int64] | None:
        """[n, M] the chosen tokens of each, padded with token 0; None if there are none."""
        most = max(map(len, self.chosen))
        if not most:
            return None
        ids = np.zeros((len(self.chosen), most), dtype=np.int64)
        for row, chosen in enumerate(self.chosen):
            ids[row, : len(chosen)] = chosen
        return ids


@dataclass(frozen=True, slots=True)
class RareRows:
    """Requests whose logits go through `rare_sampler.filtered`, one by one.

    `SamplingBatch.rare` has those with a rare sampler (`SamplingParams.has_rare_sampler`), and the batch's other parts,
    but log-probabilities, do not have them; `LogprobRequest.processed` those with log-probabilities.

    Attributes:
        indices: [n] into the S rows, ascending.
        batch: penalties, edits and masks of these rows, which are numbered from 0 there.
        params: [n].
        draw: of the filtered logits, without filters, at temperature 1; None: all take the argmax.
        coins: [n] in [0, 1), for XTC.
    """

    indices: Int64s
    batch: SamplingBatch
    params: tuple[SamplingParams, ...]
    draw: Draw | None
    coins: tuple[float, ...]

    def with_masks(self, masks: TokenMasks) -> RareRows:
        """The same rows, with their masks among those of all S rows."""
        return replace(self, batch=self.batch.with_masks(_masks_of_rows(masks, self.indices)))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling of one step. All parts None: every request takes the argmax of the model's logits."""

    num_rows: int
    penalties: Penalties | None = None
    edits: LogitEdits | None = None
    grammar: TokenMasks | None = None
    draw: Draw | None = None
    logprobs: LogprobRequest | None = None
    rare: RareRows | None = None

    @property
    def processes_logits(self) -> bool:
        """Whether some tokens are sampled from changed logits."""
        return self.penalties is not None or self.edits is not None or self.grammar is not None

    def rows(self, indices: Int64s) -> SamplingBatch:
        """The batch of some of its rows ([n], ascending), with no penalties, logprobs and rare samplers."""
        return SamplingBatch(
            len(indices),
            grammar=None if self.grammar is None else _masks_of_rows(self.grammar, indices),
            edits=None if self.edits is None else self.edits.of_rows(indices),
            draw=None if self.draw is None else self.draw.of_rows(indices),
        )

    def with_masks(self, masks: TokenMasks | None) -> SamplingBatch:
        """The same batch, with the masks of its grammars."""
        if masks is None:
            return self
        logprobs, rare, rest = self.logprobs, self.rare, masks
        if logprobs is not None and logprobs.processed is not None:
            logprobs = replace(logprobs, processed=logprobs.processed.with_masks(masks))
        if rare is not None:
            own = np.flatnonzero(~np.isin(masks.indices, rare.indices))
            rare, rest = rare.with_masks(masks), TokenMasks(masks.indices[own], masks.bits[own])
        return replace(self, grammar=_joined(self.grammar, rest), rare=rare, logprobs=logprobs)


def plan_sampling(
    rows: Int64s,
    positions: Int64s,
    states: RequestStates,
    counts: TokenCounts,
    eos_token_ids: tuple[int, ...],
    last_token: Callable[[int], int],
    *,
    processed_logprobs: bool = False,
) -> SamplingBatch:
    """Make the `SamplingBatch` of a step.

    Args:
        rows: [S] pool rows of the requests that sample.
        positions: [S] position of the token to be sampled, which is the number of tokens before it.
        last_token: the token that a row sampled last; called for rows with a `TokenHistory` only.
        processed_logprobs: log-probabilities are taken after changes and filters (`--logprobs-mode processed`).
    """
    flags = states.flags[rows]
    if not np.count_nonzero(flags & _FOR_SAMPLER):
        return SamplingBatch(len(rows))

    def one_by_one(indices: Int64s) -> RareRows:
        own = _Planner(rows[indices], positions[indices], flags[indices] & _CHANGES, states, last_token)
        return own.rare(indices, own.batch(counts, eos_token_ids))

    rare = processed = None
    if processed_logprobs and np.count_nonzero(flags & SamplingFlag.LOGPROBS):
        processed = one_by_one(np.flatnonzero(flags & SamplingFlag.LOGPROBS))
    if np.count_nonzero(flags & SamplingFlag.RARE):
        indices = np.flatnonzero(flags & SamplingFlag.RARE)
        rare = one_by_one(indices)
        flags[indices] &= SamplingFlag.LOGPROBS
    batch = _Planner(rows, positions, flags, states, last_token).batch(counts, eos_token_ids)
    if batch.logprobs is not None and processed is not None:
        batch = replace(batch, logprobs=replace(batch.logprobs, processed=processed))
    return batch if rare is None else replace(batch, rare=rare)


@dataclass(frozen=True, slots=True)
class _Planner:
    rows: Int64s
    positions: Int64s
    flags: Int32s
    states: RequestStates
    last_token: Callable[[int], int]

    def batch(self, counts: TokenCounts, eos_token_ids: tuple[int, ...]) -> SamplingBatch:
        """The parts that the flags ask for."""
        union = int(np.bitwise_or.reduce(self.flags))
        return SamplingBatch(
            num_rows=len(self.rows),
            penalties=self.penalties(counts) if union & SamplingFlag.PENALTIES else None,
            edits=self.edits(eos_token_ids) if union & _EDITS else None,
            grammar=self.allowed() if union & SamplingFlag.ALLOWED else None,
            draw=self.draw(union) if union & SamplingFlag.DRAW else None,
            logprobs=self.logprobs() if union & SamplingFlag.LOGPROBS else None,
        )

    def rare(self, indices: Int64s, batch: SamplingBatch) -> RareRows:
        """All the rows, to be filtered one by one."""
        keys = noise_keys(self.states.seed[self.rows], self.positions)
        params = tuple(self.states[row].sampling for row in self.rows.tolist())
        warm = np.flatnonzero([p.temperature >= GREEDY_TEMPERATURE or p.dynatemp_range > 0 for p in params])
        draw = Draw(warm, keys[warm], np.ones(len(warm), dtype=np.float32), None, None, None)
        return RareRows(indices, batch, params, draw if len(warm) else None, tuple(coins(keys).tolist()))

    def having(self, flag: SamplingFlag) -> Int64s:
        """Indices into the S rows of the requests with this flag."""
        return np.flatnonzero(self.flags & flag)

    def penalties(self, counts: TokenCounts) -> Penalties:
        indices = self.having(SamplingFlag.PENALTIES)
        rows = self.rows[indices].tolist()
        params = [self.states[row].sampling for row in rows]
        return Penalties(
            indices=indices,
            slots=counts.slots(rows),
            repetition=_float32s([p.repetition_penalty for p in params]),
            frequency=_float32s([p.frequency_penalty for p in params]),
            presence=_float32s([p.presence_penalty for p in params]),
        )

    def edits(self, eos_token_ids: tuple[int, ...]) -> LogitEdits | None:
        """Biases, penalties of DRY, and -inf for EOS and stop tokens of outputs below their minimum length."""
        rows: list[int] = []
        token_ids: list[int] = []
        values: list[float] = []
        for idx in self.having(_EDITS).tolist():
            row, position = int(self.rows[idx]), int(self.positions[idx])
            state = self.states[row]
            sampling = state.sampling
            ends: set[int] = set()
            if position - state.prompt_len < sampling.min_new_tokens:
                ends = {*eos_token_ids, *sampling.stop_token_ids}
            changes = dict(sampling.logit_bias or {})
            changes |= {word[0]: -np.inf for word in sampling.bad_words_ids if len(word) == 1}
            if state.history is not None:
                if state.history.length < position:
                    state.history.append(self.last_token(row))
                assert state.history.length == position, "a request with a history has no drafts"
                for token_id, change in state.history.changes().items():
                    changes[token_id] = changes.get(token_id, 0.0) + change
            changes |= dict.fromkeys(ends, -np.inf)
            rows += [idx] * len(changes)
            token_ids += changes.keys()
            values += changes.values()
        if not rows:
            return None
        return LogitEdits(
            rows=np.array(rows, dtype=np.int64),
            token_ids=np.array(token_ids, dtype=np.int64),
            values=_float32s(values),
        )

    def allowed(self) -> TokenMasks:
        """The masks of `allowed_token_ids`, before those of grammars."""
        indices = self.having(SamplingFlag.ALLOWED)
        masks = (self.states[row].allowed for row in self.rows[indices].tolist())
        return TokenMasks(indices, np.stack([mask for mask in masks if mask is not None]))

    def draw(self, union: int) -> Draw:
        indices = self.having(SamplingFlag.DRAW)
        rows, flags, states = self.rows[indices], self.flags[indices], self.states
        top_k = top_p = log_min_p = None
        if union & SamplingFlag.TOP_K:
            top_k = np.where(flags & SamplingFlag.TOP_K, states.top_k[rows], 0)
        if union & SamplingFlag.TOP_P:
            top_p = states.top_p[rows]
        if union & SamplingFlag.MIN_P:
            with np.errstate(divide="ignore"):
                log_min_p = np.log(states.min_p[rows])
        return Draw(
            indices=indices,
            keys=noise_keys(states.seed[rows], self.positions[indices]),
            temperature=states.temperature[rows],
            top_k=top_k,
            top_p=top_p,
            log_min_p=log_min_p,
        )

    def logprobs(self) -> LogprobRequest:
        indices = self.having(SamplingFlag.LOGPROBS).tolist()
        params = [self.states[row].sampling for row in self.rows[indices].tolist()]
        return LogprobRequest(
            tuple(indices),
            tuple(p.logprobs or 0 for p in params),
            tuple(p.logprob_token_ids for p in params),
        )


def _masks_of_rows(masks: TokenMasks, rows: Int64s) -> TokenMasks | None:
    """The masks of some rows, which are then numbered from 0."""
    kept = np.isin(masks.indices, rows)
    return TokenMasks(np.searchsorted(rows, masks.indices[kept]), masks.bits[kept]) if kept.any() else None


def _joined(first: TokenMasks | None, second: TokenMasks) -> TokenMasks | None:
    """Masks of both; a row that is in both may have the tokens that both allow."""
    if first is None or not len(second.indices):
        return second if first is None and len(second.indices) else first
    width = min(first.bits.shape[1], second.bits.shape[1])
    indices = np.union1d(first.indices, second.indices)
    bits = np.full((len(indices), width), -1, dtype=np.int32)
    for masks in (first, second):
        bits[np.searchsorted(indices, masks.indices)] &= masks.bits[:, :width]
    return TokenMasks(indices, bits)


def _float32s(values: list[float]) -> Float32s:
    return np.array(values, dtype=np.float32)
