"""Quantized checkpoints: packed here from the formats' definitions, and compared with the weights they stand for."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model_runner.distributed.join_group import Place
from engine.model_runner.kernels import plain
from engine.model_runner.kernels.probe import Finding, KernelProbe
from engine.model_runner.kernels.quantized import QuantizedLinears, QuantTarget, reasons_against_blocks
from engine.model_runner.kernels.quantized_weights import Fp8Weight, IntWeight
from engine.model_runner.load import load_model_runner
from engine.model_runner.weights.dummy import DummyStore
from engine.model_runner.weights.format_selection import quant_target
from engine.model_runner.weights.fp8_format import Fp8Parts, MadeFp8Parts
from engine.model_runner.weights.int_format import AwqParts, CompressedIntParts, GptqParts
from engine.model_runner.weights.linear_format import QuantizedFormat
from engine.model_runner.weights.reader import ModuleWeight, Slice, WeightReader
from engine.model_runner.weights.safetensors import SafetensorsStore
from engine.models.fields import Fields
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.hf_quantization import read_quantization
from engine.models.source import ModelSource
from engine.models.spec.model_spec import with_quantization
from engine.models.spec.quantization import QuantizationSpec
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import Driver, engine_config
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Tensors = dict[str, Tensor]


# ---------------------------------------------------------------- checkpoints, from the formats' definitions


def pack_words(numbers: Tensor, axis: int, order: list[int], bits: int = 4) -> Tensor:
    """Neighbors along an axis to a word; its i-th `bits` hold neighbor order[i]."""
    groups = numbers.to(torch.int64).movedim(axis, -1).unflatten(-1, (-1, 32 // bits))
    words = sum(groups[..., order[i]] << (bits * i) for i in range(32 // bits))
    assert isinstance(words, Tensor)
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32)).movedim(-1, axis).contiguous()


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
PLAIN_ORDER = list(range(8))


def quantize_ints(weight: Tensor, group: Tensor, bits: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[N, K] rounded, inputs of equal number in `group` [K] together: numbers [K, N], zeros, scales [G, N], meaning."""
    columns = weight.t()
    count, most = int(group.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.empty(2, count, weight.shape[0])
    for g in range(count):
        low, high = columns[group == g].amin(0).clamp(max=0), columns[group == g].amax(0).clamp(min=0)
        scales[g] = ((high - low) / most).to(torch.float16)
        zeros[g] = (-low / scales[g]).round().clamp(0, most)
    numbers = (columns / scales[group] + zeros[group]).round().clamp(0, most)
    return numbers, zeros, scales, ((numbers - zeros[group]) * scales[group]).t()


def as_awq(weight: Tensor, group_size: int, **_: Any) -> tuple[Tensors, Tensor]:
    size = group_size if group_size > 0 else weight.shape[1]
    numbers, zeros, scales, meant = quantize_ints(weight, torch.arange(weight.shape[1]) // size)
    return {
        "qweight": pack_words(numbers, 1, AWQ_ORDER),
        "qzeros": pack_words(zeros, 1, AWQ_ORDER),
        "scales": scales.to(torch.float16),
    }, meant


def as_gptq(
    weight: Tensor, group_size: int, *, offset: int = 1, desc_act: bool = False, bits: int = 4
) -> tuple[Tensors, Tensor]:
    columns = weight.shape[1]
    size = group_size if group_size > 0 else columns
    group = torch.arange(columns) // size
    if desc_act:
        group = group[torch.randperm(columns)]
    numbers, zeros, scales, meant = quantize_ints(weight, group, bits)
    return {
        "qweight": pack_words(numbers, 0, PLAIN_ORDER, bits),
        "qzeros": pack_words((zeros - offset) % (1 << bits), 1, PLAIN_ORDER, bits),
        "scales": scales.to(torch.float16),
        "g_idx": group.to(torch.int32),
        "bias": torch.zeros(weight.shape[0], dtype=torch.float16),  # as AutoGPTQ writes them
    }, meant


def as_fp8(weight: Tensor, strategy: str, suffix: str = "weight_scale") -> tuple[Tensors, Tensor]:
    rows, columns = weight.shape
    if strategy == "tensor":
        scale = weight.abs().amax().reshape(1) / 448
        whole = scale.expand(rows, columns)
    elif strategy == "channel":
        scale = weight.abs().amax(1, keepdim=True) / 448
        whole = scale.expand(rows, columns)
    else:  # blocks of 48 x 32, the last rows of which are fewer
        blocks = -(-rows // 48), columns // 32
        scale = torch.stack(
            [
                torch.stack([part.abs().amax() / 448 for part in line.split(32, dim=1)])
                for line in weight.split(48)
            ]
        )
        assert scale.shape == blocks
        whole = scale.repeat_interleave(48, 0)[:rows].repeat_interleave(32, 1)
    numbers = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, suffix: scale, "input_scale": torch.tensor(0.5)}
    return tensors, numbers.to(torch.float32) * whole


def as_ints(
    weight: Tensor,
    bits: int,
    group_size: int = 0,
    *,
    symmetric: bool = True,
    packed: bool = True,
    per_tensor: bool = False,
    by_weight: bool = False,
) -> tuple[Tensors, Tensor]:
    """The integers of compressed-tensors: signed, packed with half the range added; groups of neighbors or not."""
    rows, columns = weight.shape
    half = 1 << (bits - 1)
    group = torch.arange(columns) // (group_size or columns)
    if by_weight:
        group = group[torch.randperm(columns)]
    scales, zeros = torch.empty(2, rows, int(group.max()) + 1)
    for g in range(scales.shape[1]):
        part = weight if per_tensor else weight[:, group == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if per_tensor:
            low, high = low.min(), high.max()
        if symmetric:
            scales[:, g] = torch.maximum(-low, high) / (half - 0.5)
            zeros[:, g] = 0
        else:
            scales[:, g] = (high - low) / (2 * half - 1)
            zeros[:, g] = (-half - low / scales[:, g]).round()
    scales = scales.to(torch.bfloat16).to(torch.float32)
    signed = (weight / scales[:, group] + zeros[:, group]).round().clamp(-half, half - 1)
    stored: Tensors = {"weight_scale": scales.to(torch.bfloat16), "input_scale": torch.tensor(0.5)}
    if per_tensor:
        stored["weight_scale"] = stored["weight_scale"][:1, 0]
    if by_weight:
        stored["weight_g_idx"] = group.to(torch.int32)
    if packed:
        stored["weight_packed"] = pack_words(signed + half, 1, PLAIN_ORDER[: 32 // bits], bits)
        stored["weight_shape"] = torch.tensor(weight.shape)
    else:
        stored["weight"] = signed.to(torch.int8)
    if not symmetric:
        packed_zeros = pack_words(zeros + half, 0, PLAIN_ORDER[: 32 // bits], bits)
        stored["weight_zero_point"] = packed_zeros if packed else zeros.to(torch.int8)
    return stored, (signed - zeros[:, group]) * scales[:, group]


def ints_config(
    bits: int,
    group_size: int = 0,
    *,
    symmetric: bool = True,
    packed: bool = True,
    per_tensor: bool = False,
    by_weight: bool = False,
) -> dict[str, Any]:
    strategy = "group" if group_size else "tensor" if per_tensor else "channel"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    weights |= {"group_size": group_size or None, "actorder": "group" if by_weight else None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


INT_FORMS: dict[str, dict[str, Any]] = {
    "4 bits in groups": {"bits": 4, "group_size": 32},
    "4 bits with zeros": {"bits": 4, "group_size": 64, "symmetric": False},
    "4 bits per channel": {"bits": 4},
    "4 bits by weight": {"bits": 4, "group_size": 32, "by_weight": True},
    "8 bits in groups": {"bits": 8, "group_size": 32},
    "8 bits with zeros": {"bits": 8, "symmetric": False},
    "bytes per channel": {"bits": 8, "packed": False},
    "bytes with zeros": {"bits": 8, "group_size": 32, "packed": False, "symmetric": False},
    "bytes per tensor": {"bits": 8, "packed": False, "per_tensor": True},
    "bytes of 4 bits": {"bits": 4, "group_size": 32, "packed": False},
}
"""Arguments of `as_ints` and `ints_config`."""
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Tensors, Tensor]]]] = {
    "awq": (AWQ | {"group_size": 32}, lambda weight: as_awq(weight, 32)),
    "awq in one group": (AWQ | {"group_size": -1}, lambda weight: as_awq(weight, -1)),
    "gptq": (GPTQ | {"group_size": 32, "desc_act": False}, lambda weight: as_gptq(weight, 32)),
    "gptq v2": (
        GPTQ | {"group_size": 64, "checkpoint_format": "gptq_v2"},
        lambda weight: as_gptq(weight, 64, offset=0),
    ),
    "8 bits gptq": (
        GPTQ | {"bits": 8, "group_size": 32, "dynamic": {r"-:.*\.v_proj": {}, "+:.*down": {"bits": 8}}},
        lambda weight: as_gptq(weight, 32, bits=8),
    ),
    "auto-round": (
        AUTO_ROUND | {"packing_format": "auto_round", "extra_config": {"v_proj": {"bits": 16}}},
        lambda weight: as_gptq(weight, 32, offset=0),
    ),
    "gptq by weight": (
        GPTQ | {"group_size": 32, "desc_act": True},
        lambda weight: as_gptq(weight, 32, desc_act=True),
    ),
    "fp8 per tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight: as_fp8(weight, "tensor"),
    ),
    "fp8 per channel": (COMPRESSED, lambda weight: as_fp8(weight, "channel")),
    "fp8 per block": (
        {"quant_method": "fp8", "weight_block_size": [48, 32]},
        lambda weight: as_fp8(weight, "block", "weight_scale_inv"),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["v_proj"]},
        lambda weight: as_fp8(weight, "channel"),
    ),
}
FORMS |= {name: (ints_config(**form), functools.partial(as_ints, **form)) for name, form in INT_FORMS.items()}


def quantize_checkpoint(
    tiny: Any, description: dict[str, Any], quantize: Callable[[Tensor], tuple[Tensors, Tensor]]
) -> None:
    """Rewrite the folder in a form, and give transformers' model the weights that it means."""
    path = tiny.folder / "model.safetensors"
    stored: Tensors = {}
    parameters = dict(tiny.reference.named_parameters())
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        left_out = ("modules_to_not_convert", "dynamic", "extra_config")
        plain_module = "v_proj" in module and any("v_proj" in str(description.get(key)) for key in left_out)
        if not module.endswith("_proj") or plain_module:
            stored[name] = tensor
            continue
        tensors, meant = quantize(tensor)
        stored |= {f"{module}.{suffix}": value for suffix, value in tensors.items()}
        if "weight" in tensors and module.endswith(
            ".k_proj"
        ):  # of a KV cache in 8 bits, which nobody asked for
            stored[f"{module.removesuffix('k_proj')}k_scale"] = torch.tensor(0.1)
        parameters[name].data = meant.contiguous()
    save_file(stored, path)
    config = json.loads((tiny.folder / "config.json").read_text())
    (tiny.folder / "config.json").write_text(json.dumps(config | {"quantization_config": description}))


def prompt_logprobs(driver: Any, unpack: Any) -> Any:
    req = driver.start(PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
    return unpack(driver.step([(req, len(PROMPT))]).prompt_logprobs[0])[0]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_model_is_the_one_with_the_weights_it_stands_for(
    make_tiny_llama, make_driver, unpack, form
):
    tiny = make_tiny_llama(**SIZES)
    original = tiny.logprobs(PROMPT)
    description, quantize = FORMS[form]
    quantize_checkpoint(tiny, description, quantize)

    driver = make_driver(read_hf_spec(tiny.folder), tiny.folder)

    meant = tiny.logprobs(PROMPT)
    rows = torch.arange(len(PROMPT) - 1)
    np.testing.assert_allclose(prompt_logprobs(driver, unpack), meant[rows, PROMPT[1:]], atol=1e-3)
    assert driver.generate([PROMPT], num=10)[0] == tiny.greedy(PROMPT, 10)
    # It was quantized, and means about the same: 8-bit floats keep 4 digits of a weight, whole numbers of 4 bits fewer.
    in_8_bits = "fp8" in description["quant_method"] or form.startswith(("8 bits", "bytes"))
    assert 1e-4 < (meant - original).abs().mean() < (0.3 if in_8_bits and "of 4" not in form else 1.5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "olmo2", "glm4", "granite"])
def test_families_with_other_modules_are_read_from_integers(make_tiny_model, make_driver, unpack, family):
    """Biases, fused projections, norms in other places: names and cuts of modules are those of the family."""
    tiny = make_tiny_model(family, **SIZES, head_dim=16, pad_token_id=0)
    original = tiny.logprobs(PROMPT)
    quantize_checkpoint(tiny, *FORMS["4 bits with zeros"])

    driver = make_driver(read_hf_spec(tiny.folder), tiny.folder)

    meant = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(prompt_logprobs(driver, unpack), meant, atol=1e-4)
    assert driver.generate([PROMPT], num=10)[0] == tiny.greedy(PROMPT, 10)
    assert (tiny.logprobs(PROMPT) - original).abs().mean() > 1e-4


@pytest.mark.fast_cases(2)
@pytest.mark.skipif(
    bool(reasons_against_blocks(quant_target(CPU, torch.bfloat16))), reason="no kernel for blocks here"
)
@pytest.mark.parametrize(
    "form",
    [
        *("awq", "4 bits by weight", "awq in one group", "gptq v2", "gptq by weight", "8 bits gptq"),
        *("auto-round", *INT_FORMS),
    ],
)
def test_integers_are_multiplied_as_blocks_where_that_is_faster(
    make_tiny_llama, make_driver, unpack, caplog, form
):
    tiny = make_tiny_llama(**SIZES)
    quantize_checkpoint(tiny, *FORMS[form])

    with caplog.at_level(logging.INFO):
        driver = make_driver(read_hf_spec(tiny.folder), tiny.folder, dtype="bfloat16")

    has_order = "by weight" in form
    assert ("op=linear_blocks provider=native" in caplog.text) != has_order
    assert ("for which there is no kernel here" in caplog.text) == has_order
    expected = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(prompt_logprobs(driver, unpack) - expected.numpy()).mean() < 0.1


@pytest.mark.parametrize("group_size", [32, 96])
def test_groups_of_whole_blocks_are_blocks(group_size):
    generator = torch.Generator().manual_seed(0)
    groups = (192 // group_size, 40)
    weight = IntWeight(
        torch.randint(0, 16, (192, 40), generator=generator, dtype=torch.uint8),
        torch.rand(groups, generator=generator).half(),
        torch.randint(0, 16, groups, generator=generator, dtype=torch.uint8),
        group_size,
    )

    blocks = weight.as_blocks()

    assert blocks is not None and (blocks.bits, blocks.shape) == (4, (40, 192))
    torch.testing.assert_close(blocks.dequantized(torch.float32), weight.dequantized(torch.float32))
    assert replace(weight, order=torch.arange(192)).as_blocks() is None
    assert replace(weight, group_size=48).as_blocks() is None
    weight.scales[1, 3] = torch.inf
    assert weight.as_blocks() is None


def test_block_scales_mean_what_transformers_takes_them_for(make_tiny_llama):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    tensors, meant = as_fp8(torch.randn(96, 64), "block", "weight_scale_inv")

    theirs = _dequantize_fp8_weight(tensors["weight"], tensors["weight_scale_inv"], [48, 32], torch.float32)

    torch.testing.assert_close(meant, theirs)


def test_fp8_made_of_plain_weights(make_tiny_llama, make_driver, unpack):
    tiny = make_tiny_llama(**SIZES)
    driver = make_driver(with_quantization(tiny.spec, "fp8"), tiny.folder)
    for name, parameter in tiny.reference.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = as_fp8(parameter.detach(), "channel")[1]

    rows = torch.arange(len(PROMPT) - 1)
    expected = tiny.logprobs(PROMPT)[rows, PROMPT[1:]]
    np.testing.assert_allclose(prompt_logprobs(driver, unpack), expected, atol=1e-3)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["awq", "fp8 per block", "4 bits in groups"])
def test_experts_and_their_router(make_tiny_model, make_driver, unpack, form, dtype):
    """Experts are dequantized while they are loaded, or become blocks; routers are plain in every checkpoint."""
    tiny = make_tiny_model(
        "qwen3_moe", **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    fused = {name: p for name, p in tiny.reference.named_parameters() if ".experts." in name}
    description, quantize = FORMS[form]
    stored: Tensors = {}
    parameters = dict(tiny.reference.named_parameters())
    for name, tensor in load_file(tiny.folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = tensor
            continue
        tensors, meant = quantize(tensor)
        stored |= {f"{module}.{suffix}": value for suffix, value in tensors.items()}
        if ".experts." not in name:
            parameters[name].data = meant.contiguous()
            continue
        block, _, rest = module.partition(".experts.")
        expert, _, projection = rest.partition(".")
        if projection == "down_proj":
            fused[f"{block}.experts.down_proj"].data[int(expert)] = meant
        else:
            start = 0 if projection == "gate_proj" else 32
            fused[f"{block}.experts.gate_up_proj"].data[int(expert), start : start + 32] = meant
    save_file(stored, tiny.folder / "model.safetensors")
    config = json.loads((tiny.folder / "config.json").read_text())
    (tiny.folder / "config.json").write_text(json.dumps(config | {"quantization_config": description}))

    driver = make_driver(read_hf_spec(tiny.folder), tiny.folder, dtype=dtype)

    rows = torch.arange(len(PROMPT) - 1)
    expected = tiny.logprobs(PROMPT)[rows, PROMPT[1:]]
    found = prompt_logprobs(driver, unpack)
    if dtype == "float32":
        np.testing.assert_allclose(found, expected, atol=1e-3)
    else:  # a token may go to another expert
        assert np.abs(found - expected.numpy()).mean() < 0.1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "form", ["awq", "gptq", "fp8 per channel", "fp8 per block", "4 bits with zeros", "bytes per tensor"]
)
def test_two_ranks_say_what_one_says(make_tiny_llama, make_driver, form):
    tiny = make_tiny_llama(**SIZES)
    quantize_checkpoint(tiny, *FORMS[form])
    spec = read_hf_spec(tiny.folder)

    def tokens(group: ThreadGroup) -> list[list[int]]:
        config = ModelConfig(dtype="float32", device="cpu", num_threads=1, model_impl="engine")
        source = ModelSource("hf", str(tiny.folder), "test")
        capacity = Capacity(64, 32, 4, 4, spec.vocab_size)
        runner = load_model_runner(engine_config(config), source, spec, capacity, Place(group, None))
        return Driver(runner, capacity).generate([PROMPT], num=8)

    assert on_ranks(2, tokens) == [[tiny.greedy(PROMPT, 8)]] * 2


# ---------------------------------------------------------------- one weight


def reader_of(folder: Path, tensors: Tensors) -> WeightReader:
    save_file({f"m.{suffix}": tensor for suffix, tensor in tensors.items()}, folder / "model.safetensors")
    return WeightReader(SafetensorsStore(folder), torch.float32, CPU)


def format_of(parts: Any) -> QuantizedFormat:
    return QuantizedFormat(parts, QuantizedLinears(quant_target(CPU, torch.float32), plain.pack_linear))


PARTS: dict[str, tuple[Any, Callable[[Tensor], tuple[Tensors, Tensor]], int]] = {
    # and how many neighboring inputs cannot be split
    "awq": (AwqParts(QuantizationSpec(method="awq", group_size=32)), lambda w: as_awq(w, 32), 32),
    "awq in one group": (AwqParts(QuantizationSpec(method="awq")), lambda w: as_awq(w, -1), 8),
    "gptq": (
        GptqParts(QuantizationSpec(method="gptq", group_size=64, zeros_less_one=True)),
        lambda w: as_gptq(w, 64),
        64,
    ),
    "4 bits with zeros": (
        CompressedIntParts(QuantizationSpec(method="compressed-tensors", bits=4, group_size=32)),
        lambda w: as_ints(w, 4, 32, symmetric=False),
        32,
    ),
    "8 bits in one group": (
        CompressedIntParts(QuantizationSpec(method="compressed-tensors", bits=8, symmetric=True)),
        lambda w: as_ints(w, 8),
        4,
    ),
    "fp8 per channel": (Fp8Parts(QuantizationSpec(method="fp8")), lambda w: as_fp8(w, "channel"), 1),
    "fp8 per block": (
        Fp8Parts(QuantizationSpec(method="fp8", block=(48, 32))),
        lambda w: as_fp8(w, "block"),
        32,
    ),
}


@pytest.mark.parametrize("form", PARTS)
def test_ranks_take_their_parts(tmp_path, form):
    parts, quantize, _ = PARTS[form]
    tensors, meant = quantize(torch.randn(96, 128))
    weights = reader_of(tmp_path, tensors)

    def taken(*slices: Slice) -> Tensor:
        return format_of(parts).dense([ModuleWeight(weights, "m", (96, 128), part) for part in slices])

    torch.testing.assert_close(taken(Slice(0, 8, 40), Slice(0, 64, 96)), torch.cat((meant[8:40], meant[64:])))
    torch.testing.assert_close(taken(Slice(1, 64, 128)), meant[:, 64:])
    weights.finish()


@pytest.mark.parametrize("form", [form for form, (_, _, step) in PARTS.items() if step > 4])
def test_a_cut_within_a_group_or_a_word_is_refused(tmp_path, form):
    parts, quantize, step = PARTS[form]
    weights = reader_of(tmp_path, quantize(torch.randn(96, 128))[0])

    with pytest.raises(ConfigError, match=rf"m: a rank takes inputs 4 to 63, but {step} neighbors share"):
        format_of(parts).load([ModuleWeight(weights, "m", (96, 128), Slice(1, 4, 64))])


@pytest.mark.parametrize("form", [form for form in INT_FORMS if "by weight" not in form])
def test_integers_mean_what_their_own_library_takes_them_for(tmp_path, form):
    """Written by the `compressed-tensors` package, with random scales and zeros."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    generator = torch.Generator().manual_seed(0)
    settings = INT_FORMS[form]
    description, half = ints_config(**settings), 1 << (settings["bits"] - 1)
    size = settings.get("group_size") or 128
    shape = (1,) if settings.get("per_tensor") else (96, 128 // size)
    plain = {
        "weight": torch.randn(96, 128, generator=generator),
        "weight_scale": torch.rand(shape, generator=generator) * 3 / half + 0.01,
        "weight_zero_point": torch.randint(-half, half, shape, generator=generator).to(torch.int8),
    }
    if settings.get("symmetric", True):
        plain["weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)
    group = quantization.QuantizationScheme(**description["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.get_value_from_registry(description["format"])
    theirs = compressor.compress(plain, group)
    quantized = read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": description}))
    assert quantized is not None
    weights = reader_of(tmp_path, theirs)

    ours = format_of(CompressedIntParts(quantized)).dense([ModuleWeight(weights, "m", (96, 128))])

    weights.finish()
    torch.testing.assert_close(ours, compressor.decompress(theirs, group)["weight"], rtol=1e-6, atol=1e-6)


def test_words_of_outputs_cannot_be_parted(tmp_path):
    parts, quantize, _ = PARTS["awq"]
    weights = reader_of(tmp_path, quantize(torch.randn(96, 128))[0])

    with pytest.raises(ConfigError, match=r"takes outputs 12 to 47, but 8 neighbors share a word.*--tp"):
        format_of(parts).load([ModuleWeight(weights, "m", (96, 128), Slice(0, 12, 48))])


def test_inputs_in_the_order_of_their_weight_cannot_be_shared_by_ranks(tmp_path):
    tensors, meant = as_gptq(torch.randn(16, 64), 32, desc_act=True)
    weights = reader_of(tmp_path, tensors)
    parts = format_of(
        GptqParts(QuantizationSpec(method="gptq", group_size=32, reordered=True, zeros_less_one=True))
    )

    torch.testing.assert_close(
        parts.dense([ModuleWeight(weights, "m", (16, 64), Slice(0, 8, 16))]), meant[8:]
    )
    with pytest.raises(ConfigError, match=r"desc_act.*cannot share the 64 inputs; use --tp 1"):
        parts.load([ModuleWeight(weights, "m", (16, 64), Slice(1, 0, 32))])


def test_groups_of_the_wrong_size(tmp_path):
    tensors, _ = as_gptq(torch.randn(16, 64), 32)
    tensors["g_idx"][0] = 1
    weights = reader_of(tmp_path, tensors)
    parts = format_of(GptqParts(QuantizationSpec(method="gptq", group_size=32, reordered=True)))

    with pytest.raises(ConfigError, match=r"m.g_idx: does not assign 32 inputs to each of 2 groups"):
        parts.load([ModuleWeight(weights, "m", (16, 64))])


def test_sizes_that_are_no_whole_groups(tmp_path):
    weights = reader_of(tmp_path, as_awq(torch.randn(16, 64), 32)[0])

    with pytest.raises(ConfigError, match=r"m: a weight of 16 outputs and 64 inputs cannot be stored as awq"):
        format_of(AwqParts(QuantizationSpec(method="awq", group_size=128))).load(
            [ModuleWeight(weights, "m", (16, 64))]
        )


def test_a_bias_that_nobody_adds_is_not_forgotten(tmp_path):
    tensors, _ = as_gptq(torch.randn(16, 64), 32)
    tensors["bias"][3] = 1.0
    weights = reader_of(tmp_path, tensors)
    parts = format_of(GptqParts(QuantizationSpec(method="gptq", group_size=32)))
    parts.load([ModuleWeight(weights, "m", (16, 64))])

    with pytest.raises(ConfigError, match=r"unexpected tensor 'm.bias'"):
        weights.finish()


def test_numbers_without_their_scales_are_refused(tmp_path):
    """A checkpoint in 8 bits whose config.json does not say so."""
    weights = reader_of(tmp_path, as_fp8(torch.randn(16, 64), "channel")[0])

    with pytest.raises(
        ConfigError, match=r"'m.weight' is stored as float8_e4m3fn, but by config.json it is float32"
    ):
        weights.stacked(["m.weight"], [(16, 64)])


def test_a_weight_knows_whether_activations_are_quantized(tmp_path):
    for weights_only in (False, True):
        spec = QuantizationSpec(method="fp8", weights_only=weights_only)
        weights = reader_of(tmp_path, as_fp8(torch.randn(16, 64), "channel")[0])
        part = Fp8Parts(spec).read(ModuleWeight(weights, "m", (16, 64)))
        assert isinstance(part, Fp8Weight) and part.weights_only == weights_only


def test_routers_stay_plain_when_fp8_is_made():
    weights = WeightReader(DummyStore(0), torch.float32, CPU)
    made = MadeFp8Parts(QuantizationSpec(method="fp8", stored=False))

    assert isinstance(made.read(ModuleWeight(weights, "model.layers.0.mlp.gate", (8, 16))), Tensor)
    assert not isinstance(made.read(ModuleWeight(weights, "model.layers.0.mlp.gate_proj", (8, 16))), Tensor)


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8 per channel", "fp8 per block"])
def test_dummy_weights_of_any_form_differ(form):
    weights = WeightReader(DummyStore(0), torch.float32, CPU)

    dense = format_of(PARTS[form][0]).dense([ModuleWeight(weights, name, (96, 128)) for name in "ab"])

    assert dense.isfinite().all()
    assert len(dense.unique()) > 100 and not torch.equal(dense[:96], dense[96:])


def test_what_dequantizing_costs_is_said(make_tiny_llama, make_driver, caplog):
    tiny = make_tiny_llama(**SIZES)
    description, quantize = FORMS["awq"]
    quantize_checkpoint(tiny, description, quantize)

    with caplog.at_level(logging.INFO):
        make_driver(read_hf_spec(tiny.folder), tiny.folder)

    text = caplog.text
    assert (
        "weights are awq, for which there is no kernel here: they are kept as float32, weights_mib=" in text
    )
    assert text.count("op=linear_int4 provider=dequantized while loading (") == 1


def test_a_target_on_a_gpu_is_what_the_probe_found(monkeypatch):
    found = KernelProbe(Finding(None, "not installed", "pip install it"), Finding("3.6.0"), (9, 0))
    monkeypatch.setattr("engine.model_runner.kernels.probe.probe_kernels", lambda: found)

    target = quant_target(torch.device("cuda"), torch.bfloat16)

    assert (target.capability, target.triton_reason, target.sgl_reason) == ((9, 0), "", "not installed")


def test_a_target_on_the_cpu_asks_no_gpu():
    assert quant_target(CPU, torch.float32) == QuantTarget(
        device=CPU,
        dtype=torch.float32,
        capability=(0, 0),
        triton_reason="runs on GPUs only, not on cpu",
        sgl_reason="runs on GPUs only, not on cpu",
    )
