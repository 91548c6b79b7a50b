"""`RequestStates`: the runner's state of each request, on the host, by pool row; `TokenRelay`, on the device.

It is written only from the plan's `new_reqs` and `finished_rows`. State that every step reads for every request is in
arrays indexed by row; state that few requests need is in their `RowState`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..runtime.pooling import PoolingParams
from ..runtime.sampling_params import SamplingParams
from ..runtime.step_plan import NewReq
from .token_history import TokenHistory

Int32s = npt.NDArray[np.int32]


class SamplingFlag(enum.IntFlag):
    """Sampler features that a request needs besides the argmax; a batch's flags are the union over its rows."""

    DRAW = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    LOGIT_BIAS = 32
    MIN_NEW_TOKENS = 64
    LOGPROBS = 128
    PROMPT_LOGPROBS = 256
    RARE = 512
    HISTORY = 1024
    ALLOWED = 2048


@dataclass(frozen=True, slots=True)
class RowState:
    """One request.

    Attributes:
        rid: request id, for logs.
        input_ids: [known_len] the tokens sent when the request was (re)started; later ones are sampled here.
        prompt_len: number of prompt tokens among them.
        sampling: its sampling parameters.
        pooling: what is computed instead of a next token; None: the request generates text.
        media: [n, 3] int64, see `NewReq`.
        rope: [3, prompt_len], see `NewReq`.
        allowed: [V / 32] int32, `allowed_token_ids` as in `TokenMasks`; None: all tokens.
        history: its last tokens, for changes of logits that depend on them; None without any.
    """

    rid: str
    input_ids: Int32s
    prompt_len: int
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    media: npt.NDArray[np.int64] | None = None
    rope: Int32s | None = None
    history: TokenHistory | None = None
    allowed: Int32s | None = None


class RequestStates:
    """All rows. Rows without a live request keep stale values in the arrays.

    Attributes:
        known_len: [rows] int64, length of `RowState.input_ids`.
        prompt_len: [rows] int64.
        flags: [rows] int32, `SamplingFlag`.
        temperature, top_p, min_p: [rows] float32.
        top_k: [rows] int64.
        seed: [rows] uint64.
        adapter_slot: [rows] int64, 0: the base model.
        is_pooling: [rows] bool, whether the request has `RowState.pooling`.
        second_start: [rows] int64, see `PoolingParams`; 0 for other requests.
        media_end: [rows] int64, the position after the last one that takes a row of the encoder; 0 without images.
        rope_delta: [rows] int64, added to positions after the last image to turn heads; 0 without `NewReq.rope`.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._states: list[RowState | None] = [None] * num_rows
        self.known_len = np.zeros(num_rows, dtype=np.int64)
        self.prompt_len = np.zeros(num_rows, dtype=np.int64)
        self.flags = np.zeros(num_rows, dtype=np.int32)
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.is_pooling = np.zeros(num_rows, dtype=np.bool_)
        self.second_start = np.zeros(num_rows, dtype=np.int64)
        self.adapter_slot = np.zeros(num_rows, dtype=np.int64)
        self.media_end = np.zeros(num_rows, dtype=np.int64)
        self.rope_delta = np.zeros(num_rows, dtype=np.int64)

    def __getitem__(self, row: int) -> RowState:
        state = self._states[row]
        assert state is not None, f"row {row} has no request"
        return state

    def add(self, new: NewReq) -> RowState:
        """Add a request to its row, which must be free."""
        assert self._states[new.row] is None, (
            f"row {new.row} is taken by {self[new.row].rid}, not free for {new.rid}"
        )
        sampling = new.sampling
        input_ids = np.frombuffer(new.input_ids, dtype=np.int32)
        media = (
            np.frombuffer(new.media, dtype=np.int32).reshape(-1, 3).astype(np.int64) if new.media else None
        )
        rope = np.frombuffer(new.rope, dtype=np.int32).reshape(3, -1) if new.rope else None
        row, flags = new.row, flags_of(sampling, self._vocab_size)
        history = TokenHistory(sampling, input_ids, new.prompt_len) if flags & SamplingFlag.HISTORY else None
        allowed = _mask_of(sampling.allowed_token_ids, self._vocab_size)
        state = RowState(
            new.rid, input_ids, new.prompt_len, sampling, new.pooling, media, rope, history, allowed
        )
        self._states[row] = state
        self.known_len[row] = len(state.input_ids)
        self.prompt_len[row] = new.prompt_len
        self.flags[row] = flags
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, self._vocab_size)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed or 0
        self.is_pooling[row] = new.pooling is not None
        self.second_start[row] = 0 if new.pooling is None else new.pooling.second_start
        self.adapter_slot[row] = new.adapter_slot
        self.media_end[row] = 0 if media is None else int((media[:, 0] + media[:, 1]).max())
        self.rope_delta[row] = 0 if rope is None else int(rope.max()) + 1 - rope.shape[1]
        return state

    def remove(self, row: int) -> None:
        """Remove the row's request."""
        self._states[row] = None


