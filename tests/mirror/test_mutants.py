"""Faults planted in the product, each of which the mirror must notice: by name, by an error, or by other tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.model_runner.memory import io_buffers
from engine.model_runner.memory.device_timer import DeviceTimer
from engine.model_runner.memory.io_buffers import InputBuffers, OutputBuffers
from engine.model_runner.recording.graphs import decode_inputs
from engine.model_runner.recording.graphs.decode_inputs import HostBuffer
from engine.model_runner.request_states import TokenRelay
from engine.model_runner.sampling.sampler import Sampler
from engine.model_runner.sampling.triton_backend import TritonSamplerBackend
from engine.runtime.sampling_params import SamplingParams

from .mirror import mirror_device
from .runners import LLAMA, Ahead, load_driver, on_cpu
from .test_llama import mixed_steps

Patch = pytest.MonkeyPatch
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_new_tokens=64)


def buffer_reused(patch: Patch) -> None:
    """One page-locked buffer holds the arrays of all steps, while copies from it are queued."""
    memory: list[torch.Tensor] = []

    def put_all(self: Any, arrays: Any) -> Any:
        starts, num_bytes = io_buffers.layout(arrays)
        if not memory:
            memory.append(torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True))
        staging = memory[0][:num_bytes]
        io_buffers.fill(staging.numpy(), arrays, starts)
        return io_buffers.views(staging.to(self.device, non_blocking=True), arrays, starts)

    patch.setattr(InputBuffers, "put_all", put_all)


def one_staging_buffer(patch: Patch) -> None:
    """The inputs of recorded steps have one buffer: each launch waits for the step before."""
    patch.setattr(decode_inputs, "cycle", lambda buffers: itertools.cycle(buffers[:1]))


def no_wait_for_a_staging_buffer(patch: Patch) -> None:
    patch.setattr(HostBuffer, "wait_until_read", lambda self: None)


def no_wait_for_the_result(patch: Patch) -> None:
    patch.setattr(DeviceTimer, "wait_for_seconds", lambda self: 0.0)


def unpinned_up(patch: Patch) -> None:
    def put_all(self: Any, arrays: Any) -> Any:
        return [torch.from_numpy(array).to(self.device, non_blocking=True) for array in arrays]

    patch.setattr(InputBuffers, "put_all", put_all)


def unpinned_down(patch: Patch) -> None:
    def fetch(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor, non_blocking=True)

    patch.setattr(OutputBuffers, "fetch", fetch)


def other_stream(patch: Patch) -> None:
    """Inputs are copied on a stream of their own, and the step does not wait for it."""
    original, streams = InputBuffers.put_all, []

    def put_all(self: Any, arrays: Any) -> Any:
        streams.append(torch.cuda.Stream())
        with torch.cuda.stream(streams[-1]):
            return original(self, arrays)

    patch.setattr(InputBuffers, "put_all", put_all)


def item(patch: Patch) -> None:
    original = Sampler.sample

    def sample(self: Any, *args: Any) -> Any:
        sampled = original(self, *args)
        int(sampled.token_ids[0])
        return sampled

    patch.setattr(Sampler, "sample", sample)


def host_pointer(patch: Patch) -> None:
    """A plan stays on the host."""
    patch.setattr(InputBuffers, "put_all", lambda self, arrays: [torch.from_numpy(each) for each in arrays])


def wait_in_a_capture(patch: Patch) -> None:
    original = TokenRelay.input_ids

    def input_ids(self: Any, known_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert known_ids.max().item() is not None
        return original(self, known_ids, rows)

    patch.setattr(TokenRelay, "input_ids", input_ids)


def upload_in_a_capture(patch: Patch) -> None:
    """The recording holds an address of the host, which is freed."""
    original = TokenRelay.input_ids

    def input_ids(self: Any, known_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(known_ids.shape, dtype=known_ids.dtype, pin_memory=True)
        return original(self, known_ids + zeros.to(known_ids.device, non_blocking=True), rows)

    patch.setattr(TokenRelay, "input_ids", input_ids)


def late_variant(patch: Patch) -> None:
    """The sampler's kernels are not compiled at start."""
    patch.setattr(TritonSamplerBackend, "warm_up", lambda self, *args: None)


def wrong_dtype(patch: Patch) -> None:
    """Indices are uploaded as float64, of as many bytes."""
    original = InputBuffers.put_all

    def put_all(self: Any, arrays: Any) -> Any:
        return original(self, [a.astype(np.float64) if a.dtype == np.int64 else a for a in arrays])

    patch.setattr(InputBuffers, "put_all", put_all)


class Mutant(NamedTuple):
    """A planted fault.

    Attributes:
        noticed: the kind of the fault that names it; "": only tokens or an error of the device do.
        record, triton: what the fault needs.
        num_ahead: see `Ahead`.
        while_loading: whether it is planted before the model is loaded.
        sampling: of the requests.
    """

    plant: Callable[[Patch], None]
    noticed: str
    record: bool = False
    triton: bool = False
    num_ahead: int = 2
    while_loading: bool = False
    sampling: SamplingParams | None = None


MUTANTS = [
    Mutant(buffer_reused, ""),
    Mutant(one_staging_buffer, "stall", record=True, num_ahead=1, while_loading=True),
    Mutant(no_wait_for_a_staging_buffer, "", record=True),
    Mutant(no_wait_for_the_result, ""),
    Mutant(unpinned_up, "pageable copy"),
    Mutant(unpinned_down, "pageable copy"),
    Mutant(other_stream, ""),
    Mutant(item, "wait"),
    Mutant(host_pointer, "host tensor"),
    Mutant(wait_in_a_capture, "wait in a capture", record=True, while_loading=True),
    Mutant(upload_in_a_capture, "upload in a capture", record=True, while_loading=True),
    Mutant(late_variant, "compiled while serving", triton=True, while_loading=True, sampling=DRAWN),
    Mutant(wrong_dtype, ""),
]


MEASURED: dict[bool, Any] = {}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with on_cpu():
        return mixed_steps(load_driver(LLAMA, None))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.plant.__name__)
def test_a_planted_fault_is_noticed(mutant: Mutant, expected, monkeypatch):
    tokens: object = None
    with mirror_device(triton=mutant.triton) as mirror:
        if mutant.while_loading:
            mutant.plant(monkeypatch)
        error = ""
        try:
            # A fault that comes after the start has the start of the ones before it.
            measured = None if mutant.while_loading else MEASURED
            driver = load_driver(LLAMA, mirror, record=mutant.record, measured=measured)
            if not mutant.while_loading:
                mirror.check()
                mutant.plant(monkeypatch)
            mirror.launches.computes = not mutant.triton  # what a launch says is enough
            options = {} if mutant.sampling is None else {"sampling": mutant.sampling}
            tokens = mixed_steps(driver, Ahead(driver, mutant.num_ahead, mirror), **options)
        except (RuntimeError, IndexError, TypeError, AssertionError) as caught:
            error = str(caught)
        mirror.streams.drop_all()
        kinds = {fault.kind for fault in mirror.faults.take()}
    if mutant.noticed:
        assert mutant.noticed in kinds, (kinds, error)
    else:
        assert error or tokens != expected
