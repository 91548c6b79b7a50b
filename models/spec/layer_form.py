"""How the layers of a decoder compute, where families differ: `LayerForm`, and `AttentionForm` within it.

Beside them: `RopeScaling` and `LatentSpec`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
NormKind = Literal["rms", "offset_rms", "layer"]
MLPKind = Literal["gated", "plain"]


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are scaled for longer contexts.

    `linear` divides all frequencies by `factor`. `llama3` divides those with a wavelength above
    original_max_position / low_freq_factor, keeps those below original_max_position / high_freq_factor, and
    blends between; in Llama 4 the two factors are equal, so none is between. `yarn` (Peng et al. 2023) keeps those that
    turn more than `beta_fast` times within the original context, divides those that turn less than `beta_slow` times,
    and blends between by dimension. `longrope` (Ding et al. 2024) divides each frequency by its own factor: from
    `long_factor` if the engine serves more positions than the original context, else from `short_factor`.
    `proportional` divides the frequencies of the leading `turning_part` of the pairs by `factor`; the others do not
    turn.

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
    turning_part: float = 1.0


class TemperatureTuning(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of the rotated queries by position, which keep the scores of long contexts sharp (Nakanishi 2025).

    A query is multiplied by 1 + scale * log(1 + floor((position + offset) / length)).

    Attributes:
        unrotated_only: only in layers that do not rotate.
    """

    scale: float
    length: float
    offset: int = 0
    unrotated_only: bool = False


