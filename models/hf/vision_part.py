"""The tower of a multimodal folder: `vision_config` of config.json, and its processor's configuration.

Kinds of folders that are not in `_READERS` are served for their text only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from msgspec import structs

from ...runtime.errors import ConfigError
from ..fields import Fields
from ..model_files import read_json
from ..spec.model_spec import ModelSpec
from ..spec.vision_spec import FRAMES, ImageProcessing, VisionActivation, VisionFamily, VisionSpec
from .special_tokens import read_special_tokens

logger = logging.getLogger(__name__)

_PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json"
"""The second one has the first one's fields in `image_processor` since transformers 5, and has precedence then."""
_ACTIVATIONS: Final[dict[str, VisionActivation]] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_CLIP: Final = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
"""Normalization of CLIP, the default of some processors."""
_FILTERS: Final = {1: "Lanczos", 2: "bilinear", 3: "bicubic"}
_TEXT_ONLY: Final = "or serve its text with --language-model-only"
_MAX_SIDE: Final = 1 << 14
_SQUARE: Final = {"height": 224, "width": 224}
_Color = tuple[float, float, float]
_HALF: Final[_Color] = (0.5, 0.5, 0.5)


class _Files(NamedTuple):
    """The parts of a folder that a reader of a family reads: config.json and its `vision_config`, the processor's
    configuration, the special tokens by name, and of the language model the size of the vocabulary, the hidden size,
    and the pairs of dimensions of a head that turn.
    """

    outer: Fields
    inner: Fields
    processor: Fields
    tokens: Mapping[str, str]
    vocab_size: int
    hidden_size: int
    num_turning: int


def read_vision(folder: Path, config: Mapping[str, object], spec: ModelSpec) -> VisionSpec | None:
    """The tower of a folder; None: it has none, or none that the engine computes.

    Args:
        folder: the model's.
        config: the contents of its config.json.
        spec: of its language model.

    Raises:
        ConfigError: a field is wrong, or needs something that is not implemented.
    """
    kind, inner = config.get("model_type"), config.get("vision_config")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None or not isinstance(inner, Mapping):
        return None
    processor = _processor_fields(folder)
    if processor is None:
        logger.warning(
            "%s: there is no %s, without which images cannot be prepared: only text is served",
            folder,
            _PROCESSOR,
        )
        return None
    path = folder / "config.json"
    outer, fields = Fields(path, config), Fields(path, inner, "vision_config.")
    tokens, num_turning = read_special_tokens(folder).named, (spec.rotary_dim or spec.head_dim) // 2
    return read(_Files(outer, fields, processor, tokens, spec.vocab_size, spec.hidden_size, num_turning))


def _idefics3(files: _Files) -> VisionSpec:
    facts = _tower(files.inner, hidden_size=1152, num_heads=16, patch_size=32)
    tokens, outer = files.tokens, files.outer
    image, around = (
        tokens.get("image_token", "<image>"),
        tokens.get("fake_image_token", "<fake_token_around_image>"),
    )
    vision = VisionSpec(
        family="idefics3",
        scale_factor=outer.integer("scale_factor", 1, 64, default=2),
        image_token_id=outer.integer("image_token_id", 0, files.vocab_size - 1, default=128_257),
        image_token=image,
        begin_token=around,
        end_token=around,
        global_token=tokens.get("global_image_token", "<global-img>"),
        marker=image,
        processing=_tiles(files.processor, facts["image_size"]),
        **facts,
    )
    if vision.grid % vision.scale_factor:
        raise outer.error(
            "scale_factor",
            vision.scale_factor,
            f"which cannot divide the {vision.grid} patches of a tile's side",
        )
    return vision


