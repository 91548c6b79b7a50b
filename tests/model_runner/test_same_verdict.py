"""The doctor's verdict on a model is that of loading it: one table of files, run through both."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cli.doctor.check import will_serve
from engine.cli.doctor.model import check_model, kept_in_blocks
from engine.cli.doctor.model_facts import gather_model
from engine.launch.resolve import model_resolution
from engine.launch.resolve.host_facts import read_host_facts
from engine.launch.resolve.memory_budget import capacity_of
from engine.launch.resolve.prepare import prepare
from engine.model_runner.load import load_model_runner
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import ConfigError
from tests.model_runner.structures.encoder_texts import make_encoder
from tests.model_runner.structures.families import BLOCK_ROWS, BUFFERS, Row
from tests.model_runner.weights.test_fp4 import as_nvfp4
from tests.model_runner.weights.test_loading import write_gguf

MAKE = Callable[..., Any]
POOL = {"max_total_tokens": 512, "max_running_requests": 4, "device": "cpu", "dtype": "float32"}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes that are whole blocks of 32."""


def config_for(path: Path, settings: dict[str, Any]) -> Any:
    return merge(from_arguments({"model": str(path)} | POOL | settings))


def doctor_says(path: Path, settings: dict[str, Any]) -> str:
    """The failures of the files, "" if there are none. The folders have no tokenizer."""
    config: EngineConfig = config_for(path, settings).config
    host = read_host_facts()
    facts = gather_model(
        config.model,
        with_torch=True,
        with_checksums=True,
        in_blocks=lambda spec: kept_in_blocks(spec, config, host),
    )
    checks = [c for c in check_model(facts, config, host) if c.code in ("model", "weights", "fit")]
    return "" if will_serve(checks) else "; ".join(c.text for c in checks if not c.is_well)


def loading_says(path: Path, settings: dict[str, Any]) -> str:
    """The refusal of a start, "" if there is none."""
    try:
        prepared = prepare(config_for(path, settings))
        load_model_runner(
            prepared.config, prepared.source, prepared.spec, capacity_of(prepared.config, prepared.spec)
        )
    except ConfigError as error:
        return str(error)
    return ""


def edit(folder: Path, **changes: Any) -> None:
    """Change config.json; a value of `...` removes a field."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors by their last names; None removes one. A new name is added as it is."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, value in tensors.items():
        full = next((key for key in stored if key.endswith(name)), name)
        stored.pop(full, None)
        if value is not None:
            stored[full] = value.contiguous()
    save_file(stored, path)


def change_bytes(path: Path, start: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[start : start + len(data)] = data
    path.write_bytes(content)


def to_fp8(folder: Path) -> None:
    """Weights as ModelOpt writes them: one scale for each tensor, and scales that are not used."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(path).items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            scale = value.abs().max() / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = scale.to(torch.float32)
            tensors[f"{module}.input_scale"] = torch.tensor(1.0)
        else:
            tensors[name] = value
    save_file(tensors, path)


def modelopt(folder: Path, algorithm: str = "FP8") -> None:
    to_fp8(folder)
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))


def to_nvfp4(folder: Path) -> None:
    stored: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        form = as_nvfp4(value)[0] if name.endswith("_proj.weight") else {"weight": value}
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in form.items()}
    save_file(stored, folder / "model.safetensors")
    description = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": description}))


