"""Folders in which the experts of a layer are one tensor: gpt-oss in MXFP4, and stacks that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner.kernels.blocks.native_blocks import NativeBlockLinear
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import weight_bytes
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.structures.families import FAMILIES
from tests.model_runner.structures.text_checks import tokens_of

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture
def in_mxfp4(make_tiny_model: Any) -> Any:
    """gpt-oss with random codes of 4 bits as experts, in the folder and in the model of transformers."""
    tiny = make_tiny_model("gpt_oss", **{**FAMILIES["gpt_oss"].options, **SIZES})
    file = tiny.folder / "model.safetensors"
    tensors, random = load_file(file), torch.Generator().manual_seed(3)
    parameters = dict(tiny.reference.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8
        )
        scales = torch.randint(
            122, 126, (experts, outputs, inputs // 32), generator=random, dtype=torch.uint8
        )
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
        values = FLOATS[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        values = (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
        parameters[name].data.copy_(values.transpose(1, 2))
    save_file(tensors, file, {"format": "pt"})
    change(tiny.folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return tiny


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_codes_of_the_folder_are_those_of_transformers(in_mxfp4, make_driver, unpack):
    spec = read_hf_spec(in_mxfp4.folder)
    check_folder_weights(in_mxfp4.folder, spec)
    driver = make_driver(spec, in_mxfp4.folder, quantization="none")
    prompt = tokens_of(60)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 60)]).prompt_logprobs[0])
    expected = in_mxfp4.logprobs(prompt)[torch.arange(59), prompt[1:]]
    np.testing.assert_allclose(ours, expected, atol=3e-4)


def test_they_stay_4_bits(in_mxfp4, make_driver, unpack):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    spec = read_hf_spec(in_mxfp4.folder)
    driver = make_driver(spec, in_mxfp4.folder, dtype="bfloat16")
    layers = [layer.mlp.experts for layer in driver.runner.model.layers]
    weights = [one for layer in layers for part in (layer._gate_up, layer._down) for one in part._weights]
    assert all(isinstance(one, NativeBlockLinear) for one in weights)
    numbers = 3 * 6 * 3 * 64 * 96
    kept = sum(one.num_bytes for one in weights)
    assert weight_bytes(spec, 2, dequantized=True) - weight_bytes(spec, 2) == 2 * numbers - kept
    prompt = tokens_of(60)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 60)]).prompt_logprobs[0])
    expected = in_mxfp4.logprobs(prompt)[torch.arange(59), prompt[1:]].numpy()
    assert np.abs(ours - expected).mean() < 0.2


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.0.mlp.experts.gate_up_proj_scales"), "is missing"),
        (
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.experts.down_proj_blocks": torch.zeros(6, 64, 2, 16, dtype=torch.uint8)}
            ),
            "is missing",
        ),
        (
            lambda tensors: tensors.pop("model.layers.2.mlp.experts.down_proj_bias"),
            "down_proj.bias' is missing",
        ),
    ],
)
def test_what_is_damaged_is_named(in_mxfp4, change_of, message):
    file = in_mxfp4.folder / "model.safetensors"
    tensors = load_file(file)
    change_of(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        check_folder_weights(in_mxfp4.folder, read_hf_spec(in_mxfp4.folder))