def _gemma3(files: _Files) -> VisionSpec:
    facts = _tower(files.inner, hidden_size=768, num_heads=12, patch_size=16)
    tokens, outer, grid = files.tokens, files.outer, facts["image_size"] // facts["patch_size"]
    num_rows = outer.integer("mm_tokens_per_image", 1, grid**2, default=256)
    side = math.isqrt(num_rows)
    if side**2 != num_rows or grid % side:
        raise outer.error(
            "mm_tokens_per_image",
            num_rows,
            f"expected the square of a number that divides the {grid} patches of an image's side",
        )
    begin = tokens.get("boi_token", "<start_of_image>")
    id_name = outer.given("image_token_index", "image_token_id")
    return VisionSpec(
        family="gemma3",
        scale_factor=grid // side,
        sees_whole=True,
        image_token_id=outer.integer(id_name, 0, files.vocab_size - 1, default=262_144),
        image_token=tokens.get("image_token", "<image_soft_token>"),
        begin_token=begin,
        end_token=tokens.get("eoi_token", "<end_of_image>"),
        marker=begin,
        processing=_square(files.processor, facts["image_size"]),
        **facts,
    )


class _Qwen(NamedTuple):
    """Defaults of transformers for a tower of Qwen, whose family and `model_type` of the tower these are.

    `size`: the field with the width of the tower, which Qwen2-VL names in another way.
    """

    family: VisionFamily
    layers: int
    hidden: int
    inner: int
    patch: int
    activation: str
    sections: tuple[int, ...]
    size: str = "hidden_size"
    positions: int = 0
    window: int = 0
    whole: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()
    alternates: bool = False


_QWENS: Final = {
    "qwen2_vl": _Qwen("qwen2_vl", 32, 1280, 0, 14, "quick_gelu", (16, 24, 24), size="embed_dim"),
    "qwen2_5_vl": _Qwen(
        "qwen2_5_vl", 32, 3584, 3420, 14, "silu", (16, 24, 24), window=112, whole=(7, 15, 23, 31)
    ),
    "qwen3_vl": _Qwen(
        "qwen3_vl",
        27,
        1152,
        4304,
        16,
        "gelu_pytorch_tanh",
        (24, 20, 20),
        positions=2304,
        deepstack=(8, 16, 24),
        alternates=True,
    ),
}
_QWENS["qwen3_vl_moe"] = _QWENS["qwen3_vl"]
_QWENS["qwen3_5"] = _QWENS["qwen3_5_moe"] = _QWENS["qwen3_vl"]._replace(sections=(11, 11, 10), deepstack=())


def _qwen(files: _Files) -> VisionSpec:
    fields, tokens, known = files.inner, files.tokens, _QWENS[files.outer.text("model_type")]
    size = fields.integer(known.size, 1, 1 << 20, default=known.hidden)
    num_heads = fields.integer(fields.given("num_heads", "num_attention_heads"), 1, 1 << 12, default=16)
    if size % (4 * num_heads):
        raise fields.error(
            "num_heads", num_heads, f"they cannot divide the hidden size {size} into multiples of 4"
        )
    inner = size * fields.integer("mlp_ratio", 1, 64, default=4)
    if known.inner:
        inner = fields.integer("intermediate_size", 1, 1 << 22, default=known.inner)
    _expect(fields, "hidden_act", known.activation)
    _expect(fields, "temporal_patch_size", FRAMES)
    _expect(fields, fields.given("in_channels", "in_chans"), 3)
    out_size = "hidden_size" if known.size == "embed_dim" else "out_hidden_size"
    if fields.integer(out_size, 1, 1 << 20, default=files.hidden_size) != files.hidden_size:
        rule = f"but the language model has {files.hidden_size}; download the file again"
        raise fields.error(out_size, fields.get(out_size), rule)
    layers = fields.integer(fields.given("depth", "num_hidden_layers"), 1, 1 << 12, default=known.layers)
    patch_size = fields.integer("patch_size", 1, _MAX_SIDE, default=known.patch)
    factor = fields.integer("spatial_merge_size", 1, 64, default=2)
    window = fields.integer("window_size", 1, _MAX_SIDE, default=known.window) if known.window else 0
    if window and window < patch_size * factor:
        raise fields.error(
            "window_size", window, f"expected at least {patch_size * factor}, the pixels of a row"
        )
    positions = (
        fields.integer("num_position_embeddings", 1, 1 << 20, default=known.positions)
        if known.positions
        else 0
    )
    if math.isqrt(positions) ** 2 != positions:
        raise fields.error("num_position_embeddings", positions, "expected a square")
    for name, value in (("patch_size", patch_size), ("merge_size", factor), ("temporal_patch_size", FRAMES)):
        _expect(files.processor, name, value)
    sections, alternates = _sections(files, known)
    return VisionSpec(
        family=known.family,
        hidden_size=size,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=num_heads,
        norm_eps=1e-6,
        activation=_ACTIVATIONS.get(known.activation) or cast(VisionActivation, known.activation),
        image_size=0,
        patch_size=patch_size,
        scale_factor=factor,
        image_token_id=files.outer.integer("image_token_id", 0, files.vocab_size - 1, default=151_655),
        image_token=tokens.get("image_token", "<|image_pad|>"),
        begin_token=tokens.get("vision_bos_token", "<|vision_start|>"),
        end_token=tokens.get("vision_eos_token", "<|vision_end|>"),
        marker=tokens.get("image_token", "<|image_pad|>"),
        processing=_any_size(files.processor, patch_size * factor),
        num_positions=positions,
        window_size=window,
        whole_layers=_layer_ids(fields, "fullatt_block_indexes", known.whole, layers) if window else (),
        deepstack_layers=_layer_ids(fields, "deepstack_visual_indexes", known.deepstack, layers)
        if known.deepstack
        else (),
        rope_sections=sections,
        rope_alternates=alternates,
    )


