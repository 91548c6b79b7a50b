"""Stages of a model: which layers each has, what they weigh, and what cannot be divided."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.launch.resolve.memory_budget import capacity_of
from engine.launch.resolve.resolve import resolve
from engine.launch.resolve.stages import (
    Stage,
    balanced_lengths,
    is_of_other_stages,
    least_bubble,
    stage_spec,
    stage_weight_bytes,
    stages_of,
)
from engine.models.spec.layer_form import WindowsSpec
from engine.models.spec.quantization import QuantizationSpec
from engine.models.spec.streams_spec import StreamsSpec
from engine.models.weight_files.weight_memory import num_parameters, tied_head_bytes, weight_bytes
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import ConfigError
from tests.launch.resolve.test_resolve import HOST, config, pool_of
from tests.launch.resolve.test_resolve import SPEC as LLAMA


def lengths_of(stages: list[Stage]) -> list[int]:
    return [stage.end - stage.first for stage in stages]


def resolved(spec: Any = LLAMA, **settings: Any) -> EngineConfig:
    return resolve(config(device="cpu", **settings), spec, HOST).config


def test_layers_are_divided_once_in_order():
    stages = stages_of(LLAMA, ParallelConfig(pp=3))

    assert [(stage.index, stage.count) for stage in stages] == [(0, 3), (1, 3), (2, 3)]
    assert [layer for stage in stages for layer in range(stage.first, stage.end)] == list(
        range(LLAMA.num_layers)
    )


def test_the_output_head_counts_like_the_layers_that_it_is_as_large_as():
    small_head, large_head = replace(LLAMA, vocab_size=16), replace(LLAMA, vocab_size=200_000)
    even = LLAMA.num_layers // 2

    assert balanced_lengths(small_head, 2) == (even, LLAMA.num_layers - even)
    first, last = balanced_lengths(large_head, 2)
    assert first > last + 2


@pytest.mark.parametrize("count", range(1, 6))
def test_the_largest_stage_is_as_small_as_possible(count):
    """Against all divisions."""
    spec = replace(
        LLAMA, num_layers=7, streams=StreamsSpec(intermediate_sizes=(64, 900, 64, 64, 2000, 300, 64))
    )

    def heaviest(lengths: tuple[int, ...]) -> int:
        found, first = [], 0
        for index, length in enumerate(lengths):
            stage = Stage(index, count, first, first + length)
            own = stage_spec(spec, replace_count(stage))
            ends = 2 if not spec.tie_word_embeddings else 1
            numbers = num_parameters(own) - ends * spec.vocab_size * spec.hidden_size - spec.hidden_size
            found.append(numbers + (spec.vocab_size * spec.hidden_size if stage.is_last else 0))
            first += length
        return max(found)

    def divisions(layers: int, parts: int) -> list[tuple[int, ...]]:
        if parts == 1:
            return [(layers,)]
        return [
            (own, *rest)
            for own in range(1, layers - parts + 2)
            for rest in divisions(layers - own, parts - 1)
        ]

    best = min(heaviest(each) for each in divisions(7, count))
    assert heaviest(balanced_lengths(spec, count)) == best


def test_the_bubble_of_equal_stages_is_nothing():
    spec = replace(LLAMA, num_layers=4, vocab_size=2)

    assert least_bubble(spec, stages_of(spec, ParallelConfig(pp=2))) == pytest.approx(0.0, abs=1e-3)
    uneven = stages_of(spec, ParallelConfig(pp=2, pp_layers="3,1"))
    assert least_bubble(spec, uneven) == pytest.approx(1 / 3, abs=1e-3)
    assert least_bubble(spec, stages_of(spec, ParallelConfig())) == 0.0


def replace_count(stage: Stage) -> Stage:
    """The same layers of a model in several stages, so that `stage_spec` cuts them out."""
    return Stage(stage.index, max(2, stage.count), stage.first, stage.end)


def test_given_lengths_are_taken():
    rest = LLAMA.num_layers - 3
    assert lengths_of(stages_of(LLAMA, ParallelConfig(pp=3, pp_layers=f"1, 2,{rest}"))) == [1, 2, rest]


def test_a_stage_is_a_model_of_its_layers():
    num = LLAMA.num_layers
    spec = replace(
        LLAMA,
        windows=WindowsSpec(size=8, layers=tuple(n % 2 == 0 for n in range(num))),
        rope_layers=tuple(n % 3 == 0 for n in range(num)),
    )
    own = stage_spec(spec, Stage(1, 2, 3, num))

    assert own.num_layers == num - 3 == own.num_kv_layers
    assert own.layer_name(0) == "model.layers.3"
    assert [own.window_of(n) for n in range(own.num_layers)] == [
        spec.window_of(n + 3) for n in range(num - 3)
    ]
    assert [own.rotates(n) for n in range(own.num_layers)] == [spec.rotates(n + 3) for n in range(num - 3)]
    assert stage_spec(spec, Stage(0, 2, 0, 3)).kv_bytes_per_token(2) + own.kv_bytes_per_token(
        2
    ) == spec.kv_bytes_per_token(2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", [None, "int8", "fp8"])
def test_stages_together_weigh_what_the_model_weighs_and_a_tied_table_twice(tied, method):
    quantization = None if method is None else QuantizationSpec(method=method, stored=False)
    spec = replace(LLAMA, tie_word_embeddings=tied, quantization=quantization)
    stages = stages_of(spec, ParallelConfig(pp=3))
    weights = [
        stage_weight_bytes(stage_spec(spec, stage), stage, 2, dequantized=False, on_cpu=True)
        for stage in stages
    ]

    norms = 2 * spec.hidden_size * 2  # the final norm, which each stage's spec counts
    whole = weight_bytes(spec, 2) + tied_head_bytes(spec, 2)
    table = min(tied_head_bytes(spec, 2), 2 * spec.vocab_size * spec.hidden_size)
    # One process packs a tied plain head besides the table, and shares one in blocks.
    shared = tied and method == "int8"
    assert sum(weights) == whole + norms + (table if shared else 0)


def test_other_stages_tensors_are_known_by_name():
    spec = replace(LLAMA, tie_word_embeddings=True)
    first, last = stages_of(spec, ParallelConfig(pp=2, pp_layers=f"1,{LLAMA.num_layers - 1}"))
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.a",
        "model.layers.1.a",
        "model.layers.10.a",
        "model.norm.weight",
    ]

    others = [
        [name for name in names if is_of_other_stages(stage_spec(spec, stage), stage)(name)]
        for stage in (first, last)
    ]

    assert others == [names[2:], [names[1]]]


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"pp": 2, "pp_layers": "1,0"}, "pp_layers is '1,0', but it must be the number of layers"),
        ({"pp": 2, "pp_layers": "a,b"}, "pp_layers is 'a,b', but it must be the number of layers"),
        ({"pp": 3, "pp_layers": "1,2"}, "pp_layers is '1,2', which is 2 stages, but pp is 3"),
        ({"pp_layers": "1,2"}, "pp_layers is '1,2', which is 2 stages, but pp is 1"),
        ({"pp": 2, "executor": "ray"}, "pp is 2 with executor ray"),
        (
            {"pp": 3, "nnodes": 2, "dist_init_addr": "h:1"},
            "tp x pp is 3, but it must be a multiple of nnodes",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(parallel, told):
    with pytest.raises(ConfigError, match=told):
        ParallelConfig(**parallel)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"pp": 31}, "pp is 31, but the model has 30 layers, and each stage needs one; lower --pp"),
        ({"pp": 2, "pp_layers": "1,1"}, "pp_layers is '1,1', which is 2 layers, but the model has 30"),
        ({"pp": 2, "speculative": "ngram"}, "pp is 2 with speculative ngram"),
        (
            {"pp": 2, "multi_step_ms": 5.0},
            "multi_step_ms is 5, but pp is 2, and several steps are in flight",
        ),
        ({"pp": 2, "enable_lora": True}, "pp is 2 with lora, but adapters are not divided into stages"),
    ],
)
def test_settings_that_contradict_stages_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        resolved(**settings)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"model_type": "gemma4_text", "streams": StreamsSpec(kv_sources=(0, *range(29)))},
            "pp is 2, but the layers of gemma4_text may have inputs besides those of the layer before; use --tp",
        ),
        (
            {"model_type": "mamba"},
            "pp is 2, but mamba is computed by transformers, on one device only; use --pp 1",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_refused(fields, told):
    with pytest.raises(ConfigError, match=told):
        resolved(replace(LLAMA, **fields), pp=2)


def test_the_stage_with_the_least_room_decides_the_pool():
    """Each rank has the same memory; a stage of one layer would have room for more pages."""

    def tokens(pp_layers: str) -> int:
        return pool_of(resolved(pp=2, pp_layers=pp_layers, max_running_requests=4096))

    assert tokens("1,29") < tokens("15,15") > tokens("29,1")


def test_threads_are_shared_and_steps_in_flight_are_as_many_as_stages():
    found = resolved(pp=2)

    assert found.model.num_threads == HOST.num_cores // 2
    assert capacity_of(found, LLAMA).num_stages == 2
    assert found.scheduler.multi_step_ms == 0
