"""Images of Gemma 4 against transformers, on tiny random ones: rows, log-probabilities, chunks, prefixes, ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.attention.fa3 import FlashAttention3
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.multimodal_types import MULTIMODAL
from engine.models.spec.model_spec import with_quantization
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.model_choice import TaskChoice
from engine.runtime.step_plan import Encode
from tests.model_runner.conftest import Driver, int32
from tests.model_runner.distributed.test_tensor_parallel import load_rank
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks
from tests.model_runner.structures.families import GEMMA4, SHARING

from .test_qwen_vl import BEGIN_ID, END_ID, GRIDS, IMAGE_ID, TEXT, Image, Pictures, Qwen, scores
from .test_whole_images import cuts_of

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 240,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
PROCESSOR = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70, "do_normalize": False}
OF_TEXT = TEXT | GEMMA4 | {"sliding_window": 6, "pad_token_id": 7}
"""The window is shorter than an image; the token that stands for images is not the first one."""
UNIFIED = {
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 48,
    "output_proj_dims": 48,
    "mm_posemb_size": 80,
}
WHOLE = {"use_bidirectional_attention": "vision"}
NO_INPUTS = {"hidden_size_per_layer_input": 0}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as E2B": (SHARING, {"use_clipped_linears": True}),
    "as 31B": (
        WHOLE | NO_INPUTS | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"standardize": True},
    ),
    "inputs of layers, whole images, windows last": (WHOLE | SHARING | {"num_kv_shared_layers": 0}, {}),
    "as 26B-A4B": (
        WHOLE
        | NO_INPUTS
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
        {"standardize": True},
    ),
    "as 12B": (NO_INPUTS, UNIFIED),
}


class Gemma4(Qwen):
    """The patches of images are padded to those of the largest one, and their positions are given."""

    def inputs(self, tokens: Sequence[int], images: Sequence[Image]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {"input_ids": torch.tensor([tokens])}
        assert self.spec.vision is not None
        if not images:
            return found
        side, most = self.spec.vision.patch_size, 70 * self.spec.vision.scale_factor**2
        pixels = np.zeros((len(images), most, 3 * side * side), np.float32)
        places = np.full((len(images), most, 2), -1)
        for number, image in enumerate(images):
            rescaled = (image.astype(np.float64) / 255).astype(np.float32)
            rows, columns = (size // side for size in image.shape[:2])
            patches = rescaled.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
            pixels[number, : rows * columns] = patches.reshape(rows * columns, -1)
            grid = np.meshgrid(np.arange(columns), np.arange(rows))
            places[number, : rows * columns] = np.stack(grid, axis=-1).reshape(-1, 2)
        is_image = [[int(token == IMAGE_ID) for token in tokens]]
        found |= {
            "pixel_values": torch.from_numpy(pixels),
            "image_position_ids": torch.from_numpy(places),
            "mm_token_type_ids": torch.tensor(is_image),
        }
        if self.spec.vision.family == "gemma4_unified":
            # Without them this class attends to whole images in all layers; its `generate` does so in windows only.
            found["attention_mask"] = self.reference.create_masks_for_generate(
                self.reference.config,
                torch.zeros(1, len(tokens), 64),
                None,
                None,
                torch.arange(len(tokens))[None],
                found["mm_token_type_ids"],
            )
        return found


IDS: dict[str, Any] = {
    "image_token_id": IMAGE_ID,
    "boi_token_id": BEGIN_ID,
    "eoi_token_id": END_ID,
    "video_token_id": 94,
    "audio_token_id": 95,
}


def save_random(folder: Path, text: dict[str, Any], tower: dict[str, Any], **ids: int) -> Any:
    """A tiny random model of transformers, which it saves, with a processor's configuration."""
    import transformers

    is_unified = "mm_embed_dim" in tower

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "gemma4_unified" if is_unified else "gemma4",
        text_config=OF_TEXT | text,
        vision_config=tower if is_unified else TOWER | tower,
        audio_config=None,
        **ids,
    )
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name or "_ln" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5)
        for name, buffer in reference.named_buffers():
            if "layer_scalar" in name or "std_scale" in name:
                buffer.uniform_(0.5, 1.5)
            elif "std_bias" in name:
                buffer.normal_()
            elif name.endswith(("_min", "_max")):
                buffer.uniform_(0.5, 1.5).mul_(-1.0 if name.endswith("_min") else 1.0)
        reference.get_input_embeddings().weight[min(ids.values()) :] = 0.0  # no placeholders in answers
    reference.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    return reference


