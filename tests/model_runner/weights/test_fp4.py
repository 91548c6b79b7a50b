"""NVFP4, MXFP4 and MXFP8, alone and mixed: written from the formats' definitions, and by the library of one of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model_runner.distributed.join_group import Place
from engine.model_runner.kernels import plain
from engine.model_runner.kernels.blocks.native_blocks import NativeBlockLinear
from engine.model_runner.kernels.quantized import QuantizedLinears, reasons_against_blocks
from engine.model_runner.kernels.quantized_weights import BlockWeight, stack_blocks
from engine.model_runner.load import load_model_runner
from engine.model_runner.weights.dummy import DummyStore
from engine.model_runner.weights.format_selection import quant_target
from engine.model_runner.weights.fp4_format import Fp4Parts
from engine.model_runner.weights.fp8_format import Fp8Parts
from engine.model_runner.weights.linear_format import FiniteScales, QuantizedFormat
from engine.model_runner.weights.reader import ModuleWeight, Slice, WeightReader
from engine.models.fields import Fields
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.hf_quantization import read_quantization
from engine.models.source import ModelSource
from engine.models.spec.quantization import QuantizationSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.needed_tensors import needed_modules
from engine.models.weight_files.stored_forms import usual_block_name
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from tests.model_runner.conftest import Driver, engine_config
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks
from tests.model_runner.structures.families import BLOCK_ROWS, FAMILIES
from tests.model_runner.structures.own_code import write_as_published

from .test_quantized import PROMPT, SIZES, Tensors, as_fp8, format_of, prompt_logprobs, reader_of

FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of e2m1 by their codes."""
E4M3 = torch.float8_e4m3fn


def packed(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] over its scales [N, K / n]: codes in pairs, the first in the lower half; and their meaning."""
    whole = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    codes = (weight / whole).unsqueeze(2).sub(FLOATS).abs().argmin(2)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), FLOATS[codes] * whole


def as_nvfp4(
    weight: Tensor, *, packed_name: str = "weight", inverse: bool = False, factor: Tensor | None = None
) -> tuple[Tensors, Tensor]:
    if factor is None:
        factor = weight.abs().max() / (6 * 448)
    codes = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 / factor).to(E4M3)
    pairs, meant = packed(weight, codes.float() * factor)
    stored = {packed_name: pairs, "weight_scale": codes}
    if inverse:
        return stored | {
            "weight_global_scale": 1 / factor.reshape(1),
            "input_global_scale": torch.ones(1),
        }, meant
    return stored | {"weight_scale_2": factor.clone(), "input_scale": torch.tensor(0.5)}, meant


def exponents(weight: Tensor, most: float) -> Tensor:
    """Powers of two for 32 inputs each, as e8m0."""
    largest: Tensor = weight.unflatten(1, (-1, 32)).abs().amax(2)
    return (largest / most).log2().ceil().add(127).to(torch.uint8)


def as_mxfp4(weight: Tensor, packed_name: str = "weight") -> tuple[Tensors, Tensor]:
    codes = exponents(weight, 6)
    pairs, meant = packed(weight, torch.exp2(codes.float() - 127))
    return {packed_name: pairs, "weight_scale": codes}, meant


def as_mxfp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes = exponents(weight, 448)
    whole = torch.exp2(codes.float() - 127).repeat_interleave(32, 1)
    numbers = (weight / whole).to(E4M3)
    return {"weight": numbers, "weight_scale": codes}, numbers.float() * whole


def compressed(layout: str, strategy: str, size: int, bits: int = 4, *targets: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size}
    group = {"targets": list(targets or ["Linear"]), "weights": weights, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    }


Quantize = Callable[[Tensor], tuple[Tensors, Tensor]]
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
NVFP4 = compressed("nvfp4-pack-quantized", "tensor_group", 16)
MXFP4 = compressed("mxfp4-pack-quantized", "group", 32)
MXFP8 = compressed("mxfp8-quantized", "group", 32, 8)
BY_LIBRARY = {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8}
FORMS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "nvfp4 of modelopt": (MODELOPT | {"quant_algo": "NVFP4"}, as_nvfp4),
    "nvfp4": (NVFP4, partial(as_nvfp4, packed_name="weight_packed", inverse=True)),
    "mxfp4": (MXFP4, partial(as_mxfp4, packed_name="weight_packed")),
    "mxfp4 of modelopt": (MODELOPT | {"quant_algo": "MXFP4"}, as_mxfp4),
    "mxfp8": (MXFP8, as_mxfp8),
    "mxfp8 of modelopt": (MODELOPT | {"quant_algo": "MXFP8"}, as_mxfp8),
}


def quantize_folder(
    tiny: Any, description: dict[str, Any], quantize: Callable[[str], Quantize | None]
) -> None:
    """Rewrite the modules for which there is a form, and give transformers' model the weights that they mean."""
    path = tiny.folder / "model.safetensors"
    parameters = dict(tiny.reference.named_parameters())
    stored: Tensors = {}
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        form = quantize(module) if module.endswith(("_proj", "lm_head")) else None
        if module.endswith("k_proj"):  # of a KV cache in 8 bits, also where the module is plain
            stored[f"{module}.k_scale"] = torch.tensor(0.1)
        if form is None:
            stored[name] = tensor
            continue
        tensors, meant = form(tensor)
        stored |= {f"{module}.{suffix}": value.contiguous() for suffix, value in tensors.items()}
        block, is_expert, rest = module.partition(".experts.")
        if not is_expert:
            parameters[name].data = meant.contiguous()
            continue
        expert, projection = rest.split(".")
        fused = parameters[f"{block}.experts.{'down_proj' if 'down' in projection else 'gate_up_proj'}"]
        start = len(meant) if projection == "up_proj" else 0
        fused.data[int(expert), start : start + len(meant)] = meant
    save_file(stored, path)
    config = json.loads((tiny.folder / "config.json").read_text())
    (tiny.folder / "config.json").write_text(json.dumps(config | {"quantization_config": description}))


