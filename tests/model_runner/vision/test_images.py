"""Images in prompts against transformers, on tiny random SmolVLMs: rows, logits, chunks, prefixes, ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.model_runner import NOT_FINITE
from engine.model_runner.vision.connectors import joined
from engine.model_runner.vision.encoder_rows import ImageTokens
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec, with_quantization
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.model_choice import Quantization, TaskChoice
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import Encode
from tests.model_runner.conftest import Driver, Request, SeeingExecutor, int32
from tests.model_runner.distributed.test_tensor_parallel import load_rank
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks

IMAGE_ID = 93
TEXT = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA_TEXT = TEXT | {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 6,
}
"""The window is shorter than an image."""
NAMES = {"smolvlm": "SmolVLM", "idefics3": "Idefics3", "gemma3": "Gemma3"}
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=3, seed=0, max_new_tokens=64)
Tiles = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Seeing:
    """A tiny model of transformers that sees, its folder, and where its pictures are kept."""

    reference: Any
    folder: Path
    spec: ModelSpec

    @property
    def per_tile(self) -> int:
        assert self.spec.vision is not None
        return self.spec.vision.rows_per_tile

    @property
    def num_parts(self) -> int:
        assert self.spec.vision is not None
        return self.spec.vision.num_parts

    row_pixels = 0
    image_blocks = 1
    """Blocks of rows for which a test counts: those of an image of any size, if that is one tile."""

    def rows_of(self, image: Tiles) -> int:
        """Rows of each tile."""
        return self.per_tile

    def blocks_of(self, image: Tiles) -> int:
        """Blocks of rows that it takes: one for each tile."""
        return len(image)

    def order_of(self, image: Tiles) -> tuple[int, bytes]:
        """The number of its runs, and `MediaItem.rows`."""
        return len(image), b""

    def tiles(self, seed: int, num: int = 1) -> Tiles:
        assert self.spec.vision is not None
        side = self.spec.vision.image_size
        source = np.random.default_rng(seed)
        return source.integers(0, 256, (num, side, side, 3), dtype=np.uint8)

    def pixels(self, images: Sequence[Tiles]) -> torch.Tensor:
        """[1, tiles, 3, side, side], of Gemma 3 without the 1, as transformers' processor normalizes them."""
        assert self.spec.vision is not None
        how = self.spec.vision.processing
        rescaled = (np.concatenate(images).astype(np.float64) * how.rescale_factor).astype(np.float32)
        normalized = (rescaled - np.asarray(how.mean, np.float32)) / np.asarray(how.std, np.float32)
        pixels = torch.from_numpy(normalized).permute(0, 3, 1, 2)
        return pixels if self.spec.vision.sees_whole else pixels[None]

    def prompt(self, images: Sequence[Tiles], seed: int = 0) -> list[int]:
        """Text around runs of placeholders, one for each tile."""
        source = random.Random(seed)
        tokens = [source.randrange(90) for _ in range(5)]
        for image in images:
            for _ in image:
                tokens += [91, *[IMAGE_ID] * self.per_tile, source.randrange(90)]
        return [*tokens, *[source.randrange(90) for _ in range(7)]]

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], images: Sequence[Tiles]) -> torch.Tensor:
        """Log-probabilities of what follows each token: [len, vocab]."""
        pixels = {"pixel_values": self.pixels(images)} if images else {}
        assert self.spec.vision is not None
        if self.spec.vision.sees_whole:
            pixels["token_type_ids"] = (torch.tensor([tokens]) == IMAGE_ID).long()
        logits: torch.Tensor = self.reference(torch.tensor([tokens]), **pixels).logits[0].float()
        return logits.log_softmax(-1)


MakeSeeing = Callable[..., Seeing]


