"""Families that were published with code of their own, which is never run: mostly Llama by other names.

Baichuan 7B, XVERSE, Qwen 1, EXAONE 3, InternLM 2, and ChatGLM 2 and 3 with GLM-4-9B as they were published first.
"""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.layer_form import FUSED_QKV, GLM4, Biases, LayerForm, RopeScaling
from .family import GGUF, Facts, Family
from .hf_readers import partial_rope_facts, rope_facts
from .hf_rope import DYNAMIC, KINDS, MAX_POSITIONS, read_rope

_ALIBI_SIZE: Final = 5120
"""Hidden size of Baichuan 13B, in which positions are biases of scores (ALiBi); no field says so."""
_BAICHUAN2_VOCAB: Final = 125_696
_FUSED: Final = LayerForm(qkv_names=FUSED_QKV)
_ONLY_GLM: Final = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "original_rope": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
}
"""Fields with the only value that is supported; they may be missing."""


def _baichuan(fields: Fields) -> Facts:
    """Rows of the output head of Baichuan 2 are divided by their lengths."""
    if fields.integer("hidden_size", 1, 1 << 20) == _ALIBI_SIZE:
        raise fields.error("hidden_size", _ALIBI_SIZE, "position biases (ALiBi) of 13B are not supported")
    is_second = "z_loss_weight" in fields or fields.get("vocab_size") == _BAICHUAN2_VOCAB
    return rope_facts(fields, read_rope(fields)) | {"form": structs.replace(_FUSED, unit_head=is_second)}


def _xverse(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields))


def _qwen(fields: Fields) -> Facts:
    """Beyond `seq_length` tokens its code changes frequencies and scores; the engine serves no more than these."""
    if not fields.boolean("no_bias", default=True):
        raise fields.error("no_bias", False, "only true is supported")
    positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    bound = fields.integer("seq_length", 1, MAX_POSITIONS, default=positions)
    return partial_rope_facts(fields, read_rope(fields)) | {
        "form": _FUSED,
        "biases": Biases(qkv=True),
        "intermediate_size": fields.integer("intermediate_size", 2, 1 << 22) // 2,
        "max_position_embeddings": min(positions, bound),
    }


def _internlm2(fields: Fields) -> Facts:
    """`dynamic` scaling, which most files have, changes frequencies beyond `max_position_embeddings` only."""
    bias = fields.boolean("bias", default=True)
    return rope_facts(fields, read_rope(fields, kinds=(*KINDS, DYNAMIC))) | {
        "form": structs.replace(_FUSED, grouped_qkv=True),
        "biases": Biases(qkv=bias, attention_out=bias),
    }


def _chatglm(fields: Fields) -> Facts:
    """ChatGLM2 divides positions by `rope_ratio`; for ChatGLM3 and GLM-4 it is a factor of the base."""
    for name, only in _ONLY_GLM.items():
        if fields.get(name) not in (None, only):
            raise fields.error(name, fields.get(name), f"only {str(only).lower()} is supported")
    ratio = fields.number("rope_ratio", 1e-3, 1e9, default=1.0)
    divides = "chatglm2" in str(fields.get("_name_or_path"))  # no other field differs
    rope = read_rope(fields, 10_000.0 if divides else 10_000.0 * ratio, default_partial=0.5)
    if divides and ratio != 1.0:
        rope = rope._replace(scaling=RopeScaling(kind="linear", factor=ratio))
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    shares = fields.boolean("multi_query_attention", default=False)
    groups = fields.integer("multi_query_group_num", 1, num_heads, default=1)
    return partial_rope_facts(fields, rope) | {
        "num_kv_heads": groups if shares else num_heads,
        "biases": Biases(qkv=fields.boolean("add_qkv_bias", default=False)),
        "form": structs.replace(GLM4, norms=LayerForm().norms, qkv_names=FUSED_QKV),
    }


def _no_facts(fields: Fields, arch: str) -> Facts:
    """Files of llama.cpp have separate q, k and v, and Llama's names."""
    return {}


_GPT_NAMES: Final = {
    r"^transformer\.wte\.": "model.embed_tokens.",
    r"^transformer\.ln_f\.": "model.norm.",
    r"^transformer\.h\.": "model.layers.",
    r"\.ln_1\.": ".input_layernorm.",
    r"\.ln_2\.": ".post_attention_layernorm.",
    r"^transformer\.rotary.*|.*\.rotary_emb\.inv_freq$": "",
}