@pytest.fixture
def make_gemma4(tmp_path: Path) -> Callable[[str], Gemma4]:
    """A model of one of the `FORMS`."""

    def make(form: str) -> Gemma4:
        folder = tmp_path / "gemma4"
        return Gemma4(save_random(folder, *FORMS[form], **IDS), folder, read_hf_spec(folder))

    return make


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_rows_and_logits_are_those_of_transformers(
    make_gemma4: Callable[[str], Gemma4], make_driver: Any, unpack: Any, tmp_path: Path, form: str
) -> None:
    model = make_gemma4(form)
    spec, summary = check_folder_weights(model.folder, model.spec)
    assert spec.vision is not None and summary.num_ignored == 0
    buffers = sum(
        buffer.numel() for name, buffer in model.reference.named_buffers() if name.endswith(("_min", "_max"))
    )
    buffers += 2 * 32 * spec.vision.standardizes + spec.num_layers
    assert num_parameters(spec) == sum(p.numel() for p in model.reference.parameters()) + buffers
    driver = make_driver(spec, model.folder, num_encoder_rows=128, max_model_len=512)
    images = [model.image(seed, *grid) for seed, grid in enumerate(GRIDS)]
    kept, tokens = Pictures(driver, tmp_path), model.prompt(images)
    encodes = tuple(map(kept.add, images))
    req = kept.start(driver, tokens, encodes)

    result = driver.step([(req, len(tokens))], encodes=encodes)

    inputs = model.inputs(tokens, images)
    with torch.inference_mode():
        found = model.reference.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"])
        parts = list(driver.runner.encoder_rows._tower.parts_of(torch.from_numpy(images[0])))
    num_parts = spec.vision.num_parts * spec.vision.num_shares(*images[0].shape[:2])
    assert len(parts) == 1 + num_parts and all(part is None for part in parts[:-1])
    media = np.frombuffer(req.media, dtype=np.int32).reshape(-1, 3)
    own = torch.cat([driver.runner.encoder_rows.rows[row : row + num] for _, num, row in media.tolist()])
    np.testing.assert_allclose(own, torch.cat(list(found.pooler_output)), atol=1e-4)
    expected = model.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scores(unpack, result), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_images", [0, 1, 2, 3])
def test_chunks(
    make_gemma4: Callable[[str], Gemma4],
    make_driver: Any,
    unpack: Any,
    tmp_path: Path,
    form: str,
    num_images: int,
) -> None:
    """They cut images anywhere, unless the tokens of an image attend to all of it."""
    model = make_gemma4(form)
    images = [model.image(seed, *grid) for seed, grid in enumerate(GRIDS[:num_images])]
    driver = make_driver(model.spec, model.folder, num_encoder_rows=128)
    kept, tokens = Pictures(driver, tmp_path), model.prompt(images)
    encodes = tuple(map(kept.add, images))
    expected = model.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
    assert model.spec.vision is not None
    is_whole = model.spec.vision.sees_whole
    assert is_whole == (form != "as E2B")

    for chunk in (1, 3, 7, 12, len(tokens)):
        req = kept.start(driver, tokens, encodes)
        found: list[float] = []
        ends = cuts_of(tokens, chunk) if is_whole else [*range(chunk, len(tokens), chunk), len(tokens)]
        for end in ends:
            result = driver.step([(req, end - req.computed)], encodes=() if req.computed else encodes)
            found += scores(unpack, result) if result.prompt_logprobs else []
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-5, err_msg=f"chunks of {chunk}")
        while len(req.output) < 4:
            driver.step([(req, 1)])
        follows = model.logprobs(tokens + req.output, images)[len(tokens) - 1 : -1].argmax(-1)
        assert follows.tolist() == req.output
        driver.finish(req)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "cut"), [("as E2B", 9), ("as 31B", 23)])
