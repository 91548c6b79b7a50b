"""Several ranks against one: shared experts, their gates, layer norms and the bias of the output head."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.launch.resolve.rank_spec import check_tp
from engine.runtime.errors import ConfigError
from tests.model_runner.structures.families import FAMILIES
from tests.model_runner.structures.test_mixtures import ONE_OF_EACH

from .test_tensor_parallel import GREEDY, SEEDED, generate
from .thread_group import ThreadGroup, on_ranks


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_ranks_together_say_what_one_says(make_tiny_model, variant):
    row = FAMILIES[variant]
    tiny = make_tiny_model(row.model_type, **row.options, vocab_size=97)
    check_tp(tiny.spec, 2)
    for params in (GREEDY, SEEDED):
        expected, _ = generate(tiny, params)

        def tokens(group: ThreadGroup, params: Any = params) -> list[list[int]]:
            return generate(tiny, params, group)[0]

        assert on_ranks(2, tokens) == [expected] * 2


def test_a_shared_expert_that_cannot_be_divided_is_named(make_tiny_model):
    spec = make_tiny_model("qwen2_moe", **FAMILIES["qwen2_moe"].options).spec
    assert spec.experts is not None
    experts = msgspec.structs.replace(spec.experts, shared_size=41)
    with pytest.raises(ConfigError, match="its shared expert's intermediate size of 41 cannot be divided"):
        check_tp(msgspec.structs.replace(spec, experts=experts), 2)