def flags_of(sampling: SamplingParams, vocab_size: int) -> SamplingFlag:
    """The flags of these parameters; settings without an effect set no flag."""
    flags = SamplingFlag(0)
    if not sampling.greedy:
        flags |= SamplingFlag.DRAW
        if 0 < sampling.top_k < vocab_size:
            flags |= SamplingFlag.TOP_K
        if sampling.top_p < 1.0:
            flags |= SamplingFlag.TOP_P
        if sampling.min_p > 0.0:
            flags |= SamplingFlag.MIN_P
    if sampling.has_rare_sampler:
        flags |= SamplingFlag.RARE
    if sampling.allowed_token_ids is not None:
        flags |= SamplingFlag.ALLOWED
    if sampling.has_history:
        flags |= SamplingFlag.HISTORY
    if sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty:
        flags |= SamplingFlag.PENALTIES
    if sampling.logit_bias or any(len(word) == 1 for word in sampling.bad_words_ids):
        flags |= SamplingFlag.LOGIT_BIAS
    if sampling.min_new_tokens > 0:
        flags |= SamplingFlag.MIN_NEW_TOKENS
    if sampling.logprobs is not None:
        flags |= SamplingFlag.LOGPROBS
    if sampling.prompt_logprobs is not None:
        flags |= SamplingFlag.PROMPT_LOGPROBS
    return flags


def _mask_of(token_ids: tuple[int, ...] | None, vocab_size: int) -> Int32s | None:
    if token_ids is None:
        return None
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


class TokenRelay:
    """The last sampled token of each pool row and, after them, of the dummy row; 0 in rows never sampled.

    It passes a step's tokens to the next step on the device, so step N+1 can be launched before the host has received
    the tokens of step N.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._last = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._last_np = self._last.numpy() if device.type == "cpu" else None

    def on_host(self) -> npt.NDArray[np.int64]:
        """[rows + 1] a view of the tokens; only if the device is the CPU."""
        assert self._last_np is not None
        return self._last_np

    def last_token(self, row: int) -> int:
        """The token of one row; waits for the device, and so for the step before."""
        return int(self._last[row]) if self._last_np is None else int(self._last_np[row])

    def store(self, rows: Tensor, token_ids: Tensor) -> None:
        """Store the sampled tokens: [S] int64 rows, without repeats, and [S] int64 tokens."""
        if self._last_np is None:
            self._last.index_copy_(0, rows, token_ids)
        else:  # with cold caches, as between two steps, an operation of torch takes some 40 us
            self._last_np[rows.numpy()] = token_ids.numpy()

    def fill(self, input_ids: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Write the last tokens of `rows` [n] into `input_ids` [T] at `indices` [n]; all int64."""
        if self._last_np is None:
            input_ids.index_copy_(0, indices, self._last.index_select(0, rows))
        else:
            input_ids.numpy()[indices.numpy()] = self._last_np[rows.numpy()]

    def input_ids(self, known_ids: Tensor, rows: Tensor) -> Tensor:
        """The tokens `known_ids` [n]; where they are negative, the last tokens of `rows` [n]; all int64."""
        return torch.where(known_ids < 0, self._last.index_select(0, rows), known_ids)