def test_a_prefix_two_rows_text_and_decodes_in_one_step(
    make_gemma4: Callable[[str], Gemma4], make_driver: Any, unpack: Any, tmp_path: Path, form: str, cut: int
) -> None:
    """The prefix ends within an image, or after it where its tokens attend to all of it."""
    model = make_gemma4(form)
    first, second = model.image(1, 5, 3), model.image(2, 2, 7)
    driver = make_driver(model.spec, model.folder, num_encoder_rows=128, page_size=1)
    kept = Pictures(driver, tmp_path)
    encodes = (kept.add(first), kept.add(second))
    text, seeing = driver.start([4, 8, 15]), kept.start(driver, model.prompt([second], 3), encodes[1:])
    driver.step([(text, 3), (seeing, len(seeing.tokens))], encodes=encodes[1:])
    donor = kept.start(driver, model.prompt([first]), encodes[:1])
    driver.step([(donor, cut)], encodes=encodes[:1])
    tokens = model.prompt([first, second])
    tokens[:cut] = donor.tokens[:cut]
    assert (tokens[cut] == IMAGE_ID) == (form == "as E2B")
    req = kept.start(driver, tokens, encodes, prefix=(donor, cut))

    work = [(donor, len(donor.tokens) - cut), (req, len(tokens) - cut), (text, 1), (seeing, 1)]
    result = driver.step(work)

    target = model.logprobs(tokens, [first, second])[torch.arange(cut, len(tokens) - 1), tokens[cut + 1 :]]
    np.testing.assert_allclose(scores(unpack, result, 1), target, atol=1e-4)
    prompt = donor.tokens[: donor.prompt_len]
    target = model.logprobs(prompt, [first])[torch.arange(cut, len(prompt) - 1), prompt[cut + 1 :]]
    np.testing.assert_allclose(scores(unpack, result, 0), target, atol=1e-4)
    assert text.output[1] == model.logprobs([4, 8, 15, text.output[0]], [])[-1].argmax()
    assert seeing.output[1] == model.logprobs(seeing.tokens[:-1], [second])[-1].argmax()


@pytest.mark.slow
def test_transformers_generates_the_same_with_a_cache(
    make_gemma4: Callable[[str], Gemma4], make_driver: Any, tmp_path: Path
) -> None:
    """Gemma 4 12B attends to whole images in windows only when it generates."""
    model = make_gemma4("as 12B")
    image = model.image(5, 6, 4)
    driver, tokens = make_driver(model.spec, model.folder, num_encoder_rows=64), model.prompt([image])
    kept = Pictures(driver, tmp_path)
    encode = kept.add(image)
    req = kept.start(driver, tokens, (encode,))
    driver.step([(req, len(tokens))], encodes=(encode,))
    while len(req.output) < 4:
        driver.step([(req, 1)])

    inputs = model.inputs(tokens, [image]) | {"attention_mask": torch.ones(1, len(tokens))}
    found = model.reference.generate(**inputs, do_sample=False, max_new_tokens=4, eos_token_id=-1)

    assert found[0, len(tokens) :].tolist() == req.output


@pytest.mark.slow
@pytest.mark.parametrize("form", ["as E2B", "inputs of layers, whole images, windows last"])
def test_ranks(make_gemma4: Callable[[str], Gemma4], make_driver: Any, tmp_path: Path, form: str) -> None:
    """Each has the whole tower."""
    model, path = make_gemma4(form), tmp_path / "image"
    image = model.image(4, 3, 5)
    path.write_bytes(image.tobytes())
    assert model.spec.vision is not None
    blocks = range(0, 15, model.spec.vision.rows_per_tile)
    tokens, encode = (
        model.prompt([image]),
        Encode(str(path), (1, *image.shape), 0, 1, 0, blocks=int32(blocks)),
    )

    def run(group: ThreadGroup) -> list[int]:
        driver = Driver(*load_rank(model, group, num_encoder_rows=64))
        req = driver.start(tokens)
        req.media = int32([tokens.index(IMAGE_ID), 15, 0])
        driver.step([(req, len(tokens))], encodes=(encode,))
        while len(req.output) < 4:
            driver.step([(req, 1)])
        return req.output

    one, other = on_ranks(2, run)

    assert one == other
    assert model.logprobs(tokens + one, [image])[len(tokens) - 1 : -1].argmax(-1).tolist() == one


@pytest.mark.slow
@pytest.mark.parametrize("form", ["as E2B", "as 31B"])
def test_prompts_with_images_run_as_programs(
    make_gemma4: Callable[[str], Gemma4], make_driver: Any, tmp_path: Path, monkeypatch: Any, form: str
) -> None:
    model = make_gemma4(form)
    image = model.image(1, 3, 5)
    driver = make_driver(model.spec, model.folder, num_encoder_rows=64)
    kept, tokens = Pictures(driver, tmp_path), model.prompt([image])
    encode = kept.add(image)
    req, text = kept.start(driver, tokens, (encode,)), driver.start(model.prompt([], 3))

    with monkeypatch.context() as patch:
        patch.delattr(type(driver.runner.model), "forward")
        driver.step([(req, len(tokens)), (text, len(text.tokens))], encodes=(encode,))
    while len(req.output) < 4:
        driver.step([(req, 1)])

    assert (
        model.logprobs(tokens + req.output, [image])[len(tokens) - 1 : -1].argmax(-1).tolist() == req.output
    )
    assert text.output == [int(model.logprobs(text.tokens[:-1], [])[-1].argmax())]


