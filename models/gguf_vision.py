"""`with_tower`: the tower of a GGUF model, which is a file of its own, llama.cpp's `mmproj`.

The file says how its images become tiles except for the filter of resizing, and which tokens stand around an image:
these are those of transformers' processors. The ids of tokens are in the file of the language model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import structs

from ..runtime.errors import ConfigError
from .fields import Fields
from .gguf.gguf_file import TOWER_ARCHITECTURE, GGUFFile
from .gguf_config import float32_text
from .spec.model_spec import ModelSpec
from .spec.vision_spec import ImageProcessing, VisionSpec

_PREFIX: Final = "clip.vision."
_MAX_SIDE: Final = 1 << 14
_LANCZOS: Final = 1
_BILINEAR: Final = 2
_BICUBIC: Final = 3
_QWEN3_VL: Final = ("qwen3vl", "qwen3vlmoe")
_QWEN3_PIXELS: Final = (65_536, 16_777_216)


def with_tower(file: GGUFFile, spec: ModelSpec, path: Path) -> ModelSpec:
    """The architecture of a language model with the tower in another file, of which `file` gets the tensors.

    Raises:
        ConfigError: the tower is of another model, of a kind that is not implemented, or its file is damaged.
    """
    if spec.encoder is not None or spec.pooling is not None:
        raise ConfigError(f"{path}: the tower of a model that makes vectors, of texts only; drop --mmproj")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    tower = GGUFFile(path, with_lists=False)
    fields = Fields(path, tower.metadata)
    architecture = fields.text("general.architecture")
    if architecture != TOWER_ARCHITECTURE:
        raise fields.error(
            "general.architecture",
            architecture,
            f"expected {TOWER_ARCHITECTURE!r}: it is no tower (mmproj); give the file that llama.cpp's converter makes "
            "with --mmproj",
        )
    key = fields.given("clip.vision.projector_type", "clip.projector_type")
    projector = fields.text(key, default="mlp")
    read = _READERS.get(projector)
    if read is None:
        raise fields.error(
            key,
            projector,
            f"which the engine does not compute, only {', '.join(_READERS)}; give the model's folder with "
            "safetensors, or serve its text with --language-model-only",
        )
    size = fields.integer(f"{_PREFIX}projection_dim", 1, 1 << 20, default=spec.hidden_size)
    if size != spec.hidden_size:
        raise fields.error(
            f"{_PREFIX}projection_dim",
            size,
            f"but the embedding_length of {file.path.name} is {spec.hidden_size}: it is the tower of another model; "
            "give that of this one with --mmproj",
        )
    ids = _TokenIds(file.path, tokens if isinstance(tokens, list) else [])
    vision = read(_Files(fields, ids, Fields(file.path, file.metadata), spec))
    file.add_tower(tower)
    return structs.replace(spec, vision=vision)


class _TokenIds:
    """Ids by text, in the vocabulary of the language model."""

    def __init__(self, path: Path, tokens: list[str]) -> None:
        self._path, self._tokens = path, tokens

    def of(self, text: str) -> int:
        """The id of a token that the prompts of images need."""
        try:
            return self._tokens.index(text)
        except ValueError:
            raise ConfigError(
                f"{self._path}: the vocabulary has no token {text!r}, which stands for images: it is the language "
                "model of another tower; give both files of one model, or use --language-model-only"
            ) from None


class _Files(NamedTuple):
    """The fields of the tower's file, and the vocabulary, the fields and the architecture of the language model."""

    tower: Fields
    ids: _TokenIds
    text: Fields
    spec: ModelSpec


def _idefics3(files: _Files) -> VisionSpec:
    fields, around = files.tower, "<fake_token_around_image>"
    facts = _siglip(files, _LANCZOS)
    for text in (around, "<global-img>"):
        files.ids.of(text)
    longest = fields.integer(f"{_PREFIX}preproc_image_size", 1, _MAX_SIDE, default=4 * facts["image_size"])
    return VisionSpec(
        family="idefics3",
        scale_factor=_scale_factor(files, facts, None),
        image_token_id=files.ids.of("<image>"),
        image_token="<image>",
        begin_token=around,
        end_token=around,
        marker="<image>",
        global_token="<global-img>",
        **facts | {"processing": structs.replace(facts["processing"], longest_edge=longest, splits=True)},
    )


def _gemma3(files: _Files) -> VisionSpec:
    facts, begin, end = _siglip(files, _BILINEAR), "<start_of_image>", "<end_of_image>"
    for text in (begin, end):
        files.ids.of(text)
    return VisionSpec(
        family="gemma3",
        scale_factor=_scale_factor(files, facts, 4),
        sees_whole=True,
        image_token_id=files.ids.of("<image_soft_token>"),
        image_token="<image_soft_token>",
        begin_token=begin,
        end_token=end,
        marker=begin,
        **facts,
    )


