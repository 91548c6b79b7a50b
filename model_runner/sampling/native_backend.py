"""`NativeSamplerBackend`: samples with our C++ kernels on the CPU: one call per step, without sorting.

The settings of each row are one line of a table, so a batch may mix all kinds of requests; an all-greedy batch has no
table. `kernels/cpu/sampler.cpp` documents the algorithm, `torch_backend` the meaning of the filters.
"""

# Shapes: S requests that sample in this step, n of them with a certain part, m edits, V tokens of the vocabulary.

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.cpu.library import load_library, reasons_against_library
from .logits import TokenLogprobs
from .sampler_backend import SampledTokens
from .sampling_batch import Draw, Int64s, LogitEdits, Penalties, SamplingBatch
from .token_counts import TokenCounts

_WORD_BITS: Final = 32

_ROW: Final = np.dtype(
    [
        ("draws", np.int32),
        ("temperature", np.float32),
        ("keys", np.int32, 2),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("log_min_p", np.float32),
        ("edited", np.int32),
        ("slot", np.int32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("edits_start", np.int32),
        ("edits_stop", np.int32),
        ("grammar", np.int32),
        ("unused", np.int32),
    ]
)
"""`Row` of sampler.cpp."""


def reasons_against_native_backend(device: torch.device) -> list[str]:
    """All reasons why the native sampler cannot run here."""
    if device.type != "cpu":
        return [f"runs on CPUs only, not on {device.type}"]
    return reasons_against_library()


class _Layout(NamedTuple):
    """Memory layout of logits: address, row stride in elements, and the shape [num_rows, vocab_size], float32."""

    address: int
    row_stride: int
    num_rows: int
    vocab_size: int


class NativeSamplerBackend:
    """See `SamplerBackend`."""

    recorded_bytes: Sequence[int] = ()

    def __init__(self, counts: TokenCounts, library: ctypes.CDLL | None = None) -> None:
        """Load the kernels; `library` replaces those for this CPU."""
        library = load_library() if library is None else library
        self._counts = counts
        self._sample = library.sample_tokens
        self._logprobs = library.token_logprobs
        self._known_logits: Callable[[], Tensor | None] = lambda: None
        self._layout = _Layout(0, 0, 0, 0)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        layout = self._layout_of(logits)
        num_rows, vocab_size = layout.num_rows, layout.vocab_size
        # Allocated by numpy: with cold caches, as between two steps, torch's first operation takes some 40 us.
        token_ids = torch.from_numpy(np.empty(num_rows, dtype=np.int64))
        finite = torch.from_numpy(np.empty(num_rows, dtype=np.bool_))
        rows = in_prompt = in_output = edit_ids = edit_values = masks = None
        mask_words = 0
        if batch.draw is not None or batch.processes_logits:
            table = _table(batch)
            rows = table.ctypes.data
        if batch.penalties is not None:
            in_prompt, in_output = self._counts.in_prompt.data_ptr(), self._counts.in_output.data_ptr()
        if batch.edits is not None:
            tokens, values = batch.edits.token_ids.astype(np.int32), np.ascontiguousarray(batch.edits.values)
            edit_ids, edit_values = tokens.ctypes.data, values.ctypes.data
        if batch.grammar is not None:
            bits = np.ascontiguousarray(batch.grammar.bits)
            masks, mask_words = bits.ctypes.data, bits.shape[1]
            assert mask_words * _WORD_BITS >= vocab_size, "a mask that is shorter than the vocabulary"
        self._sample(
            layout.address,
            layout.row_stride,
            rows,
            in_prompt,
            in_output,
            edit_ids,
            edit_values,
            masks,
            mask_words,
            token_ids.data_ptr(),
            finite.data_ptr(),
            num_rows,
            vocab_size,
        )
        return SampledTokens(token_ids, finite)

    def _layout_of(self, logits: Tensor) -> _Layout:
        """The layout of the logits; cached, because the logits of a recorded step are the same tensor in each step."""
        if self._known_logits() is not logits:
            _check(logits)
            self._layout = _Layout(logits.data_ptr(), logits.stride(0), *logits.shape)
            self._known_logits = weakref.ref(logits)
        return self._layout

    def capturable(self) -> None:
        return

    def logprobs(self, logits: Tensor, indices: Int64s, token_ids: Tensor, top_k: int) -> TokenLogprobs:
        """Equally likely tokens are ordered by id."""
        _check(logits)
        vocab_size = logits.shape[1]
        assert 0 <= top_k <= vocab_size, f"the {top_k} likeliest of {vocab_size} tokens"
        assert token_ids.dtype == torch.int64 and token_ids.is_contiguous(), token_ids.dtype
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        num_rows = len(indices)
        token = torch.empty(num_rows, dtype=torch.float32)
        top_ids = torch.empty((num_rows, top_k), dtype=torch.int32)
        top = torch.empty((num_rows, top_k), dtype=torch.float32)
        self._logprobs(
            logits.data_ptr(),
            logits.stride(0),
            indices.ctypes.data,
            token_ids.data_ptr(),
            token.data_ptr(),
            top_ids.data_ptr(),
            top.data_ptr(),
            num_rows,
            vocab_size,
            top_k,
        )
        return TokenLogprobs(token, top_ids, top)


def _check(logits: Tensor) -> None:
    """Check the dtype and layout that the kernels require."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())


def _table(batch: SamplingBatch) -> npt.NDArray[Any]:
    """The table, one line per row of logits: [S] of `_ROW`."""
    table = np.zeros(batch.num_rows, dtype=_ROW)
    table["slot"] = table["grammar"] = -1
    if batch.draw is not None:
        _add_draw(table, batch.draw)
    if batch.penalties is not None:
        _add_penalties(table, batch.penalties)
    if batch.edits is not None:
        _add_edits(table, batch.edits)
    if batch.grammar is not None:
        table["grammar"][batch.grammar.indices] = np.arange(len(batch.grammar.indices))
        table["edited"][batch.grammar.indices] = 1
    return table


def _add_draw(table: npt.NDArray[Any], draw: Draw) -> None:
    rows: Int64s | slice = draw.indices if len(draw.indices) < len(table) else slice(None)
    table["draws"][rows] = 1
    table["temperature"][rows] = draw.temperature
    table["keys"][rows] = draw.keys
    table["top_k"][rows] = 0 if draw.top_k is None else draw.top_k
    table["top_p"][rows] = 1.0 if draw.top_p is None else draw.top_p
    table["log_min_p"][rows] = -np.inf if draw.log_min_p is None else draw.log_min_p


def _add_penalties(table: npt.NDArray[Any], penalties: Penalties) -> None:
    rows = penalties.indices
    table["edited"][rows] = 1
    table["slot"][rows] = penalties.slots
    table["repetition"][rows] = penalties.repetition
    table["frequency"][rows] = penalties.frequency
    table["presence"][rows] = penalties.presence


def _add_edits(table: npt.NDArray[Any], edits: LogitEdits) -> None:
    every_row = np.arange(len(table))
    table["edits_start"] = np.searchsorted(edits.rows, every_row)
    table["edits_stop"] = np.searchsorted(edits.rows, every_row, side="right")
    table["edited"][edits.rows] = 1