def assert_means_the_same(driver: Driver, tiny: Any, unpack: Any) -> None:
    """In float32, with chunks of all sizes and with a prefix that another request computed."""
    meant = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(prompt_logprobs(driver, unpack), meant, atol=1e-4)
    assert_chunks_and_prefixes_agree(driver, tiny.greedy(PROMPT, 10))


def assert_chunks_and_prefixes_agree(driver: Driver, expected: list[int]) -> None:
    for chunk in (1, 3, 4, 7, len(PROMPT)):
        assert driver.generate([PROMPT], num=10, chunk=chunk)[0] == expected
    first = driver.start(PROMPT)
    driver.step([(first, len(PROMPT))])
    second = driver.start(PROMPT, prefix=(first, 8))
    driver.step([(second, len(PROMPT) - 8)])
    while len(second.output) < 10:
        driver.step([(second, 1)])
    assert second.output == expected


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_the_one_with_the_weights_it_stands_for(make_tiny_llama, make_driver, unpack, form):
    tiny = make_tiny_llama(**SIZES)
    original = tiny.logprobs(PROMPT)
    description, quantize = FORMS[form]
    quantize_folder(tiny, description, lambda module: None if module == "lm_head" else quantize)
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    assert_means_the_same(make_driver(spec, tiny.folder), tiny, unpack)
    assert 1e-4 < (tiny.logprobs(PROMPT) - original).abs().mean() < (0.3 if "8" in form else 1.5)


def mixed(module: str) -> Quantize | None:
    """The form of a module by its layer and kind: of some FP8, of some NVFP4, of some none."""
    if module == "lm_head" or ".experts." in module:
        return as_nvfp4
    if "layers.0" in module:
        return None
    return as_mxfp8 if "o_proj" in module else lambda weight: as_fp8(weight, "tensor")


def mixed_of_modelopt(names: list[str]) -> dict[str, Any]:
    algorithms = {name: mixed(name) for name in names}
    names_of: dict[Quantize, str] = {as_nvfp4: "W4A16_NVFP4", as_mxfp8: "MXFP8"}
    layers = {
        name: {"quant_algo": names_of.get(form, "FP8")}
        for name, form in algorithms.items()
        if form is not None
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": ["mtp*"],
    }


