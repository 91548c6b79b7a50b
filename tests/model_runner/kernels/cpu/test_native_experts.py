"""Mixtures of experts by our kernels: against float64, and the bits of each expert's own products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model_runner.kernels import native_experts, plain
from engine.model_runner.kernels.blocks.native_blocks import NO_TILES, NativeBlockLinear
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.native_experts import NativeExperts
from engine.model_runner.kernels.native_linear import NativeLinear, pack_native_linear
from engine.model_runner.kernels.native_matmul import NativeMatmul
from engine.model_runner.recording.programs.arena import Arena
from engine.model_runner.recording.programs.native_program import record
from engine.models.spec.experts_spec import Routing
from tests.model_runner.kernels.stacked_experts import StackedExperts

from .guest import GuestLibrary
from .test_native_blocks import block_weight, guarded, paired

BF16 = torch.bfloat16
FORMS = [
    "bfloat16",
    "packed",
    "4 bits",
    "4 bits and minima",
    "8 bits",
    "8 bits and minima",
    "8 bits, paired scales",
    "mixed",
]
SOME = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def weight_of(library: Any, form: str, outputs: int, inputs: int, seed: int) -> NativeMatmul:
    if form == "mixed":
        form = FORMS[seed % 7]
    if "bits" in form:
        weight = block_weight(outputs, inputs, int(form[0]), "minima" in form, seed)
        if "paired" in form and inputs % 64 == 0:
            weight = paired(weight)
        return NativeBlockLinear(library, weight, NO_TILES)
    random = torch.Generator().manual_seed(seed)
    dense = (torch.randn(outputs, inputs, generator=random) / inputs**0.5).to(BF16)
    packed = (
        NativeLinear(library, dense)
        if form == "packed"
        else pack_native_linear(library, dense, compress=True)
    )
    assert isinstance(packed, NativeMatmul)
    return packed


def weights_of(library: Any, form: str, num: int, size: int, inner: int) -> tuple[list[Any], list[Any]]:
    gate_up = [weight_of(library, form, 2 * inner, size, n) for n in range(num)]
    return gate_up, [weight_of(library, form, size, inner, num + n) for n in range(num)]


def routed(num_tokens: int, num_experts: int, num_active: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=random)
    shares, ids = plain.route(logits, Routing(num_active=num_active, normalize=True))
    return shares, ids


@pytest.fixture
def threads_of_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------- routing


@SOME
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.sampled_from([1, 2, 8, 15, 16, 17, 128, 200]),
    num_active=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, BF16]),
    normalize=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_largest_logits_get_their_part_of_the_softmax(
    library, num_tokens, num_experts, num_active, dtype, normalize, seed
):
    num_active = min(num_active, num_experts)
    random = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_tokens, num_experts, generator=random) * 3).to(dtype)
    shares, ids = native_experts.route(library, logits, Routing(num_active=num_active, normalize=normalize))
    # In bfloat16 many are equal: the first one counts as larger.
    expected_ids = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :num_active]
    assert torch.equal(ids, expected_ids)
    expected = logits.double().softmax(1).gather(1, ids)
    if normalize:
        expected /= expected.sum(1, keepdim=True)
    torch.testing.assert_close(shares.double(), expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_is_no_number_still_goes_to_experts_that_exist(library, bad, everywhere):
    logits = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
    logits.fill_(bad) if everywhere else logits.diagonal().fill_(bad)
    shares, ids = native_experts.route(library, logits, Routing(num_active=8, normalize=True))
    assert ((ids >= 0) & (ids < 20)).all()
    assert all(len(set(row)) == 8 for row in ids.tolist())
    is_visible = bad != -torch.inf or everywhere  # an expert that is ruled out is a decision
    assert bool(shares.isnan().any(1).all()) == is_visible


# ---------------------------------------------------------------- products


@pytest.mark.parametrize(
    ("size", "inner", "num_active", "activation"),
    [(32, 16, 2, "silu"), (96, 64, 3, "silu"), (160, 96, 1, "silu"), (96, 64, 3, "gelu_tanh")],
)
def test_it_is_the_weighted_sum_of_the_experts(library, size, inner, num_active, activation):
    activate = F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")
    random = torch.Generator().manual_seed(1)
    gate_up = (torch.randn(7, 2 * inner, size, generator=random) / size**0.5).to(BF16)
    down = (torch.randn(7, size, inner, generator=random) / inner**0.5).to(BF16)
    experts = NativeOps(library).pack_experts(
        StackedExperts(
            gate_up,
            down,
            lambda weight: pack_native_linear(library, weight, compress=True),
            activation=activation,
        )
    )
    assert isinstance(experts, NativeExperts)
    for num_tokens in (0, 1, 5, 40, 150):
        x = guarded((num_tokens, size), 2)
        shares, ids = routed(num_tokens, 7, num_active)
        exact = torch.zeros(num_tokens, size, dtype=torch.float64)
        for token in range(num_tokens):
            for share, expert in zip(shares[token], ids[token], strict=True):
                gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
                exact[token] += share.double() * (down[expert].double() @ (activate(gate) * up))
        ours = experts(x, shares, ids)
        assert ours.dtype == BF16
        torch.testing.assert_close(ours.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "inner", [32, 96, 72]
)  # 72 gates are no whole vectors: the activation is a call of its own
def test_a_row_has_the_bits_of_its_experts_own_products(library, form, inner):
    if inner % 32 and form != "packed":
        pytest.skip("blocks have 32 inputs")
    size, num_experts = 128, 6
    experts = NativeExperts(library, *weights_of(library, form, num_experts, size, inner))
    gate_up, down = weights_of(library, form, num_experts, size, inner)
    silu_and_mul = NativeOps(library).silu_and_mul
    for num_tokens in (1, 2, 7, 64, 200):
        x = guarded((num_tokens, size + 32), 3)[:, :size]  # rows with something between them
        _, ids = routed(num_tokens, num_experts, 1, seed=num_tokens)
        expected = torch.empty(num_tokens, size, dtype=BF16)
        for expert in range(num_experts):
            mine = ids[:, 0] == expert
            expected[mine] = down[expert](silu_and_mul(gate_up[expert](x[mine])))
        assert torch.equal(experts(x, torch.ones(num_tokens, 1), ids), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_the_same_bits_alone_and_among_others(library, form):
    experts = NativeExperts(library, *weights_of(library, form, 16, 64, 32))
    x = guarded((90, 64), 4)
    shares, ids = routed(90, 16, 4)
    together = experts(x, shares, ids)
    for n in (0, 41, 89):
        assert torch.equal(experts(x[n : n + 1], shares[n : n + 1], ids[n : n + 1]), together[n : n + 1])
    ids = torch.tensor([[5, 3, 9, 11]]).repeat(90, 1)  # all to the same few
    together = experts(x, shares, ids)
    assert torch.equal(experts(x[41:42], shares[41:42], ids[41:42]), together[41:42])


@pytest.mark.parametrize("form", ["bfloat16", "4 bits"])
def test_threads_change_nothing(library, threads_of_before, form):
    experts = NativeExperts(library, *weights_of(library, form, 32, 256, 256))
    for num_tokens in (1, 4, 90):
        x = guarded((num_tokens, 256), 5)
        shares, ids = routed(num_tokens, 32, 4)
        found = []
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            found += [experts(x, shares, ids) for _ in range(3)]
        assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("form", ["packed", "bfloat16", "4 bits", "8 bits, paired scales"])
@pytest.mark.parametrize("tiles_from", [1, NO_TILES])
def test_many_rows_and_long_sums_are_cut_as_in_a_product(library, form, tiles_from):
    """More tokens than a block of any kernel, and sums that wait in memory between parts of k."""
    size, inner = 1600, 32
    gate_up = [weight_of(library, form, 2 * inner, size, n) for n in range(2)]
    down = [weight_of(library, form, size, inner, 2 + n) for n in range(2)]
    own = [weight_of(library, form, 2 * inner, size, 1), weight_of(library, form, size, inner, 3)]
    for one in (*gate_up, *down, *own):
        if isinstance(one, NativeBlockLinear):
            one.tiles_from = tiles_from
    x = guarded((500, size), 8)
    ids = torch.ones(500, 1, dtype=torch.int64)
    ids[:5] = 0
    ours = NativeExperts(library, gate_up, down)(x, torch.ones(500, 1), ids)
    expected = own[1](NativeOps(library).silu_and_mul(own[0](x[5:])))
    assert torch.equal(ours[5:], expected)


@pytest.mark.parametrize("tiles_from", [1, 3, 32])
@pytest.mark.parametrize("form", [(4, False), (4, True), (8, False)])
def test_weights_in_blocks_take_tiles_expert_by_expert(library, form, tiles_from):
    """An expert's rows are multiplied like a call of its own: by tiles or not, as many as they are."""
    bits, has_minima = form

    def weights(outputs: int, inputs: int) -> list[NativeMatmul]:
        made = [block_weight(outputs, inputs, bits, has_minima, seed) for seed in range(3)]
        return [NativeBlockLinear(library, one, tiles_from) for one in made]

    experts = NativeExperts(library, weights(128, 64), weights(64, 64))
    gate_up, down = weights(128, 64), weights(64, 64)
    ids = torch.tensor([[0]] * 70 + [[1]] * 2 + [[2]] * 31)
    x = guarded((len(ids), 64), 6)
    expected = torch.cat(
        [
            down[expert](NativeOps(library).silu_and_mul(gate_up[expert](x[ids[:, 0] == expert])))
            for expert in range(3)
        ]
    )
    assert torch.equal(experts(x, torch.ones(len(ids), 1), ids), expected)


