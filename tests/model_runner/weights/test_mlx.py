"""Folders of MLX: written from the definition of its forms, and compared with the package where it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model_runner.kernels.quantized import reasons_against_blocks
from engine.model_runner.weights.format_selection import quant_target
from engine.model_runner.weights.reader import Slice, WeightReader
from engine.model_runner.weights.safetensors import SafetensorsStore
from engine.models.fields import Fields
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.hf_quantization import read_quantization
from engine.models.spec.model_spec import with_quantization
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.needed_tensors import needed_modules
from engine.models.weight_files.weight_memory import tied_head_bytes, weight_bytes
from engine.runtime.errors import ConfigError
from tests.model_runner.structures.families import FAMILIES

from .test_fp4 import E4M3, assert_means_the_same, exponents, packed
from .test_quantized import PROMPT, SIZES, Tensors, prompt_logprobs

FORMS: dict[str, dict[str, Any]] = {
    **{f"{bits} bits": {"group_size": 64 if bits == 4 else 32, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {"mode": "mxfp4", "group_size": 32, "bits": 4},
    "nvfp4": {"mode": "nvfp4", "group_size": 16, "bits": 4},
    "mxfp8": {"mode": "mxfp8", "group_size": 32, "bits": 8},
}


def as_words(numbers: Tensor, bits: int) -> Tensor:
    """[..., K] whole numbers -> uint32 [..., K * bits / 32], without gaps."""
    single = np.unpackbits(numbers.to(torch.uint8).unsqueeze(-1).numpy(), axis=-1, bitorder="little")[
        ..., :bits
    ]
    octets = np.packbits(single.reshape(*numbers.shape[:-1], -1), axis=-1, bitorder="little")
    return torch.from_numpy(octets.view(np.uint32).copy())


def as_mlx(weight: Tensor, group_size: int, bits: int, mode: str = "affine") -> tuple[Tensors, Tensor]:
    """The tensors of a module and the weight that they stand for."""
    if mode == "mxfp8":
        codes = exponents(weight, 448)
        numbers = (weight / torch.exp2(codes.float() - 127).repeat_interleave(32, 1)).to(E4M3)
        meant = numbers.float() * torch.exp2(codes.float() - 127).repeat_interleave(32, 1)
        return {"weight": as_words(numbers.view(torch.uint8), 8), "scales": codes}, meant
    if mode != "affine":
        codes = exponents(weight, 6)
        scales = torch.exp2(codes.float() - 127)
        if mode == "nvfp4":
            codes = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6).to(E4M3)
            codes, scales = codes.view(torch.uint8), codes.float()
        pairs, meant = packed(weight, scales)
        return {"weight": torch.from_numpy(pairs.numpy().view(np.uint32).copy()), "scales": codes}, meant
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales, biases = ((high - low) / ((1 << bits) - 1)).bfloat16(), low.bfloat16()
    numbers = ((groups - biases.float()) / scales.float()).round().clamp(0, (1 << bits) - 1)
    meant = numbers * scales.float() + biases.float()
    words = as_words(numbers.flatten(1), bits)
    return {"weight": words, "scales": scales.squeeze(2), "biases": biases.squeeze(2)}, meant.flatten(1)


def quantize_folder(tiny: Any, settings: dict[str, Any]) -> None:
    """Rewrite all modules with matrices, tables and routers among them; experts as MLX stacks them."""
    path, parameters = tiny.folder / "model.safetensors", dict(tiny.reference.named_parameters())
    stored: Tensors = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        form = {key: value for key, value in settings.items() if not isinstance(value, dict | bool)}
        form = settings.get(module, form)
        if tensor.dim() != 2 or form is False:
            stored[name] = tensor
            continue
        tensors, meant = as_mlx(tensor, **form)
        block, is_expert, rest = module.partition(".experts.")
        expert, _, projection = rest.partition(".")
        for kind, value in tensors.items():
            if is_expert:
                stacks.setdefault(f"{block}.switch_mlp.{projection}.{kind}", []).append(value)
            else:
                stored[f"{module}.{kind}"] = value.contiguous()
        if not is_expert:
            parameters[name].data = meant.contiguous()
            continue
        fused = parameters[f"{block}.experts.{'down_proj' if 'down' in projection else 'gate_up_proj'}"]
        start = len(meant) if projection == "up_proj" else 0
        fused.data[int(expert), start : start + len(meant)] = meant
    stored |= {name: torch.stack(parts) for name, parts in stacks.items()}
    save_file(stored, path)
    config = json.loads((tiny.folder / "config.json").read_text())
    config |= {"quantization": settings, "quantization_config": settings}
    (tiny.folder / "config.json").write_text(json.dumps(config))


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_the_one_with_the_weights_it_stands_for(make_tiny_llama, make_driver, unpack, form):
    tiny = make_tiny_llama(**SIZES)
    original = tiny.logprobs(PROMPT)
    quantize_folder(tiny, FORMS[form])
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    assert_means_the_same(make_driver(spec, tiny.folder), tiny, unpack)
    assert (tiny.logprobs(PROMPT) - original).abs().mean() > 1e-4


NATIVE = pytest.mark.skipif(
    bool(reasons_against_blocks(quant_target(torch.device("cpu"), torch.bfloat16))),
    reason="no kernel for blocks here",
)


@NATIVE
@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_stay_in_blocks(make_tiny_llama, make_driver, unpack, caplog, form, tied):
    tiny = make_tiny_llama(**SIZES, tie_word_embeddings=tied)
    quantize_folder(tiny, FORMS[form])
    with caplog.at_level("INFO"):
        driver = make_driver(read_hf_spec(tiny.folder), tiny.folder, dtype="bfloat16")

    assert ("op=linear_blocks provider=native" in caplog.text) == (form != "mxfp8")
    assert ("has no kernel for these" in caplog.text) == (form == "mxfp8")
    meant = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(prompt_logprobs(driver, unpack) - meant.numpy()).mean() < 0.1


MIXED = {
    "group_size": 64,
    "bits": 4,
    "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8},
    "model.layers.1.mlp.gate": False,
    "model.layers.1.mlp.switch_mlp.down_proj": {"group_size": 32, "bits": 6},
    "model.layers.0.self_attn.v_proj": {"mode": "mxfp8", "group_size": 32, "bits": 8},
    "lm_head": {"group_size": 32, "bits": 6},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_routers_and_modules_with_bits_of_their_own(make_tiny_model, make_driver, unpack, dtype):
    sizes = {**SIZES, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    tiny = make_tiny_model("qwen3_moe", **sizes)
    own = dict(MIXED)
    for expert in range(4):  # names of the file before its experts are stacked
        own[f"model.layers.1.mlp.experts.{expert}.down_proj"] = MIXED[
            "model.layers.1.mlp.switch_mlp.down_proj"
        ]
    quantize_folder(tiny, own)
    config = json.loads((tiny.folder / "config.json").read_text())
    config |= {"quantization": MIXED, "quantization_config": MIXED}
    (tiny.folder / "config.json").write_text(json.dumps(config))
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    driver = make_driver(spec, tiny.folder, dtype=dtype)
    if dtype == "float32":
        assert_means_the_same(driver, tiny, unpack)
    meant = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(prompt_logprobs(driver, unpack) - meant.numpy()).mean() < 0.1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("row", "options"),
    [
        (
            "qwen3_next",
            {"hidden_size": 64, "shared_expert_intermediate_size": 64, "moe_intermediate_size": 64},
        ),
        ("lfm2", {"hidden_size": 64, "intermediate_size": 128}),
    ],
)
def test_folders_with_convolutions(make_tiny_model, make_driver, unpack, row, options):
    """Their axes are in another order, and norms around zero are around one, see mlx-lm's `sanitize`."""
    sizes = SIZES | FAMILIES[row].options | options | {"linear_value_head_dim": 16}
    tiny = make_tiny_model(row, **sizes)
    quantize_folder(tiny, {"group_size": 32, "bits": 8})
    path = tiny.folder / "model.safetensors"
    tensors = load_file(path)
    ends = ("_layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
    for name, tensor in tensors.items():
        if "conv" in name and tensor.dim() == 3:
            tensors[name] = tensor.movedim(2, 1).contiguous()
        elif row == "qwen3_next" and name.endswith(ends):
            tensors[name] = tensor + 1.0
    save_file(tensors, path)
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    driver = make_driver(spec, tiny.folder)
    meant = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(prompt_logprobs(driver, unpack), meant, atol=1e-4)
    assert driver.generate([PROMPT], num=10, chunk=3)[0] == tiny.greedy(PROMPT, 10)


def test_none_dequantizes(make_tiny_llama, make_driver, unpack, caplog):
    tiny = make_tiny_llama(**SIZES)
    quantize_folder(tiny, FORMS["4 bits"])
    spec = with_quantization(read_hf_spec(tiny.folder), "none")
    driver = make_driver(spec, tiny.folder, dtype="bfloat16", quantization="none")

    meant = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(prompt_logprobs(driver, unpack) - meant.numpy()).mean() < 0.1
    assert "provider=native" not in "".join(
        line for line in caplog.text.splitlines() if "linear_blocks" in line
    )


def store_of(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> SafetensorsStore:
    save_file({f"m.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    store = SafetensorsStore(folder)
    store._mlx = read_quantization(folder, Fields(folder, {"quantization": settings}))
    return store


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_those_of_the_package(tmp_path, form):
    mx = pytest.importorskip("mlx.core")
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(0))
    theirs = mx.quantize(mx.array(weight.numpy()), **FORMS[form])
    names = ("weight", "scales", "biases")[: len(theirs)]
    tensors = {name: torch.from_numpy(np.array(one)) for name, one in zip(names, theirs, strict=True)}
    meant = mx.dequantize(*theirs, **FORMS[form])
    reader = WeightReader(store_of(tmp_path, tensors, FORMS[form]), torch.float32, torch.device("cpu"))

    ours = reader.tensor("m.weight", (48, 192))

    expected = torch.from_numpy(np.array(meant.astype(mx.float32)))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6 if "bits" in form else 0)
    reader.finish()


@pytest.mark.parametrize("form", FORMS)
def test_ranks_take_their_parts(tmp_path, form):
    tensors, meant = as_mlx(torch.randn(48, 192), **FORMS[form])
    store = store_of(tmp_path, tensors, FORMS[form])
    for part in (Slice(0, 8, 40), Slice(1, 64, 128)):
        out = torch.empty_like(meant.narrow(part.axis, part.start, part.stop - part.start))
        store.read("m.weight", out, part)
        torch.testing.assert_close(out, meant.narrow(part.axis, part.start, part.stop - part.start))
    with pytest.raises(ConfigError, match="m: a rank takes inputs 16 to 127, but (32|64) neighbors share"):
        store.read("m.weight", torch.empty(48, 112), Slice(1, 16, 128))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("4bit", "quantization is '4bit', expected an object"),
        ({"group_size": 64}, "quantization.bits is missing"),
        ({"group_size": 64, "bits": 7}, "quantization.bits is 7, supported are 2, 3, 4, 5, 6, 8"),
        ({"group_size": 48, "bits": 4}, "quantization.group_size is 48, supported are 32, 64, 128"),
        (
            {"group_size": 64, "bits": 4, "mode": "trellis"},
            "quantization.mode is 'trellis', supported of MLX are",
        ),
        ({"group_size": 64, "bits": 4, "mode": "mxfp4"}, "quantization.group_size is 64, supported are 32"),
        (
            {"group_size": 64, "bits": 4, "lm_head": {"bits": 9, "group_size": 64}},
            "quantization.lm_head.bits is 9",
        ),
    ],
)
def test_what_is_refused_and_by_which_name(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        read_quantization(tmp_path, Fields(tmp_path / "config.json", {"quantization": settings}))


def test_damaged_folders_are_refused(make_tiny_llama, tmp_path):
    tiny = make_tiny_llama(**SIZES)
    quantize_folder(tiny, FORMS["4 bits"])
    path, spec = tiny.folder / "model.safetensors", read_hf_spec(tiny.folder)
    whole, name = load_file(path), "model.layers.0.self_attn.q_proj"
    save_file({key: value for key, value in whole.items() if key != f"{name}.biases"}, path)
    with pytest.raises(ConfigError, match=rf"'{name}.biases' is missing"):
        check_folder_weights(tiny.folder, spec)
    save_file(whole | {f"{name}.scales": torch.ones(64, 2)}, path)
    with pytest.raises(
        ConfigError, match=r"q_proj.scales' has the shape \[64, 2\], but the configuration asks for"
    ):
        check_folder_weights(tiny.folder, spec)
    save_file(whole | {f"{name}.weight": whole[f"{name}.weight"].view(torch.float32)}, path)
    with pytest.raises(
        ConfigError, match=r"q_proj.weight' is stored as F32, expected U32; the quantization of"
    ):
        check_folder_weights(tiny.folder, spec)
    save_file(whole | {f"{name}.scales": whole[f"{name}.scales"].byte()}, path)
    with pytest.raises(ConfigError, match=r"q_proj.scales' is stored as U8, expected F32 or F16 or BF16"):
        check_folder_weights(tiny.folder, spec)
    save_file(whole, path)
    assert spec.quantization is not None
    with pytest.raises(
        ConfigError, match=r"has 64 inputs, which are no whole groups of 128; the quantization"
    ):
        check_folder_weights(
            tiny.folder,
            structs.replace(spec, quantization=structs.replace(spec.quantization, group_size=128)),
        )
    tensors = as_mlx(torch.randn(32, 64), 64, 4)[0]
    store = store_of(tmp_path, tensors | {"scales": torch.full((32, 1), torch.inf)}, FORMS["4 bits"])
    with pytest.raises(ConfigError, match="m: holds scales that are not finite"):
        store.blocks("m.weight")


@NATIVE
@pytest.mark.parametrize("tied", [False, True])
def test_the_arithmetic_of_memory_is_that_of_the_loaded_model(make_tiny_llama, make_driver, tied):
    tiny = make_tiny_llama(**SIZES, tie_word_embeddings=tied)
    quantize_folder(tiny, FORMS["4 bits"])
    spec = read_hf_spec(tiny.folder)
    driver = make_driver(spec, tiny.folder, dtype="bfloat16")

    table = spec.vocab_size * spec.hidden_size * 18 // 32
    norms = 2 * (2 * spec.num_layers + 1) * spec.hidden_size
    rest = weight_bytes(spec, 2, on_cpu=True) + tied_head_bytes(spec, 2) - norms - table * (2 - tied)
    linear = sum(module.num_parameters for module in needed_modules(spec) if module.is_linear)
    down = spec.num_layers * spec.hidden_size * spec.intermediate_size
    assert rest == linear * 18 // 32, (rest, linear, down)
    embedding = driver.runner.model.embedding
    held = [value for value in vars(embedding).values() if isinstance(value, Tensor)]
    assert not held and embedding._take.func.__name__ == "rows"
