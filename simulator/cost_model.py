"""The duration of a step: `CostModel`s turn a `StepWork` into seconds."""

from __future__ import annotations

from typing import Protocol

from ..scheduler.batch import StepWork
from .device_facts import DeviceFacts
from .model_facts import ModelFacts


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
