"""Tiny checkpoints with a layer that predicts further tokens, and plain torch's idea of it.

The layer is the last one of a larger model of transformers, which does not know such layers. What is around it is as in
vLLM's `qwen3_next_mtp.py` and `glm4_moe_mtp.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec

QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 5,
    "head_dim": 16,
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "full_attention",
        "full_attention",
    ],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
QWEN3_NEXT = {
    **QWEN3_5,
    **EXPERTS,
    "model_type": "qwen3_next",
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
GLM4_MOE = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 4,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "use_qk_norm": True,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
QWEN3_5_MOE = {**QWEN3_NEXT, "model_type": "qwen3_5_moe_text"}
FORMS = {
    "qwen3.5": QWEN3_5,
    "qwen3.5-moe": QWEN3_5_MOE,
    "qwen3-next": QWEN3_NEXT,
    "glm-4.5": GLM4_MOE,
    "deepseek-v3": DEEPSEEK,
}


@dataclass
class MTPModel:
    """A checkpoint, and its parts in transformers."""

    folder: Path
    model: Any
    layer: Any
    norms: dict[str, torch.Tensor]
    projection: torch.Tensor
    feeds_normed: bool

    @property
    def spec(self) -> ModelSpec:
        spec = read_hf_spec(self.folder)
        assert spec.mtp is not None
        return structs.replace(
            spec, mtp=structs.replace(spec.mtp, is_used=True, feature_token_bytes=spec.hidden_size * 4)
        )

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        config = self.model.config
        scale = x.float().pow(2).mean(-1, keepdim=True).add(config.rms_norm_eps).rsqrt()
        return x * scale * (self.norms[name] + 1.0 if self.feeds_normed else self.norms[name])

    @torch.inference_mode()
    def features(self, tokens: Sequence[int]) -> torch.Tensor:
        """[n, K] after the model's norm."""
        states: torch.Tensor = self.model.model(torch.tensor([list(tokens)])).last_hidden_state
        return states[0]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], drafts: Sequence[int]) -> list[torch.Tensor]:
        """The logits of each draft and of one more after a text."""
        features, ids = self.features(tokens[:-1]), list(tokens[1:])
        found = []
        for draft in [*drafts, None]:
            hidden, normed = self.run(features, ids)
            found.append(self.model.lm_head(normed[-1]))
            if draft is not None:
                fed = normed if self.feeds_normed else hidden
                features, ids = torch.cat([features, fed[-1:]]), [*ids, draft]
        return found

    def run(self, features: torch.Tensor, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.model.model.embed_tokens(torch.tensor([list(ids)]))[0]
        x = torch.cat([self.norm("enorm", embedded), self.norm("hnorm", features)], dim=-1)
        x = (x @ self.projection.T)[None]
        positions = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        angles = self.model.model.rotary_emb(x, positions)
        hidden = self.layer(
            x, attention_mask=mask, position_ids=positions, position_embeddings=angles, past_key_values=None
        )
        hidden = (hidden[0] if isinstance(hidden, tuple) else hidden)[0]
        return hidden, self.norm("norm", hidden)


def make_mtp_model(make_tiny_model: Any, form: str, **options: Any) -> MTPModel:
    """The model of `form`, its last layer made the further one."""
    settings = {**FORMS[form], **options}
    tiny = make_tiny_model(settings.pop("model_type"), **settings)
    folder, model = tiny.folder, tiny.reference
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config["num_hidden_layers"] = last
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:last]
    is_qwen = form.startswith("qwen")
    if not is_qwen:
        config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    layer = f"model.layers.{last}"
    outer = "mtp." if is_qwen else f"{layer}."
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
    if not is_qwen:
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    size, generator = config["hidden_size"], torch.Generator().manual_seed(3)
    norms = {
        name: torch.rand(size, generator=generator) + (-0.5 if is_qwen else 0.5)
        for name in ("enorm", "hnorm", "norm")
    }
    projection = torch.randn((size, 2 * size), generator=generator) * (2 * size) ** -0.5
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name.replace(f"{layer}.", "mtp.layers.0.") if is_qwen else name] = tensor
    for stored, tensor in zip(names, (*norms.values(), projection), strict=True):
        tensors[f"{outer}{stored}.weight"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    further = model.model.layers[last]
    model.model.layers = model.model.layers[:last]
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = last
    return MTPModel(folder, model, further, norms, projection, feeds_normed=is_qwen)