def test_each_part_of_the_work_without_a_tower_is_a_share_of_the_patches(
    make_gemma4: Callable[[str], Gemma4], make_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = make_gemma4("as 12B"), list[int]()
    driver, image = make_driver(model.spec, model.folder, num_encoder_rows=64), model.image(5, 6, 4)
    tower = driver.runner.encoder_rows._tower
    product = tower._product

    def noted(x: torch.Tensor) -> Any:
        rows.append(len(x))
        return product(x)

    monkeypatch.setattr(tower, "_product", noted)
    done = [sum(rows) for _ in tower.parts_of(torch.from_numpy(image))]

    assert model.spec.vision is not None
    assert len(rows) == len(done) - 1 == model.spec.vision.num_shares(*image.shape[:2]) > 1
    assert done == [0, *itertools.accumulate(rows)] and sum(rows) == 6 * 4 and max(rows) - min(rows) <= 1


@pytest.mark.slow
def test_the_same_bits_beside_others_and_in_8_bits(
    make_gemma4: Callable[[str], Gemma4], make_driver: Any, tmp_path: Path
) -> None:
    model = make_gemma4("as E2B")
    image, rows = model.image(0, 3, 4), []
    for quantization in (None, "int8"):
        driver = make_driver(
            with_quantization(model.spec, quantization),
            model.folder,
            num_encoder_rows=64,
            quantization=quantization,
            dtype="bfloat16",
        )
        kept = Pictures(driver, tmp_path)
        encodes = [kept.add(each) for each in (image, model.image(1, 2, 2), image)]
        driver.step([], encodes=tuple(encodes))
        own = driver.runner.encoder_rows.rows
        per_block = kept.block_rows
        assert per_block < 12
        both = [
            torch.cat(
                [own[first : first + per_block] for first in np.frombuffer(each.blocks, dtype=np.int32)]
            )[:12]
            for each in (encodes[0], encodes[2])
        ]
        assert torch.equal(*both)
        rows.append(both[0].float())
    plain, made = rows

    with torch.inference_mode():
        inputs = model.inputs([IMAGE_ID] * 12, [image])
        found = model.reference.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"])
    assert (plain - found.pooler_output[0]).norm() < 0.1 * plain.norm()
    assert 0.0 < (plain - made).norm() < 0.2 * plain.norm()


def test_fa3_refuses_models_that_see_images_whole(make_gemma4: Callable[[str], Gemma4]) -> None:
    spec, bf16 = make_gemma4("as 31B").spec, torch.bfloat16

    reasons = FlashAttention3.reasons_against(spec, torch.device("cpu"), bf16, bf16)

    assert "attends to earlier tokens only, and those of an image see all of it" in reasons
    assert [spec.view_of(layer).causal_images for layer in range(4)] == [False, True, False, True]


def test_the_text_alone_is_read_without_the_tower(make_gemma4: Callable[[str], Gemma4]) -> None:
    model = make_gemma4("as E2B")
    spec = read_hf_spec(model.folder, TaskChoice(language_only=True))

    spec, summary = check_folder_weights(model.folder, spec)

    assert spec.vision is None and summary.num_ignored > 30


def test_names_of_modules_and_of_published_files_are_both_read() -> None:
    projection = "embed_vision.embedding_projection.weight"
    names = {
        "model.embed_vision.patch_dense.weight": "vision_embedder.patch_dense.weight",
        "model.vision_embedder.pos_norm.bias": "vision_embedder.pos_norm.bias",
        "embed_vision.pos_embedding": "vision_embedder.pos_embedding",
        "model.embed_vision.multimodal_embedder.embedding_projection.weight": projection,
        f"model.{projection}": projection,
        "model.embed_audio.embedding_projection.weight": None,
    }
    kind = MULTIMODAL["gemma4_unified"]
    assert {name: kind.usual_name(name, sees=True) for name in names} == names
    assert MULTIMODAL["gemma4"].usual_name("model.audio_tower.layers.0.norm_out.weight", sees=True) is None