@pytest.fixture
def make_seeing(tmp_path: Path) -> MakeSeeing:
    """A tiny random model, saved by transformers, with a processor's configuration."""

    def make(outer: str = "smolvlm", scale: int = 2, **vision: Any) -> Seeing:
        import transformers

        torch.manual_seed(0)
        tower = {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 24,
            "patch_size": 4,
        } | vision
        if outer == "gemma3":
            config = transformers.AutoConfig.for_model(
                outer,
                text_config=GEMMA_TEXT,
                vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **tower},
                image_token_id=IMAGE_ID,
                mm_tokens_per_image=(tower["image_size"] // tower["patch_size"] // scale) ** 2,
            )
        else:
            config = transformers.AutoConfig.for_model(
                outer, text_config=TEXT, vision_config=tower, image_token_id=IMAGE_ID, scale_factor=scale
            )
        config._attn_implementation = "eager"
        reference = getattr(transformers, f"{NAMES[outer]}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5)
            if outer != "gemma3":  # transformers wants a picture for a placeholder in an answer
                reference.lm_head.weight[IMAGE_ID] = 0.0
        folder = tmp_path / outer
        reference.save_pretrained(folder)
        side = tower["image_size"]
        processor = {
            "max_image_size": {"longest_edge": side},
            "size": {"height": side, "width": side} if outer == "gemma3" else {"longest_edge": 2 * side},
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.3, 0.7],
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return Seeing(reference, folder, read_hf_spec(folder))

    return make


class Pictures:
    """Plays the scheduler's part: keeps tiles in files, and gives them rows in the order in which they come."""

    def __init__(self, seeing: Seeing, folder: Path) -> None:
        self._seeing, self._folder, self.next_row = seeing, folder, 0

    def encode(self, image: Tiles) -> Encode:
        path = self._folder / f"tiles{self.next_row}"
        path.write_bytes(image.tobytes())
        tiles, height, width, colors = image.shape
        item = Encode(str(path), (tiles, height, width, colors), 0, len(image), self.next_row)
        self.next_row += len(image) * self._seeing.per_tile
        return item

    def media(self, tokens: Sequence[int], encodes: Sequence[Encode]) -> bytes:
        """The runs of placeholders of a prompt, with the rows of these images one after the other."""
        per_tile = self._seeing.per_tile
        rows = [e.first_row + n * per_tile for e in encodes for n in range(e.num_tiles)]
        starts = [p for p, t in enumerate(tokens) if t == IMAGE_ID and tokens[p - 1] != IMAGE_ID]
        assert len(starts) == len(rows)
        return int32([n for start, row in zip(starts, rows, strict=True) for n in (start, per_tile, row)])

    def start(
        self, driver: Driver, tokens: Sequence[int], encodes: Sequence[Encode], **options: Any
    ) -> Request:
        req = driver.start(tokens, SCORED, **options)
        req.media = self.media(tokens, encodes)
        return req


@pytest.fixture
def pictures(tmp_path: Path) -> Callable[[Seeing], Pictures]:
    return lambda seeing: Pictures(seeing, tmp_path)


def scores(unpack: Any, result: Any, index: int = 0) -> list[float]:
    found: list[float] = unpack(result.prompt_logprobs[index])[0].tolist()
    return found


SHAPES = {
    "smolvlm": ("smolvlm", 2, {}),
    "idefics3, joined by three": ("idefics3", 3, {}),
    "pixels after the last patch, exact gelu": ("smolvlm", 2, {"image_size": 27, "hidden_act": "gelu"}),
    "gemma 3": ("gemma3", 2, {}),
    "a grid whose fractions are rounded down": ("smolvlm", 2, {"image_size": 44, "patch_size": 2}),
    "one patch": ("smolvlm", 1, {"image_size": 7, "patch_size": 7, "num_hidden_layers": 1}),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("outer", "scale", "vision"), SHAPES.values(), ids=SHAPES.keys())
def test_rows_and_logits_are_those_of_transformers(
    make_seeing: MakeSeeing,
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    outer: str,
    scale: int,
    vision: dict[str, Any],
) -> None:
    seeing = make_seeing(outer, scale, **vision)
    spec, summary = check_folder_weights(seeing.folder, seeing.spec)
    assert summary.num_ignored == 0
    assert num_parameters(spec) == sum(p.numel() for p in seeing.reference.parameters())
    image, kept = seeing.tiles(1, 2), pictures(seeing)
    driver = make_driver(spec, seeing.folder, num_encoder_rows=3 * seeing.per_tile, max_model_len=512)
    tokens = seeing.prompt([image])
    encode = kept.encode(image)
    req = kept.start(driver, tokens, [encode])

    result = driver.step([(req, len(tokens))], encodes=(encode,))

    with torch.inference_mode():
        rows = seeing.reference.model.get_image_features(seeing.pixels([image])).pooler_output
    found = driver.runner.encoder_rows.rows[: 2 * seeing.per_tile]
    np.testing.assert_allclose(found, torch.cat(list(rows)), atol=1e-4)
    expected = seeing.logprobs(tokens, [image])[torch.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scores(unpack, result), expected, atol=1e-4)
    assert result.encode_s > 0.0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("num_images", [2, 0, 1, 3])
def test_chunks_may_cut_images_anywhere(
    make_seeing: MakeSeeing,
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    num_images: int,
) -> None:
    seeing = make_seeing()
    images = [seeing.tiles(seed, 1 + seed % 2) for seed in range(num_images)]
    tokens = seeing.prompt(images)
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    encodes = tuple(kept.encode(image) for image in images)
    expected = seeing.logprobs(tokens, images)
    target = expected[torch.arange(len(tokens) - 1), tokens[1:]].numpy()

    for chunk in (1, 3, 7, 12, len(tokens)):
        req = kept.start(driver, tokens, encodes)
        found, first = [], True
        while req.computed < len(tokens):
            result = driver.step(
                [(req, min(chunk, len(tokens) - req.computed))], encodes=encodes if first else ()
            )
            found += scores(unpack, result) if result.prompt_logprobs else []
            first = False
        np.testing.assert_allclose(found, target, atol=1e-4, err_msg=f"chunks of {chunk}")
        while len(req.output) < 4:
            driver.step([(req, 1)])
        follows = seeing.logprobs(tokens + req.output, images)[len(tokens) - 1 : -1].argmax(-1)
        assert follows.tolist() == req.output
        driver.finish(req)


def test_decodes_with_images_before_them_are_recorded(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    seeing = make_seeing()
    image, kept = seeing.tiles(1), pictures(seeing)
    driver = make_driver(seeing.spec, seeing.folder, dtype="bfloat16", num_encoder_rows=64)
    encode, tokens = kept.encode(image), seeing.prompt([image])
    req = driver.start(tokens)
    req.media = kept.media(tokens, [encode])
    seen = SeeingExecutor(driver)
    driver.step([(req, len(tokens))], encodes=(encode,))
    while len(req.output) < 5:
        driver.step([(req, 1)])

    assert seen.num_recorded == 4
    assert [batch.images is not None for batch in seen.batches] == [True, False, False, False, False]


def test_two_rows_a_shared_prefix_and_a_prompt_of_text(
    make_seeing: MakeSeeing, make_driver: Any, unpack: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    """A prefix that ends inside of an image is reused; in one step are two requests with images, text and a decode."""
    seeing = make_seeing()
    first, second = seeing.tiles(1), seeing.tiles(2)
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    encodes = (kept.encode(first), kept.encode(second))
    decoding = driver.start([4, 8, 15])
    driver.step([(decoding, 3)])
    donor_tokens = seeing.prompt([first])
    donor = kept.start(driver, donor_tokens, encodes[:1])
    driver.step([(donor, 10)], encodes=encodes[:1])
    assert donor_tokens[8] == donor_tokens[7] == IMAGE_ID
    tokens = seeing.prompt([first, second])
    tokens[:8] = donor_tokens[:8]
    req = kept.start(driver, tokens, encodes, prefix=(donor, 8))
    text = driver.start([3, 1, 4, 1, 5], SCORED)

    rest = len(donor_tokens) - 10
    work = [(donor, rest), (req, len(tokens) - 8), (text, 5), (decoding, 1)]
    result = driver.step(work, encodes=encodes[1:])

    expected = seeing.logprobs(tokens, [first, second])
    target = expected[torch.arange(8, len(tokens) - 1), tokens[9:]]
    np.testing.assert_allclose(scores(unpack, result, 1), target, atol=1e-4)
    expected = seeing.logprobs(donor_tokens, [first])
    target = expected[torch.arange(10, len(donor_tokens) - 1), donor_tokens[11:]]
    np.testing.assert_allclose(scores(unpack, result, 0), target, atol=1e-4)
    expected = seeing.logprobs([3, 1, 4, 1, 5], [])
    np.testing.assert_allclose(scores(unpack, result, 2), expected[range(4), [1, 4, 1, 5]], atol=1e-4)
    assert decoding.output[0] == seeing.logprobs([4, 8, 15], [])[-1].argmax()


def test_a_retracted_request_begins_again_with_its_output(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    """Its rows may be others then."""
    seeing = make_seeing()
    image = seeing.tiles(3)
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    tokens, encode = seeing.prompt([image]), kept.encode(image)
    req = kept.start(driver, tokens, [encode])
    driver.step([(req, len(tokens))], encodes=(encode,))
    driver.step([(req, 1)])
    driver.finish(req)
    again, other = driver.start(req.tokens, prompt_len=len(tokens)), kept.encode(image)
    again.media = kept.media(tokens, [other])
    assert other.first_row != encode.first_row

    driver.step([(again, len(req.tokens))], encodes=(other,))

    assert again.tokens[-1] == seeing.logprobs(req.tokens, [image])[-1].argmax()


def test_a_prompt_may_end_with_a_placeholder(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    """The last token is computed alone, as a decode would be."""
    seeing = make_seeing()
    image = seeing.tiles(3)
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    tokens, encode = [5, *[IMAGE_ID] * seeing.per_tile], kept.encode(image)
    req = driver.start(tokens)
    req.media = kept.media(tokens, [encode])
    driver.step([(req, len(tokens) - 1)], encodes=(encode,))
    driver.step([(req, 1)])

    assert req.output == [int(seeing.logprobs(tokens, [image])[-1].argmax())]


def test_a_picture_that_is_gone_or_not_finite_ends_its_requests_only(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures], monkeypatch: Any
) -> None:
    seeing = make_seeing()
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    images = [seeing.tiles(1), seeing.tiles(2), seeing.tiles(3)]
    good, gone, damaged = encodes = tuple(kept.encode(image) for image in images)
    Path(gone.pixels).unlink()
    tower = driver.runner.encoder_rows._tower
    parts_of, calls = tower.parts_of, []

    def damage(tile: torch.Tensor) -> Iterator[torch.Tensor]:
        calls.append(tile)
        *_, rows = parts_of(tile)
        yield rows * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(tower, "parts_of", damage)
    tokens = seeing.prompt(images[:1])
    reqs = [driver.start(tokens) for _ in encodes]
    for req, item in zip(reqs, encodes, strict=True):
        req.media = kept.media(tokens, [item])

    result = driver.step([(req, len(tokens)) for req in reqs], encodes=encodes)

    assert sorted(result.errors) == [1, 2] and result.errors[2] == NOT_FINITE
    assert result.errors[1].startswith("the pixels of an image are not there any more (FileNotFoundError)")
    again = driver.start(tokens)
    again.media = reqs[1].media
    Path(gone.pixels).write_bytes(images[0].tobytes())
    assert driver.step([(again, len(tokens))], encodes=(gone,)).errors == {}
    assert again.output == reqs[0].output[:1]
    assert damaged.first_row == 2 * seeing.per_tile and good.first_row == 0


def test_unfinished_work_does_not_go_on_in_the_rows_of_another_tile(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    """A tile loses its rows after some parts of its work. The next one there cannot be read, or is computed at once."""
    seeing = make_seeing()
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    first, other = kept.encode(seeing.tiles(1)), kept.encode(seeing.tiles(2))
    rows, last = driver.runner.encoder_rows, seeing.spec.vision.num_parts  # type: ignore[union-attr]

    def encode(item: Encode, begin: int, count: int) -> None:
        driver.step([], encodes=(replace(item, first_row=0, first_part=begin, num_parts=count),))

    encode(first, 0, last - 1)
    encode(replace(other, pixels=other.pixels + "lost"), 0, 1)
    encode(replace(other, pixels=other.pixels + "lost"), 1, last - 1)
    assert rows.rows[: seeing.per_tile].isnan().all() and "not there any more" in rows.failure(np.array([0]))
    encode(first, 0, last - 1)
    encode(other, 0, 0)
    expected = rows.rows[: seeing.per_tile].clone()
    driver.step([], encodes=(other,))
    assert torch.equal(expected, rows.rows[other.first_row :][: seeing.per_tile])
    encode(first, last - 1, 1)
    assert torch.equal(expected, rows.rows[: seeing.per_tile]), "the work of a tile that has no rows any more"


def test_a_tile_without_memory_drops_the_step(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures], monkeypatch: Any
) -> None:
    def no_memory(tile: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("none is left")

    seeing = make_seeing()
    kept, driver, image = (
        pictures(seeing),
        make_driver(seeing.spec, seeing.folder, num_encoder_rows=64),
        seeing.tiles(1),
    )
    tokens, encode = seeing.prompt([image]), kept.encode(image)
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.encoder_rows._tower, "parts_of", no_memory)
        req = kept.start(driver, tokens, [encode])
        plan = driver.plan([(req, len(tokens))], encodes=(encode,))
        assert driver.runner.launch(plan).wait().out_of_memory == "none is left"
    driver.finish(req)
    again = kept.start(driver, tokens, [encode])
    driver.step([(again, len(tokens))], encodes=(encode,))
    assert again.output == [int(seeing.logprobs(tokens, [image])[-1].argmax())]


def test_tiles_of_another_size_end_their_request_only(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    seeing = make_seeing()
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    image = seeing.tiles(1)
    tokens, encodes = seeing.prompt([image]), (kept.encode(image), kept.encode(image[:, ::2].copy()))
    reqs = [kept.start(driver, tokens, [each]) for each in encodes]

    result = driver.step([(req, len(tokens)) for req in reqs], encodes=encodes)

    assert [*result.errors] == [1] and "(12, 24, 3), but the model needs (24, 24, 3)" in result.errors[1]


def test_tensor_parallel_ranks_have_the_whole_tower(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    seeing = make_seeing()
    image = seeing.tiles(4, 2)
    tokens, kept = seeing.prompt([image]), pictures(seeing)
    encode = kept.encode(image)

    def run(group: ThreadGroup) -> list[int]:
        driver = Driver(*load_rank(seeing, group, num_encoder_rows=64))
        req = driver.start(tokens)
        req.media = kept.media(tokens, [encode])
        driver.step([(req, 20)], encodes=(encode,))
        driver.step([(req, len(tokens) - 20)])
        while len(req.output) < 4:
            driver.step([(req, 1)])
        return req.output

    one, other = on_ranks(2, run)

    assert one == other
    assert seeing.logprobs(tokens + one, [image])[len(tokens) - 1 : -1].argmax(-1).tolist() == one


def test_the_same_bits_in_every_batch_and_in_bfloat16(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    seeing = make_seeing()
    driver, kept = (
        make_driver(seeing.spec, seeing.folder, dtype="bfloat16", num_encoder_rows=99),
        pictures(seeing),
    )
    many = kept.encode(np.concatenate([seeing.tiles(5), seeing.tiles(6, 2)]))
    one, per_tile = kept.encode(seeing.tiles(5)), seeing.per_tile

    driver.step([], encodes=(many, one))

    rows = driver.runner.encoder_rows.rows
    assert rows.dtype == torch.bfloat16 and rows[:per_tile].isfinite().all()
    assert torch.equal(rows[:per_tile], rows[one.first_row : one.first_row + per_tile])
    with torch.inference_mode():
        expected = seeing.reference.model.get_image_features(seeing.pixels([seeing.tiles(5)])).pooler_output[
            0
        ]
    np.testing.assert_allclose(rows[:per_tile].float(), expected, atol=0.06 * float(expected.abs().max()))


def test_without_the_tower_its_weights_are_not_read(make_seeing: MakeSeeing, make_driver: Any) -> None:
    seeing = make_seeing()
    spec = read_hf_spec(seeing.folder, TaskChoice(language_only=True))

    _, summary = check_folder_weights(seeing.folder, spec)

    assert summary.num_ignored > 30 and spec.vision is None
    assert make_driver(spec, seeing.folder).runner.encoder_rows is None


def test_a_tower_that_is_missing_names_the_way_out(make_seeing: MakeSeeing) -> None:
    from safetensors.torch import load_file, save_file

    seeing = make_seeing()
    path = seeing.folder / "model.safetensors"
    kept = {name: each for name, each in load_file(path).items() if "post_layernorm" not in name}
    save_file(kept, path)

    with pytest.raises(
        ConfigError, match=r"'vision_model.post_layernorm.weight' is missing; .* --language-model-only"
    ):
        check_folder_weights(seeing.folder, seeing.spec)


def test_image_tokens_of_chunks() -> None:
    media = np.array([[3, 4, 20], [9, 2, 40]])

    found = ImageTokens.of([(0, 5, 6, media), (6, 0, 3, media), (9, 10, 1, media)])

    assert found is not None
    assert found.indices.tolist() == [0, 1, 4, 5, 9]
    assert found.rows.tolist() == [22, 23, 40, 41, 41]
    assert ImageTokens.of([(0, 0, 3, media), (3, 11, 5, media)]) is None


def test_pixel_shuffle_joins_squares() -> None:
    grid = torch.arange(16.0)[:, None]

    assert joined(grid, 4, 2).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@pytest.mark.skipif(bool(reasons_against_library()), reason="needs the C++ kernels")
def test_prompts_with_images_run_as_programs(
    make_seeing: MakeSeeing, make_driver: Any, pictures: Callable[[Seeing], Pictures], monkeypatch: Any
) -> None:
    """The model's own forward, which the program replaces, is not called; texts beside images are as they were."""
    seeing = make_seeing()
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    monkeypatch.delattr(type(driver.runner.model), "forward")
    image = seeing.tiles(1)
    tokens, text = seeing.prompt([image]), seeing.prompt([], seed=3)
    item = kept.encode(image)
    req, beside, alone = kept.start(driver, tokens, [item]), driver.start(text), driver.start(text)

    driver.step([(req, 11), (beside, len(text))], encodes=(item,))
    driver.step([(req, len(tokens) - 11)])
    driver.step([(alone, len(text))])

    assert req.output == [int(seeing.logprobs(tokens, [image])[-1].argmax())]
    assert beside.output == alone.output == [int(seeing.logprobs(text, [])[-1].argmax())]


@pytest.mark.parametrize(("asked", "same"), [("int8", False), ("int4", True)])
def test_a_tower_in_8_bits_makes_rows_near_the_plain_ones(
    make_seeing: MakeSeeing,
    make_driver: Any,
    pictures: Callable[[Seeing], Pictures],
    asked: Quantization,
    same: bool,
) -> None:
    """Beside a language model in 4 bits the tower stays plain."""
    seeing = make_seeing(hidden_size=64, intermediate_size=96)
    item = pictures(seeing).encode(seeing.tiles(1))
    rows = []
    for quantization in (None, asked):
        spec = with_quantization(seeing.spec, quantization)
        driver = make_driver(
            spec, seeing.folder, num_encoder_rows=64, quantization=quantization, dtype="bfloat16"
        )
        driver.step([], encodes=(item,))
        rows.append(driver.runner.encoder_rows.rows[: seeing.per_tile])
    plain, made = rows

    assert torch.equal(plain, made) == same
    assert (plain - made).norm() < 0.03 * plain.norm()
