"""`TowerFiles`: what the readers of llama.cpp's `mmproj` files take, and what these readers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..runtime.errors import ConfigError
from .fields import Fields
from .gguf.gguf_file import TensorInfo
from .gguf_config import float32_text
from .spec.model_spec import ModelSpec
from .spec.vision_spec import VisionActivation

PREFIX: Final = "clip.vision."
MAX_SIDE: Final = 1 << 14
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Filters, as Pillow numbers them."""
QUICK_GELU: Final = ""
"""The activation of a file that names none, see `tower_facts`."""


class TokenIds:
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

    def check(self, *texts: str) -> None:
        """Check that these tokens exist."""
        for text in texts:
            self.of(text)


class TowerFiles(NamedTuple):
    """The fields and tensors of the tower's file, and the vocabulary, fields and architecture of the language model."""

    tower: Fields
    tensors: Mapping[str, TensorInfo]
    ids: TokenIds
    text: Fields
    spec: ModelSpec


def tower_facts(
    files: TowerFiles, activations: Mapping[str, VisionActivation], intermediate_size: int | None = None
) -> dict[str, Any]:
    """The sizes that all towers have.

    Args:
        activations: by the fields `clip.use_*` that name one; `QUICK_GELU`: none of them is set.
        intermediate_size: width of the inner layer of MLPs; None: as the metadata says.
    """
    fields = files.tower
    size = fields.integer(f"{PREFIX}embedding_length", 1, 1 << 20)
    num_heads = fields.integer(f"{PREFIX}attention.head_count", 1, 1 << 12)
    if size % num_heads:
        rule = f"they cannot divide the embedding length {size}"
        raise fields.error(f"{PREFIX}attention.head_count", num_heads, rule)
    norm_eps = fields.number(f"{PREFIX}attention.layer_norm_epsilon", 1e-30, 1.0, default=1e-6)
    return {
        "hidden_size": size,
        "intermediate_size": intermediate_size or fields.integer(f"{PREFIX}feed_forward_length", 1, 1 << 22),
        "num_layers": fields.integer(f"{PREFIX}block_count", 1, 1 << 12),
        "num_heads": num_heads,
        "norm_eps": float32_text(norm_eps),
        "activation": _activation(fields, activations),
        "patch_size": fields.integer(f"{PREFIX}patch_size", 1, MAX_SIDE),
    }


def _activation(fields: Fields, known: Mapping[str, VisionActivation]) -> VisionActivation:
    names = ("use_gelu", "use_silu")
    given = next((name for name in names if fields.boolean(f"clip.{name}", default=False)), QUICK_GELU)
    if given in known:
        return known[given]
    expected = next(filter(None, known), given)
    raise fields.error(
        f"clip.{expected}",
        expected == given,
        f"expected {str(expected != given).lower()} for a tower of this kind; download it again",
    )


def values_of_pixels(fields: Fields, resample: int) -> dict[str, Any]:
    """The filter and the numbers that make values of pixels."""
    return {
        "resample": resample,
        "rescale_factor": 1 / 255,
        "mean": _by_color(fields, f"{PREFIX}image_mean", -1e9),
        "std": _by_color(fields, f"{PREFIX}image_std", 1e-9),
    }


def _by_color(fields: Fields, name: str, low: float) -> tuple[float, float, float]:
    value = fields.get(name)
    if (
        not isinstance(value, np.ndarray)
        or value.dtype.kind != "f"
        or value.shape != (3,)
        or not ((value >= low) & (value <= 1e9)).all()
    ):
        raise fields.error(name, value, f"expected three numbers from {low:g} to 1e9, one for each color")
    red, green, blue = (float32_text(float(number)) for number in value)
    return red, green, blue
