"""Images of Llama 4 against transformers, on a tiny random one: rows, log-probabilities, chunks, answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.gguf_vision import with_tower
from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights, check_gguf_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError
from tests.mmproj_files import write_tower
from tests.model_runner.conftest import Driver, TinyModel
from tests.model_runner.structures.families import LLAMA4_FIXED
from tests.model_runner.weights.test_gguf_mixtures import write

from .test_images import IMAGE_ID, TEXT, Pictures, Seeing, Tiles, pictures, scores
from .test_scheduled_images import CASES, check_case

__all__ = ["pictures"]  # a fixture

LLAMA4 = {
    **TEXT,
    "model_type": "llama4_text",
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 45,
    "floor_scale": 32,
}
"""An image may lie in two chunks of attention."""
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
    "projector_input_dim": 40,
    "projector_output_dim": 40,
    "vision_output_dim": 40,
}
RENAMED = {
    "positional_embedding_vlm": "positional_embedding_vlm.weight",
    "multi_modal_projector.linear_1": "model.connector.modality_projection.proj",
    r"vision_model.model.(layers.\d+).post_attention_layernorm": r"vision_tower.encoder.\1.layer_norm2",
}
"""Names that the converter changes; the last of them it gave another one before it had Gemma 4."""
MakeLlama = Callable[..., Seeing]


class Llama(Seeing):
    """Tiles in one list; their values are computed in bfloat16."""

    def pixels(self, images: Sequence[Tiles]) -> torch.Tensor:
        assert self.spec.vision is not None
        how = self.spec.vision.processing
        pixels = torch.from_numpy(np.concatenate(images)).to(torch.bfloat16) * how.rescale_factor
        mean, std = (torch.tensor(values, dtype=torch.bfloat16) for values in (how.mean, how.std))
        return pixels.sub(mean).div_(std).permute(0, 3, 1, 2).float()


@pytest.fixture
def make_llama(tmp_path: Path) -> MakeLlama:
    """A tiny random model, saved by transformers, with a processor's configuration."""

    def make(text: Any = None, **tower: Any) -> Seeing:
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            "llama4",
            text_config=LLAMA4 | (text or {}),
            vision_config=TOWER | tower,
            image_token_index=IMAGE_ID,
        )
        config._attn_implementation = "eager"
        reference = transformers.Llama4ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5)
            reference.language_model.lm_head.weight[IMAGE_ID] = 0.0  # no placeholders in answers
        folder = tmp_path / "model"
        reference.save_pretrained(folder)
        side = config.vision_config.image_size
        processor = {
            "size": {"height": side, "width": side},
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.3, 0.7],
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return Llama(reference, folder, read_hf_spec(folder))

    return make


TOWERS: dict[str, dict[str, Any]] = {
    "as Scout": {},
    "joined by four, pixels after the last patch": {
        "pixel_shuffle_ratio": 0.25,
        "intermediate_size": 512,
        "image_size": 25,
        "patch_size": 3,
    },
    "one head, one patch a row": {
        "pixel_shuffle_ratio": 1.0,
        "intermediate_size": 32,
        "num_attention_heads": 1,
    },
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("tower", TOWERS.values(), ids=TOWERS.keys())
def test_rows_and_logits_are_those_of_transformers(
    make_llama: MakeLlama,
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    tower: dict[str, Any],
) -> None:
    seeing = make_llama(**tower)
    spec, summary = check_folder_weights(seeing.folder, seeing.spec)
    assert summary.num_ignored == 0
    assert num_parameters(spec) == sum(p.numel() for p in seeing.reference.parameters())
    images, kept = [seeing.tiles(1, 2), seeing.tiles(2)], pictures(seeing)
    driver = make_driver(spec, seeing.folder, num_encoder_rows=4 * seeing.per_tile, max_model_len=512)
    tokens, encodes = seeing.prompt(images), tuple(map(kept.encode, images))

    req = kept.start(driver, tokens, encodes)
    result = driver.step([(req, len(tokens))], encodes=encodes)

    with torch.inference_mode():
        features = seeing.reference.get_image_features(seeing.pixels(images)).last_hidden_state
        rows = seeing.reference.multi_modal_projector(features).flatten(0, 1)
    assert len(rows) == 3 * seeing.per_tile
    np.testing.assert_allclose(driver.runner.encoder_rows.rows[: len(rows)], rows, atol=1e-4)
    expected = seeing.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scores(unpack, result), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_images", [0, 1, 2, 3])
def test_chunks_may_cut_images_anywhere(
    make_llama: MakeLlama,
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    num_images: int,
) -> None:
    seeing = make_llama()
    images = [seeing.tiles(seed, 1 + seed % 2) for seed in range(num_images)]
    tokens, kept = seeing.prompt(images), pictures(seeing)
    driver = make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    encodes = tuple(map(kept.encode, images))
    target = seeing.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]

    for chunk in (1, 3, 7, 12, 40, len(tokens)):
        req, found = kept.start(driver, tokens, encodes), []
        while req.computed < len(tokens):
            part = (req, min(chunk, len(tokens) - req.computed))
            result = driver.step([part], encodes=encodes if not req.computed else ())
            found += scores(unpack, result) if result.prompt_logprobs else []
        np.testing.assert_allclose(found, target, atol=1e-4, err_msg=f"chunks of {chunk}")
        while len(req.output) < 4:
            driver.step([(req, 1)])
        follows = seeing.logprobs(tokens + req.output, images)[len(tokens) - 1 : -1].argmax(-1)
        assert follows.tolist() == req.output
        driver.finish(req)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(
    make_llama: MakeLlama, make_driver: Callable[..., Driver], tmp_path: Path, case: str
) -> None:
    """Prompts with 0 to 3 images, with hits of the prefix cache within them, retracted, and in parts of tiles."""
    check_case(make_llama(), make_driver, tmp_path, CASES[case])


