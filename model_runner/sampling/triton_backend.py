"""`TritonSamplerBackend`: samples with our Triton kernels: one upload, two or three launches, without sorting.

The settings of each row are one line of a table (`kernels/triton/sampler_rows`), so a batch may mix all kinds of
requests.
Expected on an H200, not measured: a row of 152k logits is 75 chunks, so one request keeps 75 of 132 multiprocessors
busy for a few us per launch instead of one for 10 times as long; 256 rows are 156 MB, 36 us at memory bandwidth.
"""

# Shapes: S requests that sample in this step, n of them with a certain part, m edits, V tokens of the vocabulary.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from ..kernels.triton import sampler as kernels
from ..kernels.triton import sampler_choose as choose_kernels
from ..kernels.triton import sampler_logprobs as logprob_kernels
from ..kernels.triton import sampler_rows as lines
from .logits import TokenLogprobs
from .sampler_backend import CapturableSampler, SampledTokens
from .sampling_batch import Draw, Int32s, Int64s, LogitEdits, Penalties, SamplingBatch
from .token_counts import TokenCounts
from .torch_backend import TorchSamplerBackend

_WORD_BITS: Final = 32
_LOGPROB_WARPS: Final = 4
_MOST_RANKED: Final = 20
"""The kernels rank so many likeliest tokens, which nearly all requests stay below; for more, torch does."""
# The torch backend rounds products before it adds them. Without fusion penalized logits are the same bit for bit.
_LAUNCH: Final[dict[str, Any]] = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes, powers of 2. They must not depend on the batch, or the order of sums and their last bits would too.

    Attributes:
        chunk: tokens per program of the survey kernel.
        group: tokens per group; the bound of top_k uses only the largest logit of each group.
        capacity: length of the candidate list that is filtered; with more candidates, filters scan the whole row in
            tens of passes.
        block: tokens that a filter program handles at a time.
    """

    chunk: int = 2048
    group: int = 128
    capacity: int = 16384
    block: int = 4096


class TritonSamplerBackend:
    """See `SamplerBackend`."""

    recorded_bytes: Sequence[int] = ()

    def __init__(self, counts: TokenCounts, geometry: Geometry = Geometry()) -> None:
        self._counts = counts
        self._buffers = counts.buffers
        self._geometry = geometry
        self._torch = TorchSamplerBackend(counts)

    def warm_up(self, vocab_size: int, logits_dtype: torch.dtype = torch.float32) -> None:
        """Compile every variant of the kernels at start: seconds on a new machine, which no request has to wait for."""
        logits = torch.zeros((1, vocab_size), dtype=logits_dtype, device=self._buffers.device)
        row, word = np.zeros(1, dtype=np.int64), np.zeros((1, 2), dtype=np.int32)
        ones = np.ones(1, dtype=np.float32)
        token_ids = torch.zeros(1, dtype=torch.int64, device=self._buffers.device)
        edits = LogitEdits(row, row, ones)
        plain, filtered = (Draw(row, word, ones, None, top_p, None) for top_p in (None, 0.5 * ones))
        for edits_or_none, draw in itertools.product((None, edits), (None, plain, filtered)):
            self.sample(logits, SamplingBatch(1, edits=edits_or_none, draw=draw))
        for top_k in (1, _MOST_RANKED):
            self.logprobs(logits, row, token_ids, top_k)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        (num_rows, vocab_size), device = logits.shape, logits.device
        results = self.results(num_rows)
        if num_rows == 0:
            return results
        if batch.draw is None and not batch.processes_logits:
            self.sample_rows(logits, None, results)
            return results
        plan = _Plan(batch, vocab_size)
        scratch = _Scratch(num_rows, vocab_size, plan.kinds, self._geometry, device)
        table, edit_ids, edit_values, words = self._buffers.put_all(plan.arrays)
        edited = scratch.stats
        if plan.kinds.edited:
            edited = torch.empty((plan.num_edited, vocab_size), dtype=torch.float32, device=device)
        rows = (logits, logits.stride(0), table, edited)
        self._survey(rows, (edit_ids, edit_values, words, words.stride(0)), scratch, plan.kinds)
        if plan.kinds.filters:
            self._shortlist(rows, scratch)
        self._choose(rows, scratch, plan.kinds, results)
        return results

    def capturable(self) -> CapturableSampler:
        return self

    @property
    def table_width(self) -> int:
        return int(lines.WIDTH.value)

    def results(self, num_rows: int) -> SampledTokens:
        """Memory for the results of some rows, [S] each: one piece, so that one copy brings both to the host.

        Both begin at a multiple of 16 bytes for any S: Triton would compile other kernels for other addresses.
        """
        ids_bytes = 8 * num_rows
        flags_start = -(-ids_bytes // 16) * 16
        memory = torch.empty(flags_start + num_rows, dtype=torch.uint8, device=self._buffers.device)
        return SampledTokens(memory[:ids_bytes].view(torch.int64), memory[flags_start:].view(torch.bool))

    def write_table(self, table: Int32s, batch: SamplingBatch) -> None:
        _write_rows(table, batch.draw)

    def sample_rows(self, logits: Tensor, table: Tensor | None, results: SampledTokens) -> None:
        num_rows, vocab_size = logits.shape
        kinds = _Kinds(table=table is not None)
        scratch = _Scratch(num_rows, vocab_size, kinds, self._geometry, logits.device)
        # Arguments that the kernels do not read may be any tensors of their dtypes.
        integers, floats = scratch.shortlist.length, scratch.stats
        rows = (logits, logits.stride(0), integers if table is None else table, floats)
        self._survey(rows, (integers, floats, integers, 1), scratch, kinds)
        self._choose(rows, scratch, kinds, results)

    def _choose(self, rows: _Rows, scratch: _Scratch, kinds: _Kinds, results: SampledTokens) -> None:
        num_rows, vocab_size = rows[0].shape
        choose_kernels.choose_kernel[(num_rows,)](
            *rows,
            self._counts.in_output,
            scratch.stats,
            *scratch.shortlist,
            *results,
            self._geometry.capacity,
            vocab_size,
            scratch.num_chunks,
            HAS_TABLE=kinds.table,
            HAS_EDITED=kinds.edited,
            HAS_FILTERS=kinds.filters,
            CHUNKS=triton.next_power_of_2(scratch.num_chunks),
            BLOCK=self._geometry.block,
            num_warps=choose_kernels.CHOOSE_WARPS,
            **_LAUNCH,
        )

    def _survey(self, rows: _Rows, edits: tuple[Any, ...], scratch: _Scratch, kinds: _Kinds) -> None:
        num_rows, vocab_size = rows[0].shape
        assert rows[0].stride(1) == 1
        kernels.survey_kernel[(scratch.num_chunks, num_rows)](
            *rows,
            self._counts.in_prompt.view(torch.uint8),
            self._counts.in_output,
            *edits,
            scratch.stats,
            scratch.group_max,
            scratch.shortlist.length,
            vocab_size,
            HAS_TABLE=kinds.table,
            HAS_EDITED=kinds.edited,
            CHUNK=self._geometry.chunk,
            GROUP=self._geometry.group,
            num_warps=kernels.SURVEY_WARPS,
            **_LAUNCH,
        )

    def _shortlist(self, rows: _Rows, scratch: _Scratch) -> None:
        num_rows, vocab_size = rows[0].shape
        kernels.shortlist_kernel[(scratch.num_chunks, num_rows)](
            *rows,
            scratch.stats,
            scratch.group_max,
            *scratch.shortlist,
            self._geometry.capacity,
            vocab_size,
            CHUNK=self._geometry.chunk,
            GROUP=self._geometry.group,
            CHUNKS=triton.next_power_of_2(scratch.num_chunks),
            num_warps=kernels.SURVEY_WARPS,
            **_LAUNCH,
        )

    def logprobs(self, logits: Tensor, indices: Int64s, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """Equally likely tokens are ordered by id, where at most `_MOST_RANKED` are asked for."""
        if top_k > _MOST_RANKED:
            return self._torch.logprobs(logits, indices, token_ids, top_k)
        assert logits.stride(1) == 1
        num_rows, vocab_size = len(indices), logits.shape[1]
        device, chunk = logits.device, self._geometry.chunk
        token = torch.empty(num_rows, dtype=torch.float32, device=device)
        top_ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=device)
        top = torch.empty((num_rows, top_k), dtype=torch.float32, device=device)
        if num_rows == 0:
            return TokenLogprobs(token, top_ids, top)
        rows = self._buffers.put(indices)
        num_chunks = triton.cdiv(vocab_size, chunk)
        stats = torch.empty((2, num_rows, num_chunks), dtype=torch.float32, device=device)
        ranked = torch.empty((num_rows, num_chunks, max(top_k, 1)), dtype=torch.int64, device=device)
        logprob_kernels.survey_logprobs_kernel[(num_chunks, num_rows)](
            logits,
            logits.stride(0),
            rows,
            stats,
            ranked,
            top_k,
            vocab_size,
            CHUNK=chunk,
            num_warps=_LOGPROB_WARPS,
        )
        logprob_kernels.collect_logprobs_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            rows,
            token_ids,
            stats,
            ranked,
            token,
            top_ids,
            top,
            top_k,
            num_chunks,
            CHUNKS=triton.next_power_of_2(num_chunks),
            CANDIDATES=triton.next_power_of_2(num_chunks * (_MOST_RANKED if top_k > 1 else 1)),
            num_warps=_LOGPROB_WARPS,
        )
        return TokenLogprobs(token, top_ids, top)


_Rows = tuple[Tensor, int, Tensor, Tensor]
"""The first arguments of every stage: the logits, the stride of their rows, the table, and the changed logits."""


class _Kinds(NamedTuple):
    """Needs of the rows of a batch; a kernel is compiled for each combination.

    Attributes:
        table: more than the argmax of the model's logits.
        edited: some are sampled from changed logits.
        filters: some have a filter.
    """

    table: bool
    edited: bool = False
    filters: bool = False


class _Shortlist(NamedTuple):
    """The lists of filtered rows, in the order of the kernels' arguments; see `sampler.shortlist_kernel`."""

    length: Tensor
    values: Tensor
    token_ids: Tensor
    bounds: Tensor


