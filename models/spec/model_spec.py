"""ModelSpec: the facts about a model's architecture that the rest of the engine computes with.

Read from a model's files by `hf_config` and `gguf_config` (see `load_spec`); sent to every process inside messages. It
holds no tensors, no paths and no facts about devices: memory planning and model building derive those from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from msgspec import structs

from ...runtime.errors import ConfigError
from ...runtime.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from .encoder_spec import EncoderSpec, PoolingSpec
from .experts_spec import ExpertsSpec
from .layer_form import (
    NO_BIASES,
    PLAIN_ATTENTION,
    PRE_NORMS,
    AttentionForm,
    Biases,
    LatentSpec,
    LayerForm,
    LayerHeads,
    RopeScaling,
    WindowsSpec,
)
from .mtp_spec import MTPSpec
from .quantization import MADE, QuantizationSpec
from .state_spec import StateSpec
from .streams_spec import ONE_STREAM, StreamsSpec
from .vision_spec import VisionSpec

if TYPE_CHECKING:
    from ...runtime.config.model_choice import Quantization

DTypeName = Literal["float32", "bfloat16", "float16"]


class LayerView(NamedTuple):
    """Facts of a layer that attention needs: its window, see `ModelSpec.window_of`, and its heads.

    `chunked`: see `AttentionForm`; False without a window. `causal_images`: tokens of images attend to earlier tokens
    only, while in other layers of the model they attend to all of an image.
    """

    window: int | None
    heads: LayerHeads
    chunked: bool = False
    causal_images: bool = False


class FilesSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the files of a model, which only their readers use.

    Attributes:
        language_of: `model_type` of the multimodal folder around this language model, see `language_part`.
        num_mtp_layers: layers stored after the last one, to predict further tokens; they are not read, except for the
            one of `ModelSpec.mtp`.
        image_layers: layers of the files that attend to images, which are not read: the others are numbered without
            them. The embedding then has further rows, for images.
        num_parameters: numbers in the files, where only they show what the model has.
    """

    language_of: str = ""
    num_mtp_layers: int = 0
    image_layers: tuple[int, ...] = ()
    num_parameters: int | None = None


class DrafterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a drafter beside a model, which each rank has as a whole.

    Attributes:
        heads: of its layers, whose keys and values are further tensors of the KV pool.
        weights_bytes: memory of its weights.
        state_size: numbers that it keeps of the last token of each page; 0: none.
        state_token_bytes: their memory, by tokens.
    """

    heads: tuple[LayerHeads, ...]
    weights_bytes: int
    state_size: int = 0
    state_token_bytes: int = 0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Architecture of one decoder-only model or encoder; names follow Hugging Face's config.json where possible."""

    model_type: str  # of Hugging Face; names the family, which names the structure
    vocab_size: int  # rows of the embedding: the width of the logits
    hidden_size: int
    intermediate_size: int  # the largest, if layers differ
    num_layers: int
    num_heads: int  # of queries, except in layers that have a number of their own
    num_kv_heads: int
    head_dim: int  # of windowed layers, if layers differ
    rms_norm_eps: float  # of all norms, also of those that are not RMS norms
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int
    tie_word_embeddings: bool
    biases: Biases = NO_BIASES
    torch_dtype: DTypeName  # dtype of the saved weights, or the best choice for a quantized file
    eos_token_ids: tuple[int, ...] = ()  # sampling one of them ends a text
    bos_token_id: int | None = None
    rotary_dim: int | None = None  # leading elements of a head that rotate; None: all
    rope_layers: tuple[bool, ...] = ()  # one for each layer: whether it rotates q and k; empty: all do
    windows: WindowsSpec | None = None  # None: no layer has a window
    experts: ExpertsSpec | None = None
    state: StateSpec | None = None  # of layers without keys and values; None: all layers attend
    latent: LatentSpec | None = None  # of a model with latent attention, see there for the other fields
    form: LayerForm = PRE_NORMS
    attention: AttentionForm = PLAIN_ATTENTION
    streams: StreamsSpec = ONE_STREAM  # of Gemma 3n and Gemma 4
    quantization: QuantizationSpec | None = None  # of the weights of linear layers; None: not quantized
    sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS  # of requests without their own
    decision_temperatures: dict[str, float] = {}  # see `runtime/decision_calibration.py`
    files: FilesSpec = FilesSpec()
    pooling: PoolingSpec | None = None  # of an embedder or a scorer; None: the model generates text
    encoder: EncoderSpec | None = (
        None  # of a model in which tokens attend to later ones, too; None: a decoder
    )
    vision: VisionSpec | None = None  # None: the model does not see images
    drafter: DrafterSpec | None = None  # of a second model that drafts, see `launch/resolve/drafter.py`
    first_layer: int = 0  # of a pipeline stage: the whole model's number of its layer 0, see `stage_spec`
    layers_name: str = "model.layers"  # the module of the layers
    mtp: MTPSpec | None = (
        None  # of the layer that predicts further tokens; None: the files have none that is known
    )

    def layer_name(self, layer_id: int) -> str:
        """The module of a layer in the whole model."""
        return f"{self.layers_name}.{self.first_layer + layer_id}"

    @property
    def mtp_layer(self) -> ModelSpec | None:
        """The layer that predicts further tokens, as a model of one layer; None: none is used."""
        if self.mtp is None or not self.mtp.is_used:
            return None
        return structs.replace(
            self,
            num_layers=1,
            first_layer=self.mtp.number,
            layers_name=self.mtp.layers,
            rope_layers=(),
            windows=None,
            experts=self.experts and structs.replace(self.experts, dense_layers=()),
            state=None,
            mtp=None,
        )

    @property
    def draft_memory(self) -> tuple[tuple[LayerHeads, ...], int]:
        """The KV pool's part for a drafter: heads of its layers, and numbers of a feature, 0 without features."""
        layer = self.mtp_layer
        if layer is not None:
            return (layer.heads_of(0),), layer.hidden_size
        return ((), 0) if self.drafter is None else (self.drafter.heads, self.drafter.state_size)

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and to those before it."""
        return self.encoder is None

    @property
    def num_kv_layers(self) -> int:
        """Number of `kv_layers`."""
        return len(self.kv_layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers with KV memory of their own: all layers of an encoder share it, as none reads that of another."""
        if self.encoder is not None:
            return (0,)
        return tuple(layer for layer in self.attention_layers if self.kv_source_of(layer) == layer)

    def kv_source_of(self, layer_id: int) -> int:
        """The layer whose keys and values this layer attends to; those that it computes itself, or an earlier one's."""
        return self.streams.kv_sources[layer_id] if self.streams.kv_sources else layer_id

    def heads_of(self, layer_id: int) -> LayerHeads:
        """The heads of one layer."""
        if not self.streams.layer_heads:
            return LayerHeads(
                head_dim=self.head_dim, num_kv_heads=self.num_kv_heads, num_heads=self.num_heads
            )
        heads = self.streams.layer_heads[layer_id]
        return structs.replace(heads, num_heads=heads.num_heads or self.num_heads)

    def computes_kv(self, layer_id: int) -> bool:
        """Whether an attention layer has keys and values of its own."""
        return self.kv_source_of(layer_id) == layer_id

    def keys_are_values(self, layer_id: int) -> bool:
        """Whether the values of a layer are its keys before norm and rotary."""
        return self.form.full_keys_are_values and self.window_of(layer_id) is None

    def inner_size_of(self, layer_id: int) -> int:
        """Width of the dense MLP of one layer."""
        sizes = self.streams.intermediate_sizes
        return sizes[layer_id] if sizes else self.intermediate_size

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend to keys and values."""
        return tuple(layer for layer in range(self.num_layers) if self.attends(layer))

    def attends(self, layer_id: int) -> bool:
        """Whether this layer attends to keys and values."""
        return self.has_mixer(layer_id) and (self.state is None or not self.state.layers[layer_id])

    def has_mixer(self, layer_id: int) -> bool:
        """Whether this layer attends to keys and values, or keeps a state: most do, unless layers are single blocks."""
        if layer_id in self.form.without_attention:
            return False
        return not self.form.mlp_layers or not self.form.mlp_layers[layer_id]

    def has_mlp(self, layer_id: int) -> bool:
        """Whether this layer has an MLP: most have one, unless layers are single blocks."""
        if layer_id in self.form.without_mlp:
            return False
        return not self.form.mlp_layers or self.form.mlp_layers[layer_id]

    def window_of(self, layer_id: int) -> int | None:
        """Tokens that this layer attends to, including the query's own; None: all that it may.

        In an encoder the window is odd: as many tokens before the query as after it.
        """
        return self.windows.size if self.windows is not None and self.windows.layers[layer_id] else None

    def has_sinks(self, layer_id: int) -> bool:
        """Whether the query heads of this layer have sinks."""
        form = self.attention
        return form.sinks and not (form.window_sinks and self.window_of(layer_id) is None)

    def value_dim_of(self, layer_id: int) -> int:
        """Size of the heads of v in one layer."""
        return self.attention.value_dim or self.heads_of(layer_id).head_dim

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The distinct sizes of heads."""
        return tuple(dict.fromkeys(heads.head_dim for heads in self.streams.layer_heads)) or (self.head_dim,)

    def view_of(self, layer_id: int) -> LayerView:
        """Facts of one layer that attention needs; layers with equal views share the plan of a step."""
        window = self.window_of(layer_id)
        has_window = window is not None
        causal_images = self.vision is not None and self.vision.only_in_windows and not has_window
        return LayerView(
            window, self.heads_of(layer_id), self.attention.chunked and has_window, causal_images
        )

    @property
    def score_scale(self) -> float:
        """The factor of the products of queries and keys."""
        scale = self.attention.query_scale
        return self.head_dim**-0.5 if scale is None else scale

    def rotates(self, layer_id: int) -> bool:
        """Whether this layer rotates q and k by position; if not, its tokens have no order but that of time."""
        return not self.rope_layers or self.rope_layers[layer_id]

    def qk_norm_sizes(self, layer_id: int) -> tuple[int, int]:
        """Widths of the norms of q and of k of one layer, if there are any; 0 if the layer has no k."""
        own = self.heads_of(layer_id)
        heads = (own.num_heads, own.num_kv_heads) if self.form.qk_norm_over_heads else (1, 1)
        return heads[0] * own.head_dim, heads[1] * own.head_dim * self.computes_kv(layer_id)

    @property
    def known_positions(self) -> int:
        """Positions that the model can use: files with yarn added often still name the length before it."""
        scaling = self.rope_scaling
        if (
            scaling.kind != "yarn" or self.pooling is not None
        ):  # an embedder's files may allow less than the model
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(scaling.original_max_position * scaling.factor))

    @property
    def mlp_width(self) -> int:
        """Activation elements of the widest MLP per token."""
        if self.experts is None:
            return 3 * self.intermediate_size
        sparse = self.experts.num_active * (3 * self.experts.intermediate_size + 2 * self.hidden_size)
        sparse += 3 * self.experts.shared_size
        return max(sparse, 3 * self.intermediate_size if self.experts.dense_layers else 0)

    @property
    def stream_width(self) -> int:
        """Activation elements per token of what there is beside the layers: their inputs, and further streams."""
        inputs, altup = self.streams.layer_inputs, self.streams.altup
        width = 0 if inputs is None else 3 * self.num_layers * inputs.size
        return width + (0 if altup is None else 3 * altup.num_streams * self.hidden_size)

    def kv_bytes_per_token(self, dtype_bytes: int, scale_bytes: int = 0) -> int:
        """Memory of one token's keys and values over all layers: each element, and one scale per head.

        Windowed layers count like the others: they keep tokens that left their window, so that prefixes can be shared.
        With latent attention the values are a part of the keys. With a drafter: its keys and values, and the features
        of pages.
        """
        parts = 2 if self.latent is None else 1
        heads = [*(self.heads_of(layer_id) for layer_id in self.kv_layers), *self.draft_memory[0]]
        own = parts * sum(each.num_kv_heads * (each.head_dim * dtype_bytes + scale_bytes) for each in heads)
        own += 0 if self.drafter is None else self.drafter.state_token_bytes
        return own + (0 if self.mtp is None else self.mtp.feature_token_bytes)

    def contradiction(self) -> str | None:
        """The first contradiction between these facts, or None; the readers put the file's name before it."""
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
        encoder = self.encoder
        if encoder is not None and self.num_heads * self.head_dim != self.hidden_size:
            return f"{self.num_heads} attention heads cannot divide the hidden size {self.hidden_size} evenly"
        if encoder is not None and encoder.position_rows and self.max_position_embeddings > encoder.positions:
            return f"{self.max_position_embeddings} positions, but there are only {encoder.positions}"
        if self.head_dim % 2:
            return f"head_dim is {self.head_dim}, rotary position embedding needs an even number"
        rotary_dim = self.rotary_dim or self.head_dim
        streams, altup = self.streams, self.streams.altup
        if altup is not None and altup.active >= altup.num_streams:
            return f"stream {altup.active} is active, but there are only {altup.num_streams}"
        in_windows = self.windows.rotary_dim if self.windows is not None else None
        for turning in (rotary_dim, in_windows or rotary_dim):
            if turning % 2:
                return f"{turning} elements of a head rotate, rotary position embedding needs an even number"
        per_layer = (
            ("layer types", () if self.windows is None else self.windows.layers),
            ("rotary choices", self.rope_layers),
            ("head sizes", streams.layer_heads),
            ("sources of keys and values", streams.kv_sources),
            ("intermediate sizes", streams.intermediate_sizes),
            ("activation sparsities", streams.sparsity),
            ("kinds of blocks", self.form.mlp_layers),
        )
        for name, layers in per_layer:
            if layers and len(layers) != self.num_layers:
                return f"{len(layers)} {name} for {self.num_layers} layers"
        for heads in streams.layer_heads:
            if heads.head_dim % 2 or (heads.num_heads or self.num_heads) % heads.num_kv_heads:
                return f"{heads.num_heads or self.num_heads} attention heads cannot share {heads}"
        state = self.state
        if state is not None and len(state.layers) != self.num_layers:
            return f"{len(state.layers)} kinds of layers for {self.num_layers} layers"
        if not self.attention_layers:
            return "no layer attends to earlier tokens; a model needs at least one layer with attention"
        if state is not None and (found := state.contradiction()):
            return found
        experts = self.experts
        if experts is not None and (found := experts.routing.contradiction(experts.num_experts)):
            return found
        return self._rope_contradiction(rotary_dim // 2)

    def _rope_contradiction(self, num_frequencies: int) -> str | None:
        scaling = self.rope_scaling
        if scaling.kind == "llama3" and scaling.high_freq_factor < scaling.low_freq_factor:
            return (
                f"llama3 rope scaling has high_freq_factor {scaling.high_freq_factor:g}, "
                f"it must not be below low_freq_factor {scaling.low_freq_factor:g}"
            )
        if scaling.kind == "longrope":
            for name, factors in (
                ("short_factor", scaling.short_factor),
                ("long_factor", scaling.long_factor),
            ):
                if len(factors) != num_frequencies:
                    return f"longrope's {name} holds {len(factors)} numbers, expected {num_frequencies}"
        return None


def with_quantization(spec: ModelSpec, asked: Quantization | None) -> ModelSpec:
    """The model with this quantization; None: as in its files.

    Raises:
        ConfigError: the files have another quantization, or none that can be used.
    """
    found = spec.quantization
    if asked is None or (found is not None and found.method == asked):
        return spec
    if asked == "none":
        # GGUF tensors in blocks are read as plain values unless blocks are requested.
        if found is None or found.method == "gguf" or not found.stored:
            return structs.replace(spec, quantization=None)
        return structs.replace(spec, quantization=structs.replace(found, kept=False))
    if found is not None and (found.method != "gguf" or asked not in MADE):
        raise ConfigError(
            f"quantization is {asked}, but the checkpoint's weights are {found.method}; omit --quantization"
        )
    if asked not in MADE:
        raise ConfigError(
            f"quantization is {asked}, but the checkpoint's weights are not quantized, and only {', '.join(MADE)} can "
            f"be made while loading; name a checkpoint in {asked}, use one of those, or omit --quantization"
        )
    return structs.replace(spec, quantization=QuantizationSpec(method=asked, stored=False))
