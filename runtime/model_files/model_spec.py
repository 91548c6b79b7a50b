"""ModelSpec: the facts about a model's architecture that the rest of the engine computes with.

Read from a model's files by `hf_config` and `gguf_config` (see `load_spec`); sent to every process inside messages. It
holds no tensors, no paths and no facts about devices: memory planning and model building derive those from it.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from ..sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from .encoder_spec import ENCODER_MODEL_TYPES, EncoderSpec
from .pooling_spec import PoolingSpec
from .quantization import BLOCK_METHODS, QuantizationSpec

SUPPORTED_MODEL_TYPES: Final = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "phi3",
    *ENCODER_MODEL_TYPES,
)
"""Hugging Face `model_type` values for which there is a model implementation."""

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
DTypeName = Literal["float32", "bfloat16", "float16"]


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are scaled for longer contexts.

    `linear` divides all frequencies by `factor`. `llama3` divides those with a wavelength above
    original_max_position / low_freq_factor, keeps those below original_max_position / high_freq_factor, and
    blends between. `yarn` (Peng et al. 2023) keeps those that turn more than `beta_fast` times within the original
    context, divides those that turn less than `beta_slow` times, and blends between by dimension. `longrope` (Ding et
    al. 2024) divides each frequency by its own factor: from `long_factor` if the engine serves more positions than the
    original context, else from `short_factor`.

    `attention_factor` multiplies cos and sin, which makes the scores of long contexts sharper (yarn, longrope).
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the blend begins and ends at whole dimensions
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sparse MLPs of a mixture-of-experts model."""

    num_experts: int
    num_active: int  # experts that compute for a token
    intermediate_size: int  # of each expert
    normalize: bool  # the weights of a token's active experts add up to 1
    dense_layers: tuple[int, ...] = ()  # layers with a dense MLP instead