def both(first: Callable[[Path], None], second: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        first(path)
        second(path)

    return damage


def as_lora(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


NAN = torch.full((64, 64), torch.nan)
FOLDERS: dict[str, tuple[str, Callable[[Path], Any], dict[str, Any]]] = {
    "well": ("", lambda _: None, {}),
    "no config": ("no config.json", lambda f: (f / "config.json").unlink(), {}),
    "more layers": ("layers.2.* is missing", lambda f: edit(f, num_hidden_layers=3), {}),
    "fewer layers": ("unexpected tensor", lambda f: edit(f, num_hidden_layers=1), {}),
    "wider": ("has the shape", lambda f: edit(f, intermediate_size=128), {}),
    "unknown architecture": ("no built-in language model", lambda f: edit(f, model_type="phi3small"), {}),
    "tensor missing": ("norm.weight' is missing", lambda f: change(f, **{"model.norm.weight": None}), {}),
    "tensor added": ("unexpected tensor 'x'", lambda f: change(f, x=torch.ones(1)), {}),
    "bias added": (
        "unexpected tensor",
        lambda f: change(f, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        {},
    ),
    "dtype F64": (
        "F64",
        lambda f: change(f, **{"0.self_attn.o_proj.weight": torch.ones(64, 64).double()}),
        {},
    ),
    "fp8 without description": ("is stored as", to_fp8, {}),
    "fp8": (
        "",
        both(to_fp8, lambda f: edit(f, quantization_config={"quant_method": "fp8", "fmt": "float8_e4m3fn"})),
        {},
    ),
    "fp8 asked for as int8": (
        "the checkpoint's weights are fp8",
        both(to_fp8, lambda f: edit(f, quantization_config={"quant_method": "fp8", "fmt": "float8_e4m3fn"})),
        {"quantization": "int8"},
    ),
    "plain weights asked for as awq": ("are not quantized", lambda _: None, {"quantization": "awq"}),
    "modelopt FP8": ("", modelopt, {}),
    "modelopt INT4_AWQ": ("INT4_AWQ", lambda f: modelopt(f, "INT4_AWQ"), {}),
    "modelopt NVFP4": ("", to_nvfp4, {}),
    "NVFP4 in blocks": ("", to_nvfp4, {"dtype": "bfloat16"}),
    "NaN": ("", lambda f: change(f, **{"0.self_attn.o_proj.weight": NAN}), {}),
    "NaN in int8": (
        "not finite",
        lambda f: change(f, **{"0.self_attn.o_proj.weight": NAN}),
        {"quantization": "int8", "dtype": "bfloat16"},
    ),
    "dummy weights": ("", lambda f: (f / "model.safetensors").unlink(), {"load_format": "dummy"}),
    "no weights": ("no .safetensors", lambda f: (f / "model.safetensors").unlink(), {}),
    "empty": ("it is empty", lambda f: (f / "model.safetensors").write_bytes(b""), {}),
    "truncated": (
        "truncated",
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        {},
    ),
    "LFS pointer": (
        "Git LFS pointer",
        lambda f: (f / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        {},
    ),
    "config is a web page": ("web page", lambda f: (f / "config.json").write_text("<!DOCTYPE html><p>"), {}),
    "LoRA": ("LoRA adapter of org/base", as_lora, {}),
    "LoRA alone": ("LoRA adapter", both(as_lora, lambda f: (f / "config.json").unlink()), {}),
    "GGUF asked for": ("load_format is gguf", lambda _: None, {"load_format": "gguf"}),
    "fp8 through transformers": (
        "weights are quantized",
        both(to_fp8, lambda f: edit(f, quantization_config={"quant_method": "fp8"})),
        {"model_impl": "transformers"},
    ),
    "fp8 made by transformers": (
        "quantization is fp8",
        lambda _: None,
        {"model_impl": "transformers", "quantization": "fp8"},
    ),
    "through transformers": ("", lambda _: None, {"model_impl": "transformers"}),
}


def assert_same_verdict(path: Path, reason: str, settings: dict[str, Any]) -> None:
    doctor, loading = doctor_says(path, settings), loading_says(path, settings)
    assert bool(doctor) == bool(loading) == bool(reason), f"doctor: {doctor!r}, loading: {loading!r}"
    for said in (doctor, loading):
        before, _, after = reason.partition("*")
        assert before in said and after in said, said


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize(("reason", "damage", "settings"), FOLDERS.values(), ids=FOLDERS.keys())
def test_folders(make_tiny_llama: MAKE, reason: str, damage: MAKE, settings: dict[str, Any]) -> None:
    folder = make_tiny_llama(**WIDE).folder
    damage(folder)
    assert_same_verdict(folder, reason, settings)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("row", BLOCK_ROWS.values(), ids=BLOCK_ROWS.keys())
def test_families(make_tiny_model: MAKE, row: Row) -> None:
    tiny = make_tiny_model(row.made_as, **row.in_blocks)
    assert_same_verdict(tiny.folder, "", {})
    source = model_resolution.find_model(config_for(tiny.folder, {}).config.model)
    spec = model_resolution.read_model(config_for(tiny.folder, {}).config.model, source).spec
    buffers = (one for name, one in tiny.reference.named_buffers() if name.endswith(BUFFERS))
    assert num_parameters(spec) == sum(one.numel() for one in (*tiny.reference.parameters(), *buffers))


FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("layer 0 has 4 heads, 4 KV heads", {}),
    "opt": ("layer 0 has 4 heads, 4 KV heads", {"word_embed_proj_dim": 64, "ffn_dim": 128}),
    "diffllama": ("layer 0 attends twice", {}),
    "nemotron": ("does not get the step's arguments", {}),
    "moshi": ("layer 0 attends to all tokens", {}),
    "bloom": ("external attention", {"n_layer": 2, "n_head": 4}),
    "gptj": ("external attention", {"n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    "mamba": ("its layers keep a state", {}),
    "falcon_h1": ("its layers keep a state", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16}),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("model_type", FOREIGN)
def test_architectures_of_transformers_that_are_refused(make_tiny_model: MAKE, model_type: str) -> None:
    reason, options = FOREIGN[model_type]
    assert_same_verdict(make_tiny_model(model_type, **WIDE, **options).folder, reason, {})


def spoil(path: Path) -> None:
    info = GGUFFile(path).tensors["blk.1.ffn_up.weight"]
    change_bytes(path, info.offset, b"\xff" * 1000)


GGUF_FAULTS: dict[str, tuple[str, str, Callable[[Path], Any], dict[str, Any]]] = {
    "F32": ("", "F32", lambda _: None, {}),
    "Q4_0": ("", "Q4_0", lambda _: None, {"dtype": "bfloat16"}),
    "Q8_0": ("", "Q8_0", lambda _: None, {"dtype": "bfloat16"}),
    "truncated": ("truncated", "F32", lambda p: p.write_bytes(p.read_bytes()[:-100]), {}),
    "header cut": ("truncated or damaged", "F32", lambda p: p.write_bytes(p.read_bytes()[:300]), {}),
    "LFS pointer": ("LFS", "F32", lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), {}),
    "0xff in blocks": ("not finite", "Q4_0", spoil, {"dtype": "bfloat16"}),
    "0xff in blocks, dequantized": ("", "Q4_0", spoil, {"quantization": "none"}),
    "safetensors asked for": (
        "load_format is safetensors",
        "F32",
        lambda _: None,
        {"load_format": "safetensors"},
    ),
    "transformers asked for": ("not GGUF files", "F32", lambda _: None, {"model_impl": "transformers"}),
}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("reason", "form", "damage", "settings"), GGUF_FAULTS.values(), ids=GGUF_FAULTS.keys()
)
def test_gguf_files(
    make_tiny_llama: MAKE, tmp_path: Path, reason: str, form: str, damage: MAKE, settings: dict[str, Any]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny_llama(**WIDE), form)
    damage(path)
    assert_same_verdict(path, reason, settings)


@pytest.mark.parametrize("tensor", ["blk.0.attn_q.weight", "output_norm.weight", "blk.1.attn_norm.weight"])
def test_gguf_tensors_with_other_names(make_tiny_llama: MAKE, tmp_path: Path, tensor: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny_llama(**WIDE))
    renamed = tensor.replace("t", "y").encode()
    path.write_bytes(path.read_bytes().replace(tensor.encode(), renamed))
    assert_same_verdict(path, "missing", {})


def test_one_damaged_gguf_file_is_one_line(make_tiny_llama: MAKE, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny_llama(**WIDE))
    path.write_bytes(path.read_bytes()[:-100])
    config = config_for(path, {}).config
    facts = gather_model(config.model, with_torch=True, with_checksums=True)
    (check,) = [c for c in check_model(facts, config, read_host_facts()) if not c.is_well]
    assert check.code == "model" and "truncated" in check.text


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_that_is_not_the_embedding_is_used(
    make_tiny_llama: MAKE, caplog: pytest.LogCaptureFixture, is_equal: bool
) -> None:
    folder = make_tiny_llama(tie_word_embeddings=False, **WIDE).folder
    edit(folder, tie_word_embeddings=True)
    if is_equal:
        change(
            folder, **{"lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"]}
        )

    assert_same_verdict(folder, "", {})

    prepared = prepare(config_for(folder, {}))
    assert prepared.spec.tie_word_embeddings is is_equal
    assert ("lm_head.weight is not equal to model.embed_tokens.weight" in caplog.text) is not is_equal


def test_without_transformers_its_architectures_are_refused_before_loading(
    make_tiny_model: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("gpt_neox", **WIDE).folder
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else real(name, *a)
    )
    for settings in ({}, {"load_format": "dummy"}):
        assert "that package is not installed; install it" in loading_says(folder, settings)
        assert "that package is not installed" in doctor_says(folder, settings)


def test_values_are_read_only_where_they_matter(make_tiny_llama: MAKE) -> None:
    """The doctor finds NaN in a head that is quantized while loading, too."""
    folder = make_tiny_llama(**WIDE).folder
    head = np.full((96, 64), np.nan, np.float32)
    change(folder, **{"lm_head.weight": torch.from_numpy(head)})
    assert_same_verdict(folder, "lm_head.weight holds values", {"quantization": "int8", "dtype": "bfloat16"})


def with_prefix(folder: Path) -> None:
    """The tensors as a model with a head has them, and one of the head."""
    path = folder / "model.safetensors"
    save_file(
        {f"bert.{name}": value for name, value in load_file(path).items()} | {"cls.bias": torch.ones(4)}, path
    )


ENCODERS: dict[str, tuple[str, Callable[[Path], Any], dict[str, Any]]] = {
    "well": ("", lambda _: None, {}),
    "with a head": ("", with_prefix, {}),
    "more layers": ("'encoder.layer.3.* is missing", lambda f: edit(f, num_hidden_layers=4), {}),
    "fewer layers": ("unexpected tensor", lambda f: edit(f, num_hidden_layers=2), {}),
    "wider": ("has the shape", lambda f: edit(f, intermediate_size=128), {}),
    "more positions": (
        "position_embeddings.weight' has the shape",
        lambda f: edit(f, max_position_embeddings=200),
        {},
    ),
    "bias missing": (
        "output.dense.bias' is missing",
        lambda f: change(f, **{"0.output.dense.bias": None}),
        {},
    ),
    "relative positions": ("only 'absolute'", lambda f: edit(f, position_embedding_type="relative_key"), {}),
    "drafts": ("speculative is ngram, but bert is an encoder", lambda _: None, {"speculative": "ngram"}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_one_verdict_on_an_encoder(tmp_path, name):
    expected, damage, settings = ENCODERS[name]
    folder = make_encoder(tmp_path / "encoder", "bert").folder
    damage(folder)
    assert_same_verdict(folder, expected, settings)
