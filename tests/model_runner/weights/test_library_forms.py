"""bitsandbytes and torchao: written from the definitions of their forms, and compared with the packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels import plain
from engine.model_runner.kernels.blocks.native_blocks import NativeBlockLinear
from engine.model_runner.kernels.quantized import QuantizedLinears, reasons_against_blocks
from engine.model_runner.kernels.quantized_weights import BlockWeight
from engine.model_runner.weights.bitsandbytes_format import BitsAndBytesParts
from engine.model_runner.weights.block_format import BlockFormat
from engine.model_runner.weights.dummy import DummyStore
from engine.model_runner.weights.format_selection import _part_reader, quant_target
from engine.model_runner.weights.linear_format import QuantizedFormat
from engine.model_runner.weights.reader import ModuleWeight, Slice, WeightReader
from engine.models.fields import Fields
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.hf_quantization import read_quantization
from engine.models.spec.quantization import FP4_CODES, NF4_CODES, CodeTable, QuantizationSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.runtime.errors import ConfigError

from .test_fp4 import MODELOPT, as_nvfp4, assert_means_the_same, quantize_folder
from .test_mlx import as_mlx, store_of
from .test_quantized import (
    AWQ,
    PROMPT,
    SIZES,
    Tensors,
    as_awq,
    as_ints,
    format_of,
    ints_config,
    prompt_logprobs,
    reader_of,
)

CPU = torch.device("cpu")


def as_codes(weight: Tensor, kind: str, *, nested: bool = False, size: int = 64) -> tuple[Tensors, Tensor]:
    """4 bits of bitsandbytes; `nested`: scales are codes of a table of 256 values, too."""
    table = torch.tensor((NF4_CODES if kind == "nf4" else FP4_CODES).values)
    flat = weight.reshape(-1, size)
    largest = flat.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    stored: Tensors = {"weight.quant_map": table, "weight.absmax": largest}
    if nested:
        offset, values = float(largest.mean()), torch.linspace(-1, 1, 256)
        factors = torch.stack([part.abs().max() for part in (largest - offset).split(256)])
        whole = factors.repeat_interleave(256)[: len(largest)]
        codes = ((largest - offset) / whole).unsqueeze(1).sub(values).abs().argmin(1)
        largest = values[codes] * whole + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        stored |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": factors}
        stored["weight.nested_quant_map"] = values
    numbers = (flat / largest.unsqueeze(1)).unsqueeze(2).sub(table).abs().argmin(2)
    pairs = numbers.flatten()
    stored["weight"] = (pairs[::2] << 4 | pairs[1::2]).to(torch.uint8).unsqueeze(1)
    text = json.dumps(state).encode()
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return stored, (table[numbers] * largest.unsqueeze(1)).view(weight.shape)


def as_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    largest = weight.abs().amax(1)
    numbers = (weight * (127 / largest).unsqueeze(1)).round().to(torch.int8)
    stored = {"weight": numbers, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, numbers.float() * (largest / 127).unsqueeze(1)


def as_torchao_int4(weight: Tensor, size: int = 32) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales = ((high - low) / 15).bfloat16().float()
    zeros = (low + 8 * scales).bfloat16().float()
    signed = ((groups - zeros) / scales).round().clamp(-8, 7)
    numbers = signed.to(torch.int32).flatten(1) & 15
    stored = {
        "_weight_qdata": (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8),
        "_weight_scale": scales.squeeze(2).t().bfloat16(),
        "_weight_zero_point": zeros.squeeze(2).t().bfloat16(),
    }
    return stored, (signed * scales + zeros).flatten(1)


def as_torchao_bytes(weight: Tensor, bits: int, size: int = 0) -> tuple[Tensors, Tensor]:
    half = 1 << (bits - 1)
    groups = weight.unflatten(1, (-1, size or weight.shape[1]))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales = ((high - low) / (2 * half - 1)).bfloat16().float()
    zeros = (-half - low / scales).round().clamp(-half, half - 1)
    signed = (groups / scales + zeros).round().clamp(-half, half - 1)
    stored = {
        "_weight_qdata": signed.flatten(1).to(torch.int8),
        "_weight_scale": scales.squeeze(2).bfloat16(),
        "_weight_zero_point": zeros.squeeze(2).to(torch.int8),
    }
    return stored, ((signed - zeros) * scales).flatten(1)


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
    }


def per_group(size: int) -> dict[str, Any]:
    return {"_type": "PerGroup", "_version": 1, "_data": {"group_size": size}}


IN_4_BITS = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "llm_int8_threshold": 6.0,
}
INT4_OF_INTX = {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}, "granularity": per_group(32)}
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Tensors, Tensor]]]] = {
    "nf4": (IN_4_BITS | {"bnb_4bit_quant_type": "nf4"}, partial(as_codes, kind="nf4")),
    "nf4 nested": (IN_4_BITS | {"bnb_4bit_quant_type": "nf4"}, partial(as_codes, kind="nf4", nested=True)),
    "fp4": (IN_4_BITS | {"bnb_4bit_quant_storage": "uint8"}, partial(as_codes, kind="fp4", nested=True)),
    "int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        as_int8,
    ),
    "torchao int4": (
        torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format={"_data": "PLAIN"}),
        as_torchao_int4,
    ),
    "torchao int8": (torchao("Int8WeightOnlyConfig"), partial(as_torchao_bytes, bits=8)),
    "torchao int4 in bytes": (
        torchao("IntxWeightOnlyConfig", **INT4_OF_INTX),
        partial(as_torchao_bytes, bits=4, size=32),
    ),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_the_one_with_the_weights_it_stands_for(make_tiny_llama, make_driver, unpack, form):
    tiny = make_tiny_llama(**SIZES)
    original = tiny.logprobs(PROMPT)
    description, quantize = FORMS[form]
    quantize_folder(tiny, description, lambda module: None if module == "lm_head" else quantize)
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    assert_means_the_same(make_driver(spec, tiny.folder), tiny, unpack)
    assert 1e-4 < (tiny.logprobs(PROMPT) - original).abs().mean() < 1.5


NATIVE = pytest.mark.skipif(
    bool(reasons_against_blocks(quant_target(CPU, torch.bfloat16))), reason="no kernel for blocks here"
)


@NATIVE
@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_weights_stay_in_blocks(make_tiny_llama, make_driver, unpack, caplog, form):
    tiny = make_tiny_llama(**SIZES)
    description, quantize = FORMS[form]
    quantize_folder(tiny, description, lambda module: None if module == "lm_head" else quantize)
    with caplog.at_level("INFO"):
        driver = make_driver(read_hf_spec(tiny.folder), tiny.folder, dtype="bfloat16")

    assert "op=linear_blocks provider=native" in caplog.text and "dequantized" not in caplog.text
    meant = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(prompt_logprobs(driver, unpack) - meant.numpy()).mean() < 0.1


@NATIVE
@pytest.mark.parametrize(("kind", "table"), [("nf4", NF4_CODES), ("fp4", FP4_CODES)])
def test_kernels_round_the_values_of_codes(tmp_path, kind, table: CodeTable):
    """By at most 0.33 % of the largest value of a block; the exact values are those of `dequantized`."""
    tensors, meant = as_codes(torch.randn(96, 256), kind)
    reader = reader_of(tmp_path, tensors)
    module = ModuleWeight(reader, "m", (96, 256))
    linears = QuantizedLinears(quant_target(CPU, torch.bfloat16), plain.pack_linear)
    parts = BitsAndBytesParts(QuantizationSpec(method="bitsandbytes"))

    exact = parts.read(module)
    linear: Any = QuantizedFormat(parts, linears).load([module])

    assert isinstance(exact, BlockWeight)
    torch.testing.assert_close(exact.dequantized(torch.float32), meant, rtol=1e-6, atol=0)
    largest = tensors["weight.absmax"].view(96, -1).repeat_interleave(64, 1)
    error = (linear.rows(torch.arange(96)).float() - meant).abs() / largest
    assert error.max() < 0.0033 + 2**-8
    numbers = torch.tensor(table.form.table) - table.form.zero
    assert (numbers / table.divisor - torch.tensor(table.values)).abs().max() < 0.0033


@pytest.mark.parametrize("form", FORMS)
def test_ranks_take_their_parts(tmp_path, form):
    description, quantize = FORMS[form]
    tensors, meant = quantize(torch.randn(96, 128))
    weights = reader_of(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    found = read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": description}))
    assert found is not None
    format_ = format_of(_part_reader(found))
    for part in (Slice(0, 8, 40), Slice(1, 64, 128), None):
        ours = format_.dense([ModuleWeight(weights, "m", (96, 128), part)])
        expected = meant if part is None else meant.narrow(part.axis, part.start, part.stop - part.start)
        torch.testing.assert_close(ours, expected)
    weights.finish()


def test_blocks_across_outputs_are_dequantized(tmp_path):
    tensors, meant = as_codes(torch.randn(64, 96), "nf4")
    weights = reader_of(tmp_path, tensors)
    parts = BitsAndBytesParts(QuantizationSpec(method="bitsandbytes"))
    for part in (None, Slice(1, 32, 96)):
        ours = parts.read(ModuleWeight(weights, "m", (64, 96), part))
        assert isinstance(ours, Tensor)
        torch.testing.assert_close(ours, meant if part is None else meant[:, 32:])


@pytest.mark.parametrize("form", FORMS)
def test_dummy_weights_differ(tmp_path, form):
    weights = WeightReader(DummyStore(0), torch.float32, CPU)
    found = read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": FORMS[form][0]}))
    assert found is not None
    modules = [ModuleWeight(weights, name, (96, 128)) for name in "ab"]
    dense = format_of(_part_reader(found)).dense(modules)
    assert dense.isfinite().all() and dense.any() and not torch.equal(dense[:96], dense[96:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", FORMS)
def test_scales_that_are_not_finite_are_refused_in_every_form(tmp_path, form, value):
    description, quantize = FORMS[form]
    found = read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": description}))
    assert found is not None
    tensors = quantize(torch.randn(96, 128))[0]
    scales = [n for n, each in tensors.items() if each.is_floating_point() and "map" not in n]
    assert scales
    for name in scales:
        spoiled = tensors[name].clone(memory_format=torch.contiguous_format)
        spoiled.view(-1)[-1] = value
        changed = {**tensors, name: spoiled}
        weights = reader_of(tmp_path, {n: tensor.contiguous() for n, tensor in changed.items()})
        with pytest.raises(ConfigError, match="m: holds scales that are not finite; the file is damaged"):
            _part_reader(found).read(ModuleWeight(weights, "m", (96, 128)))


def damaged_state(**changes: Any) -> Tensors:
    """The description of codes [32, 64] with some fields changed."""
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [32, 64]} | changes
    return {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (damaged_state(blocksize=1 << 40), "m: blocksize is 1099511627776, a number from 1 to 65536 is"),
        (
            damaged_state(nested_blocksize=1 << 40, nested_offset=0.1),
            "nested_blocksize is 1099511627776, a number",
        ),
        (
            damaged_state(nested_blocksize=256, nested_offset=10**400),
            "nested_offset is 10*, a number up to 1e",
        ),
        (
            {"weight.quant_state.bitsandbytes__nf4": torch.full((100_000,), ord("[")).byte()},
            "bitsandbytes__nf4: is damaged",
        ),
        ({"weight.absmax": torch.full((32,), torch.nan)}, "m: holds scales that are not finite"),
        ({"weight.quant_map": torch.linspace(-1, 1, 16)}, "m: quant_map is not the table of nf4"),
        (
            {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"{]"), dtype=torch.uint8)},
            "bitsandbytes__nf4: is damaged",
        ),
        (
            {
                "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                    list(b'{"shape": [64, 32]}'), dtype=torch.uint8
                )
            },
            r"the weight has the shape \[64, 32\], but the configuration asks for",
        ),
    ],
)
def test_damaged_codes_are_refused(tmp_path, changes, message):
    tensors = as_codes(torch.randn(32, 64), "nf4")[0] | changes
    parts = BitsAndBytesParts(QuantizationSpec(method="bitsandbytes"))
    with pytest.raises(ConfigError, match=message):
        parts.read(ModuleWeight(reader_of(tmp_path, tensors), "m", (32, 64)))


@pytest.mark.parametrize(
    ("form", "tensors", "columns", "message"),
    [
        ("torchao int4", as_torchao_int4, 144, "m: 144 inputs are no whole groups of 32; config.json does"),
        (
            "torchao int4 in bytes",
            partial(as_torchao_bytes, bits=8, size=32),
            128,
            "m: holds integers outside of -8 to 7, but by config.json they have 4 bits",
        ),
    ],
)
def test_integers_of_another_form_than_described_are_refused(tmp_path, form, tensors, columns, message):
    stored = tensors(torch.randn(96, 128))[0]
    if columns != 128:
        stored["_weight_qdata"] = torch.zeros(96, columns // 2, dtype=torch.uint8)
    weights = reader_of(tmp_path, {name: tensor.contiguous() for name, tensor in stored.items()})
    found = read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": FORMS[form][0]}))
    assert found is not None
    with pytest.raises(ConfigError, match=message):
        _part_reader(found).read(ModuleWeight(weights, "m", (96, columns)))


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit is True, but load_in_8bit is True"),
        (
            IN_4_BITS | {"bnb_4bit_quant_type": "nf3"},
            "bnb_4bit_quant_type is 'nf3', supported are nf4 and fp4",
        ),
        (
            IN_4_BITS | {"bnb_4bit_quant_storage": "bfloat16"},
            "bnb_4bit_quant_storage is 'bfloat16', only uint8",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only"},
            "quant_type is .*expected one config",
        ),
        (torchao("UIntXWeightOnlyConfig"), "default._type is 'UIntXWeightOnlyConfig', supported are Int4"),
        (
            torchao("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}),
            "int4_packing_format is 'tile_packed_to_4d', which only kernels for one device read",
        ),
        (torchao("Int4WeightOnlyConfig", group_size=16), "group_size is 16, multiples of 32"),
        (
            torchao(
                "IntxWeightOnlyConfig", **INT4_OF_INTX, intx_packing_format={"_data": "OPAQUE_ATEN_KLEIDIAI"}
            ),
            "intx_packing_format is 'OPAQUE_ATEN_KLEIDIAI', only UNPACKED_TO_INT8",
        ),
        (
            torchao("IntxWeightOnlyConfig", weight_dtype="float8"),
            "weight_dtype is 'float8', integers of 1 to 8",
        ),
        (
            torchao("Int8WeightOnlyConfig", granularity={"_type": "PerBlock"}),
            "granularity is 'PerBlock', only Per",
        ),
        (torchao("Int8WeightOnlyConfig") | {"include_input_output_embeddings": True}, "quantized embeddings"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
            "only version 2 is stored in safetensors",
        ),
    ],
    ids=str,
)
def test_what_is_refused_and_by_which_name(tmp_path, description, message):
    with pytest.raises(ConfigError, match=message):
        read_quantization(tmp_path, Fields(tmp_path / "config.json", {"quantization_config": description}))


# ---------------------------------------------------------------- the packages


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codes_mean_what_bitsandbytes_takes_them_for(tmp_path, kind, nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    numbers, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {"weight": numbers} | {
        f"weight.{name}": value for name, value in state.as_dict(packed=True).items()
    }
    weights = reader_of(tmp_path, tensors)
    parts = BitsAndBytesParts(QuantizationSpec(method="bitsandbytes"))

    ours = format_of(parts).dense([ModuleWeight(weights, "m", (96, 128))])

    weights.finish()
    torch.testing.assert_close(ours, functional.dequantize_4bit(numbers, state), rtol=1e-5, atol=1e-7)


def test_int8_means_what_bitsandbytes_takes_it_for(tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    layer = bnb.nn.Linear8bitLt(128, 96, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
    stored = layer.to("cpu").state_dict()
    weights = reader_of(tmp_path, {name: value.contiguous() for name, value in stored.items()})
    parts = BitsAndBytesParts(QuantizationSpec(method="bitsandbytes", bits=8))

    ours = format_of(parts).dense([ModuleWeight(weights, "m", (96, 128))])

    weights.finish()
    expected = bnb.functional.int8_vectorwise_dequant(stored["weight"], stored["SCB"])
    torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, weight, rtol=0, atol=0.03)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_tensors_mean_what_torchao_takes_them_for(tmp_path, kind):
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    transformers = pytest.importorskip("transformers")
    options = {"Int8WeightOnlyConfig": {"version": 2}, "Float8WeightOnlyConfig": {}}.get(
        kind,
        {
            "weight_dtype": getattr(torch, "int4"),  # noqa: B009
            "granularity": quantization.PerGroup(32),
        },
    )
    model = torch.nn.Sequential(torch.nn.Linear(128, 96, bias=False))
    config = getattr(quantization, kind)(**options)
    quantization.quantize_(model, config)
    flat, _ = support.flatten_tensor_state_dict(model.state_dict())
    weights = reader_of(tmp_path, {name.removeprefix("0."): value for name, value in flat.items()})
    description = json.loads(json.dumps(transformers.TorchAoConfig(config).to_dict()))
    found = read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": description}))
    assert found is not None

    ours = format_of(_part_reader(found)).dense([ModuleWeight(weights, "m", (96, 128))])

    weights.ignore("m.weight_zero_point")
    dequantize: Any = model[0].weight.dequantize
    weights.finish()
    torch.testing.assert_close(ours, dequantize().float(), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- ModelOpt's integers and blocks of FP8


def as_awq_of_modelopt(weight: Tensor, size: int = 32) -> tuple[Tensors, Tensor]:
    """As `pack_int4_in_uint8` of ModelOpt: two outputs in a byte."""
    scales = weight.unflatten(1, (-1, size)).abs().amax(2) / 7
    whole = scales.repeat_interleave(size, 1)
    signed = (weight / whole).round().clamp(-8, 7)
    numbers = signed.to(torch.int32) & 15
    packed = (numbers[::2] | numbers[1::2] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(0.1)}, signed * whole


def as_int8_of_modelopt(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1) / 127
    signed = (weight / scales[:, None]).round()
    return {"weight": signed.to(torch.int8), "weight_scale": scales}, signed * scales[:, None]


def with_factors(
    quantize: Callable[[Tensor], tuple[Tensors, Tensor]], weight: Tensor
) -> tuple[Tensors, Tensor]:
    """Factors of the inputs, which the weights are divided by before they are quantized."""
    factors = torch.linspace(0.5, 2, weight.shape[1])
    stored, meant = quantize(weight / factors)
    return stored | {"pre_quant_scale": factors}, meant * factors


def as_fp8_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.full((rows, columns), float(weight.abs().max()) / 448)
    numbers = (weight / scales[0, 0]).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales.view(rows, 1, columns, 1)}, numbers.float() * scales[
        0, 0
    ]


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


OF_MODELOPT: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Tensors, Tensor]]]] = {
    "W4A16_AWQ": (modelopt("W4A16_AWQ", group_size=32), as_awq_of_modelopt),
    "W4A8_AWQ": (modelopt("W4A8_AWQ", group_size=32), partial(with_factors, as_awq_of_modelopt)),
    "W8A16": (modelopt("W8A16"), as_int8_of_modelopt),
    "W8A8_SQ": (modelopt("W8A8_SQ_PER_CHANNEL"), partial(with_factors, as_int8_of_modelopt)),
    "NVFP4_AWQ": (modelopt("NVFP4_AWQ", group_size=16), partial(with_factors, as_nvfp4)),
    "FP8_PB_WO": (modelopt("fp8_pb_wo"), as_fp8_blocks),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("form", OF_MODELOPT)
def test_forms_of_modelopt(make_tiny_llama, make_driver, unpack, form):
    tiny = make_tiny_llama(**SIZES)
    description, quantize = OF_MODELOPT[form]
    quantize_folder(tiny, description, lambda module: None if module == "lm_head" else quantize)
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    assert_means_the_same(make_driver(spec, tiny.folder), tiny, unpack)


@NATIVE
@pytest.mark.parametrize("form", ["W4A16_AWQ", "W4A8_AWQ"])
def test_only_factors_of_inputs_are_dequantized(make_tiny_llama, make_driver, unpack, caplog, form):
    tiny = make_tiny_llama(**SIZES)
    description, quantize = OF_MODELOPT[form]
    quantize_folder(tiny, description, lambda module: None if module == "lm_head" else quantize)
    driver = make_driver(read_hf_spec(tiny.folder), tiny.folder, dtype="bfloat16")

    assert ("factors of their inputs (pre_quant_scale)" in caplog.text) == (form == "W4A8_AWQ")
    meant = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(prompt_logprobs(driver, unpack) - meant.numpy()).mean() < 0.1


@pytest.mark.parametrize("form", OF_MODELOPT)
def test_ranks_take_parts_of_forms_of_modelopt(tmp_path, form):
    description, quantize = OF_MODELOPT[form]
    tensors, meant = quantize(torch.randn(96, 256))
    weights = reader_of(tmp_path, tensors)
    found = read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": description}))
    assert found is not None
    for part in (Slice(0, 8, 40), Slice(1, 128, 256), None):
        ours = format_of(_part_reader(found)).dense([ModuleWeight(weights, "m", (96, 256), part)])
        expected = meant if part is None else meant.narrow(part.axis, part.start, part.stop - part.start)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    weights.finish()


def test_groups_of_awq_are_those_of_each_module(tmp_path):
    layers = {
        "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_AWQ", "group_size": 64},
        "model.layers.1.mlp.up_proj": {"quant_algo": "W4A16_AWQ", "group_size": 128},
        "model.layers.2.mlp.up_proj": {"quant_algo": "W8A16"},
    }
    description = modelopt("MIXED_PRECISION", quantized_layers=layers)
    found = read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": description}))
    assert found is not None
    forms = [found.part_of(name) for name in layers]
    assert [form and (form.bits, form.group_size) for form in forms] == [(4, 64), (4, 128), (8, 0)]


# ---------------------------------------------------------------- memory


def in_mlx(weight: Tensor) -> tuple[Tensors, Tensor]:
    return as_mlx(weight, 64, 4)


MLX_4_BITS = {"quantization": {"group_size": 64, "bits": 4}}
MEMORY: dict[str, tuple[dict[str, Any], Callable[[Tensor], tuple[Tensors, Tensor]]]] = {
    "W4A16": ({"quantization_config": ints_config(4, 128)}, partial(as_ints, bits=4, group_size=128)),
    "W4A16 with zeros": (
        {"quantization_config": ints_config(4, 128, symmetric=False)},
        partial(as_ints, bits=4, group_size=128, symmetric=False),
    ),
    "AWQ": ({"quantization_config": AWQ | {"group_size": 128}}, partial(as_awq, group_size=128)),
    "NVFP4": ({"quantization_config": MODELOPT | {"quant_algo": "NVFP4"}}, as_nvfp4),
    "nf4": ({"quantization_config": FORMS["nf4"][0]}, partial(as_codes, kind="nf4")),
    "nf4 nested": ({"quantization_config": FORMS["nf4"][0]}, partial(as_codes, kind="nf4", nested=True)),
    "MLX": (MLX_4_BITS, in_mlx),
}


@NATIVE
@pytest.mark.parametrize("form", MEMORY)
def test_memory_is_at_most_105_percent_of_the_file(tmp_path, form):
    """Bytes of the matrices; their tables of values are shared by a whole model and not counted."""
    description, quantize = MEMORY[form]
    tensors, meant = quantize(torch.randn(256, 2048))
    found = read_quantization(tmp_path, Fields(tmp_path, description))
    assert found is not None
    linears = QuantizedLinears(quant_target(CPU, torch.bfloat16), plain.pack_linear)
    if found.method == "mlx":
        reader = WeightReader(store_of(tmp_path, tensors, description["quantization"]), torch.bfloat16, CPU)
        format_: QuantizedFormat = BlockFormat(found, linears)
    else:
        reader = reader_of(tmp_path, tensors)
        format_ = QuantizedFormat(_part_reader(found), linears)

    linear: Any = format_.load([ModuleWeight(reader, "m", (256, 2048))])

    not_counted = ("map", "state", "shape")
    stored = sum(one.nbytes for name, one in tensors.items() if not any(part in name for part in not_counted))
    assert isinstance(linear, NativeBlockLinear)
    assert linear.num_bytes <= 1.05 * stored, linear.num_bytes / stored
    assert linear.num_bytes == found.bytes_of("m", 256, 2048, on_cpu=True)
    allowed = 0.004 * float(meant.abs().max())  # of nf4's table, and of minima in half precision
    torch.testing.assert_close(linear.rows(torch.arange(256)).float(), meant, rtol=2**-7, atol=allowed)