MIXED_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "fp4": compressed("nvfp4-pack-quantized", "tensor_group", 16, 4, r"re:.*\.experts\..*", "lm_head")[
            "config_groups"
        ]["group_0"],
        "mx": compressed("mxfp8-quantized", "group", 32, 8, "re:.*o_proj$")["config_groups"]["group_0"],
        "fp8": compressed("float-quantized", "tensor", 0, 8)["config_groups"]["group_0"],
    },
    "ignore": [r"re:.*layers\.0\.self_attn.*"],
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("by", ["modelopt", "modelopt, experts together", "compressed-tensors"])
def test_forms_are_mixed_by_module(make_tiny_model, make_driver, unpack, by):
    tiny = make_tiny_model(
        "qwen3_moe", **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    description: dict[str, Any] = MIXED_GROUPS
    if by != "compressed-tensors":
        names = [name.removesuffix(".weight") for name in load_file(tiny.folder / "model.safetensors")]
        description = mixed_of_modelopt([name for name in names if name.endswith(("_proj", "lm_head"))])
    if "together" in by:
        layers = {
            name.partition(".experts.")[0] + ".experts" * (".experts." in name): form
            for name, form in description["quantized_layers"].items()
        }
        description = description | {"quantized_layers": layers}
    quantize_folder(tiny, description, mixed)
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    assert_means_the_same(make_driver(spec, tiny.folder), tiny, unpack)
    found = spec.quantization
    assert found is not None and found.method == "mixed"
    forms = [found.part_of(f"model.layers.{name}") for name in ("0.self_attn.q_proj", "1.self_attn.q_proj")]
    assert [form and form.method for form in forms] == [None, "fp8"]
    head = found.part_of("lm_head")
    assert head is not None and head.method == "nvfp4"


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("row", BLOCK_ROWS.values(), ids=BLOCK_ROWS.keys())
def test_each_family_finds_its_modules(make_tiny_model, make_driver, unpack, row):
    """All linear layers in NVFP4 or FP8 in turn, listed by the names of the files: as the same weights in float32."""
    tiny = make_tiny_model(row.made_as, **row.in_blocks)
    linear = {module.name for module in needed_modules(tiny.spec) if module.is_linear}
    path, plain, stored = tiny.folder / "model.safetensors", Tensors(), Tensors()
    layers: dict[str, dict[str, str]] = {}
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        usual = usual_block_name(tiny.spec, module) if tiny.spec.form.mlp_layers else module
        if usual not in linear or QuantizationSpec(method="nvfp4").is_plain(usual):
            plain[name] = stored[name] = tensor
            continue
        in_4_bits = len(layers) % 2 == 0 or ".experts." in name
        layers[module] = {"quant_algo": "W4A16_NVFP4" if in_4_bits else "FP8"}
        tensors, plain[name] = as_nvfp4(tensor) if in_4_bits else as_fp8(tensor, "tensor")
        stored |= {f"{module}.{suffix}": value for suffix, value in tensors.items()}
    save_file(plain, path)
    expected = prompt_logprobs(make_driver(tiny.spec, tiny.folder), unpack)
    save_file(stored, path)
    description = MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = json.loads((tiny.folder / "config.json").read_text())
    (tiny.folder / "config.json").write_text(json.dumps(config | {"quantization_config": description}))
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    assert len(layers) > 4
    np.testing.assert_allclose(prompt_logprobs(make_driver(spec, tiny.folder), unpack), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("row", "stored", "usual"),
    [
        ("gemma4 experts beside the MLP", "layers.0.experts.1.up_proj", "layers.0.moe.experts.1.up_proj"),
        ("mimo_v2_flash", "layers.0.self_attn.o_proj", "layers.0.self_attn.o_proj"),
    ],
)
def test_lists_have_the_names_of_the_files_of_a_family(make_tiny_model, row, stored, usual):
    found = FAMILIES[row]
    folder = make_tiny_model(found.made_as, **found.options).folder
    config = json.loads((folder / "config.json").read_text())
    mixed_by_name = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {f"model.{stored}": {"quant_algo": "FP8"}},
    }
    plain = {"quant_algo": "FP8", "ignore": [f"model.{stored}"]}
    forms = []
    for description in (mixed_by_name, plain):
        (folder / "config.json").write_text(
            json.dumps(config | {"quantization_config": MODELOPT | description})
        )
        spec = read_hf_spec(folder)
        assert spec.quantization is not None
        forms.append(spec.quantization.part_of(f"model.{usual}"))

    assert forms[0] is not None and forms[0].method == "fp8"
    assert forms[1] is None


