"""Dequantization is compared with the reference implementation of the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from engine.models.gguf.ggml_types import GGML_TYPES, dequantize
from engine.runtime.errors import ConfigError

CONVERTIBLE = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "NVFP4",
    "TQ1_0",
    "TQ2_0",
    "IQ3_S",
    "IQ3_XXS",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
    "IQ1_M",
    "IQ1_S",
]

# Byte offsets of the float16 fields of a block: random bytes there could be NaN or infinity.
HALF_FIELDS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
    "NVFP4": [],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ3_S": [0],
    "IQ3_XXS": [0],
    "IQ2_S": [0],
    "IQ2_XS": [0],
    "IQ2_XXS": [0],
    "IQ1_M": [],
    "IQ1_S": [0],
}


def by_name(name: str):
    return next(t for t in GGML_TYPES.values() if t.name == name)


def random_blocks(name: str, num_blocks: int) -> np.ndarray:
    """Random, finite blocks: [num_blocks, block_bytes] uint8."""
    rng = np.random.default_rng(0)
    ggml_type = by_name(name)
    if name == "F32":
        return rng.standard_normal((num_blocks, 1), dtype=np.float32).view(np.uint8)
    if name == "F16":
        return rng.standard_normal((num_blocks, 1)).astype(np.float16).view(np.uint8)
    if name == "BF16":
        floats = rng.standard_normal((num_blocks, 1), dtype=np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(115, 135, num_blocks)  # the exponent
    if name == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 0x8F | 0x30  # the upper bits of the half that is in parts
    for offset in HALF_FIELDS[name]:
        blocks[:, offset : offset + 2] = (
            rng.standard_normal((num_blocks, 1)).astype(np.float16).view(np.uint8)
        )
    return blocks


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_dequantize_agrees_with_the_reference(name: str) -> None:
    blocks = random_blocks(name, 3000)

    ours = dequantize(blocks, by_name(name))

    reference = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert ours.dtype == np.float32
    assert ours.shape == reference.shape
    # The K formats multiply in another order than the reference: a few last bits may differ.
    np.testing.assert_allclose(ours, reference, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_rows_convert_alone_as_they_do_together(name: str) -> None:
    ggml_type = by_name(name)
    rows = random_blocks(name, 24).reshape(2, 3, 4 * ggml_type.block_bytes)

    together = dequantize(rows, ggml_type)

    assert together.shape == (2, 3, 4 * ggml_type.block_len)
    np.testing.assert_array_equal(dequantize(rows[1, 1:], ggml_type), together[1, 1:])
    # A column slice is not contiguous in memory.
    np.testing.assert_array_equal(
        dequantize(rows[..., : ggml_type.block_bytes], ggml_type), together[..., : ggml_type.block_len]
    )


def test_all_exponents_of_mxfp4() -> None:
    blocks = np.full((253, 17), 0x72, dtype=np.uint8)  # larger ones overflow
    blocks[:, 0] = np.arange(253)
    reference = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(dequantize(blocks, by_name("MXFP4")), reference)


def test_block_sizes_are_those_of_the_reference() -> None:
    for type_id, ggml_type in GGML_TYPES.items():
        if ggml_type.name == "Q8_1":
            continue  # the package still counts the float32 scales that ggml stored before 2023
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == tuple(ggml_type)


def test_a_type_without_conversion_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Q8_K cannot be read; supported are .*Q4_K"):
        dequantize(np.zeros((1, 292), dtype=np.uint8), by_name("Q8_K"))
