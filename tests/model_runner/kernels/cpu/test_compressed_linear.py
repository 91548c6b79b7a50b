"""Weights of 12 bits a number: the same numbers, and the bits that 16 bits a number give."""

from __future__ import annotations

import ctypes
import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model_runner.kernels.native_linear import (
    CompressedLinear,
    NativeLinear,
    PackReport,
    pack_native_linear,
)

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def can_compress(library: ctypes.CDLL) -> None:
    if NativeLinear(library, weight(256, 256)).compressed() is None:
        pytest.skip("this level of instructions multiplies no such weights")


def weight(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers: Tensor = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return numbers.to(BF16)


def tokens(num_tokens: int, inputs: int, seed: int = 1) -> Tensor:
    return torch.randn(num_tokens, inputs, generator=torch.Generator().manual_seed(seed)).to(BF16)


def compressed(library: ctypes.CDLL, plain: NativeLinear) -> CompressedLinear:
    """Also where it saves nothing."""
    shape = plain._outputs, plain._inputs
    return CompressedLinear(
        library, plain._packed, *shape, library.compressed_linear_bytes(plain._address, *shape)
    )


def with_rare_exponents(numbers: Tensor, share: float, seed: int) -> Tensor:
    """Some of them get any bits at all: other exponents, infinities, NaN, zeros of both signs, denormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, numbers.shape, dtype=torch.int16, generator=generator)
    chosen = torch.rand(numbers.shape, generator=generator) < share
    return torch.where(chosen, bits, numbers.view(torch.int16)).view(BF16)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    as_bits = torch.int16 if one.dtype == BF16 else torch.int32
    assert one.dtype == other.dtype and torch.equal(one.view(as_bits), other.view(as_bits))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the library does not change
)
@given(
    inputs=st.integers(1, 500).map(lambda half: 2 * half),
    outputs=st.integers(1, 300),
    num_tokens=st.integers(0, 70),
    share=st.sampled_from((0.0, 0.0001, 0.01, 1.0)),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_weight_gives_the_bits_that_it_gives_uncompressed(
    library, inputs, outputs, num_tokens, share, has_bias, seed
):
    numbers = with_rare_exponents(weight(outputs, inputs, seed), share, seed)
    plain = NativeLinear(library, numbers)
    small = compressed(library, plain)
    assert_same_bits(small.rows(torch.arange(outputs)), numbers)
    if share == 1.0:  # sums of NaN and infinities of both signs are NaN, but which NaN is nobody's promise
        return
    x, bias = tokens(num_tokens, inputs), weight(1, outputs)[0] if has_bias else None
    ours, theirs = small.to_float32(x, bias), plain.to_float32(x, bias)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert_same_bits(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 832), (2016, 70), (160, 2000)])
@pytest.mark.parametrize("is_gated", [False, True])
def test_bits_are_the_same_for_any_number_of_tokens(library, outputs, inputs, is_gated):
    """One strip of rows, a few that unpack for themselves, and those that take what the first one has left."""
    numbers = with_rare_exponents(weight(outputs, inputs), 1e-4, 3).nan_to_num(0.5, 0.5, 0.5)
    plain = NativeLinear(library, numbers)
    small = compressed(library, plain)
    if is_gated:
        assert plain.fuse_silu_and_mul() and small.fuse_silu_and_mul()
    for num_tokens in (1, 2, 3, 4, 5, 6, 7, 12, 13, 18, 19, 24, 25, 60, 61, 127, 130, 300):
        x = tokens(num_tokens, inputs)
        assert_same_bits(small(x), plain(x))
    assert_same_bits(small.rows(torch.arange(outputs).flip(0)), numbers.flip(0))


@pytest.mark.parametrize(("outputs", "is_gated"), [(1000, False), (992, True)])
def test_bits_do_not_depend_on_the_number_of_threads(library, outputs, is_gated):
    """Eight get pieces that begin within a panel: with so many inputs two vectors are worth waking a thread.

    Of 100 tokens three and five cut the last of 16 panels into a part for each.
    """
    numbers = with_rare_exponents(weight(outputs, 1100), 1e-4, 3).nan_to_num(0.5, 0.5, 0.5)
    plain = NativeLinear(library, numbers)
    small = compressed(library, plain)
    if is_gated:
        assert plain.fuse_silu_and_mul() and small.fuse_silu_and_mul()
    before = torch.get_num_threads()
    try:
        for num_tokens in (1, 5, 7, 50, 100, 200):
            x = tokens(num_tokens, 1100)
            outs = []  # kept: what a call leaves out would be there already in memory of the one before
            for num_threads in (1, 2, 3, 5, 8):
                torch.set_num_threads(num_threads)
                outs += [plain(x), small(x)]
            for out in outs[1:]:
                assert_same_bits(out, outs[0])
    finally:
        torch.set_num_threads(before)


def test_a_result_is_written_and_nothing_beside_it(library):
    small, x = compressed(library, NativeLinear(library, weight(41, 70))), tokens(35, 70)
    for dtype in (BF16, torch.float32):
        memory = torch.full((64 + 35 * 41 + 64,), 7.0, dtype=dtype)
        out = memory[64:-64].view(35, 41)
        small._multiply(x, None, out)
        assert (memory[:64] == 7).all() and (memory[-64:] == 7).all()
        assert torch.equal(out, small(x) if dtype == BF16 else small.to_float32(x))


def test_compressing_stays_within_the_bytes_it_asked_for(library):
    for outputs, inputs, share in ((41, 70, 0.0), (64, 64, 1.0), (130, 258, 0.01)):
        plain = NativeLinear(library, with_rare_exponents(weight(outputs, inputs), share, 5))
        num_bytes = library.compressed_linear_bytes(plain._address, outputs, inputs)
        memory = torch.full((num_bytes + 128,), 77, dtype=torch.uint8)
        library.compress_linear(plain._address, outputs, inputs, memory.data_ptr() + 64)
        assert (memory[:64] == 77).all() and (memory[-64:] == 77).all()
        back = torch.full((plain.num_bytes + 128,), 77, dtype=torch.uint8)
        library.decompress_linear(memory.data_ptr() + 64, outputs, inputs, back.data_ptr() + 64)
        assert (back[:64] == 77).all() and (back[-64:] == 77).all()
        assert torch.equal(back[64:-64], plain._packed)


def test_weights_of_a_model_take_three_quarters(library):
    packed = pack_native_linear(library, weight(960, 576), compress=True)
    assert isinstance(packed, CompressedLinear)
    assert 0.75 < packed.num_bytes / (2 * 960 * 576) < 0.77


def test_a_weight_that_would_not_become_smaller_stays_as_it_is(library):
    any_bits = with_rare_exponents(weight(256, 256), 1.0, 0)
    few_outputs = weight(16, 256)  # filled up to 64
    for numbers in (any_bits, few_outputs):
        packed = pack_native_linear(library, numbers, compress=True)
        assert isinstance(packed, NativeLinear)
        assert_same_bits(packed.rows(torch.arange(len(numbers))), numbers)


def test_the_log_says_how_many_weights_were_compressed_and_what_that_saves(library, caplog):
    report = PackReport(lambda numbers: pack_native_linear(library, numbers, compress=True))
    with caplog.at_level(logging.INFO):
        report.log()
        assert not caplog.messages
        for outputs in (16, 960, 2048):
            report(weight(outputs, 2048))
        report.log()
    plain_mib = (960 + 2048) * 2048 * 2 >> 20
    assert caplog.messages == [f"weights_compressed=2 compressed_mib=8 instead of {plain_mib}, without loss"]
