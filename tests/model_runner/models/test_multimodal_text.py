"""The text of multimodal folders against transformers, on tiny random models that transformers has saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.runtime.model_files.hf.hf_config import read_hf_spec
from engine.runtime.model_files.weight_files.check_weights import check_folder_weights
from engine.runtime.model_files.weight_memory import num_parameters
from engine.runtime.sampling_params import SamplingParams

from ..conftest import TinyModel
from .test_architectures import tokens_of

TEXT = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA = {
    "text_config": TEXT
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 7,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "vision_config": SIGLIP,
    "mm_tokens_per_image": 4,
    "image_token_index": 90,
    "boi_token_index": 91,
    "eoi_token_index": 92,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", GEMMA),
    "gemma3 untied": ("gemma3", {**GEMMA, "tie_word_embeddings": False}),
}
kinds = pytest.mark.parametrize(("outer", "options"), KINDS.values(), ids=KINDS.keys())
MakeTiny = Callable[..., TinyModel]


@pytest.fixture
def make_tiny(tmp_path: Path) -> MakeTiny:
    """A tiny random multimodal model, saved by transformers.

    With `old_names` its tensors are called as transformers called them before 4.52, with `new_names` as its modules
    are.
    """

    def make(
        outer: str, options: dict[str, Any], *, dtype: str = "float32", names: str = "saved", **save: Any
    ) -> TinyModel:
        from transformers import AutoConfig, AutoModelForImageTextToText

        torch.manual_seed(0)
        config = AutoConfig.for_model(outer, **options)
        reference = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5)
        reference = reference.to(getattr(torch, dtype))
        folder = tmp_path / outer
        reference.save_pretrained(folder, **save)
        if names == "new":
            save_file(_modules_names(reference), folder / "model.safetensors")
        return TinyModel(reference, folder, read_hf_spec(folder))

    return make


def _modules_names(reference: Any) -> dict[str, torch.Tensor]:
    """All tensors by the names of the modules, which `save_pretrained` changes into those of older versions."""
    tied = set(reference.all_tied_weights_keys)
    return {name: tensor.clone() for name, tensor in reference.state_dict().items() if name not in tied}


@kinds
@pytest.mark.parametrize("names", ["saved", "new"])
def test_logits_are_those_of_transformers(
    make_tiny: MakeTiny, make_driver: Any, unpack: Any, outer: str, options: dict[str, Any], names: str
) -> None:
    tiny = make_tiny(outer, options, names=names)
    spec, summary = check_folder_weights(tiny.folder, tiny.spec)
    driver = make_driver(spec, tiny.folder)
    prompt = tokens_of(150, vocab=90)
    expected = tiny.logprobs(prompt)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=5))

    found = []
    for chunk in (37, 1, 80, 32):
        found += unpack(driver.step([(req, chunk)]).prompt_logprobs[0])[0].tolist()

    np.testing.assert_allclose(found, expected[torch.arange(149), prompt[1:]], atol=2e-4)
    while len(req.output) < 8:
        driver.step([(req, 1)])
    assert tiny.logprobs(prompt + req.output)[149:-1].argmax(-1).tolist() == req.output
    tower = sum(
        tensor.numel()
        for name, tensor in tiny.reference.named_parameters()
        if "language_model" not in name and not name.startswith("lm_head")
    )
    assert summary.num_ignored > 0 and summary.ignored_bytes == 4 * tower
    assert num_parameters(spec) == sum(p.numel() for p in tiny.reference.parameters()) - tower
