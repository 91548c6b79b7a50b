"""The duration of a step: a `CostModel` turns a `StepWork` into seconds, `StageTimes` sends it through pipeline stages.

Stages have equal parts of the layers, so each takes its share of a step's time. A step enters a stage when it has left
the stage before, and the step before it has left this one; so a short step waits after a long one (the bubble).
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np

from ..scheduler.batch import ScheduleBatch, StepWork
from .facts import DeviceFacts, ModelFacts


class CostModel(Protocol):
    """Computes the duration of steps."""

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step; more work never takes less time."""
        ...


class Roofline:
    """Every part of a step takes the longer of its computation and its memory traffic.

        matrices   max(2 · (layer parameters · tokens + head parameters · sampled) / FLOP/s, weight bytes / bandwidth)
        prefill    4 · layers · heads · head_dim · pairs / FLOP/s
        decode     KV bytes / bandwidth
        swap       KV bytes / bandwidth to the host
        + a fixed overhead

    (Williams, Waterman, Patterson: Roofline, CACM 2009. Batching pays because the matrices share their weights over the
    batch; attention, the other part, does not.)
    """

    def __init__(self, model: ModelFacts, device: DeviceFacts) -> None:
        self.model, self.device = model, device
        flops = device.flops * device.compute_share
        bandwidth = device.memory_bandwidth * device.bandwidth_share
        self._token_s = 2 * model.layer_parameters / flops
        self._head_s = 2 * model.head_parameters / flops
        self._weights_s = (model.layer_parameters + model.head_parameters) * model.dtype_bytes / bandwidth
        self._pair_s = 4 * model.num_layers * model.num_heads * model.head_dim / flops
        self._kv_token_s = model.kv_token_bytes / bandwidth
        self._swap_token_s = model.kv_token_bytes / (device.host_bandwidth * device.bandwidth_share)
        self._overhead_s = device.step_overhead_s

    def step_s(self, work: StepWork) -> float:
        tokens = work.prefill_tokens + work.decode_rows
        arithmetic_s = tokens * self._token_s + work.num_sampled * self._head_s
        matrices_s = max(arithmetic_s, self._weights_s)
        attention_s = work.prefill_pairs * self._pair_s + work.kv_tokens * self._kv_token_s
        return self._overhead_s + matrices_s + attention_s + work.swapped_tokens * self._swap_token_s


class PaddedWork(NamedTuple):
    """The device's work for a step.

    Attributes:
        work: padding included.
        padded_tokens: the padding in it: of prompts, and of rows that have finished.
    """

    work: StepWork
    padded_tokens: int


class StaticPadding:
    """A batch is a rectangle: prompts are padded to the longest, and finished rows are computed until the batch ends.

    Prefill: n · max(length) tokens instead of their sum. Decode: as many rows as the batch began with, each reading as
    much KV as the longest. (Request-level scheduling in Orca, OSDI 2022.)
    """

    def __init__(self) -> None:
        self._num_rows = 0

    def pad(self, batch: ScheduleBatch, work: StepWork) -> PaddedWork:
        """The device's work for a step; called once per step, in order."""
        num_extends = batch.num_extends
        if num_extends:
            if not work.decode_rows:
                self._num_rows = 0  # no request runs: a new batch begins
            self._num_rows += num_extends
            ends = batch.end[:num_extends]
            starts = np.frombuffer(batch.plan.num_computed_tokens, dtype=np.int32)[:num_extends]
            longest = int((ends - starts).max())
            tokens = longest * num_extends
            pairs = num_extends * longest * (float(starts.max()) + (longest + 1) / 2)
        else:
            tokens, pairs = 0, 0.0
        num_rows, kv_tokens = work.decode_rows, work.kv_tokens
        if work.decode_rows:
            num_rows = max(self._num_rows - num_extends, work.decode_rows)
            kv_tokens = num_rows * int(batch.end[num_extends:].max())
        padded = StepWork(tokens, pairs, num_rows, kv_tokens, work.num_sampled, work.swapped_tokens)
        return PaddedWork(padded, tokens - work.prefill_tokens + num_rows - work.decode_rows)


HOP_S: Final = 0.0002
"""An assumption: a message between two machines, and its launch."""


class StageTimes:
    """See the module. With one stage a step takes its own time."""

    def __init__(self, num_stages: int, token_s: float) -> None:
        """All stages are free.

        Args:
            token_s: seconds to send the activations of a token to the next stage.
        """
        self._free_s = [0.0] * num_stages
        self._token_s = token_s

    def end_s(self, start_s: float, step_s: float, num_tokens: int) -> float:
        """Send a step through the stages from `start_s` on; returns when its results are there.

        Args:
            step_s: seconds of the step with all layers.
            num_tokens: that it computes.
        """
        free_s = self._free_s
        stage_s = step_s / len(free_s)
        at_s = start_s
        for idx, stage_free_s in enumerate(free_s):
            if idx:
                at_s += HOP_S + num_tokens * self._token_s
            free_s[idx] = at_s = max(at_s, stage_free_s) + stage_s
        return at_s