class AttentionForm(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the scores in attention; the default is a plain softmax of scaled products.

    Attributes:
        query_scale: of the products of queries and keys; None: head_dim ** -0.5.
        score_cap: scaled scores become cap * tanh(score / cap); None: they are not capped.
        sinks: each query head has a learned score of its own, the sink, without a value: it only joins the denominator
            of the softmax. Sinks are neither scaled nor capped.
        window_sinks: only layers with a window have sinks.
        value_dim: size of the heads of v; in the KV pool they end with zeros. None: that of the heads of q and k.
        value_scale: a factor of the values.
        chunked: windows are chunks: positions are divided into chunks of a window's size, and a token of a windowed
            layer attends to itself and to those before it in its chunk.
        output_gate: what heads have attended to is multiplied by sigmoid(gate(x)) before the output projection; the
            gate's rows are in the matrix of queries, those of each head after its query.
        head_gates: the same with one gate for each query head, by a matrix of its own, `g_proj`.
        temperature: None: queries have no factors by position.
    """

    query_scale: float | None = None
    score_cap: float | None = None
    sinks: bool = False
    window_sinks: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0
    chunked: bool = False
    output_gate: bool = False
    head_gates: bool = False
    temperature: TemperatureTuning | None = None


PLAIN_ATTENTION: Final = AttentionForm()


class WindowsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that attend to the last tokens only.

    Attributes:
        size: tokens that such a layer attends to, see `ModelSpec.window_of`.
        layers: one for each layer of the model: whether it has a window.
        rope_theta: of these layers, whose frequencies are not scaled; None: they rotate as the others.
        rotary_dim: of these layers if they have a `rope_theta`: elements of a head that rotate; None: as in the others.
    """

    size: int
    layers: tuple[bool, ...]
    rope_theta: float | None = None
    rotary_dim: int | None = None


class LayerHeads(msgspec.Struct, frozen=True, kw_only=True):
    """The heads of one layer: the size of all heads, and the numbers of those of keys and values, and of queries.

    `num_heads`: 0 in a spec is `ModelSpec.num_heads`, which `ModelSpec.heads_of` fills in.
    """

    head_dim: int
    num_kv_heads: int
    num_heads: int = 0


class Biases(msgspec.Struct, frozen=True, kw_only=True):
    """Which linear layers have biases: q, k and v; the output of attention; the MLP."""

    qkv: bool = False
    attention_out: bool = False
    mlp: bool = False


NO_BIASES: Final = Biases()


class ModuleNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of modules that differ between families; the default is Llama's. `final_norm` is outside of layers.

    `mtp`: the prefix of layers that predict further tokens, which are not read; empty: see `FilesSpec`.
    """

    mlp: str = "mlp"
    attention_out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    final_norm: str = "norm"
    mtp: str = ""


class LayerForm(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of a decoder's layers; the default is Llama's.

    Attributes:
        norms: names of the norms of a layer, without those of heads.
        norm: kind of all norms except those of heads; `offset_rms`: the weight is 1 + the stored one, also of heads.
        norm_bias: these norms have biases.
        float32_norms: the weights of norms are kept in float32, for any serving dtype.
        mlp: `gated`: down(act(gate) * up); `plain`: down(act(up)).
        qkv_names: modules of `self_attn` with q, k and v; one name: a matrix of all three.
        grouped_qkv: the rows of this matrix are those of each KV head together: its queries, its key, its value.
        mlp_names: modules of `mlp`, down last; one name before it in a gated MLP: a matrix of gate and up.
        qk_norm: each head of q and k is normalized before rotary.
        qk_norm_over_heads: if they are, q and k have one norm each over all of their heads together.
        unit_qk_norm: in layers that rotate, heads of q and k are divided by their root mean squares, without weights.
        interleaved_rope: rotary turns neighboring elements of a head, (0, 1), (2, 3), ...; else the halves are paired.
        embedding_scale: a factor of the embedding's vectors.
        residual_scale: a factor of what each block adds to the residual stream.
        logits_scale: a factor of the logits.
        logits_cap: logits become cap * tanh(logit / cap); None: they are not capped.
        names: of modules.
        head_bias: the output head has a bias.
        unit_head: the rows of the output head are divided by their lengths, and are not quantized.
        value_norm: each head of v is divided by its root mean square.
        full_keys_are_values: layers without a window have no v: values are the keys before norm and rotary.
        layer_scalars: each layer has a learned factor of its whole result.
        mlp_layers: of a decoder whose layers are single blocks, one for each layer: whether that block is an MLP, see
            `ModelSpec.has_mlp`; empty: each layer has two blocks.
        without_attention, without_mlp: layers without one of their two blocks, and without the norm before it.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: NormKind = "rms"
    norm_bias: bool = False
    float32_norms: bool = False
    mlp: MLPKind = "gated"
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    grouped_qkv: bool = False
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    unit_qk_norm: bool = False
    interleaved_rope: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    names: ModuleNames = ModuleNames()
    head_bias: bool = False
    unit_head: bool = False
    value_norm: bool = False
    full_keys_are_values: bool = False
    layer_scalars: bool = False
    mlp_layers: tuple[bool, ...] = ()
    without_attention: tuple[int, ...] = ()
    without_mlp: tuple[int, ...] = ()

    @property
    def fused_qkv(self) -> bool:
        """Whether one matrix holds q, k and v."""
        return len(self.qkv_names) == 1

    @property
    def fused_gate_up(self) -> bool:
        """Whether one matrix holds gate and up."""
        return self.mlp == "gated" and len(self.mlp_names) == 2


PRE_NORMS: Final = LayerForm()
"""A norm before attention and one before the MLP."""

QK_NORMS: Final = LayerForm(qk_norm=True)
"""The same with norms of each head of q and k, as in Qwen3."""

PRE_NORMS_OVER_HEADS: Final = LayerForm(qk_norm=True, qk_norm_over_heads=True)
"""The same with norms of q and k over all heads, as in OLMoE."""

FUSED_QKV: Final = ("qkv_proj",)
"""The name of one matrix of q, k and v."""

FUSED: Final = LayerForm(qkv_names=FUSED_QKV, mlp_names=("gate_up_proj", "down_proj"))
"""The same; q, k, v are one matrix, gate and up another, as in Phi-3."""

FOUR_NORMS: Final = LayerForm(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)
"""Norms before and after attention and the MLP, as in Gemma."""

POST_NORMS_OVER_HEADS: Final = LayerForm(
    norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm=True, qk_norm_over_heads=True
)
"""Norms after attention and the MLP only, as in OLMo 2."""

GLM4: Final = LayerForm(
    norms=(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    mlp_names=("gate_up_proj", "down_proj"),
    interleaved_rope=True,
)
"""Norms before and after attention and the MLP, by GLM-4's names."""

PARALLEL: Final = LayerForm(norms=("input_layernorm",), norm="layer", interleaved_rope=True)
"""One norm before attention and the MLP, which take the same input, as in Command R."""


KV_UP: Final = "self_attn.kv_b_proj"
"""Keys and values from latents; held per head in the serving dtype, whatever the form of linear layers."""


class IndexSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The indexer of sparse latent attention (DeepSeek-V3.2, 2025), which chooses the tokens that a token attends to.

    A token has an index key, at the end of its row in the KV pool. The index score of an earlier token is the weighted
    sum over the index heads of relu(query . key); the `top_k` tokens with the best scores are attended to, all tokens
    where there are not more. The first `qk_rope_head_dim` numbers of index queries and keys rotate.

    Attributes:
        num_heads, head_dim: of the index queries; all share one key.
        interleaved_rope: see `LayerForm`; of the indexer.
        shared_layers: one for each layer: whether it attends to the tokens that the layer before it chose, and has no
            indexer; empty: none does.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved_rope: bool = False
    shared_layers: tuple[bool, ...] = ()

    def is_in(self, layer_id: int) -> bool:
        """Whether this layer has an indexer."""
        return not self.shared_layers or not self.shared_layers[layer_id]


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of latent attention (DeepSeek-V2, 2024).

    A token has one row in the KV pool for all heads: its normalized latent, then a key part that rotates. Per head,
    keys and values are `kv_b_proj` of the latent. Queries take in the keys' half of that matrix (the absorbed form), so
    attention reads the rows as they are: one KV head, the row as key, its first `kv_lora_rank` numbers as value. Where
    the row ends with an index key, the end of a query is 0.

    The `ModelSpec` of such a model describes attention over rows: `num_kv_heads` is 1, `head_dim` the row's size and
    `rotary_dim` the part that rotates, which is the last one of the row.
    """

    q_lora_rank: int | None  # size of the queries' own latent; None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int  # of a head's query: the part that does not rotate
    qk_rope_head_dim: int  # the part that does
    v_head_dim: int
    norm_eps: float = 1e-6  # of the norms of latents, whatever the other norms have
    index: IndexSpec | None = None  # None: a token attends to all earlier ones

    @property
    def key_size(self) -> int:
        """Numbers of a token's latent and of its key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def row_size(self) -> int:
        """Numbers of a token in the KV pool, in a layer with an indexer if there is one: the index key is the end."""
        return self.key_size + (0 if self.index is None else self.index.head_dim)

    @property
    def qk_head_dim(self) -> int:
        """Size of a head's query and key before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
