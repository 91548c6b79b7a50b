"""Blocks that are kept mean what dequantizing them gives, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from engine.models.gguf.ggml_blocks import unpack_blocks
from engine.models.gguf.ggml_types import dequantize
from engine.models.spec.quantization import GGUF_FORMS
from tests.models.gguf.test_ggml_types import by_name, random_blocks

EXACT = [name for name, form in GGUF_FORMS.items() if form.is_exact]


@pytest.mark.parametrize("name", EXACT)
def test_numbers_times_scales_plus_minima_are_the_dequantized_weights(name: str) -> None:
    form, ggml_type = GGUF_FORMS[name], by_name(name)
    raw = random_blocks(name, 3000).reshape(750, -1)  # more than is unpacked at a time, for the large blocks

    numbers, scales, minima = unpack_blocks(raw, ggml_type)

    assert numbers.dtype == np.uint8 and numbers.shape == (750, 4 * ggml_type.block_len)
    assert 0 < numbers.max() < 2**form.bits
    assert (minima is not None) == form.has_minima
    values = (numbers if form.table is None else np.array(form.table)[numbers]).astype(np.float32)
    groups = values.reshape(750, -1, form.scale_len)
    if minima is None:
        means = (groups - form.zero) * scales[:, :, None]
    else:
        means = groups * scales[:, :, None] + minima[:, :, None]
    np.testing.assert_array_equal(means.reshape(750, -1), dequantize(raw, ggml_type))


@pytest.mark.parametrize("name", EXACT)
def test_rows_that_are_cut_out_or_reordered_are_those_of_the_whole(name: str) -> None:
    raw = random_blocks(name, 12).reshape(6, -1)
    whole = unpack_blocks(raw, by_name(name))

    some = unpack_blocks(raw[[4, 1]], by_name(name))

    np.testing.assert_array_equal(some.numbers, whole.numbers[[4, 1]])
    np.testing.assert_array_equal(some.scales, whole.scales[[4, 1]])


def test_memory_of_blocks_is_that_of_the_file_or_less() -> None:
    """Q5_0 takes more, having 8 bits here, and K-quants where a rank has a part of a superblock."""
    held = {name: form.num_bytes(1, 256) for name, form in GGUF_FORMS.items()}
    assert held["Q4_0"] == 8 * by_name("Q4_0").block_bytes
    assert held["Q4_1"] == 8 * by_name("Q4_1").block_bytes
    assert held["Q8_0"] == 8 * by_name("Q8_0").block_bytes
    assert held["Q5_0"] == held["Q8_0"]
    for name in ("Q4_K", "Q5_K", "Q6_K"):
        assert held[name] == by_name(name).block_bytes
    in_parts = {name: form.num_bytes(1, 128) for name, form in GGUF_FORMS.items()}
    assert in_parts["Q4_K"] == 80 and in_parts["Q6_K"] == in_parts["Q8_0"] == 136
