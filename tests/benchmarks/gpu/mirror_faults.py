"""The same for `triage.py --device cuda`: its children load the model on a mirror of a GPU (`tests/mirror`)."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from benchmarks.gpu.first_difference import Comparer
from engine.launch.resolve import prepare
from engine.launch.resolve.host_facts import read_host_facts
from engine.launch.resolve.nvidia_gpus import GpuFacts
from engine.model_runner import load
from tests.benchmarks.gpu import planted_faults
from tests.mirror.mirror import Mirror, mirror_device


@contextmanager
def clean(told: Any) -> Iterator[Mirror]:
    """A mirror; while a model is loaded its kernels compute nothing, so nothing is compared."""
    original = load.load_model_runner
    compares = told.get("compare", False)

    def theirs(
        _self: Any, _op: str, _provider: str, both: Any, args: Any, *_more: Any, **_options: Any
    ) -> Any:
        return both[1](*args)

    gpu = GpuFacts("mirror", 1 << 30, 1 << 30, (9, 0))
    facts = dataclasses.replace(read_host_facts(), gpus=(gpu,), torch_version="2.11.0+cu130")

    with mirror_device(num_sms=4) as mirror:

        def load_on_mirror(*args: Any, **kwargs: Any) -> Any:
            with mirror.loading(), mock.patch.object(Comparer, "call", theirs):
                runner = original(*args, **kwargs)
            mirror.faults.serving = not compares  # each comparison waits
            return runner

        with (
            mock.patch.object(load, "load_model_runner", load_on_mirror),
            mock.patch.object(prepare, "read_host_facts", return_value=facts),
        ):
            yield mirror
            mirror.faults.serving = False


@contextmanager
def _both(told: Any, *faults: Callable[[Any], Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(clean(told))
        for fault in faults:
            stack.enter_context(fault(told))
        yield


def wrong(told: Any) -> Any:
    return _both(told, planted_faults.wrong)


def crash(told: Any) -> Any:
    return _both(told, planted_faults.crash)
