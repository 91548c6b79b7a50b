"""`with_tower`: the tower of a GGUF model, which is a file of its own, llama.cpp's `mmproj`.

The file says how its images become tiles except for the filter of resizing, and which tokens stand around an image:
these are those of transformers' processors. The ids of tokens are in the file of the language model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from msgspec import structs

from ..runtime.errors import ConfigError
from .fields import Fields
from .gguf.gguf_file import TOWER_ARCHITECTURE, GGUFFile
from .gguf_config import float32_text
from .spec.model_spec import ModelSpec
from .spec.vision_spec import ImageProcessing, VisionSpec

_PROJECTORS: Final = ("idefics3",)
_PREFIX: Final = "clip.vision."
_MAX_SIDE: Final = 1 << 14
_LANCZOS: Final = 1


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
    if projector not in _PROJECTORS:
        raise fields.error(
            key,
            projector,
            f"which the engine does not compute, only {', '.join(_PROJECTORS)}; give the model's folder with "
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
    vision = _read_vision(fields, _TokenIds(file.path, tokens if isinstance(tokens, list) else []))
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


def _read_vision(fields: Fields, ids: _TokenIds) -> VisionSpec:
    image_size = fields.integer(f"{_PREFIX}image_size", 1, _MAX_SIDE)
    size = fields.integer(f"{_PREFIX}embedding_length", 1, 1 << 20)
    norm_eps = fields.number(f"{_PREFIX}attention.layer_norm_epsilon", 1e-30, 1.0, default=1e-6)
    if not fields.boolean("clip.use_gelu", default=False):
        raise fields.error("clip.use_gelu", False, "expected true for a tower of SigLIP; download it again")
    vision = VisionSpec(
        family="idefics3",
        hidden_size=size,
        intermediate_size=fields.integer(f"{_PREFIX}feed_forward_length", 1, 1 << 22),
        num_layers=fields.integer(f"{_PREFIX}block_count", 1, 1 << 12),
        num_heads=fields.integer(f"{_PREFIX}attention.head_count", 1, 1 << 12),
        norm_eps=float32_text(norm_eps),
        activation="gelu_tanh",  # ggml's gelu
        image_size=image_size,
        patch_size=fields.integer(f"{_PREFIX}patch_size", 1, image_size),
        scale_factor=fields.integer(f"{_PREFIX}projector.scale_factor", 1, 64),
        image_token_id=ids.of("<image>"),
        image_token="<image>",
        begin_token="<fake_token_around_image>",
        end_token="<fake_token_around_image>",
        marker="<image>",
        global_token="<global-img>",
        processing=ImageProcessing(
            longest_edge=fields.integer(f"{_PREFIX}preproc_image_size", 1, _MAX_SIDE, default=4 * image_size),
            tile_size=image_size,
            splits=True,
            resample=_LANCZOS,
            rescale_factor=1 / 255,
            mean=_by_color(fields, f"{_PREFIX}image_mean", -1e9),
            std=_by_color(fields, f"{_PREFIX}image_std", 1e-9),
        ),
    )
    for text in (vision.begin_token, vision.global_token):
        ids.of(text)
    if size % vision.num_heads:
        rule = f"they cannot divide the embedding length {size}"
        raise fields.error(f"{_PREFIX}attention.head_count", vision.num_heads, rule)
    if vision.grid % vision.scale_factor:
        rule = f"which cannot divide the {vision.grid} patches of a tile's side"
        raise fields.error(f"{_PREFIX}projector.scale_factor", vision.scale_factor, rule)
    return vision


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
