"""`VisionSpec`: the tower of a model that sees images, and how an image becomes its input.

A tower turns a tile of an image into rows, which take the place of embeddings of tokens in a prompt. The rows of a tile
have the order of its pixels: row by row of what the tower makes of `scale_factor` x `scale_factor` patches.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
"""`gelu` is the exact one, by the error function; the quick one is x * sigmoid(1.702 x)."""
VisionBody = Literal["siglip", "clip", "internvit", "llama4"]
"""The layers of a tower for tiles of one size."""
VisionFamily = Literal[
    "idefics3",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "llava_next",
    "internvl",
    "pixtral",
    "llama4",
]
"""Names the text around images (`tokenizer_manager/media/processors`) and the connector (`model_runner/vision`)."""


PART_PATCHES: Final = 256
"""Patches that a part of the work on a tile has, about, on few cores: a product needs no more to be fast there."""
FRAMES: Final = 2
"""Frames of a video in a patch of Qwen's towers, which see an image as so many equal frames."""
GATED: Final = ("qwen2_5_vl", "pixtral", "gemma4")
"""Families with gated MLPs in their towers."""
SHOWN_PIXELS: Final = 1 << 20
"""Pixels of an image of any size whose time is told."""


LLAMA4_TEXTS: Final[dict[str, Any]] = {
    "image_token": "<|patch|>",
    "begin_token": "<|image_start|>",
    "end_token": "<|image_end|>",
    "global_token": "<|image|>",
    "marker": "<|image|>",
}
"""The special tokens of Llama 4, which no file names, as fields of `VisionSpec`."""