@pytest.mark.parametrize(
    ("row", "pattern", "usual", "other"),
    [
        ("internlm2", r"re:.*feed_forward\.w2$", "layers.0.mlp.down_proj", "layers.0.mlp.up_proj"),
        ("exaone", r"re:transformer\.h\.0\.attn\.", "layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"),
        ("step3p5", r"re:.*\.share_expert\.", "layers.2.mlp.shared_experts.up_proj", "layers.0.mlp.up_proj"),
        (
            "step3p5",
            r"re:.*moe\.experts\.1\.",
            "layers.2.mlp.experts.1.up_proj",
            "layers.2.mlp.experts.2.up_proj",
        ),
        ("step3p5", r"re:.*moe\.up_proj$", "layers.2.mlp.experts.1.up_proj", "layers.0.mlp.up_proj"),
    ],
)
def test_patterns_are_matched_with_the_names_of_the_files(make_tiny_model, row, pattern, usual, other):
    found = FAMILIES[row]
    folder = make_tiny_model(found.made_as, **found.options).folder
    write_as_published(folder, found.model_type)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"model_type": found.model_type, "architectures": []}
    forms = []
    for ignore, targets in (([pattern], ["Linear"]), ([], [pattern])):
        description = compressed("float-quantized", "tensor", 0, 8, *targets) | {"ignore": ignore}
        path.write_text(json.dumps(config | {"quantization_config": description}))
        quantization = read_hf_spec(folder).quantization
        assert quantization is not None
        forms += [quantization.part_of(f"model.{name}") is None for name in (usual, other)]

    assert forms == [True, False, False, True]


NATIVE = pytest.mark.skipif(
    bool(reasons_against_blocks(quant_target(torch.device("cpu"), torch.bfloat16))),
    reason="no kernel for blocks here",
)


@NATIVE
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("form", ["nvfp4 of modelopt", "nvfp4", "mxfp4"])
def test_codes_are_multiplied_as_they_are_in_the_file(make_tiny_llama, make_driver, unpack, caplog, form):
    tiny = make_tiny_llama(**SIZES)
    description, quantize = FORMS[form]
    quantize_folder(tiny, description, lambda module: None if module == "lm_head" else quantize)

    with caplog.at_level(logging.INFO):
        driver = make_driver(read_hf_spec(tiny.folder), tiny.folder, dtype="bfloat16")

    assert "op=linear_blocks provider=native" in caplog.text and "dequantized" not in caplog.text
    assert f"weights are kept as {form[:5]}, weights_mib=" in caplog.text
    expected = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(prompt_logprobs(driver, unpack) - expected.numpy()).mean() < 0.1
    assert_chunks_and_prefixes_agree(driver, driver.generate([PROMPT], num=10)[0])


