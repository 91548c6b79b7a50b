"""Where bfloat16 weights are compressed: the decision for each level of instructions, and its log line."""

from __future__ import annotations

import ctypes
import logging

import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels import native, native_linear, plain
from engine.model_runner.kernels.cpu.compiler import ISAS, Isa, NoLibraryError
from engine.model_runner.kernels.cpu.library import load_library
from engine.model_runner.kernels.native_linear import (
    CompressedLinear,
    NativeLinear,
    PackReport,
    pack_native_linear,
    reasons_against_compression,
)

NO_PRODUCTS = "no kernel multiplies with 12-bit weights on "
SLOWER = "take longer with 12-bit weights"
DECISIONS: dict[Isa, str] = {
    "amx": NO_PRODUCTS,
    "avx512_bf16": "",
    "avx512_vnni": SLOWER,
    "avx512": SLOWER,
    "avx2_vnni": NO_PRODUCTS,
    "avx2": NO_PRODUCTS,
    "neon_bf16": NO_PRODUCTS,
    "neon_i8mm": NO_PRODUCTS,
    "neon_dot": NO_PRODUCTS,
    "neon": NO_PRODUCTS,
    "portable": NO_PRODUCTS,
}


@pytest.fixture
def best() -> ctypes.CDLL:
    try:
        return load_library()
    except NoLibraryError as error:
        pytest.skip(str(error))


def weight(outputs: int, inputs: int = 256) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def test_there_is_a_decision_for_each_level():
    assert tuple(DECISIONS) == ISAS


@pytest.mark.parametrize(("isa", "expected"), DECISIONS.items())
def test_weights_are_compressed_with_bfloat16_instructions_of_avx512_only(isa, expected):
    reasons = reasons_against_compression(isa)
    assert len(reasons) == bool(expected)
    assert all(expected in reason and isa in reason for reason in reasons)


@pytest.mark.parametrize("isa", ISAS)
def test_the_operations_follow_the_decision(best, monkeypatch, isa):
    can_compress = NativeLinear(best, weight(256)).compressed() is not None
    monkeypatch.setattr(native, "loaded_isa", lambda: isa)
    packed = native.native_ops().pack_linear(weight(256))
    assert isinstance(packed, CompressedLinear if isa == "avx512_bf16" and can_compress else NativeLinear)


@pytest.mark.parametrize(("isa", "expected"), DECISIONS.items())
def test_the_log_says_once_why_weights_are_not_compressed(best, monkeypatch, caplog, isa, expected):
    monkeypatch.setattr(native_linear, "loaded_isa", lambda: isa)
    report = PackReport(lambda numbers: pack_native_linear(best, numbers, compress=False))
    with caplog.at_level(logging.INFO):
        report(weight(256))
        report(weight(128))
        report.log()
    assert len(caplog.messages) == bool(expected)
    assert all(line.startswith("weights_compressed=none: ") and expected in line for line in caplog.messages)


def test_without_native_weights_the_log_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(native_linear, "loaded_isa", lambda: "avx512")
    report = PackReport(plain.pack_linear)
    with caplog.at_level(logging.INFO):
        report(weight(256).float())
        report.log()
    assert not caplog.messages
