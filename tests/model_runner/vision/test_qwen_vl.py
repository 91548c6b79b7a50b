"""Images of Qwen's models against transformers, on tiny random ones: rows, logits, chunks, positions on three axes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.model_runner.layers.rotary import RotaryEmbedding
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.media import tile_rows
from engine.runtime.messages import MediaItem
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import Encode
from engine.scheduler.requests.prompt_images import rope_axes
from tests.model_runner.conftest import Driver, Request, SeeingExecutor, int32

IMAGE_ID, BEGIN_ID, END_ID = 93, 91, 92
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=3, seed=0, max_new_tokens=64)
Image = npt.NDArray[np.uint8]

TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIZES = {"depth": 4, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64, "intermediate_size": 40}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections, **more}


FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {"rope_parameters": _rope([2, 3, 3])},
        {"depth": 4, "num_heads": 2, "patch_size": 4, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _rope([2, 3, 3])},
        {**SIZES, "hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1, 3]},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"rope_parameters": _rope([4, 2, 2], mrope_interleaved=True)},
        {
            **SIZES,
            "hidden_size": 32,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2, 3],
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        DELTA
        | {
            "head_dim": 32,
            "rope_parameters": _rope([4, 2, 2], mrope_interleaved=True, partial_rotary_factor=0.5),
        },
        {**SIZES, "hidden_size": 32, "num_position_embeddings": 25},
    ),
}
MIXTURE = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
}
for _dense, _sparse, _name in (
    ("qwen3_vl", "qwen3_vl_moe", "Qwen3VLMoe"),
    ("qwen3_5", "qwen3_5_moe", "Qwen3_5Moe"),
):
    FAMILIES[_sparse] = (_name, FAMILIES[_dense][1] | MIXTURE, FAMILIES[_dense][2])


@dataclass(frozen=True)
class Qwen:
    """A tiny model of transformers that sees, its folder, and what the engine reads of it."""

    reference: Any
    folder: Path
    spec: ModelSpec

    def image(self, seed: int, rows: int, columns: int) -> Image:
        assert self.spec.vision is not None
        side = self.spec.vision.row_pixels
        shape = (rows * side, columns * side, 3)
        return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def prompt(self, images: Sequence[Image], seed: int = 0) -> list[int]:
        assert self.spec.vision is not None
        source = random.Random(seed)
        tokens = [source.randrange(90) for _ in range(5)]
        for image in images:
            num_rows = self.spec.vision.rows_of(*image.shape[:2])
            tokens += [BEGIN_ID, *[IMAGE_ID] * num_rows, END_ID, source.randrange(90)]
        return [*tokens, *[source.randrange(90) for _ in range(4)]]

    def inputs(self, tokens: Sequence[int], images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """The inputs of transformers' model: its patches have each pixel once for each frame."""
        vision = self.spec.vision
        assert vision is not None
        how, side, factor = vision.processing, vision.patch_size, vision.scale_factor
        found: dict[str, torch.Tensor] = {"input_ids": torch.tensor([tokens])}
        if not images:
            return found
        patches, grids = [], []
        for image in images:
            rescaled = (image.astype(np.float64) * how.rescale_factor).astype(np.float32)
            values = (rescaled - np.asarray(how.mean, np.float32)) / np.asarray(how.std, np.float32)
            height, width = (size // (side * factor) for size in image.shape[:2])
            blocks = values.reshape(height, factor, side, width, factor, side, 3).transpose(
                0, 3, 1, 4, 6, 2, 5
            )
            frames = np.repeat(blocks.reshape(-1, 3, 1, side * side), 2, axis=2)
            patches.append(frames.reshape(len(frames), -1))
            grids.append([1, height * factor, width * factor])
        is_image = [[int(token == IMAGE_ID) for token in tokens]]
        return found | {
            "pixel_values": torch.from_numpy(np.concatenate(patches)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": torch.tensor(is_image, dtype=torch.int32),
        }

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
        """Log-probabilities of what follows each token: [len, vocab]."""
        self.reference.model.rope_deltas = None
        logits: torch.Tensor = self.reference(**self.inputs(tokens, images)).logits[0].float()
        return logits.log_softmax(-1)


MakeQwen = Callable[[str], Qwen]


@pytest.fixture
def make_qwen(tmp_path: Path) -> MakeQwen:
    """A tiny random model, saved by transformers, with a processor's configuration."""

    def make(outer: str) -> Qwen:
        import transformers

        torch.manual_seed(0)
        name, text, vision = FAMILIES[outer]
        config = transformers.AutoConfig.for_model(
            outer,
            text_config=TEXT | text,
            vision_config=vision,
            image_token_id=IMAGE_ID,
            vision_start_token_id=BEGIN_ID,
            vision_end_token_id=END_ID,
            video_token_id=94,
        )
        config._attn_implementation = "eager"
        reference = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "norm" in name or "ln_q" in name:
                    parameter.uniform_(0.5, 1.5)
                elif parameter.ndim > 1:
                    parameter.normal_(0.0, 1.5 / parameter[0].numel() ** 0.5)
                elif "A_log" in name:  # a state that fades at once is one product, whose sign may be rounding
                    parameter.uniform_(-4.0, 0.0)
                elif "dt_bias" not in name:
                    parameter.normal_(0.0, 0.3)
            reference.lm_head.weight[IMAGE_ID:95] = 0.0  # no placeholders in answers
        folder = tmp_path / outer
        reference.save_pretrained(folder)
        processor = {
            "patch_size": 4,
            "size": {"shortest_edge": 64, "longest_edge": 8192},
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.3, 0.7],
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return Qwen(reference, folder, read_hf_spec(folder))

    return make


class Pictures:
    """Plays the scheduler's part: keeps images in files, and gives each some blocks of rows, not in order."""

    def __init__(self, driver: Driver, folder: Path) -> None:
        self._capacity, self._folder, self._number = driver.capacity, folder, 0
        self.block_rows = size = self._capacity.encoder_tile_rows
        self._blocks = list(range(0, self._capacity.num_encoder_rows, size))
        random.Random(5).shuffle(self._blocks)

    def add(self, image: Image) -> Encode:
        self._number += 1
        path = self._folder / f"image{self._number}"
        path.write_bytes(image.tobytes())
        height, width, colors = image.shape
        item = MediaItem(b"", b"", str(path), (1, height, width, colors))
        num = -(-tile_rows(item, self._capacity) // self._capacity.encoder_tile_rows)
        blocks = [self._blocks.pop() for _ in range(num)]
        return Encode(str(path), item.shape, 0, 1, blocks[0], blocks=int32(blocks) if num > 1 else b"")

    def start(
        self, driver: Driver, tokens: Sequence[int], encodes: Sequence[Encode], **options: Any
    ) -> Request:
        """A request whose images, in order, have these rows; the output so far may follow the prompt."""
        req = driver.start(tokens, SCORED, **options)
        size, media, items, start = self._capacity.encoder_tile_rows, [], [], 0
        for encode in encodes:
            start = tokens.index(BEGIN_ID, start) + 1
            item = MediaItem(b"", b"", encode.pixels, encode.shape)
            num_rows = tile_rows(item, self._capacity)
            blocks = np.frombuffer(encode.blocks, dtype=np.int32).tolist() or [encode.first_row]
            for number, block in enumerate(blocks):
                media += [start + number * size, min(size, num_rows - number * size), block]
            items.append(MediaItem(b"", int32([start, num_rows]), encode.pixels, encode.shape))
        req.media = int32(media)
        if items and self._capacity.has_rope_axes:
            req.rope = rope_axes(items, req.prompt_len, self._capacity.encoder_row_pixels)
        return req


def scores(unpack: Any, result: Any, index: int = 0) -> list[float]:
    found: list[float] = unpack(result.prompt_logprobs[index])[0].tolist()
    return found


GRIDS = [(3, 5), (1, 1), (6, 4)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("outer", FAMILIES)
def test_rows_and_logits_are_those_of_transformers(
    make_qwen: MakeQwen, make_driver: Any, unpack: Any, tmp_path: Path, outer: str
) -> None:
    qwen = make_qwen(outer)
    spec, summary = check_folder_weights(qwen.folder, qwen.spec)
    assert spec.vision is not None and summary.num_ignored == 0
    assert num_parameters(spec) == sum(p.numel() for p in qwen.reference.parameters())
    driver = make_driver(spec, qwen.folder, num_encoder_rows=128, max_model_len=512)
    images = [qwen.image(seed, *grid) for seed, grid in enumerate(GRIDS)]
    kept, tokens = Pictures(driver, tmp_path), qwen.prompt(images)
    encodes = tuple(map(kept.add, images))
    req = kept.start(driver, tokens, encodes)

    result = driver.step([(req, len(tokens))], encodes=encodes)

    inputs = qwen.inputs(tokens, images)
    with torch.inference_mode():
        found = qwen.reference.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    made = [torch.cat(list(each)) for each in getattr(found, "deepstack_features", None) or []]
    rows = torch.cat(list(found.pooler_output))
    media = np.frombuffer(req.media, dtype=np.int32).reshape(-1, 3)
    own = torch.cat([driver.runner.encoder_rows.rows[row : row + num] for _, num, row in media.tolist()])
    np.testing.assert_allclose(own, torch.cat([rows, *made], dim=1), atol=1e-4)
    with torch.inference_mode():
        parts = list(driver.runner.encoder_rows._tower.parts_of(torch.from_numpy(images[0])))
    num_parts = spec.vision.num_parts * spec.vision.num_shares(*images[0].shape[:2])
    assert len(parts) == 1 + num_parts and all(part is None for part in parts[:-1])
    expected = qwen.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scores(unpack, result), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("num_images", [0, 1, 2, 3])
def test_chunks_may_cut_images_anywhere(
    make_qwen: MakeQwen, make_driver: Any, unpack: Any, tmp_path: Path, outer: str, num_images: int
) -> None:
    """And the answer continues after the larger side of each image, not after its tokens."""
    qwen = make_qwen(outer)
    images = [qwen.image(seed, *grid) for seed, grid in enumerate(GRIDS[:num_images])]
    driver = make_driver(qwen.spec, qwen.folder, num_encoder_rows=128)
    kept, tokens = Pictures(driver, tmp_path), qwen.prompt(images)
    encodes = tuple(map(kept.add, images))
    expected = qwen.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()

    for chunk in (1, 3, 7, 12, len(tokens)):
        req = kept.start(driver, tokens, encodes)
        found, first = [], True
        while req.computed < len(tokens):
            work = [(req, min(chunk, len(tokens) - req.computed))]
            result = driver.step(work, encodes=encodes if first else ())
            found += scores(unpack, result) if result.prompt_logprobs else []
            first = False
        # Chunks of one token compute states token by token, which sums in another order.
        atol = 5e-4 if outer == "qwen3_5" else 1e-4
        np.testing.assert_allclose(found, expected, atol=atol, err_msg=f"chunks of {chunk}")
        while len(req.output) < 4:
            driver.step([(req, 1)])
        follows = qwen.logprobs(tokens + req.output, images)[len(tokens) - 1 : -1].argmax(-1)
        assert follows.tolist() == req.output
        driver.finish(req)


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["qwen2_5_vl", "qwen3_vl"])
def test_a_prefix_within_an_image_two_rows_text_and_decodes_in_one_step(
    make_qwen: MakeQwen, make_driver: Any, unpack: Any, tmp_path: Path, outer: str
) -> None:
    qwen = make_qwen(outer)
    first, second = qwen.image(1, 4, 3), qwen.image(2, 2, 7)
    driver = make_driver(qwen.spec, qwen.folder, num_encoder_rows=128)
    kept = Pictures(driver, tmp_path)
    encodes = (kept.add(first), kept.add(second))
    text, seeing = driver.start([4, 8, 15]), kept.start(driver, qwen.prompt([second], 3), encodes[1:])
    driver.step([(text, 3), (seeing, len(seeing.tokens))], encodes=encodes[1:])
    donor = kept.start(driver, qwen.prompt([first]), encodes[:1])
    driver.step([(donor, 10)], encodes=encodes[:1])
    tokens = qwen.prompt([first, second])
    tokens[:8] = donor.tokens[:8]
    assert tokens[7] == tokens[8] == IMAGE_ID
    req = kept.start(driver, tokens, encodes, prefix=(donor, 8))
    unseen = driver.start([3, 1, 4, 1, 5], SCORED)

    rest = len(donor.tokens) - 10
    work = [(donor, rest), (req, len(tokens) - 8), (unseen, 5), (text, 1), (seeing, 1)]
    result = driver.step(work)

    target = qwen.logprobs(tokens, [first, second])[torch.arange(8, len(tokens) - 1), tokens[9:]]
    np.testing.assert_allclose(scores(unpack, result, 1), target, atol=1e-4)
    prompt = donor.tokens[: donor.prompt_len]
    target = qwen.logprobs(prompt, [first])[torch.arange(10, len(prompt) - 1), prompt[11:]]
    np.testing.assert_allclose(scores(unpack, result, 0), target, atol=1e-4)
    expected = qwen.logprobs([3, 1, 4, 1, 5], [])
    np.testing.assert_allclose(scores(unpack, result, 2), expected[range(4), [1, 4, 1, 5]], atol=1e-4)
    for req, images in ((text, []), (seeing, [second])):
        follows = qwen.logprobs(req.tokens[:-1], images)[req.prompt_len - 1 :].argmax(-1)
        assert follows.tolist() == req.output


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["qwen2_5_vl", "qwen3_vl"])
def test_a_retracted_request_begins_again_in_other_rows_with_its_output(
    make_qwen: MakeQwen, make_driver: Any, tmp_path: Path, outer: str
) -> None:
    qwen = make_qwen(outer)
    image = qwen.image(3, 5, 4)
    driver = make_driver(qwen.spec, qwen.folder, num_encoder_rows=128)
    kept, tokens = Pictures(driver, tmp_path), qwen.prompt([image])
    encode, other = kept.add(image), kept.add(image)
    assert other.first_row != encode.first_row
    req = kept.start(driver, tokens, [encode])
    driver.step([(req, len(tokens))], encodes=(encode,))
    for _ in range(3):
        driver.step([(req, 1)])
    driver.finish(req)
    again = kept.start(driver, req.tokens, [other], prompt_len=len(tokens))

    driver.step([(again, len(tokens) + 2)], encodes=(other,))
    driver.step([(again, len(req.tokens) - len(tokens) - 2)])

    assert again.tokens[-1] == qwen.logprobs(req.tokens, [image])[-1].argmax()


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_decodes_after_images_are_recorded_beside_text(
    make_qwen: MakeQwen, make_driver: Any, tmp_path: Path, outer: str
) -> None:
    """A recording that text made serves a request with an image: its input is the position by which heads turn."""
    qwen = make_qwen(outer)
    image = qwen.image(1, 6, 2)
    outputs = []
    for eager in (False, True):
        driver = make_driver(qwen.spec, qwen.folder, dtype="bfloat16", num_encoder_rows=128)
        if eager:
            driver.run_eagerly()
        kept, tokens = Pictures(driver, tmp_path), qwen.prompt([image])
        encode = kept.add(image)
        text, req = driver.start([5, 6, 7]), kept.start(driver, tokens, [encode])
        driver.step([(text, 3)])
        driver.step([(text, 1)])
        seen = SeeingExecutor(driver)
        driver.step([(req, len(tokens))], encodes=(encode,))
        for _ in range(4):
            driver.step([(req, 1)])
        for _ in range(2):
            driver.step([(text, 1), (req, 1)])
        outputs.append((text.output, req.output))
        if not eager:
            assert seen.num_recorded == 7, "all decodes, that of the text before the image too"
            delta = 6 - 12  # the image's larger side counts, not its tokens
            turned = [(batch.positions, batch.rope_positions) for batch in seen.batches[1:]]
            deltas = [None if rope is None else (rope - positions).tolist() for positions, rope in turned]
            assert deltas == [*[[delta]] * 4, *[[0, delta]] * 2]
    assert outputs[0] == outputs[1]


def test_positions_of_a_prompt_are_those_of_transformers(make_qwen: MakeQwen) -> None:
    qwen = make_qwen("qwen3_vl")
    images = [qwen.image(seed, *grid) for seed, grid in enumerate([(3, 5), (2, 2), (7, 1)])]
    tokens = qwen.prompt(images)
    inputs = qwen.inputs(tokens, images)
    position_ids, delta = qwen.reference.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    starts = [at + 1 for at, token in enumerate(tokens) if token == BEGIN_ID]
    assert qwen.spec.vision is not None
    items = []
    for start, image in zip(starts, images, strict=True):
        height, width, colors = image.shape
        runs = int32([start, qwen.spec.vision.rows_of(height, width)])
        items.append(MediaItem(b"", runs, "", (1, height, width, colors)))

    found = np.frombuffer(rope_axes(items, len(tokens), qwen.spec.vision.row_pixels), dtype=np.int32)

    assert found.reshape(3, -1).tolist() == position_ids[:, 0].tolist()
    assert int(found.max()) + 1 - len(tokens) == int(delta)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["visual.", "model.visual."])
def test_both_layouts_of_folders_are_read(make_qwen: MakeQwen, names: str) -> None:
    """Folders of before transformers 4.52 have the tower beside `model.`; later ones within it."""
    from safetensors.torch import load_file, save_file

    qwen = make_qwen("qwen2_5_vl")
    path = qwen.folder / "model.safetensors"
    old = names == "visual."

    def renamed(name: str) -> str:
        plain = name.removeprefix("model.").removeprefix("language_model.")
        if plain.startswith("visual."):
            return names + plain.removeprefix("visual.")
        if plain.startswith("lm_head"):
            return plain
        return ("model." if old else "model.language_model.") + plain

    save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path)

    spec, summary = check_folder_weights(qwen.folder, qwen.spec)

    assert spec.vision is not None and summary.num_ignored == 0


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize(
    ("sections", "alternates"), [((2, 3, 3), False), ((4, 2, 2), True), ((3, 1, 2), True)]
)
def test_angles_of_axes_are_those_of_transformers(
    sections: tuple[int, ...], alternates: bool, in_one: bool
) -> None:
    """Also in the form for GPUs; equal axes have the bits of one axis."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    frequencies = 1.0 / (100.0 ** (torch.arange(8, dtype=torch.float32) / 8))
    vision = SimpleNamespace(rope_sections=sections, rope_alternates=alternates)
    context: Any = SimpleNamespace(
        max_model_len=40,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ops=SimpleNamespace(take_rows=lambda table, rows: table[rows]),
        spec=SimpleNamespace(vision=vision),
    )
    rotary = RotaryEmbedding(frequencies, 1.0, context, in_one=in_one)
    positions = torch.tensor([[1, 7, 7, 9], [1, 8, 20, 9], [1, 30, 2, 9]])
    angles = positions[..., None].float() * frequencies
    theirs: Any = Qwen3VLTextRotaryEmbedding if alternates else Qwen2_5_VLRotaryEmbedding
    both = [
        theirs.recomposition_frequencies(SimpleNamespace(mrope_section=sections), each.clone()[:, None])[0]
        for each in (angles.cos(), angles.sin())
    ]

    cos, sin = rotary.at(positions)

    signs = torch.cat((-torch.ones(8), torch.ones(8)))
    assert torch.equal(cos, both[0]) and torch.equal(sin, both[1] * signs)
    for own, whole in zip(rotary.at(positions[:1].expand(3, -1)), rotary.at(positions[0]), strict=True):
        assert torch.equal(own, whole)
