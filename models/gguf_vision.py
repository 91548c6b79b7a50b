"""`with_tower`: the tower of a GGUF model, which is a file of its own, llama.cpp's `mmproj`.

The file says how its images become tiles except for the filter of resizing, and which tokens stand around an image:
these are those of transformers' processors. The ids of tokens are in the file of the language model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import structs

from ..runtime.errors import ConfigError
from .fields import Fields
from .gguf.gguf_file import TOWER_ARCHITECTURE, GGUFFile
from .gguf_any_size_vision import read_pixtral, read_qwen2, read_qwen2_5, read_qwen3
from .gguf_vision_fields import (
    BICUBIC,
    BILINEAR,
    LANCZOS,
    MAX_SIDE,
    PREFIX,
    QUICK_GELU,
    TokenIds,
    TowerFiles,
    tower_facts,
    values_of_pixels,
)
from .spec.model_spec import ModelSpec
from .spec.vision_spec import LLAMA4_TEXTS, ImageProcessing, VisionSpec

_LAST_PRODUCTS: Final = ("mm.2.weight", "mm.model.mlp.3.weight")
"""Products of connectors that make the rows; without them the metadata has the width of a row."""
_ADAPTER: Final = "mm.model.mlp.1.weight"
"""The first product of the connector of Llama 4, which has its width; a file without it is refused by its name."""
_FOLDER: Final = "give the model's folder with safetensors, or serve its text with --language-model-only"


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
            key, projector, f"which the engine does not compute, only {', '.join(_READERS)}; {_FOLDER}"
        )
    _check_row_size(fields, tower, spec, file.path.name)
    ids = TokenIds(file.path, tokens if isinstance(tokens, list) else [])
    vision = read(TowerFiles(fields, tower.tensors, ids, Fields(file.path, file.metadata), spec))
    file.add_tower(tower)
    return structs.replace(spec, vision=vision)


def _check_row_size(fields: Fields, tower: GGUFFile, spec: ModelSpec, model: str) -> None:
    """Check that rows are as wide as embeddings. Old converters wrote another number into the metadata."""
    made = next((tower.tensors[name] for name in _LAST_PRODUCTS if name in tower.tensors), None)
    key = f"{PREFIX}projection_dim"
    size = made.shape[0] if made else fields.integer(key, 1, 1 << 20, default=spec.hidden_size)
    if size != spec.hidden_size:
        raise fields.error(
            f"the number of rows of {made.name}" if made else key,
            size,
            f"but the embedding_length of {model} is {spec.hidden_size}: it is the tower of another model; give that "
            "of this one with --mmproj",
        )


def _idefics3(files: TowerFiles) -> VisionSpec:
    fields, around = files.tower, "<fake_token_around_image>"
    facts = _tile_facts(files, {"use_gelu": "gelu_tanh"}, LANCZOS)
    files.ids.check(around, "<global-img>")
    longest = fields.integer(f"{PREFIX}preproc_image_size", 1, MAX_SIDE, default=4 * facts["image_size"])
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


def _gemma3(files: TowerFiles) -> VisionSpec:
    facts = _tile_facts(files, {"use_gelu": "gelu_tanh"}, BILINEAR)
    begin, end = "<start_of_image>", "<end_of_image>"
    files.ids.check(begin, end)
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


def _llava(files: TowerFiles) -> VisionSpec:
    """A tower of CLIP, of LLaVA 1.5 or LLaVA-NeXT; the file has no layer after the one whose output is used."""
    fields = files.tower
    if "v.class_embd" not in files.tensors:
        raise ConfigError(
            f"{fields.path}: has no tensor 'v.class_embd': it is not a tower of CLIP, the only one that is computed "
            f"for the projector mlp; {_FOLDER}"
        )
    facts = _tile_facts(files, {QUICK_GELU: "quick_gelu", "use_gelu": "gelu"}, BICUBIC)
    layers = fields.get(f"{PREFIX}feature_layer")
    if layers is not None and (
        not isinstance(layers, np.ndarray) or layers.tolist() != [facts["num_layers"]]
    ):
        rule = f"expected only the last of the {facts['num_layers']} layers; {_FOLDER}"
        raise fields.error(f"{PREFIX}feature_layer", layers, rule)
    pinpoints = _pinpoints(fields, facts["image_size"])
    processing = structs.replace(
        facts["processing"], crops=not pinpoints, splits=bool(pinpoints), pinpoints=pinpoints
    )
    return VisionSpec(
        family="llava_next" if pinpoints else "llava",
        body="clip",
        ends_normed=False,
        has_mlp_bias="mm.0.bias" in files.tensors,
        scale_factor=1,
        image_token_id=files.ids.of("<image>"),
        image_token="<image>",
        begin_token="",
        end_token="",
        marker="<image>",
        **facts | {"processing": processing},
    )


def _pinpoints(fields: Fields, image_size: int) -> tuple[tuple[int, int], ...]:
    """Heights and widths to which images of LLaVA-NeXT are padded; empty: it is LLaVA 1.5."""
    name, merge = f"{PREFIX}image_grid_pinpoints", f"{PREFIX}mm_patch_merge_type"
    value = fields.get(name)
    if value is None:
        return ()
    if fields.text(merge, default="spatial_unpad") != "spatial_unpad":
        raise fields.error(
            merge, fields.get(merge), f"expected 'spatial_unpad' for a tower of tiles; {_FOLDER}"
        )
    sides = value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "iu" else []
    if not sides or len(sides) % 2 or any(not 0 < side <= MAX_SIDE or side % image_size for side in sides):
        rule = f"expected pairs of multiples of {image_size}, the side of a tile; convert the model again"
        raise fields.error(name, value, rule)
    return tuple(zip(sides[::2], sides[1::2], strict=True))


def _internvl(files: TowerFiles) -> VisionSpec:
    """A tower of InternViT-300M; that of 6B has other norms."""
    fields, image, begin, end = files.tower, "<IMG_CONTEXT>", "<img>", "</img>"
    if "v.blk.0.ln1.bias" not in files.tensors or "v.blk.0.attn_q_norm.weight" in files.tensors:
        raise ConfigError(
            f"{fields.path}: is a tower of InternViT-6B, of which only that of 300M is computed; {_FOLDER}"
        )
    facts = _tile_facts(files, {"use_gelu": "gelu"}, BICUBIC)
    most = fields.integer(f"{PREFIX}preproc_max_tiles", 1, 1 << 10, default=12)
    least = fields.integer(f"{PREFIX}preproc_min_tiles", 1, most, default=1)
    files.ids.check(begin, end)
    return VisionSpec(
        family="internvl",
        body="internvit",
        ends_normed=False,
        has_qkv_bias="v.blk.0.attn_q.bias" in files.tensors,
        scale_factor=_scale_factor(files, facts, 2),
        image_token_id=files.ids.of(image),
        image_token=image,
        begin_token=begin,
        end_token=end,
        marker=image,
        **facts
        | {
            "processing": structs.replace(
                facts["processing"], splits=most > 1, min_tiles=least, max_tiles=most
            )
        },
    )


def _llama4(files: TowerFiles) -> VisionSpec:
    """A tower of Llama 4. The file has no limit of tiles: 16, as in published models."""
    facts, most = _tile_facts(files, {"use_gelu": "gelu"}, BILINEAR), 16
    if facts["hidden_size"] % (4 * facts["num_heads"]):
        rule = f"they cannot divide the embedding length {facts['hidden_size']} into multiples of 4"
        raise files.tower.error(f"{PREFIX}attention.head_count", facts["num_heads"], rule)
    adapter = files.tensors.get(_ADAPTER)
    files.ids.check(*LLAMA4_TEXTS.values(), "<|tile_x_separator|>", "<|tile_y_separator|>")
    processing = structs.replace(facts["processing"], splits=True, min_tiles=1, max_tiles=most)
    return VisionSpec(
        family="llama4",
        body="llama4",
        scale_factor=_scale_factor(files, facts, 2),
        connector_size=adapter.shape[0] if adapter else 1,
        image_token_id=files.ids.of(LLAMA4_TEXTS["image_token"]),
        **LLAMA4_TEXTS,
        **facts | {"processing": processing},
    )


def _tile_facts(files: TowerFiles, activations: dict[str, Any], resample: int) -> dict[str, Any]:
    """The sizes of a tower for tiles of one size, and how an image becomes one tile."""
    fields, facts = files.tower, tower_facts(files, activations)
    image_size = fields.integer(f"{PREFIX}image_size", facts["patch_size"], MAX_SIDE)
    processing = ImageProcessing(
        longest_edge=None, tile_size=image_size, splits=False, **values_of_pixels(fields, resample)
    )
    return facts | {"image_size": image_size, "processing": processing}


def _scale_factor(files: TowerFiles, facts: dict[str, Any], default: int | None) -> int:
    name, grid = f"{PREFIX}projector.scale_factor", facts["image_size"] // facts["patch_size"]
    factor = files.tower.integer(name, 1, 64, default=default)
    if grid % factor:
        raise files.tower.error(name, factor, f"which cannot divide the {grid} patches of a tile's side")
    return factor


_READERS: Final[dict[str, Callable[[TowerFiles], VisionSpec]]] = {
    "idefics3": _idefics3,
    "gemma3": _gemma3,
    "mlp": _llava,
    "internvl": _internvl,
    "pixtral": read_pixtral,
    "qwen2vl_merger": read_qwen2,
    "qwen2.5vl_merger": read_qwen2_5,
    "qwen3vl_merger": read_qwen3,
    "llama4": _llama4,
}
