"""Which modules of a model with latent attention an adapter can change."""

from __future__ import annotations

from engine.models.adapters.base_modules import BaseModules
from tests.launch.resolve.test_latent_attention import LATENT_SPEC


def test_projections_can_be_changed_but_not_what_queries_take_in():
    base = BaseModules(LATENT_SPEC)
    layer = "model.layers.3.self_attn"

    assert {name.rpartition(".")[2] for name in base.linears() if name.startswith(f"{layer}.")} == {
        "q_proj",
        "kv_a_proj_with_mqa",
        "o_proj",
    }
    assert base.by_name[f"{layer}.kv_a_proj_with_mqa"][1:] == (576, 576)
    assert base.find(f"{layer}.kv_b_proj") is None
    assert "queries take in a part of kv_b_proj" in base.reason_against(f"{layer}.kv_b_proj")