def _sections(files: _Files, known: _Qwen) -> tuple[tuple[int, ...], bool]:
    """How the pairs of rotated dimensions of the language model are divided among axes."""
    path, inner = files.outer.path, files.outer.get("text_config")
    text = Fields(path, inner, "text_config.") if isinstance(inner, Mapping) else files.outer
    name = text.given("rope_parameters", "rope_scaling")
    rope = text.get(name)
    fields = Fields(path, rope if isinstance(rope, Mapping) else {}, f"{name}.")
    sections = fields.integers("mrope_section", 0, 1 << 12) or known.sections
    alternates = fields.boolean("mrope_interleaved", default=known.alternates)
    if len(sections) != 3 or sum(sections) != files.num_turning or alternates != known.alternates:
        rule = f"expected three numbers with the sum {files.num_turning}, the pairs of a head that turn"
        if alternates != known.alternates:
            raise fields.error("mrope_interleaved", alternates, f"{known.family} has {known.alternates}")
        raise fields.error("mrope_section", list(sections), rule)
    return sections, alternates


def _layer_ids(fields: Fields, name: str, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    found = fields.integers(name, 0, num_layers - 1) if fields.get(name) is not None else default
    if list(found) != sorted(set(found)) or (found and found[-1] >= num_layers):
        raise fields.error(
            name, list(found), f"expected ascending numbers below {num_layers}, the layers of the tower"
        )
    return found


def _expect(fields: Fields, name: str, value: object) -> None:
    if (fields.get(name) if fields.get(name) is not None else value) != value:
        raise fields.error(name, fields.get(name), f"expected {value!r}, {_TEXT_ONLY}")


def _any_size(fields: Fields, multiple: int) -> ImageProcessing:
    """How an image becomes one tile in its ratio, as Qwen2-VL's processor in transformers does."""
    _expect(fields, "do_resize", True)
    size = fields.get("size")
    sides = Fields(fields.path, size if isinstance(size, Mapping) else {}, "size.")
    least = sides.integer("shortest_edge", 1, 1 << 30, default=56 * 56)
    most = sides.integer("longest_edge", 1, 1 << 30, default=28 * 28 * 1280)
    least = fields.integer("min_pixels", 1, 1 << 30, default=least)
    most = fields.integer("max_pixels", 1, 1 << 30, default=most)
    if not multiple**2 <= most or least > most:
        raise fields.error("max_pixels", most, f"expected at least min_pixels, {least}, and {multiple**2}")
    return ImageProcessing(
        longest_edge=None,
        tile_size=multiple,
        splits=True,
        min_pixels=least,
        max_pixels=most,
        **_values(fields, resample=3, **_CLIP),
    )


def _llava(files: _Files) -> VisionSpec | None:
    """A tower of CLIP, or of SigLIP, of which the output of a layer before the last is used."""
    inner, outer = files.inner, files.outer
    kind = inner.text("model_type", default="clip_vision_model")
    if kind not in _LLAVA_TOWERS:
        logger.warning(
            "%s: vision_config.model_type is %r, and of a llava model only %s are computed: only text is served",
            outer.path,
            kind,
            " and ".join(_LLAVA_TOWERS),
        )
        return None
    is_clip = kind == "clip_vision_model"
    facts = _tower(
        inner,
        hidden_size=768,
        num_heads=12,
        patch_size=32 if is_clip else 16,
        activation="quick_gelu" if is_clip else "gelu_pytorch_tanh",
        norm_eps=1e-5 if is_clip else 1e-6,
    )
    facts["num_layers"] = _layers_used(outer, facts["num_layers"], -2)
    keeps = _keeps_first_row(outer)
    if not is_clip and not keeps:
        raise outer.error(
            "vision_feature_select_strategy",
            "default",
            f"but SigLIP has no row for the class to leave out, {_TEXT_ONLY}",
        )
    _check_mlp(outer)
    image = files.tokens.get("image_token", "<image>")
    id_name = outer.given("image_token_index", "image_token_id")
    image_size = facts["image_size"]
    return VisionSpec(
        family="llava",
        body="clip" if is_clip else "siglip",
        ends_normed=False,
        keeps_class=is_clip and keeps,
        scale_factor=1,
        image_token_id=outer.integer(id_name, 0, files.vocab_size - 1, default=32_000),
        image_token=image,
        begin_token="",
        end_token="",
        marker=image,
        processing=_crop(files.processor, image_size) if is_clip else _square(files.processor, image_size),
        **facts,
    )


def _internvl(files: _Files) -> VisionSpec:
    """A tower of InternViT, each 2 x 2 patches of which become a row."""
    inner, outer, tokens = files.inner, files.outer, files.tokens
    sides = {name: _side(inner, name, default) for name, default in (("image_size", 448), ("patch_size", 14))}
    for name, wanted in (("norm_type", "layer_norm"), ("use_qk_norm", False), ("use_mean_pooling", True)):
        value = inner.get(name)
        if value is not None and value != wanted:
            raise inner.error(name, value, f"expected {wanted!r}: a tower of InternViT-300M, {_TEXT_ONLY}")
    facts = _tower(
        _with(inner, sides),
        hidden_size=1024,
        num_heads=16,
        patch_size=14,
        activation="gelu",
        intermediate_size=4096,
        num_layers=24,
    )
    facts["num_layers"] = _layers_used(outer, facts["num_layers"], -1)
    if _keeps_first_row(outer):
        raise outer.error(
            "vision_feature_select_strategy", "full", f"only default is supported, {_TEXT_ONLY}"
        )
    ratio = outer.number("downsample_ratio", 0.01, 1.0, default=0.5)
    grid, factor = facts["image_size"] // facts["patch_size"], int(1 / ratio)
    if factor * ratio != 1 or grid % factor:
        rule = f"expected 1 divided by a number that divides the {grid} patches of a tile's side"
        raise outer.error("downsample_ratio", ratio, rule)
    if outer.text("projector_hidden_act", default="gelu") != "gelu":
        raise outer.error(
            "projector_hidden_act", outer.get("projector_hidden_act"), f"only gelu is, {_TEXT_ONLY}"
        )
    most = files.processor.integer("max_patches", 1, 1 << 10, default=12)
    image = tokens.get("context_image_token", "<IMG_CONTEXT>")
    processing = _square(files.processor, facts["image_size"], resample=3, **_CLIP)
    return VisionSpec(
        family="internvl",
        body="internvit",
        ends_normed=False,
        has_qkv_bias=inner.boolean("attention_bias", default=False),
        scale_factor=factor,
        image_token_id=outer.integer("image_token_id", 0, files.vocab_size - 1, default=151_667),
        image_token=image,
        begin_token=tokens.get("start_image_token", "<img>"),
        end_token=tokens.get("end_image_token", "</img>"),
        marker=image,
        processing=structs.replace(
            processing,
            splits=most > 1,  # the processor asks for it, whatever crop_to_patches says
            min_tiles=files.processor.integer("min_patches", 1, most, default=1),
            max_tiles=most,
        ),
        **facts,
    )


def _mistral3(files: _Files) -> VisionSpec:
    """A tower of Pixtral, and a merger of patches."""
    inner, outer, tokens = files.inner, files.outer, files.tokens
    _expect(inner, "model_type", "pixtral")
    _expect(outer, "projector_hidden_act", "gelu")
    rope = inner.get("rope_parameters")
    of_rope = Fields(inner.path, rope if isinstance(rope, Mapping) else {}, "vision_config.rope_parameters.")
    for fields in (inner, of_rope):
        _expect(fields, "rope_theta", 10_000.0)
    facts = _tower(
        inner,
        hidden_size=1024,
        num_heads=16,
        patch_size=14,
        activation="gelu",
        intermediate_size=4096,
        num_layers=24,
        activations={"gelu": "gelu", "silu": "silu"},
    )
    if _layers_used(outer, facts["num_layers"], -1) != facts["num_layers"]:
        raise outer.error(
            "vision_feature_layer", outer.get("vision_feature_layer"), f"expected -1, {_TEXT_ONLY}"
        )
    size, num_heads = facts["hidden_size"], facts["num_heads"]
    if size % (4 * num_heads):
        raise inner.error(
            "num_attention_heads", num_heads, f"they cannot divide the hidden size {size} into multiples of 4"
        )
    _expect(inner, "head_dim", size // num_heads)
    factor = outer.integer("spatial_merge_size", 1, 64, default=2)
    multiple = facts["patch_size"] * factor
    longest = _longest_edge(files.processor, "size", 1024)
    whole = -(-longest // multiple) * multiple
    image, facts["norm_eps"], facts["image_size"] = tokens.get("image_token", "[IMG]"), 1e-5, 0
    _expect(files.processor, "do_resize", True)
    return VisionSpec(
        family="pixtral",
        scale_factor=factor,
        has_mlp_bias=outer.boolean("multimodal_projector_bias", default=False),
        image_token_id=outer.integer(
            outer.given("image_token_index", "image_token_id"), 0, files.vocab_size - 1, default=10
        ),
        image_token=image,
        begin_token=tokens.get("image_break_token", "[IMG_BREAK]"),
        end_token=tokens.get("image_end_token", "[IMG_END]"),
        marker=image,
        processing=ImageProcessing(
            longest_edge=longest,
            tile_size=multiple,
            splits=True,
            max_pixels=whole**2,
            **_values(files.processor, resample=3, **_CLIP),
        ),
        **facts,
    )


_LLAVA_TOWERS: Final = ("clip_vision_model", "siglip_vision_model")
_READERS: Final[dict[str, Callable[[_Files], VisionSpec | None]]] = {
    **dict.fromkeys(_QWENS, _qwen),
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "llava": _llava,
    "internvl": _internvl,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
}


def _layers_used(fields: Fields, num_layers: int, default: int) -> int:
    """Layers up to the one whose output goes on: the last is -1."""
    layer = fields.get("vision_feature_layer")
    if isinstance(layer, list) and len(layer) == 1:
        layer = layer[0]
    if layer is None:
        layer = default
    used = layer + (num_layers + 1 if layer < 0 else 0) if isinstance(layer, int) else 0
    if isinstance(layer, bool) or not 1 <= used <= num_layers:
        rule = f"expected the number of one of the {num_layers} layers, {_TEXT_ONLY}"
        raise fields.error("vision_feature_layer", layer, rule)
    return used


def _keeps_first_row(fields: Fields) -> bool:
    strategy = fields.text("vision_feature_select_strategy", default="default")
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", strategy, "expected default or full")
    return strategy == "full"


def _check_mlp(fields: Fields) -> None:
    if fields.text("projector_hidden_act", default="gelu") != "gelu":
        raise fields.error(
            "projector_hidden_act",
            fields.get("projector_hidden_act"),
            f"only gelu is supported, {_TEXT_ONLY}",
        )
    if not fields.boolean("multimodal_projector_bias", default=True):
        raise fields.error("multimodal_projector_bias", False, f"only true is supported, {_TEXT_ONLY}")


def _side(fields: Fields, name: str, default: int) -> int:
    """A side of a square, which files have twice or once."""
    value = fields.get(name)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise fields.error(name, value, f"expected the same number twice, {_TEXT_ONLY}")
        value = value[0]
    return Fields(fields.path, {name: value}, "vision_config.").integer(name, 1, _MAX_SIDE, default=default)


def _with(fields: Fields, values: Mapping[str, object]) -> Fields:
    return Fields(fields.path, {**{name: fields.get(name) for name in fields}, **values}, "vision_config.")


def _tower(
    fields: Fields,
    *,
    hidden_size: int,
    num_heads: int,
    patch_size: int,
    activation: str = "gelu_pytorch_tanh",
    norm_eps: float = 1e-6,
    intermediate_size: int = 3072,
    num_layers: int = 12,
    activations: Mapping[str, VisionActivation] = _ACTIVATIONS,
) -> dict[str, Any]:
    """The sizes of a tower; the arguments are the defaults in transformers, mostly those of SigLIP."""
    image_size = fields.integer("image_size", 1, _MAX_SIDE, default=224)
    size = fields.integer("hidden_size", 1, 1 << 20, default=hidden_size)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12, default=num_heads)
    if size % num_heads:
        raise fields.error("num_attention_heads", num_heads, f"they cannot divide the hidden size {size}")
    activation = fields.text("hidden_act", default=activation)
    if activation not in activations:
        raise fields.error(
            "hidden_act", activation, f"expected one of {', '.join(activations)}, {_TEXT_ONLY}"
        )
    return {
        "hidden_size": size,
        "intermediate_size": fields.integer("intermediate_size", 1, 1 << 22, default=intermediate_size),
        "num_layers": fields.integer("num_hidden_layers", 1, 1 << 12, default=num_layers),
        "num_heads": num_heads,
        "norm_eps": fields.number("layer_norm_eps", 1e-30, 1.0, default=norm_eps),
        "activation": activations[activation],
        "image_size": image_size,
        "patch_size": fields.integer("patch_size", 1, image_size, default=patch_size),
    }


def _processor_fields(folder: Path) -> Fields | None:
    nested = folder / _NESTED
    if nested.exists():
        inner = read_json(nested).get("image_processor")
        if isinstance(inner, Mapping):
            return Fields(nested, inner, "image_processor.")
    path = folder / _PROCESSOR
    return Fields(path, read_json(path)) if path.exists() else None


def _tiles(fields: Fields, image_size: int) -> ImageProcessing:
    """How an image becomes tiles; the defaults are those of Idefics3's processor in transformers."""
    tile_size = _longest_edge(fields, "max_image_size", 364)
    if tile_size != image_size:
        raise _other_size(fields, "max_image_size", image_size)
    return ImageProcessing(
        longest_edge=_longest_edge(fields, "size", 4 * 364)
        if fields.boolean("do_resize", default=True)
        else None,
        tile_size=tile_size,
        splits=fields.boolean("do_image_splitting", default=True),
        **_values(fields, resample=1),
    )


def _crop(fields: Fields, image_size: int) -> ImageProcessing:
    """How the middle of an image becomes one square tile, as in CLIP's processor in transformers."""
    if fields.boolean("do_pad", default=False):
        raise fields.error("do_pad", True, f"only false is supported, {_TEXT_ONLY}")
    for name in ("do_resize", "do_center_crop"):
        if not fields.boolean(name, default=True):
            raise fields.error(name, False, f"only true is supported, {_TEXT_ONLY}")
    for name, wanted in (("size", ["shortest_edge"]), ("crop_size", ["height", "width"])):
        value = fields.get(name)
        sizes = (
            [value] * 2
            if isinstance(value, int)
            else [*value.values()]
            if isinstance(value, Mapping)
            else [224]
        )
        if (isinstance(value, Mapping) and sorted(value) != wanted) or set(sizes) != {image_size}:
            raise _other_size(fields, name, image_size)
    return ImageProcessing(
        longest_edge=None,
        tile_size=image_size,
        splits=False,
        crops=True,
        **_values(fields, resample=3, **_CLIP),
    )


def _square(
    fields: Fields, image_size: int, *, resample: int = 2, mean: _Color = _HALF, std: _Color = _HALF
) -> ImageProcessing:
    """How an image becomes one square tile, as Gemma 3's processor in transformers does without pan and scan."""
    for name, wanted in (("do_pan_and_scan", False), ("do_resize", True)):
        if fields.boolean(name, default=wanted) != wanted:
            raise fields.error(name, not wanted, f"only {str(wanted).lower()} is supported, {_TEXT_ONLY}")
    size = fields.get("size")
    if (size if size is not None else _SQUARE) != {"height": image_size, "width": image_size}:
        raise _other_size(fields, "size", image_size)
    return ImageProcessing(
        longest_edge=None,
        tile_size=image_size,
        splits=False,
        **_values(fields, resample=resample, mean=mean, std=std),
    )


def _other_size(fields: Fields, name: str, image_size: int) -> ConfigError:
    rule = f"but the tower sees tiles of {image_size} pixels; download the file again, {_TEXT_ONLY}"
    return fields.error(name, fields.get(name), rule)


def _values(
    fields: Fields,
    *,
    resample: int,
    mean: tuple[float, float, float] = _HALF,
    std: tuple[float, float, float] = _HALF,
) -> dict[str, Any]:
    """The filter and the numbers that make values of pixels; the arguments are the defaults."""
    resample = fields.integer("resample", 0, 5, default=resample)
    if resample not in _FILTERS:
        known = ", ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise fields.error("resample", resample, f"expected one of {known}, {_TEXT_ONLY}")
    rescales = fields.boolean("do_rescale", default=True)
    normalizes = fields.boolean("do_normalize", default=True)
    return {
        "resample": resample,
        "rescale_factor": fields.number("rescale_factor", 1e-9, 1e9, default=1 / 255) if rescales else 1.0,
        "mean": _by_color(fields, "image_mean", 0.0, mean) if normalizes else (0.0, 0.0, 0.0),
        "std": _by_color(fields, "image_std", 1e-9, std) if normalizes else (1.0, 1.0, 1.0),
    }


def _longest_edge(fields: Fields, name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, Mapping) or "longest_edge" not in value:
        raise fields.error(name, value, f'expected {{"longest_edge": pixels}}, {_TEXT_ONLY}')
    return Fields(fields.path, value, f"{name}.").integer("longest_edge", 1, _MAX_SIDE)


def _by_color(
    fields: Fields, name: str, low: float, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = fields.get(name)
    if value is None:
        return default
    numbers = value if isinstance(value, list) else [value] * 3
    if len(numbers) != 3 or any(
        isinstance(one, bool) or not isinstance(one, int | float) or not low <= one <= 1e9 for one in numbers
    ):
        raise fields.error(name, value, f"expected three numbers of at least {low:g}, one for each color")
    red, green, blue = map(float, numbers)
    return red, green, blue