@NATIVE
@pytest.mark.parametrize("shares_factor", [True, False])
def test_experts_are_kept_too(make_tiny_model, make_driver, unpack, caplog, shares_factor):
    """Gate and up of an expert are one weight if they have one factor, as all exports for GPUs have them."""
    tiny = make_tiny_model(
        "qwen3_moe", **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    factor = torch.tensor(1e-4) if shares_factor else None
    quantize = partial(as_nvfp4, factor=factor)
    description = MODELOPT | {"quant_algo": "NVFP4"}
    quantize_folder(tiny, description, lambda module: None if module == "lm_head" else quantize)

    with caplog.at_level(logging.INFO):
        driver = make_driver(read_hf_spec(tiny.folder), tiny.folder, dtype="bfloat16")

    assert ("experts are computed one after the other" in caplog.text) != shares_factor
    assert "dequantized" not in caplog.text
    expected = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(prompt_logprobs(driver, unpack) - expected.numpy()).mean() < 0.1


@NATIVE
@pytest.mark.parametrize(("form", "more"), [("nvfp4", 1.0), ("mxfp4", 18 / 17)])
def test_a_weight_takes_the_bytes_of_the_file(tmp_path, form, more):
    tensors, meant = FORMS[form][1](torch.randn(96, 256))
    weights = reader_of(tmp_path, tensors)
    linears = QuantizedLinears(quant_target(torch.device("cpu"), torch.bfloat16), plain.pack_linear)

    linear = QuantizedFormat(parts_of(form), linears).load([ModuleWeight(weights, "m", (96, 256))])

    stored = tensors["weight_packed"].nbytes + tensors["weight_scale"].nbytes
    assert isinstance(linear, NativeBlockLinear) and linear.num_bytes == round(more * stored)
    assert linear.num_bytes == QuantizationSpec(method=form[:5]).bytes_of("m", 96, 256, on_cpu=True)
    # bfloat16 holds the weights but for the last bits of NVFP4's factor.
    torch.testing.assert_close(linear.rows(torch.arange(96)).float(), meant, rtol=2**-8, atol=0)


def test_two_ranks_say_what_one_says(make_tiny_llama):
    tiny = make_tiny_llama(**SIZES)
    description, quantize = FORMS["nvfp4 of modelopt"]
    quantize_folder(tiny, description, lambda module: None if module == "lm_head" else quantize)
    spec = read_hf_spec(tiny.folder)

    def tokens(group: ThreadGroup) -> list[list[int]]:
        config = ModelConfig(dtype="float32", device="cpu", num_threads=1, model_impl="engine")
        source, capacity = (
            ModelSource("hf", str(tiny.folder), "test"),
            Capacity(64, 32, 4, 4, spec.vocab_size),
        )
        runner = load_model_runner(engine_config(config), source, spec, capacity, Place(group, None))
        return Driver(runner, capacity).generate([PROMPT], num=8)

    assert on_ranks(2, tokens) == [[tiny.greedy(PROMPT, 8)]] * 2


# ---------------------------------------------------------------- one weight


def parts_of(form: str) -> Any:
    if "mxfp8" in form:
        return Fp8Parts(QuantizationSpec(method="fp8", block=(1, 32)))
    return Fp4Parts(QuantizationSpec(method="nvfp4" if "nvfp4" in form else "mxfp4"))


@pytest.mark.parametrize("form", BY_LIBRARY)
def test_weights_mean_what_their_own_library_takes_them_for(tmp_path, form):
    """Written by the `compressed-tensors` package."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    description, plain = BY_LIBRARY[form], {"weight": weight}
    if form == "nvfp4":
        plain["weight_global_scale"] = 6 * 448 / weight.abs().max().reshape(1)
        most = weight.unflatten(1, (-1, 16)).abs().amax(2)
        plain["weight_scale"] = (most / 6 * plain["weight_global_scale"]).to(E4M3).float()
    else:
        plain["weight_scale"] = torch.exp2(exponents(weight, 448 if form == "mxfp8" else 6).float() - 127)
    group = quantization.QuantizationScheme(**description["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.get_value_from_registry(description["format"])
    theirs = compressor.compress(plain, group)
    weights = reader_of(tmp_path, {name: tensor.contiguous() for name, tensor in theirs.items()})

    ours = format_of(parts_of(form)).dense([ModuleWeight(weights, "m", (96, 128))])

    weights.finish()
    expected = compressor.decompress(theirs, group)["weight"].float()
    if "fp4" in form:  # theirs is rounded to bfloat16
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=0)
        numbers = helpers.unpack_fp4_from_uint8(theirs["weight_packed"], 96, 128, torch.float32)
        scales = compressor._decompress_scale(theirs["weight_scale"], torch.float32)
        factor, args = theirs.get("weight_global_scale"), group.weights
        expected = forward.dequantize(numbers, scales, args=args, global_scale=factor, dtype=torch.float32)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    assert read_quantization(tmp_path, Fields(tmp_path, {"quantization_config": description})) is not None


@pytest.mark.parametrize("form", FORMS)
def test_ranks_take_their_parts(tmp_path, form):
    tensors, meant = FORMS[form][1](torch.randn(96, 128))
    weights = reader_of(tmp_path, tensors)

    def taken(*slices: Slice) -> Tensor:
        return format_of(parts_of(form)).dense(
            [ModuleWeight(weights, "m", (96, 128), part) for part in slices]
        )

    torch.testing.assert_close(taken(Slice(0, 8, 40), Slice(0, 64, 96)), torch.cat((meant[8:40], meant[64:])))
    torch.testing.assert_close(taken(Slice(1, 64, 128)), meant[:, 64:])
    weights.finish()
    with pytest.raises(ConfigError, match="m: a rank takes inputs 48 to 127, but 32 neighbors share"):
        taken(Slice(1, 48, 128))


def test_scales_of_more_inputs_are_those_of_each_16(tmp_path):
    """As ModelOpt's W4A8_NVFP4_FP8 has them."""
    weight = torch.randn(32, 64)
    codes = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 6).to(E4M3)
    pairs, meant = packed(weight, codes.float() * 0.25)
    weights = reader_of(
        tmp_path, {"weight": pairs, "weight_scale": codes, "weight_scale_2": torch.tensor(0.25)}
    )

    part = parts_of("nvfp4").read(ModuleWeight(weights, "m", (32, 64)))

    assert isinstance(part, BlockWeight) and part.scales.shape == (32, 4)
    torch.testing.assert_close(part.dequantized(torch.float32), meant)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight_scale": torch.ones(32, 3, dtype=torch.uint8).view(E4M3)},
            r"the shape \[32, 3\], but scales of 16",
        ),
        (
            {"weight_scale": torch.full((32, 4), torch.nan).to(E4M3)},
            "m: holds scales that are not finite",
        ),
        ({"weight_scale_2": torch.tensor(torch.inf)}, "m: holds scales that are not finite"),
        ({"weight_scale_2": None}, "'m.weight_scale_2' or 'm.weight_global_scale', one number, is missing"),
        ({"weight": torch.ones(32, 16, dtype=torch.uint8)}, r"'m.weight' has the shape \[32, 16\], but"),
        ({"weight": torch.ones(32, 32)}, "'m.weight' is stored as float32, but by config.json it is uint8"),
    ],
)
def test_damaged_weights_are_refused(tmp_path, changes, message):
    tensors = as_nvfp4(torch.randn(32, 64))[0] | changes
    weights = reader_of(tmp_path, {name: value for name, value in tensors.items() if value is not None})

    with pytest.raises(ConfigError, match=message):
        FiniteScales(parts_of("nvfp4")).read(ModuleWeight(weights, "m", (32, 64)))


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "mxfp8"])
def test_dummy_weights_differ(form):
    weights = WeightReader(DummyStore(0), torch.float32, torch.device("cpu"))
    dense = format_of(parts_of(form)).dense([ModuleWeight(weights, name, (96, 128)) for name in "ab"])
    assert dense.isfinite().all() and dense.any()
    assert len(dense.unique()) > 10 and not torch.equal(dense[:96], dense[96:])