class _Linear(NamedTuple):
    """A linear layer that occurs `num` times in a layer of the model: outputs per module name, and number of inputs."""

    rows: dict[str, int]
    columns: int
    num: int = 1


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Architecture of one decoder-only model or encoder; names follow Hugging Face's config.json where possible."""

    model_type: str  # of Hugging Face; names the module in model_runner/models
    vocab_size: int  # rows of the embedding: the width of the logits
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float  # of all norms, also of those that are not RMS norms
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False  # of the q, k and v projections
    attention_out_bias: bool = False
    mlp_bias: bool = False
    torch_dtype: DTypeName  # dtype of the saved weights, or the best choice for a quantized file
    eos_token_ids: tuple[int, ...] = ()  # sampling one of them ends a text
    bos_token_id: int | None = None
    rotary_dim: int | None = None  # leading elements of a head that rotate; None: all
    qk_norm: bool = False  # each head of q and k is normalized before rotary
    query_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    sliding_window: int | None = None  # tokens that a windowed layer attends to, see `window_of`
    windowed_layers: tuple[bool, ...] = ()  # one for each layer; empty: none has a window
    local_rope_theta: float | None = None  # of windowed layers, without scaling; None: as the others
    experts: ExpertsSpec | None = None
    norms_per_layer: int = 2
    float32_norms: bool = False  # norm weights are kept in float32, for any serving dtype
    stored_parameters: int | None = None  # numbers in the files, where only they show what the model has
    quantization: QuantizationSpec | None = None  # of the weights of linear layers; None: not quantized
    sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS  # of requests without their own
    pooling: PoolingSpec | None = None  # of an embedder or a scorer; None: the model generates text
    encoder: EncoderSpec | None = (
        None  # of a model in which tokens attend to later ones, too; None: a decoder
    )

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and to those before it."""
        return self.encoder is None

    @property
    def num_kv_layers(self) -> int:
        """Layers with KV memory of their own: all layers of an encoder share it, as none reads that of another."""
        return self.num_layers if self.encoder is None else 1

    def window_of(self, layer_id: int) -> int | None:
        """Tokens that this layer attends to, including the query's own; None: all that it may.

        In an encoder the window is odd: as many tokens before the query as after it.
        """
        return self.sliding_window if self.windowed_layers and self.windowed_layers[layer_id] else None

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
    def num_parameters(self) -> int:
        """Weights of the model; a tied output head counts once."""
        if self.stored_parameters is not None:
            return self.stored_parameters
        if self.encoder is not None:
            return self.encoder.num_parameters(
                vocab_size=self.vocab_size,
                size=self.hidden_size,
                inner=self.intermediate_size,
                num_layers=self.num_layers,
                biases=(self.attention_bias, self.attention_out_bias, self.mlp_bias),
            )
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        if self.attention_bias:
            attention += q_size + 2 * kv_size
        if self.attention_out_bias:
            attention += self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * attention + self._mlp_parameters + self._norm_parameters + embeddings

    @property
    def _mlp_parameters(self) -> int:
        dense = 3 * self.hidden_size * self.intermediate_size
        if self.mlp_bias:
            dense += 2 * self.intermediate_size + self.hidden_size
        if self.experts is None:
            return self.num_layers * dense
        num_dense = len(self.experts.dense_layers)
        one = 3 * self.hidden_size * self.experts.intermediate_size
        sparse = self.experts.num_experts * (one + self.hidden_size)  # plus the expert's row in the router
        return num_dense * dense + (self.num_layers - num_dense) * sparse

    @property
    def _norm_parameters(self) -> int:
        layer = self.norms_per_layer * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return self.num_layers * layer + self.hidden_size

    @property
    def mlp_width(self) -> int:
        """Activation elements of the widest MLP per token."""
        if self.experts is None:
            return 3 * self.intermediate_size
        sparse = self.experts.num_active * (3 * self.experts.intermediate_size + 2 * self.hidden_size)
        return max(sparse, 3 * self.intermediate_size if self.experts.dense_layers else 0)

    def weight_bytes(self, dtype_bytes: int, *, dequantized: bool = False) -> int:
        """Memory of the weights; those that are not quantized take `dtype_bytes` each.

        `dequantized`: counts quantized weights in `dtype_bytes` too, as they are stored if no kernel supports them.
        """
        wider = (4 - dtype_bytes) * self._norm_parameters if self.float32_norms else 0
        saved = 0 if dequantized else self._saved_by_quantization(dtype_bytes)
        return self.num_parameters * dtype_bytes + wider - saved

    def _saved_by_quantization(self, dtype_bytes: int) -> int:
        """Bytes saved by linear layers, by experts in blocks, and by an output head that is not tied."""
        if self.quantization is None:
            return 0
        saved = 0
        for layer in range(self.num_layers):
            for linear in self._linears(layer):
                modules = [(f"model.layers.{layer}.{name}", rows) for name, rows in linear.rows.items()]
                together = self.quantization.bytes_together(modules, linear.columns)
                for held, rows in zip(together, linear.rows.values(), strict=True):
                    if held is not None:
                        saved += linear.num * (rows * linear.columns * dtype_bytes - held)
        table = self.vocab_size * self.hidden_size * dtype_bytes
        if not self.tie_word_embeddings:
            saved += table - self._head_bytes("lm_head", dtype_bytes)
        elif self._head_bytes("model.embed_tokens", dtype_bytes) < table:
            saved += table  # rows are looked up in the head
        return saved

    def tied_head_bytes(self, dtype_bytes: int, *, dequantized: bool = False) -> int:
        """Memory of a head that is tied to the embedding but packed for its kernel, which makes it a copy."""
        if not self.tie_word_embeddings or self.encoder is not None:
            return 0
        if self.quantization is None or dequantized:
            return self.vocab_size * self.hidden_size * dtype_bytes
        return self._head_bytes("model.embed_tokens", dtype_bytes)

    def _head_bytes(self, name: str, dtype_bytes: int) -> int:
        assert self.quantization is not None
        held = self.quantization.bytes_of(name, self.vocab_size, self.hidden_size)
        return self.vocab_size * self.hidden_size * dtype_bytes if held is None else held

    def _linears(self, layer: int) -> list[_Linear]:
        """A layer's linear layers; without experts if their form is not blocks, because those are dequantized."""
        size, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        linears = [
            _Linear({f"self_attn.{name}": rows for name, rows in qkv.items()}, size),
            _Linear({"self_attn.o_proj": size}, q_size),
        ]
        mlp, num, experts = "mlp", 1, self.experts
        if experts is not None and layer not in experts.dense_layers:
            if self.quantization is not None and self.quantization.method not in BLOCK_METHODS:
                return linears
            mlp, num, inner = "mlp.experts.0", experts.num_experts, experts.intermediate_size
        gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        return [*linears, _Linear(gate_up, size, num), _Linear({f"{mlp}.down_proj": size}, inner, num)]

    def kv_bytes_per_token(self, dtype_bytes: int, scale_bytes: int = 0) -> int:
        """Memory of one token's keys and values over all layers: each element, and one scale per head.

        Windowed layers count like the others: they keep tokens that left their window, so that prefixes can be shared.
        """
        return 2 * self.num_kv_layers * self.num_kv_heads * (self.head_dim * dtype_bytes + scale_bytes)

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
        if rotary_dim % 2:
            return f"{rotary_dim} elements of a head rotate, rotary position embedding needs an even number"
        if self.windowed_layers and len(self.windowed_layers) != self.num_layers:
            return f"{len(self.windowed_layers)} layer types for {self.num_layers} layers"
        experts = self.experts
        if experts is not None and experts.num_active > experts.num_experts:
            return f"{experts.num_active} experts for each token, but there are only {experts.num_experts}"
        return self._rope_contradiction(rotary_dim // 2)

    def _rope_contradiction(self, num_frequencies: int) -> str | None:
        scaling = self.rope_scaling
        if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
            return (
                f"llama3 rope scaling has high_freq_factor {scaling.high_freq_factor:g}, "
                f"it must be above low_freq_factor {scaling.low_freq_factor:g}"
            )
        if scaling.kind == "longrope":
            for name, factors in (
                ("short_factor", scaling.short_factor),
                ("long_factor", scaling.long_factor),
            ):
                if len(factors) != num_frequencies:
                    return f"longrope's {name} holds {len(factors)} numbers, expected {num_frequencies}"
        return None
