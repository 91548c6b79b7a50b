"""The text of Llama 3.2 Vision without its layers for images, and of Janus, against transformers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError

from .test_families import prompt_logprobs
from .test_multimodal_text import TEXT
from .text_checks import tokens_of

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_global_layers": 1,
    "attention_heads": 2,
    "intermediate_size": 24,
    "vision_output_dim": 32,
    "image_size": 28,
    "patch_size": 14,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
}
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
PROMPT = tokens_of(80)


@pytest.fixture
def mllama(tmp_path):
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    torch.manual_seed(0)
    text = {**TEXT, "num_hidden_layers": 5, "cross_attention_layers": [1, 3], "rope_parameters": ROPE}
    config = MllamaConfig(vision_config=VISION, text_config=text, image_token_index=97)
    config._attn_implementation = "eager"
    model = MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    return SimpleNamespace(reference=model, folder=tmp_path)


def test_layers_for_images_are_not_read(mllama, make_driver, unpack):
    spec = read_hf_spec(mllama.folder)
    check_folder_weights(mllama.folder, spec)

    found = prompt_logprobs(make_driver(spec, mllama.folder), unpack, 80)

    with torch.no_grad():
        logits = mllama.reference(input_ids=torch.tensor([PROMPT])).logits[0].float()
    expected = logits.log_softmax(-1)[torch.arange(79), PROMPT[1:]]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert spec.num_layers == 3
    tables = 2 * 96 * 48
    assert num_parameters(spec) < tables + 4 * 48 * (80 * 3 + 48 * 2 + 16 * 2 + 2)


def test_some_layers_must_attend_to_text(mllama):
    path = mllama.folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["cross_attention_layers"] = [0, 1, 2, 3, 4]
    path.write_text(json.dumps(config))

    with pytest.raises(ConfigError, match="cross_attention_layers is .* a layer that attends to text"):
        read_hf_spec(mllama.folder)


def test_the_text_of_janus_is_served(make_tiny_model, make_driver):
    tiny = make_tiny_model("llama")
    path, weights = tiny.folder / "config.json", tiny.folder / "model.safetensors"
    config = json.loads(path.read_text())
    config.pop("rms_norm_eps")
    outer = {
        "model_type": "multi_modality",
        "language_config": config,
        "vision_config": {"cls": "CLIPVisionTower"},
    }
    path.write_text(json.dumps(outer))
    tensors = {f"language_model.{name}": each for name, each in load_file(weights).items()}
    other = {"gen_head.output_mlp_projector.weight": torch.ones(4), "aligner.layers.0.weight": torch.ones(4)}
    save_file(tensors | other, weights)
    spec = read_hf_spec(tiny.folder)
    check_folder_weights(tiny.folder, spec)

    assert make_driver(spec, tiny.folder).generate([PROMPT], num=4) == [tiny.greedy(PROMPT, 4)]