def _siglip(files: _Files, resample: int) -> dict[str, Any]:
    """The sizes of a tower of SigLIP, and how an image becomes one tile."""
    fields = files.tower
    image_size = fields.integer(f"{_PREFIX}image_size", 1, _MAX_SIDE)
    size = fields.integer(f"{_PREFIX}embedding_length", 1, 1 << 20)
    norm_eps = fields.number(f"{_PREFIX}attention.layer_norm_epsilon", 1e-30, 1.0, default=1e-6)
    if not fields.boolean("clip.use_gelu", default=False):
        raise fields.error("clip.use_gelu", False, "expected true for a tower of SigLIP; download it again")
    num_heads = fields.integer(f"{_PREFIX}attention.head_count", 1, 1 << 12)
    if size % num_heads:
        rule = f"they cannot divide the embedding length {size}"
        raise fields.error(f"{_PREFIX}attention.head_count", num_heads, rule)
    return {
        "hidden_size": size,
        "intermediate_size": fields.integer(f"{_PREFIX}feed_forward_length", 1, 1 << 22),
        "num_layers": fields.integer(f"{_PREFIX}block_count", 1, 1 << 12),
        "num_heads": num_heads,
        "norm_eps": float32_text(norm_eps),
        "activation": "gelu_tanh",  # ggml's gelu
        "image_size": image_size,
        "patch_size": fields.integer(f"{_PREFIX}patch_size", 1, image_size),
        "processing": ImageProcessing(
            longest_edge=None,
            tile_size=image_size,
            splits=False,
            resample=resample,
            rescale_factor=1 / 255,
            mean=_by_color(fields, f"{_PREFIX}image_mean", -1e9),
            std=_by_color(fields, f"{_PREFIX}image_std", 1e-9),
        ),
    }


def _scale_factor(files: _Files, facts: dict[str, Any], default: int | None) -> int:
    name, grid = f"{_PREFIX}projector.scale_factor", facts["image_size"] // facts["patch_size"]
    factor = files.tower.integer(name, 1, 64, default=default)
    if grid % factor:
        raise files.tower.error(name, factor, f"which cannot divide the {grid} patches of a tile's side")
    return factor


def _qwen3(files: _Files) -> VisionSpec:
    """The tower of Qwen3-VL; the bounds of pixels are those of the published processors."""
    fields, ids, spec = files.tower, files.ids, files.spec
    architecture = files.text.text("general.architecture")
    if architecture not in _QWEN3_VL:
        rule = f"whose tower is not computed from GGUF files, only that of {' and '.join(_QWEN3_VL)}"
        raise files.text.error("general.architecture", architecture, f"{rule}; give the model's folder")
    size = fields.integer(f"{_PREFIX}embedding_length", 1, 1 << 20)
    num_heads = fields.integer(f"{_PREFIX}attention.head_count", 1, 1 << 12)
    if size % (4 * num_heads):
        rule = f"they cannot divide the embedding length {size} into multiples of 4"
        raise fields.error(f"{_PREFIX}attention.head_count", num_heads, rule)
    patch_size = fields.integer(f"{_PREFIX}patch_size", 1, _MAX_SIDE)
    factor = fields.integer(f"{_PREFIX}spatial_merge_size", 1, 64, default=2)
    grid = fields.integer(f"{_PREFIX}image_size", patch_size, _MAX_SIDE) // patch_size
    num_layers = fields.integer(f"{_PREFIX}block_count", 1, 1 << 12)
    least = fields.integer(f"{_PREFIX}image_min_pixels", 1, 1 << 30, default=_QWEN3_PIXELS[0])
    most = fields.integer(f"{_PREFIX}image_max_pixels", least, 1 << 30, default=_QWEN3_PIXELS[1])
    return VisionSpec(
        family="qwen3_vl",
        hidden_size=size,
        intermediate_size=fields.integer(f"{_PREFIX}feed_forward_length", 1, 1 << 22),
        num_layers=num_layers,
        num_heads=num_heads,
        norm_eps=1e-6,
        activation="gelu_tanh",
        image_size=0,
        patch_size=patch_size,
        scale_factor=factor,
        image_token_id=ids.of("<|image_pad|>"),
        image_token="<|image_pad|>",
        begin_token="<|vision_start|>",
        end_token="<|vision_end|>",
        marker="<|image_pad|>",
        processing=ImageProcessing(
            longest_edge=None,
            tile_size=patch_size * factor,
            splits=True,
            min_pixels=least,
            max_pixels=max(most, (patch_size * factor) ** 2),
            resample=_BICUBIC,
            rescale_factor=1 / 255,
            mean=_by_color(fields, f"{_PREFIX}image_mean", -1e9),
            std=_by_color(fields, f"{_PREFIX}image_std", 1e-9),
        ),
        num_positions=grid**2,
        deepstack_layers=_deepstack_layers(fields, num_layers),
        rope_sections=_rope_sections(files.text, spec),
        rope_alternates=True,
    )


def _deepstack_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    name = f"{_PREFIX}is_deepstack_layers"
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, np.ndarray) or value.dtype.kind != "b" or value.shape != (num_layers,):
        raise fields.error(name, value, f"expected true or false for each of the {num_layers} layers")
    return tuple(np.flatnonzero(value).tolist())


def _rope_sections(fields: Fields, spec: ModelSpec) -> tuple[int, ...]:
    """How the pairs of rotated dimensions of the language model are divided among its three axes."""
    name = f"{fields.text('general.architecture')}.rope.dimension_sections"
    value, num_turning = fields.get(name), (spec.rotary_dim or spec.head_dim) // 2
    sections = value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "iu" else []
    if len(sections) not in (3, 4) or sum(sections) != num_turning or any(sections[3:]):
        rule = f"expected three numbers with the sum {num_turning}, the pairs of a head that turn, and a 0"
        raise fields.error(name, value, f"{rule}; convert the model again")
    return tuple(sections[:3])


_READERS: Final[dict[str, Callable[[_Files], VisionSpec]]] = {
    "idefics3": _idefics3,
    "gemma3": _gemma3,
    "qwen3vl_merger": _qwen3,
}


def _by_color(fields: Fields, name: str, low: float) -> tuple[float, float, float]:
    value = fields.get(name)
    if (
        not isinstance(value, np.ndarray)
        or value.dtype.kind != "f"
        or len(value) != 3
        or not (value >= low).all()
    ):
        raise fields.error(name, value, f"expected three numbers of at least {low:g}, one for each color")
    red, green, blue = (float32_text(float(number)) for number in value)
    return red, green, blue
