"""What a start says of GGUF formats without a kernel."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.model_runner.kernels.quantized import reasons_against_blocks
from engine.model_runner.weights.format_selection import make_linear_format, quant_target
from engine.models.spec.quantization import GGUF_FORMS, QuantizationSpec
from engine.models.weight_files.weight_memory import rounded_bytes

from .test_blocks import SPEC

CPU = torch.device("cpu")
DOWN, HEAD = "model.layers.0.mlp.down_proj", "model.embed_tokens"
TYPES = {"model.layers.0.self_attn.q_proj": "IQ4_XS", DOWN: "IQ2_S", HEAD: "Q6_K"}
SPEC_OF_TYPES = replace(SPEC, quantization=QuantizationSpec(method="gguf", types=TYPES))


def test_formats_with_scales_of_16_numbers_take_8_bits() -> None:
    types = {**TYPES, HEAD: "Q3_K"}
    spec = replace(SPEC, quantization=QuantizationSpec(method="gguf", types=types))
    assert rounded_bytes(spec) == {
        "Q3_K": (96 * 512 + 2 * 96 * 16, 96 * 2 * 110),
        "IQ2_S": (512 * 768 + 2 * 512 * 24, 512 * 3 * 82),
    }
    assert list(rounded_bytes(SPEC_OF_TYPES)) == ["IQ2_S"]  # Q6_K has a kernel
    untied = replace(spec, tie_word_embeddings=False)  # the embedding is no linear layer then
    assert list(rounded_bytes(untied)) == ["IQ2_S"]
    assert not rounded_bytes(SPEC)
    assert not rounded_bytes(replace(SPEC, quantization=QuantizationSpec(method="int8", stored=False)))


@pytest.mark.skipif(
    bool(reasons_against_blocks(quant_target(CPU, torch.bfloat16))), reason="no kernel for blocks here"
)
def test_one_line_names_the_formats_and_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    large = replace(SPEC_OF_TYPES, hidden_size=4096, intermediate_size=8192)
    ops = type("Ops", (), {"pack_linear": None})
    with caplog.at_level(logging.INFO):
        make_linear_format(None, large, ops, CPU, torch.bfloat16)  # type: ignore[arg-type]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "weights are kept as gguf (IQ4_XS x 1, IQ2_S x 1, Q6_K x 1), weights_mib=" in line
    assert line.endswith("; IQ2_S: no kernel, rounded to 8 bits, mib=34, in the file 10")


def test_without_kernels_all_formats_are_named(caplog: pytest.LogCaptureFixture) -> None:
    ops = type("Ops", (), {"pack_linear": None})
    with caplog.at_level(logging.WARNING):
        make_linear_format(None, SPEC_OF_TYPES, ops, CPU, torch.float32)  # type: ignore[arg-type]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("weights are gguf (IQ4_XS x 1, IQ2_S x 1, Q6_K x 1), and the product ")
    assert "they are kept as float32, weights_mib=" in line


def test_the_page_on_models_has_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    _, _, section = page.partition("\n## GGUF formats\n")
    words = set(re.findall(r"\w+", section.partition("\n## ")[0]))
    assert words.issuperset(GGUF_FORMS)
