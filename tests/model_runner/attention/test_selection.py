"""What was asked for is taken or refused with reasons; else the first backend without any, and the log says why."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch

from engine.model_runner.attention.selection import BACKENDS, select_backend
from engine.model_runner.attention.triton_paged import TritonAttention
from engine.model_runner.kernels.avoided import NOTHING_AVOIDED, AvoidedKernels
from engine.runtime.errors import ConfigError
from tests.model_runner.attention.paged_batches import spec_of

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class FastBackend:
    name = "fast"

    @staticmethod
    def reasons_to_ask(dtype: torch.dtype, kv_dtype: torch.dtype) -> list[str]:
        return ["less exact"] if kv_dtype == torch.float16 else []

    @staticmethod
    def reasons_against_pages(spec: Any, page_size: int) -> list[str]:
        return ["pages of 64"] if page_size == 64 else []

    @staticmethod
    def reasons_against(
        spec: Any, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        reasons = ["head_dim 40 is not a multiple of 64"] if spec == "odd model" else []
        if kv_dtype == FP8:
            reasons.append("one precision for all")
        return [*reasons, "needs a GPU"] if device.type == "cpu" else reasons


class SlowBackend(FastBackend):
    name = "slow"

    @staticmethod
    def reasons_to_ask(dtype: torch.dtype, kv_dtype: torch.dtype) -> list[str]:
        return []

    @staticmethod
    def reasons_against_pages(spec: Any, page_size: int) -> list[str]:
        return []

    @staticmethod
    def reasons_against(
        spec: Any, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        return []


def select(
    spec: str = "model",
    device: str = "meta",
    kv_dtype: torch.dtype = BF16,
    asked: tuple[str, str] | None = None,
    page_size: int = 16,
    avoid: AvoidedKernels = NOTHING_AVOIDED,
) -> str:
    backends = cast("Any", (FastBackend, SlowBackend))
    kind = torch.device(device)
    return select_backend(cast("Any", spec), kind, BF16, kv_dtype, asked, page_size, avoid, backends).name


def test_backends_passed_over_are_logged_with_all_reasons(caplog):
    with caplog.at_level(logging.DEBUG):
        assert select("odd model", "cpu") == "slow"
    assert "fast passed over: head_dim 40 is not a multiple of 64; needs a GPU" in caplog.text


def test_one_that_computes_something_else_waits_to_be_asked(caplog):
    with caplog.at_level(logging.DEBUG):
        assert select(kv_dtype=torch.float16) == "slow"
    assert "fast passed over: less exact" in caplog.text
    assert select(kv_dtype=torch.float16, asked=("fast", "fast")) == "fast"
    assert select(kv_dtype=torch.float16, asked=("fast", "slow")) == "fast,slow"


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "expected"),
    [((4, 4), BF16, "fast,slow"), ((8, 2), BF16, "fast"), ((4, 2), BF16, "fast"), ((4, 4), FP8, "slow")],
)
def test_decodes_go_where_they_were_measured_to_be_faster(monkeypatch, heads, kv_dtype, expected):
    """By head shape: a kernel for grouped heads may read the keys of single ones at half the rate."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    choices = {((9, 0), 1): "slow", ((9, 0), 4): "nowhere", ((8, 0), 2): "slow"}
    cuda = torch.device("cuda")

    more: Any = {"backends": (FastBackend, SlowBackend), "choices": choices}

    chosen = select_backend(spec_of(heads[0], heads[1], 64), cuda, BF16, kv_dtype, None, 16, **more)
    assert chosen.name == expected
    asked = select_backend(spec_of(4, 4, 64), cuda, BF16, BF16, ("fast", "fast"), 16, **more)
    assert asked.name == "fast"
    avoid = AvoidedKernels(["slow:attention"])
    best = select_backend(spec_of(4, 4, 64), cuda, BF16, BF16, None, 16, avoid, **more)
    assert best.name == "fast"


def test_a_size_of_pages_may_speak_against_it_and_a_warning_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert select("odd model", page_size=64) == "slow"
        assert not caplog.messages, "it would not run with other pages either"
        assert select(page_size=64) == "slow"
    assert caplog.messages == ["attention_backend=fast passed over: pages of 64"]
    with pytest.raises(ConfigError, match="cannot run here: fast: pages of 64; omit"):
        select(asked=("fast", "fast"), page_size=64)


def test_the_preferred_one_is_taken_when_nothing_speaks_against_it():
    assert select() == "fast"
    assert select(kv_dtype=FP8) == "slow"


def test_what_was_asked_for_is_taken_for_prompts_and_for_decodes():
    assert select(asked=("slow", "slow")) == "slow"
    assert select(asked=("slow", "fast")) == "slow,fast"


def test_what_cannot_run_is_refused_with_all_reasons_and_a_way_out():
    with pytest.raises(ConfigError) as caught:
        select("odd model", "cpu", asked=("fast", "slow"))
    assert str(caught.value) == (
        "attention_backend is 'fast,slow', but that cannot run here: fast: head_dim 40 is not a multiple of 64, needs "
        "a GPU; omit --attention-backend, or use slow"
    )


def test_the_last_one_runs_everywhere():
    spec = spec_of(9, 3, 40, window=7)
    for dtype, kv_dtype in [(BF16, FP8), (torch.float32, BF16), (torch.float16, torch.float16)]:
        assert BACKENDS[-1].reasons_against(spec, torch.device("cpu"), dtype, kv_dtype) == []


def test_reasons_against_triton():
    cpu = torch.device("cpu")
    assert TritonAttention.reasons_against(spec_of(128, 1, 576), cpu, torch.float64, torch.int8) == [
        "needs a CUDA device, not cpu",
        "head_dim is 576, at most 512 fits",
        "128 query heads share a KV head, at most 32 fit",
        "has no kernels for torch.float64",
        "reads no KV pool of torch.int8",
    ]
    encoder = spec_of(4, 4, 32, causal=False)
    assert TritonAttention.reasons_against(encoder, cpu, BF16, BF16)[1:] == [
        "attends to earlier tokens only, and the model is an encoder"
    ]
