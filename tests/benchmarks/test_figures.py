"""What turns measurements into figures of the documents: ratios, shares of a limit, divergences."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.ceilings import Ceiling
from benchmarks.exactness import COMPARED, divergence, row_of
from benchmarks.peers.limits import (
    Machine,
    ModelCosts,
    ServedModel,
    batch_limit,
    decode_limit,
    prefill_limit,
)
from benchmarks.peers.results import (
    SCHEMA,
    Measurement,
    MismatchError,
    Results,
    figures_table,
    limits_table,
    open_results,
    targets_table,
)
from benchmarks.peers.workloads import TARGETS, WORKLOADS, RunError, check_counts, quick
from engine.cli.bench.load import BenchRequest
from engine.cli.bench.result_file import RequestRow
from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.weight_memory import num_parameters

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
EXPERTS = ExpertsSpec(num_experts=8, intermediate_size=16, routing=Routing(num_active=3), dense_layers=(0,))


def new_results(*sides: str, **settings: object) -> Results:
    costs = ModelCosts(dense_parameters=1, head_parameters=1, kv_token_bytes=1, attention_width=1)
    settings = {"kv_tokens": 65536, "cores": [0, 1], "quick": False, **settings}
    return Results(SCHEMA, settings, {}, {name: {} for name in sides}, ServedModel(costs))


def add(results: Results, side: str, workload: str, figure: str, *values: float) -> None:
    results.measurements += [
        Measurement(side, workload, idx, {figure: value}, 0.02) for idx, value in enumerate(values)
    ]


@pytest.fixture
def measured() -> Results:
    """Three rounds, of which the second was slow for both: only ratios by round are steady."""
    results = new_results("engine-bf16", "vllm")
    add(results, "engine-bf16", "W1", "decode", 200.0, 90.0, 160.0)
    add(results, "vllm", "W1", "decode", 100.0, 50.0, 80.0)
    add(results, "vllm", "W4", "wall", 3.0)
    for side, starts, size in (("engine-bf16", (2.0, 9.0, 3.0), 2e9), ("vllm", (72.0,), 6e9)):
        add(results, side, "start", "first completion", *starts)
        add(results, side, "memory", "resident", size)
    return results


def rows(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_ratios_are_taken_round_by_round(measured):
    assert rows(targets_table(measured, TARGETS)) == [
        ["W1", "decode", "engine-bf16", "vllm", "2.00 (1.80-2.00)", "≥ 2.00", "met"],
        ["memory", "resident", "engine-bf16", "vllm", "0.33", "≤ 0.50", "met"],
        ["start", "first completion", "engine-bf16", "vllm", "0.042", "≤ 0.083", "met"],
    ]


def test_a_ratio_on_the_wrong_side_is_missed():
    results = new_results("engine-bf16", "vllm")
    for name, wall, decode in (("engine-bf16", 1.5, 150.0), ("vllm", 3.0, 100.0)):
        add(results, name, "W4", "wall", wall)
        add(results, name, "W1", "decode", decode)

    assert [(line[0], line[-1]) for line in rows(targets_table(results, TARGETS))] == [
        ("W1", "missed"),
        ("W4", "missed"),
    ]


def test_figures_are_medians(measured):
    chosen = [workload for workload in WORKLOADS if workload.name in ("W1", "W4")]

    assert [line[1:] for line in rows(figures_table(measured, chosen))] == [
        ["decode, tok/s", "160.0", "80.0"],
        ["wall, s", "-", "3.00"],
        ["first completion, s", "3.00", "72.0 (1)"],
        ["resident, GB", "2.00", "6.00"],
    ]


def test_shares_of_the_limit(measured):
    limits = {("W1", "engine-bf16"): 200.0, ("W1", "vllm"): 200.0, ("W2", "vllm"): 1.0}

    assert rows(limits_table(measured, WORKLOADS, limits)) == [
        ["W1", "engine-bf16", "160.0 tok/s", "200.0 tok/s", "80%", "≥ 80%", "met"],
        ["W1", "vllm", "80.0 tok/s", "200.0 tok/s", "40%", "", ""],
    ]


def test_results_are_resumed_unless_the_settings_differ(measured, tmp_path):
    path = tmp_path / "results.json"
    measured.write(path)

    resumed = open_results(path, new_results("engine-bf16", "llama-bf16"))

    assert resumed.measurements == measured.measurements
    assert list(resumed.sides) == ["engine-bf16", "vllm", "llama-bf16"]
    with pytest.raises(MismatchError, match="settings: .*65536.*, now .*1024"):
        open_results(path, new_results("engine-bf16", kv_tokens=1024))


def test_limits_follow_from_the_ceilings() -> None:
    ceilings = [("read", 269, 26.9), ("read", 98, 9.8), ("bf16", 512, 1000.0), ("bf16", 64, 500.0)]
    machine = Machine(tuple(Ceiling(what, size, 2, rate) for what, size, rate in ceilings), 2)
    costs = ModelCosts(
        dense_parameters=100_000_000, head_parameters=34_500_000, kv_token_bytes=20_000, attention_width=2_000
    )

    assert decode_limit(machine, costs, 269) == pytest.approx(100.0)
    assert decode_limit(machine, costs, 98) == pytest.approx(100.0)
    # A prompt of 1,000: 2e8 operations a token for the weights, and 1e6 on average for attention.
    assert prefill_limit(machine, costs, 1000) == pytest.approx(1e12 / 201e6)
    # Two requests of 10 tokens, 2 and 3 out: two prompts, a step of both, a step of one.
    prompts_s = 2 * (2e9 + 1e5) / 1e12
    steps_s = 2 * 269e6 / 26.9e9 + (11 + 11 + 12) * 20_000 / 26.9e9
    assert batch_limit(machine, costs, [(10, 2), (10, 3)]) == pytest.approx(5 / (prompts_s + steps_s))
    with pytest.raises(KeyError):
        machine.rate("int8", 64)


def test_limits_of_a_mixture_are_those_of_the_experts_chosen() -> None:
    ceilings = [
        ("read", 400, 40.0),
        ("bf16", 512, 1000.0),
        ("bf16", 64, 1.0),
    ]  # products take longer than reading
    machine = Machine(tuple(Ceiling(what, size, 2, rate) for what, size, rate in ceilings), 2)
    costs = ModelCosts(
        dense_parameters=30_000_000,
        expert_parameters=160_000_000,
        active_share=0.25,
        head_parameters=10_000_000,
        kv_token_bytes=0,
        attention_width=0,
    )

    assert costs.bf16_megabytes == 400  # all experts: what a cache would have to hold
    assert [costs.read_parameters(n) for n in (1, 2)] == pytest.approx([80e6, 40e6 + 160e6 * 7 / 16])
    assert costs.read_parameters(1000) == pytest.approx(costs.all_parameters)
    # 160 of the 400 MB are read for a token.
    assert decode_limit(machine, costs, 400) == pytest.approx(40e9 / 160e6)
    assert prefill_limit(machine, costs, 1000) == pytest.approx(1e12 / (2 * 70e6))
    # Two prompts of 10, 2 tokens out: one step of both, each multiplied by its own 80 million weights.
    taken_s = 2 * 10 * 2 * 70e6 / 1e12 + 2 * 2 * 80e6 / 1e9
    assert batch_limit(machine, costs, [(10, 2), (10, 2)]) == pytest.approx(4 / taken_s)


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_costs_are_the_weights_of_the_architecture(experts: ExpertsSpec | None) -> None:
    spec = replace(SPEC, experts=experts)

    costs = ModelCosts.of(spec)

    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    embedding = spec.vocab_size * spec.hidden_size  # rows of it are looked up: not read as a whole
    assert costs.all_parameters == num_parameters(spec) - norms - embedding
    assert costs.kv_token_bytes == spec.kv_bytes_per_token(2)
    if experts is None:
        assert costs.layer_parameters == costs.dense_parameters == costs.all_parameters - embedding
    else:
        one_layer = 3 * experts.num_experts * spec.hidden_size * experts.intermediate_size
        assert costs.expert_parameters == 2 * one_layer  # one layer of three is dense
        assert costs.active_share == 3 / 8


def test_a_product_s_limit_is_the_better_one_of_bf16_and_fp32() -> None:
    def machine(**rates: float) -> Any:
        return Machine(tuple(Ceiling(what, 512, 2, rate) for what, rate in rates.items()), 2)

    assert machine(bf16=86.0).product_rate(512) == 86e9  # as measured before there was fp32
    assert machine(bf16=86.0, fp32=159.0).product_rate(512) == 159e9
    assert machine(bf16=2900.0, fp32=159.0).product_rate(512) == 2900e9
    with pytest.raises(KeyError):
        machine(int8=700.0).product_rate(512)


def test_other_token_counts_than_asked_for_are_an_error() -> None:
    asked = [BenchRequest(prompt=[5] * 8, prompt_len=8, output_len=4)]
    right = RequestRow(0.0, 0.1, 0.1, 0.4, prompt_tokens=8, output_tokens=4, cached_tokens=0)
    short = RequestRow(0.0, 0.1, 0.1, 0.4, prompt_tokens=8, output_tokens=3, cached_tokens=0)

    check_counts(asked, [right])
    with pytest.raises(RunError, match="8 tokens in, 4 out, .* 8 in, 3 out"):
        check_counts(asked, [short])


def test_flags_and_requests_are_of_one_workload() -> None:
    class Ids:
        def ordinary_token_ids(self) -> list[int]:
            return list(range(3, 100))

    ids: Any = Ids()
    for workload in WORKLOADS:
        small = quick(workload)
        assert set(small.flags()[::2]) == {"--" + name.replace("_", "-") for name in small.settings}
        requests = workload.requests(ids, seed=7)
        assert len(small.requests(ids, seed=7)) < len(requests)
        if workload.name == "W4":
            assert {(r.prompt_len, r.output_len) for r in requests} == {(1056, 32)}
            assert "generated-shared-prefix" in workload.flags()


def test_figures_are_read_from_a_summary() -> None:
    decode = WORKLOADS[0].figures[0]
    assert decode.of({"tpot_ms": {"mean": 8.0}}) == pytest.approx(125.0)
    with pytest.raises(ValueError, match=r"tpot_ms\.mean"):
        decode.of({"tpot_ms": {"mean": None}})


def likely(**probabilities: float) -> dict[int, float]:
    return {ord(name): math.log(value) for name, value in probabilities.items()}


def test_divergence_is_that_of_the_compared_tokens_and_all_others():
    true, said = likely(a=0.5, b=0.25), likely(a=0.25, b=0.25)

    assert divergence(true, true) == 0
    assert divergence(true, said) == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5))


def test_a_token_that_a_side_does_not_return_counts_with_the_others():
    assert divergence(likely(a=0.5, b=0.25), likely(a=0.5, c=0.4)) == pytest.approx(0)


def test_only_the_likeliest_tokens_are_compared():
    true = {token: math.log(0.5**token) for token in range(1, COMPARED + 2)}
    said = true | {COMPARED + 1: math.log(1e-9)}

    assert divergence(true, said) == pytest.approx(0)


def test_positions_with_the_same_likeliest_token_are_counted():
    one, other = likely(a=0.6, b=0.3), likely(a=0.3, b=0.6)

    row = row_of("x", [one, other, one], [one, one, one])

    assert (row.agree, row.positions) == (2, 3)
    assert row.kl == pytest.approx(divergence(one, other) / 3)
