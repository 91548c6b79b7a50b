"""Gemma 4 and Gemma 3n against transformers on tiny random models: each variant has several options at once."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.models.adapters.read_adapter import read_adapter
from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from tests.model_runner.adapters.peft_adapters import ALL_LINEAR, make_adapter

from .families import FAMILIES
from .text_checks import check_prefill_and_decode, tokens_of

families = pytest.mark.parametrize("name", ["gemma4, shared keys, wide MLPs", "gemma3n"])


@pytest.mark.fast_cases(1)
@families
def test_adapters_change_every_linear_layer(make_tiny_model, make_driver, tmp_path, name):
    row = FAMILIES[name]
    tiny = make_tiny_model(row.model_type, **row.options)
    names = [*ALL_LINEAR, "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
    if row.model_type == "gemma3n_text":
        names += ["linear_left", "linear_right"]
    adapter = make_adapter(tiny.reference, tmp_path / "adapter", target_modules=names, seed=3)
    spec = read_adapter(adapter.folder, "one", tiny.spec)
    driver = make_driver(tiny.spec, tiny.folder, adapter_slots=SlotSizes(1, 4, set(names)))
    driver.runner.adapters.store.read(5, spec)
    req = driver.start(tokens_of(20), adapter_slot=1)
    driver.step([(req, 20)], adapter_loads=[(1, 5)])
    while len(req.output) < 6:
        driver.step([(req, 1)])

    assert adapter.logits(req.tokens)[19:-1].argmax(-1).tolist() == req.output
    assert tiny.logprobs(req.tokens)[19:-1].argmax(-1).tolist() != req.output


def test_published_fields_and_the_keys_of_layers_that_share(make_tiny_model, make_driver, unpack):
    """Published folders name the wide heads by `global_head_dim`, and may have tensors that no layer uses."""
    row = FAMILIES["gemma4, shared keys, wide MLPs"]
    tiny = make_tiny_model(row.model_type, **row.options)
    path = tiny.folder / "config.json"
    config = json.loads(path.read_text())
    del config["per_layer_config"]
    path.write_text(json.dumps(config | {"global_head_dim": 32}))
    tensors = load_file(tiny.folder / "model.safetensors")
    tensors["model.layers.3.self_attn.k_proj.weight"] = torch.zeros(64, 48)
    tensors["model.layers.3.self_attn.k_norm.weight"] = torch.zeros(32)
    save_file(tensors, tiny.folder / "model.safetensors")

    assert read_hf_spec(tiny.folder) == tiny.spec
    spec, _ = check_folder_weights(tiny.folder, tiny.spec)
    check_prefill_and_decode(tiny, make_driver(spec, tiny.folder), unpack, length=40)


def test_a_folder_of_gemma3n_with_towers(make_tiny_model, make_driver, unpack):
    row = FAMILIES["gemma3n"]
    tiny = make_tiny_model(row.model_type, **row.options)
    path = tiny.folder / "config.json"
    inner = json.loads(path.read_text())
    del inner["architectures"]
    outer = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": inner,
    }
    path.write_text(json.dumps(outer))
    tensors = load_file(tiny.folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    towers = {"model.vision_tower.timm_model.stem.weight": torch.zeros(3)}
    towers |= {"model.embed_audio.embedding.weight": torch.zeros(2)}
    save_file(named | towers, tiny.folder / "model.safetensors")

    spec, summary = check_folder_weights(tiny.folder, read_hf_spec(tiny.folder))

    assert (spec.files.language_of, summary.num_ignored) == ("gemma3n", 2)
    check_prefill_and_decode(tiny, make_driver(spec, tiny.folder), unpack, length=40)