FAMILIES: Final = (
    Family(
        "baichuan",
        structure="llama",
        published="Baichuan 7B, Baichuan 2 7B",
        architecture="BaichuanForCausalLM",
        read=_baichuan,
        tensors={r"\.W_pack\.": ".qkv_proj.", r".*\.rotary_emb\.inv_freq$": ""},
    ),
    Family(
        "xverse",
        structure="llama",
        published="XVERSE 7B, 13B, 65B",
        architecture="XverseForCausalLM",
        read=_xverse,
        gguf={"xverse": GGUF(_no_facts, neighbors=True)},
        tensors={r".*\.rotary_emb\.inv_freq$": ""},
    ),
    Family(
        "qwen",
        structure="llama",
        published="Qwen 1.8B, 7B, 14B, 72B",
        architecture="QWenLMHeadModel",
        read=_qwen,
        norm_eps="layer_norm_epsilon",
        renamed={
            "rotary_emb_base": "rope_theta",
            "rotary_pct": "partial_rotary_factor",
            "kv_channels": "head_dim",
        },
        tensors={
            **_GPT_NAMES,
            r"\.attn\.c_attn\.": ".self_attn.qkv_proj.",
            r"\.attn\.c_proj\.": ".self_attn.o_proj.",
            r"\.mlp\.w1\.": ".mlp.up_proj.",
            r"\.mlp\.w2\.": ".mlp.gate_proj.",
            r"\.mlp\.c_proj\.": ".mlp.down_proj.",
        },
    ),
    Family(
        "exaone",
        structure="llama",
        published="EXAONE 3.0, 3.5, Deep",
        architecture="ExaoneForCausalLM",
        read=_xverse,
        gguf={"exaone": GGUF(_no_facts)},
        norm_eps="layer_norm_epsilon",
        renamed={"num_layers": "num_hidden_layers", "activation_function": "hidden_act"},
        tensors={
            **_GPT_NAMES,
            r"\.attn\.attention\.out_proj\.": ".self_attn.o_proj.",
            r"\.attn\.attention\.": ".self_attn.",
            r"\.mlp\.c_fc_0\.": ".mlp.gate_proj.",
            r"\.mlp\.c_fc_1\.": ".mlp.up_proj.",
            r"\.mlp\.c_proj\.": ".mlp.down_proj.",
        },
    ),
    Family(
        "internlm2",
        structure="llama",
        published="InternLM 2, 2.5",
        architecture="InternLM2ForCausalLM",
        read=_internlm2,
        gguf={"internlm2": GGUF(_no_facts, neighbors=True)},
        tensors={
            r"\.tok_embeddings\.": ".embed_tokens.",
            r"^output\.": "lm_head.",
            r"\.attention\.wqkv\.": ".self_attn.qkv_proj.",
            r"\.attention\.wo\.": ".self_attn.o_proj.",
            r"\.attention_norm\.": ".input_layernorm.",
            r"\.ffn_norm\.": ".post_attention_layernorm.",
            r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
            r"\.feed_forward\.w2\.": ".mlp.down_proj.",
            r"\.feed_forward\.w3\.": ".mlp.up_proj.",
        },
    ),
    Family(
        "chatglm",
        structure="llama",
        published="ChatGLM2, ChatGLM3, GLM-4-9B as published first",
        architecture="ChatGLMModel",
        read=_chatglm,
        norm_eps="layernorm_epsilon",
        renamed={
            "padded_vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "ffn_hidden_size": "intermediate_size",
            "kv_channels": "head_dim",
            "seq_length": "max_position_embeddings",
        },
        tensors={
            r"^transformer\.embedding\.word_embeddings\.": "model.embed_tokens.",
            r"^transformer\.encoder\.final_layernorm\.": "model.norm.",
            r"^transformer\.encoder\.layers\.": "model.layers.",
            r"^transformer\.output_layer\.": "lm_head.",
            r"^transformer\.rotary.*": "",
            r"\.self_attention\.query_key_value\.": ".self_attn.qkv_proj.",
            r"\.self_attention\.dense\.": ".self_attn.o_proj.",
            r"\.mlp\.dense_h_to_4h\.": ".mlp.gate_up_proj.",
            r"\.mlp\.dense_4h_to_h\.": ".mlp.down_proj.",
        },
    ),
)