class ImageProcessing(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes tiles, as the folder's preprocessor_config.json says.

    Attributes:
        longest_edge: an image is resized so that its longer side has so many pixels; None: it is not.
        tile_size: height and width of a tile in pixels; of images of any size, what both are whole multiples of.
        splits: an image larger than a tile becomes several, and a small copy of the whole one; else one tile.
        resample: the filter of resizing, as Pillow numbers them: 1 Lanczos, 2 bilinear, 3 bicubic.
        min_pixels, max_pixels: bounds of an image of any size, which keeps its ratio; 0: tiles have one size.
        crops: the shorter side is resized to that of a tile, and the middle is kept; else the ratio changes.
        min_tiles, max_tiles: of an image whose tiles have the ratio nearest to its own (InternVL), or hold it without
            scaling it down (Llama 4); 0: they are chosen by `longest_edge`.
        pinpoints: heights and widths to the fittest of which an image is padded before it becomes tiles (LLaVA-NeXT).
        rescale_factor, mean, std: a value of a pixel, 0..255, becomes (value * rescale_factor - mean) / std, by color.
    """

    longest_edge: int | None
    tile_size: int
    splits: bool
    resample: int
    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_pixels: int = 0
    max_pixels: int = 0
    crops: bool = False
    min_tiles: int = 0
    max_tiles: int = 0
    pinpoints: tuple[tuple[int, int], ...] = ()


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Architecture of a tower and its connector.

    Attributes:
        family: of Idefics3 is SmolVLM, too.
        hidden_size, intermediate_size, num_layers, num_heads, norm_eps, activation: of the tower.
        image_size: side of a tile in pixels; 0: an image is one tile of any size.
        patch_size: side of a patch in pixels.
        scale_factor: the connector makes one row of so many patches in each direction.
        sees_whole: the tokens of an image attend to all of it, also to those after them.
        only_in_windows: they do so in layers with a window only (Gemma 4).
        image_token_id: the id at positions of a prompt that take rows.
        image_token, begin_token, end_token, global_token: texts of special tokens: the placeholder, the one before
            each tile (of Pixtral, after each row), the one after the last, and the one before the copy of the whole
            image.
        marker: what the chat template writes for an image.
        processing: how an image becomes tiles.
        num_positions: rows of the table of positions, a square that is stretched over images of any size; 0: there is
            none. Gemma 4 has one such table for columns and one for rows.
        window_size: pixels in each direction that a layer attends to together, but for `whole_layers`; 0: all.
        whole_layers: layers that attend to all patches.
        deepstack_layers: layers after each of which a connector makes rows, too; the first of these are added to the
            tokens of the image after the first layer of the language model, and so on (DeepStack, Meng et al. 2024).
        body: the kind of its layers. SigLIP has patches only; the others begin with a row for the class of the image,
            InternViT scales what its layers add, and that of Llama 4 turns queries and keys by the place of a patch.
        ends_normed: a norm follows the last layer.
        keeps_class: the row of the class is one of the rows of a tile.
        has_qkv_bias: of its layers.
        has_mlp_bias: of the connector, if that is an MLP.
        connector_size: width between the layers of the connector of Llama 4.
        clips: inputs and outputs of linear layers have bounds, which are in the files.
        standardizes: the means of patches have an offset and a factor, which are in the files.
        part_scale: a part of the work on a tile has so many times the usual patches: for many cores, and GPUs.
        layer_input_id: the token that stands for those of images where layers have inputs of their own
            (`LayerInputsSpec`); None: each token for itself.
        rope_sections: of a language model in which a token has a position on each of three axes (M-RoPE, Qwen2-VL,
            2024): time, row and column of images, all equal for text. Pairs of rotated dimensions that turn by each
            axis; empty: a token has one position.
        rope_alternates: the pairs of the axes alternate, and what is left turns by the first axis (Qwen3-VL); else they
            are three runs.
    """

    family: VisionFamily
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: VisionActivation
    image_size: int
    patch_size: int
    scale_factor: int
    sees_whole: bool = False
    only_in_windows: bool = False
    image_token_id: int
    image_token: str
    begin_token: str
    end_token: str
    global_token: str = ""
    marker: str
    processing: ImageProcessing
    num_positions: int = 0
    window_size: int = 0
    whole_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    rope_sections: tuple[int, ...] = ()
    rope_alternates: bool = False
    body: VisionBody = "siglip"
    ends_normed: bool = True
    keeps_class: bool = False
    has_qkv_bias: bool = True
    has_mlp_bias: bool = True
    connector_size: int = 0
    clips: bool = False
    standardizes: bool = False
    part_scale: int = 1
    layer_input_id: int | None = None

    @property
    def num_tower_rows(self) -> int:
        """Rows inside the tower: patches, and the class."""
        return self.grid**2 + (self.body != "siglip")

    @property
    def grid(self) -> int:
        """Patches in each direction of a tile; pixels after the last whole patch are not seen."""
        return self.image_size // self.patch_size

    @property
    def row_pixels(self) -> int:
        """Pixels in each direction for which a row stands; 0 where tiles have one size."""
        return 0 if self.image_size else self.patch_size * self.scale_factor

    @property
    def rows_per_tile(self) -> int:
        """Rows that a tile becomes; of images of any size, the rows of a block, see `Capacity.encoder_tile_rows`.

        The last row of a tile of LLaVA-NeXT is the one that ends rows of patches.
        """
        if not self.image_size:
            return max(1, self.part_patches // self.scale_factor**2)
        return (self.grid // self.scale_factor) ** 2 + self.keeps_class + (self.family == "llava_next")

    def rows_of(self, height: int, width: int) -> int:
        """Rows that a tile of so many pixels becomes."""
        side = self.row_pixels
        return height // side * (width // side) if side else self.rows_per_tile

    @property
    def most_rows(self) -> int:
        """Rows of the largest image, in whole tiles or blocks."""
        return self.most_tiles * self.rows_per_tile

    def row_width(self, hidden_size: int) -> int:
        """Numbers of a row of the encoder, for a language model of this hidden size."""
        return (1 + len(self.deepstack_layers)) * hidden_size

    @property
    def num_parts(self) -> int:
        """Parts into which the work on a tile, or on each block of rows, can be divided: see `layer_parts`."""
        return max(1, 4 * self.num_layers) * self._shares_of_block

    def num_shares(self, height: int, width: int) -> int:
        """Shares of the patches of a tile of so many pixels: a layer has four parts for each."""
        return -(-self.rows_of(height, width) // self.rows_per_tile) * self._shares_of_block

    @property
    def _shares_of_block(self) -> int:
        return 1 if self.row_pixels else -(-(self.grid**2) // self.part_patches)

    @property
    def part_patches(self) -> int:
        """Patches of a part of the work on a tile, about."""
        return PART_PATCHES * self.part_scale

    @property
    def patch_values(self) -> int:
        """Values of a patch: its pixels in three colors."""
        return 3 * self.patch_size**2

    @property
    def most_tiles(self) -> int:
        """Tiles, or blocks, of the largest image after resizing; of images that are not resized, a guess."""
        if side := self.row_pixels:
            return -(-(self.processing.max_pixels // side**2) // self.rows_per_tile)
        if not self.processing.splits:
            return 1
        if self.processing.max_tiles:
            return self.processing.max_tiles + (self.processing.max_tiles > 1)
        if self.processing.pinpoints:
            return 1 + max(map(self._num_tiles, self.processing.pinpoints))
        if self.processing.longest_edge is None:
            return 17
        return (-(-self.processing.longest_edge // self.processing.tile_size)) ** 2 + 1

    def _num_tiles(self, pinpoint: tuple[int, int]) -> int:
        height, width = (size // self.processing.tile_size for size in pinpoint)
        return height * width

    @property
    def shown_pixels(self) -> int:
        """Pixels of a tile, or of an image of any size that stands for all."""
        return (
            min(self.processing.max_pixels, SHOWN_PIXELS) if self.row_pixels else self.processing.tile_size**2
        )

    @property
    def most_pixels(self) -> int:
        """Pixels of all tiles of the largest image."""
        if self.row_pixels:
            return self.processing.max_pixels
        return self.most_tiles * self.processing.tile_size**2

    def limited(self, max_pixels: int, min_pixels: int = 0) -> VisionSpec:
        """The same with images of so many pixels at most, or of one tile if that has more.

        Args:
            max_pixels: of all tiles.
            min_pixels: of images of any size, at least; 0: those of the model's processor.
        """
        if side := self.row_pixels:
            most = max(min(max_pixels, self.most_pixels), side**2)
            least = min(min_pixels or self.processing.min_pixels, most)
            return replace(self, processing=replace(self.processing, min_pixels=least, max_pixels=most))
        if max_pixels >= self.most_pixels or not self.processing.splits:
            return self
        num_tiles = max(max_pixels // self.processing.tile_size**2 - 1, 1)
        if self.processing.pinpoints:
            fitting = tuple(each for each in self.processing.pinpoints if self._num_tiles(each) <= num_tiles)
            fitting = fitting if max_pixels >= 2 * self.processing.tile_size**2 else ()
            how = replace(
                self.processing, splits=bool(fitting), pinpoints=fitting or self.processing.pinpoints
            )
            return replace(self, processing=how)
        side = math.isqrt(num_tiles)
        if side == 1 and (num_tiles == 1 or not self.processing.max_tiles):
            return replace(self, processing=replace(self.processing, splits=False))
        if self.processing.max_tiles:
            least = min(self.processing.min_tiles, num_tiles)
            return replace(self, processing=replace(self.processing, min_tiles=least, max_tiles=num_tiles))
        edge = side * self.processing.tile_size
        return replace(self, processing=replace(self.processing, longest_edge=edge))

    @property
    def joined_size(self) -> int:
        """Width of the connector's input: patches side by side; Gemma 3 and 4 take their mean."""
        return self.hidden_size * (1 if self.family in ("gemma3", "gemma4") else self.scale_factor**2)

    @property
    def workspace_bytes(self) -> int:
        """Working memory of encoding a tile: activations. Scores of attention take none, see `ops.whole_attention`."""
        width = self.patch_values + 6 * self.hidden_size + 2 * self.intermediate_size
        patches = self.processing.max_pixels // self.patch_size**2 if self.row_pixels else self.grid**2
        return 4 * patches * width

    def flops_per_tile(self, row_size: int) -> float:
        """Floating-point operations that encode a tile, `row_size` wide: those of products, also of attention.

        Of images of any size, an image of `shown_pixels`.
        """
        size, patches = self.hidden_size, self.grid**2
        if self.row_pixels:
            patches = self.shown_pixels // self.patch_size**2
        matrices = 4 * size + (3 if self.family in GATED else 2) * self.intermediate_size
        layer = 2 * patches * size * matrices
        num_windowed = self.num_layers - len(self.whole_layers) if self.window_size else 0
        seen = (self.num_layers - num_windowed) * patches + num_windowed * (
            self.window_size // self.patch_size
        ) ** 2
        rows, joined = patches // self.scale_factor**2, self.joined_size
        inner = 2 * rows * joined * (joined + row_size) if self.row_pixels else 2 * rows * joined * row_size
        ends = 2 * patches * self.patch_values * size + (1 + len(self.deepstack_layers)) * inner
        return float(self.num_layers * layer + 4 * patches * seen * size + ends)