def test_weights_with_other_factors_stay_beside_each_other(tmp_path):
    weights = [torch.randn(32, 64), torch.randn(32, 64) * 3]
    parts = []
    for n, weight in enumerate(weights):
        (tmp_path / str(n)).mkdir()
        reader = reader_of(tmp_path / str(n), as_nvfp4(weight)[0])
        parts.append(parts_of("nvfp4").read(ModuleWeight(reader, "m", (32, 64))))
    one, other = parts
    assert isinstance(one, BlockWeight) and isinstance(other, BlockWeight)
    assert one.stacks_with(one) and not one.stacks_with(other)
    expected = torch.cat([part.dequantized(torch.float32) for part in (one, other)])
    assert torch.equal(stack_blocks([one, one]).dequantized(torch.float32)[32:], expected[:32])
    rounded = stack_blocks([one, other])
    step = expected.unflatten(1, (-1, 32)).abs().amax(2).div(127).repeat_interleave(32, 1)
    assert rounded.bits == 8 and ((rounded.dequantized(torch.float32) - expected).abs() <= 0.51 * step).all()
    assert torch.equal(one.take_blocks(torch.tensor([1])).dequantized(torch.float32), expected[:32, 32:])
    assert torch.equal(one.padded(40).dequantized(torch.float32)[32:], torch.zeros(8, 64))
