"""Several ranks against one: norms over all heads, interleaved rotary, plain MLPs, parallel blocks, caps, factors."""

from __future__ import annotations

from typing import Any

import pytest

from engine.launch.resolve.rank_spec import check_tp
from tests.model_runner.structures.families import FAMILIES, GRANITE, NEMOTRON_EXPERTS, SPARSE

from .test_tensor_parallel import GREEDY, SEEDED, generate
from .thread_group import ThreadGroup, on_ranks

GLM = {"head_dim": 8, "num_attention_heads": 6}

VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "smollm3": ("smollm3", 2, {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "olmo2 norms over the heads of all ranks": ("olmo2", 2, {"attention_bias": True}),
    "olmo3 KV heads held twice": (
        "olmo3",
        4,
        {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "sliding_window": 9},
    ),
    "glm4": ("glm4", 2, GLM),
    "starcoder2 biases": ("starcoder2", 2, {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", 2, {"sliding_window": 9, "logit_scale": 0.5, "attention_bias": True}),
    "granite factors, tied": ("granite", 2, {**GRANITE, "tie_word_embeddings": True, "vocab_size": 97}),
    "deepseek_v32 all ranks choose the same tokens": ("deepseek_v32", 2, {**SPARSE, "index_topk": 8}),
    "nemotron_h experts of latents": (
        "nemotron_h",
        2,
        {**NEMOTRON_EXPERTS, "n_group": 1, "moe_latent_size": 20},
    ),
    "gemma4 experts beside the MLP": (
        "gemma4_text",
        2,
        FAMILIES["gemma4 experts beside the MLP"].options,
    ),
    "mimo_v2_flash": ("mimo_v2_flash", 2, FAMILIES["mimo_v2_flash experts, as wide values"].options),
    "step3p5": ("step3p5", 2, FAMILIES["step3p5"].options),
    "mimo_v2_flash small heads of v": ("mimo_v2_flash", 4, FAMILIES["mimo_v2_flash"].options),
    "gemma2 caps, a vocabulary that does not divide": (
        "gemma2",
        2,
        {
            "head_dim": 16,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "vocab_size": 97,
        },
    ),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("model_type", "size", "options"), VARIANTS.values(), ids=VARIANTS.keys())
def test_ranks_together_say_what_one_says(make_tiny_model, model_type, size, options):
    tiny = make_tiny_model(model_type, **options)
    check_tp(tiny.spec, size)
    for params in (GREEDY, SEEDED):
        expected, _ = generate(tiny, params)

        def tokens(group: ThreadGroup, params: Any = params) -> list[list[int]]:
            return generate(tiny, params, group)[0]

        assert on_ranks(size, tokens) == [expected] * size