@pytest.mark.parametrize("form", ["bfloat16", "4 bits and minima"])
def test_a_recorded_call_goes_where_the_router_says_each_time(library, threads_of_before, form):
    if isinstance(library, GuestLibrary):
        pytest.skip("calls of another architecture are not recorded")
    torch.set_num_threads(2)
    experts = NativeExperts(library, *weights_of(library, form, 8, 64, 32))
    x, logits = guarded((9, 64), 7), torch.zeros(9, 8)

    def compute() -> Tensor:
        return experts(x, *native_experts.route(library, logits, Routing(num_active=3, normalize=True)))

    recorded = record(library, Arena(), compute)
    assert recorded.program is not None, recorded.reason_against
    for seed in range(5):
        logits.copy_(torch.randn(9, 8, generator=torch.Generator().manual_seed(seed)))
        recorded.program.run()
        assert torch.equal(recorded.result, compute())


def test_weights_of_others_are_computed_one_after_the_other(best_library):
    """An odd number of inputs is not ours."""
    gate_up, down = torch.randn(4, 32, 33).to(BF16), torch.randn(4, 33, 16).to(BF16)
    ops = NativeOps(best_library)
    experts = ops.pack_experts(StackedExperts(gate_up, down, ops.pack_linear))
    assert isinstance(experts, plain.LoopedExperts)
    shares, ids = routed(5, 4, 2)
    assert experts(torch.randn(5, 33).to(BF16), shares, ids).shape == (5, 33)