def test_names_of_published_files_and_newer_ones(make_llama: MakeLlama) -> None:
    """Towers have `model.` before them or not."""
    seeing = make_llama()
    path = seeing.folder / "model.safetensors"
    stored = load_file(path)
    assert {"vision_model.positional_embedding_vlm", "multi_modal_projector.linear_1.weight"} < {*stored}
    renamed = {(name if name.startswith("language") else f"model.{name}"): x for name, x in stored.items()}
    save_file(renamed, path)

    _, summary = check_folder_weights(seeing.folder, seeing.spec)

    assert summary.num_ignored == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "atol"), [("F32", 1e-4), ("F16", 0.03)])
def test_a_pair_of_gguf_files(
    make_llama: MakeLlama,
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    tmp_path: Path,
    kind: str,
    atol: float,
) -> None:
    """The names of the tower's tensors as llama.cpp's converter has them, and its keys."""
    seeing = make_llama(text=LLAMA4_FIXED)
    text, tower = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    seeing.reference.language_model.save_pretrained(tmp_path / "text")
    language = TinyModel(seeing.reference.language_model, tmp_path / "text", seeing.spec)
    write(text, language, "llama4")
    config = json.loads((seeing.folder / "config.json").read_text())
    stored = load_file(seeing.folder / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        for own, known in RENAMED.items():
            name = re.sub(own, known, name)
        if not name.startswith("language_model."):
            tensors[name] = tensor.numpy()
    keys = {"projector_type": "llama4", "vision__projector__scale_factor": 2}
    write_tower(seeing.folder, tower, config, tensors, kind, False, keys)
    file = GGUFFile(text)
    special = [
        "<|image_start|>",
        "<|image_end|>",
        "<|image|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ]
    tokens = [*special, *(f"<unused{n}>" for n in range(IMAGE_ID - len(special))), "<|patch|>"]
    file.metadata = {**file.metadata, "tokenizer.ggml.tokens": tokens}

    spec = with_tower(file, read_gguf_spec(file), tower)

    assert spec.vision == seeing.spec.vision and num_parameters(spec) == num_parameters(seeing.spec)
    check_gguf_weights(file, spec)
    driver = make_driver(spec, text, kind="gguf", tower=str(tower), num_encoder_rows=64)
    images, kept = [seeing.tiles(1, 2), seeing.tiles(2)], pictures(seeing)
    prompt, encodes = seeing.prompt(images), tuple(map(kept.encode, images))
    result = driver.step([(kept.start(driver, prompt, encodes), len(prompt))], encodes=encodes)
    expected = seeing.logprobs(prompt, images)[torch.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(scores(unpack, result), expected, atol=atol)
    file.metadata = {**file.metadata, "tokenizer.ggml.tokens": [*tokens[:4], *tokens[5:]]}
    with pytest.raises(ConfigError, match=r"has no token '<\|tile_y_separator\|>', which stands for images"):
        with_tower(file, read_gguf_spec(file), tower)