class _Scratch:
    """Intermediate results that the stages of one call pass on; they are freed after the call.

    Attributes:
        stats: [4, S, C] float32.
        group_max: [S, groups] float32; without filters it and the lists may be any tensor, because no kernel reads it.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, kinds: _Kinds, sizes: Geometry, device: torch.device
    ) -> None:
        self.num_chunks: int = triton.cdiv(vocab_size, sizes.chunk)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.stats = self.group_max = torch.empty((4, num_rows, self.num_chunks), **floats)
        lengths = torch.empty(num_rows, **integers)
        self.shortlist = _Shortlist(lengths, self.stats, lengths, self.stats)
        if kinds.filters:
            self.group_max = torch.empty((num_rows, self.num_chunks * sizes.chunk // sizes.group), **floats)
            self.shortlist = _Shortlist(
                lengths,
                torch.empty((num_rows, sizes.capacity), **floats),
                torch.empty((num_rows, sizes.capacity), **integers),
                torch.empty(num_rows, **floats),
            )


class _Plan:
    """The table of a batch in which some rows need more than the argmax, and facts derived from it.

    Attributes:
        kinds: what the rows need.
        num_edited: number of rows that sample from changed logits.
        arrays: the table [S, 16] int32; token ids [m] int32 and values [m] float32 of edits; masks [n, words] int32.
    """

    def __init__(self, batch: SamplingBatch, vocab_size: int) -> None:
        self._words = np.empty((batch.num_rows, lines.WIDTH.value), dtype=np.int32)
        self._numbers = self._words.view(np.float32)
        _write_rows(self._words, batch.draw)
        edit_ids, edit_values = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
        masks = np.zeros((1, 1), dtype=np.int32)
        if batch.penalties is not None:
            self._add_penalties(batch.penalties)
        if batch.edits is not None:
            self._add_edits(batch.edits)
            edit_ids, edit_values = batch.edits.token_ids.astype(np.int32), batch.edits.values
        if batch.grammar is not None:
            masks = batch.grammar.bits
            assert masks.shape[1] * _WORD_BITS >= vocab_size, "a mask that is shorter than the vocabulary"
            self._words[batch.grammar.indices, lines.GRAMMAR.value] = np.arange(len(masks))
            self._words[batch.grammar.indices, lines.EDITED.value] = 0
        edited = np.flatnonzero(self._words[:, lines.EDITED.value] == 0)
        self._words[edited, lines.EDITED.value] = np.arange(len(edited))
        self.num_edited = len(edited)
        filters = batch.draw is not None and batch.draw.filtered
        self.kinds = _Kinds(table=True, edited=self.num_edited > 0, filters=filters)
        self.arrays: list[npt.NDArray[Any]] = [self._words, edit_ids, edit_values, masks]

    def _add_penalties(self, penalties: Penalties) -> None:
        rows = penalties.indices
        self._words[rows, lines.EDITED.value] = 0
        self._words[rows, lines.SLOT.value] = penalties.slots
        self._numbers[rows, lines.REPETITION.value] = penalties.repetition
        self._numbers[rows, lines.FREQUENCY.value] = penalties.frequency
        self._numbers[rows, lines.PRESENCE.value] = penalties.presence

    def _add_edits(self, edits: LogitEdits) -> None:
        every_row = np.arange(len(self._words))
        self._words[:, lines.EDITS_START.value] = np.searchsorted(edits.rows, every_row)
        self._words[:, lines.EDITS_STOP.value] = np.searchsorted(edits.rows, every_row, side="right")
        self._words[edits.rows, lines.EDITED.value] = 0


def _write_rows(words: Int32s, draw: Draw | None) -> None:
    """Lines of the table, [S, 16], for rows that take the argmax of the model's logits or draw from them."""
    words.fill(0)
    words[:, [lines.EDITED.value, lines.SLOT.value, lines.GRAMMAR.value]] = -1
    if draw is None:
        return
    rows, numbers = draw.indices, words.view(np.float32)
    kinds = np.where(draw.filtering(), lines.FILTERED_DRAW.value, lines.DRAW.value)
    words[rows, lines.KIND.value] = kinds
    words[rows, lines.KEY_0.value] = draw.keys[:, 0]
    words[rows, lines.KEY_1.value] = draw.keys[:, 1]
    words[rows, lines.TOP_K.value] = 0 if draw.top_k is None else draw.top_k
    numbers[rows, lines.TEMPERATURE.value] = draw.temperature
    numbers[rows, lines.TOP_P.value] = 1.0 if draw.top_p is None else draw.top_p
    numbers[rows, lines.LOG_MIN_P.value] = -np.inf if draw.log_min_p is None else draw.log_min_p
