"""Several ranks against one, for models with state layers: each rank has a part of each state's channels and heads."""

from __future__ import annotations

from typing import Any

import pytest

from engine.launch.resolve.rank_spec import check_tp
from engine.runtime.errors import ConfigError
from tests.model_runner.structures.families import FAMILIES, LFM2_MOE, NEMOTRON_EXPERTS

from .test_tensor_parallel import GREEDY, SEEDED, generate
from .thread_group import ThreadGroup, on_ranks

DENSE, SPARSE = (
    FAMILIES[name].options for name in ("mamba2 dense, no rotary", "mamba2 experts, groups, rotary, biases")
)
ON_RANKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "lfm2": ("lfm2", 2, FAMILIES["lfm2"].options),
    "biases": ("lfm2", 3, FAMILIES["lfm2 four taps, biases, 9/3"].options | {"block_multiple_of": 12}),
    "lfm2_moe": ("lfm2_moe", 2, LFM2_MOE),
    "qwen3_next": ("qwen3_next", 2, FAMILIES["qwen3_next"].options),
    "qwen3_5_text": ("qwen3_5_text", 4, FAMILIES["qwen3_5_text"].options),
    "granite, one group": ("granitemoehybrid", 2, DENSE),
    "granite, a group for two ranks": (
        "granitemoehybrid",
        4,
        {**DENSE, "mamba_n_groups": 2, "mamba_proj_bias": True},
    ),
    "granite, a group for each rank": ("granitemoehybrid", 2, SPARSE),
    "nemotron_h": ("nemotron_h", 2, NEMOTRON_EXPERTS),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("model_type", "size", "options"), ON_RANKS.values(), ids=ON_RANKS.keys())
def test_ranks_together_say_what_one_says(make_tiny_model, model_type, size, options):
    tiny = make_tiny_model(model_type, **options)
    check_tp(tiny.spec, size)
    for params in (GREEDY, SEEDED):
        expected, _ = generate(tiny, params)

        def tokens(group: ThreadGroup, params: Any = params) -> list[list[int]]:
            return generate(tiny, params, group)[0]

        assert on_ranks(size, tokens) == [expected] * size


def test_channels_that_do_not_divide_are_refused(make_tiny_model):
    options = {"hidden_size": 90, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    tiny = make_tiny_model("lfm2", **FAMILIES["lfm2"].options | options)
    with pytest.raises(ConfigError, match="the 90 channels of its convolutions cannot be divided by it"):
        check_tp(tiny.spec, 4)


def test_groups_of_mamba_that_do_not_divide_are_refused(make_tiny_model):
    options = {"mamba_n_heads": 6, "mamba_n_groups": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    tiny = make_tiny_model("granitemoehybrid", **DENSE | options)
    with pytest.raises(ConfigError, match="the 3 groups of its Mamba layers can neither be divided"):
        check_tp(tiny.spec, 2)
    with pytest.raises(ConfigError, match="the 6 heads of its Mamba layers cannot be divided"):
        check_tp(tiny.spec, 4)


def test_key_heads_of_delta_nets_that_do_not_divide_are_refused(make_tiny_model):
    tiny = make_tiny_model("qwen3_next", **FAMILIES["qwen3_next"].options)
    with pytest.raises(ConfigError, match="the 2 key heads of its delta nets cannot be divided by it"):
        check_tp(tiny.spec, 4)
