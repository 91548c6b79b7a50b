"""Rows of a GGUF file packed in one pass: the same bytes as from unpacked numbers, for every type, order and part."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.model_runner.kernels.blocks import packed_blocks, tensor_rows
from engine.model_runner.kernels.blocks.packed_blocks import PackedBlocks, pack
from engine.model_runner.kernels.blocks.stored_rows import StoredRows, stack_rows
from engine.model_runner.kernels.blocks.tensor_rows import ScaleRange, TensorRows, scan
from engine.models.spec.quantization import GGUF_FORMS, WIDEST
from tests.models.gguf.test_ggml_types import HALF_FIELDS, by_name

from .conftest import UsedMemory

PACKED = {
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("Q6_K", "Q3_K", "Q2_K"),
}
"""The others are unpacked first."""


def random_rows(kind: str, num_rows: int, num_inputs: int, seed: int = 0) -> TensorRows:
    """Random bytes, with scales and minima of any finite half."""
    ggml_type = by_name(kind)
    random = np.random.default_rng(seed)
    num_blocks = num_rows * num_inputs // ggml_type.block_len
    blocks = random.integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8)
    for at in HALF_FIELDS[kind]:
        halves = random.integers(0, 1 << 16, num_blocks, dtype=np.uint16)
        halves[halves & 0x7C00 == 0x7C00] ^= 0x4000
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    if kind == "MXFP4":  # 12 times the largest is not finite
        blocks[:, 0] %= 250
    if kind == "IQ1_M":  # the scale's bits are in four places
        blocks[:, 55] &= 0x3F
    return TensorRows(blocks.reshape(num_rows, -1), ggml_type)


def packed(library: ctypes.CDLL, weight: StoredRows) -> PackedBlocks:
    """In blocks, also where the kernels would take superblocks (test_superblocks.py)."""
    if all(library.packs_rows(one.type_number) for one in weight.tensors):
        return packed_blocks._pack_stored(library, weight, UsedMemory())
    return pack(library, weight)


def check(library: ctypes.CDLL, weight: StoredRows) -> None:
    made, expected = packed(library, weight), pack(library, weight.unpacked())
    assert repr(made._replace(packed=torch.empty(0))) == repr(expected._replace(packed=torch.empty(0)))
    assert torch.equal(made.packed, expected.packed)


def permutation(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_packed_rows_are_the_same_to_the_bit(library, kind):
    rows = random_rows(kind, 70, 512)
    assert bool(library.packs_rows(rows.type_number)) is (kind in PACKED)

    check(library, StoredRows((rows,)))
    check(library, StoredRows((replace(rows, rows=permutation(70)),)).padded(100))
    check(library, StoredRows((replace(rows, rows=permutation(70)[3:44], blocks=permutation(16)),)))
    check(library, StoredRows((replace(rows, raw=rows.raw[5:6], blocks=torch.arange(3, 12)),)))


@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_stacked_rows_are_the_same_to_the_bit(library, kind):
    """Panels have outputs of two tensors; where forms differ both are widened."""
    parts = [StoredRows((random_rows(kind, size, 512, size),)) for size in (45, 3, 33)]
    check(library, stack_rows(parts))
    for other in ("Q4_K", "Q6_K", "IQ4_NL"):
        mixed = stack_rows([parts[0], StoredRows((random_rows(other, 35, 512),)), parts[2]])
        assert (mixed.form == WIDEST) is not GGUF_FORMS[kind].is_held_like(GGUF_FORMS[other]) or kind in (
            "Q5_1",
            "Q5_K",
        )
        check(library, mixed)


@pytest.mark.parametrize("kind", ["Q6_K", "Q3_K", "Q2_K", "Q4_0"])
def test_rows_that_are_rounded_together_share_a_factor(library, kind, monkeypatch):
    """Small values beside large ones have scales that are no normal halves. A large tensor is packed in pieces."""
    monkeypatch.setattr(tensor_rows, "_PIECE_BYTES", 1)
    rows = random_rows(kind, 4130, 256)
    for at in HALF_FIELDS[kind]:
        rows.raw[4096:, at + 1] &= 3
    weight = StoredRows((replace(rows, rows=permutation(4130)),))
    released: list[int] = []
    check(library, StoredRows((replace(rows, release=lambda: released.append(1)),)))
    assert len(released) == 4  # two pieces are scanned, then packed
    check(library, weight)
    check(library, StoredRows((replace(rows, blocks=torch.arange(2, 5)),)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q6_K"])
def test_equal_scales_in_pairs_are_found(library, kind):
    rows = random_rows(kind, 40, 512)
    block_len = rows.ggml_type.block_len
    blocks = rows.raw.reshape(40 * 512 // block_len, -1)
    if kind == "Q6_K":
        blocks[:, :192], blocks[:, 192:208] = 0, 1
    else:
        blocks[1::2, :2] = blocks[::2, :2]
    weight = StoredRows((rows,))
    assert packed(library, weight).scale_len == 64
    check(library, weight)
    check(library, StoredRows((replace(rows, blocks=torch.arange(1, 9)),)))
    check(library, StoredRows((replace(rows, blocks=torch.arange(15)),)))


@pytest.mark.parametrize("kind", sorted(PACKED))
def test_the_largest_scale_is_found_and_so_is_one_that_is_no_number(library, kind):
    rows = random_rows(kind, 70, 512)
    weight = rows.unpacked()
    minimum = 0.0 if weight.minima is None else float(weight.minima.abs().max())
    assert rows.scale_range == ScaleRange(float(weight.scales.abs().max()), minimum)
    scales, minima = scan(library, rows)
    assert torch.equal(scales, rows._scanned[0]) and torch.equal(minima, rows._scanned[1])
    for bad in (np.nan, np.inf, -np.inf):
        for at in HALF_FIELDS[kind]:
            damaged = rows.raw.copy()
            start = damaged.shape[1] - rows.ggml_type.block_bytes + at
            damaged[69, start : start + 2] = np.array([bad], dtype=np.float16).view(np.uint8)
            assert not StoredRows((replace(rows, raw=damaged),)).is_finite
            assert not scan(library, replace(rows, raw=damaged))[0].isfinite().all()


def test_no_rows_are_packed_to_nothing(best_library):
    check(best_library, StoredRows((replace(random_rows("Q4_K", 4, 256), rows=torch.arange(0)),)))
