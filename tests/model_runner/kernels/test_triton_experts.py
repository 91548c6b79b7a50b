"""Triton's mixture of experts: the router against torch's, the experts against the sum that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.kernels import plain
from engine.model_runner.kernels.triton import experts, route
from engine.models.spec.experts_spec import Routing
from tests.model_runner.kernels.stacked_experts import StackedExperts
from tests.selection import examples
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

pytestmark = pytest.mark.usefixtures("poisoned")


@settings(max_examples=examples(9))
@given(
    num_tokens=st.integers(0, 5),
    shape=st.sampled_from([(4, 1), (6, 6), (60, 4), (128, 8)]),
    normalize=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_router_chooses_as_torch_does(device, num_tokens, shape, normalize, dtype, seed):
    num_experts, num_active = shape
    torch.manual_seed(seed)
    # A shuffled row has no equals, about which torch promises nothing.
    rows = [torch.randperm(num_experts) / 8 - 3 for _ in range(num_tokens)]
    logits = torch.stack([*rows, torch.zeros(num_experts)])[:num_tokens].to(device, dtype)
    shares, ids = route.route(logits, Routing(num_active=num_active, normalize=normalize))
    expected_shares, expected_ids = plain.route(logits, Routing(num_active=num_active, normalize=normalize))
    assert (shares.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(shares, expected_shares)


def test_equal_experts_are_taken_in_their_order(device):
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]], device=device)
    assert route.route(logits, Routing(num_active=4, normalize=True))[1].tolist() == [[1, 2, 4, 0]]


def test_logits_that_are_no_numbers_choose_experts_that_exist(device):
    logits = torch.full((2, 5), torch.nan, device=device)
    logits[1, 3] = 1.0
    _, ids = route.route(logits, Routing(num_active=3, normalize=True))
    assert ids.min() >= 0 and ids.max() < 5
    assert ids[1, 0] == 3


def exact(gate_up, down, x, shares, ids):
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for share, expert in zip(shares[token], ids[token], strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += share.double() * (down[expert].double() @ (F.silu(gate) * up))
    return out


@settings(max_examples=examples(9))
@given(
    num_tokens=st.integers(0, 9),
    num_experts=st.sampled_from([3, 4, 7]),
    num_active=st.integers(1, 3),
    widths=st.sampled_from([(16, 16), (40, 24), (136, 72)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_experts_are_the_weighted_sum(device, num_tokens, num_experts, num_active, widths, dtype, seed):
    width, inner = widths
    torch.manual_seed(seed)
    gate_up = (torch.randn(num_experts, 2 * inner, width, device=device) / width**0.5).to(dtype)
    down = (torch.randn(num_experts, width, inner, device=device) / inner**0.5).to(dtype)
    x = torch.randn(num_tokens, width, device=device).to(dtype)
    logits = torch.randn(num_tokens, num_experts, device=device)
    shares, ids = plain.route(logits, Routing(num_active=num_active, normalize=True))
    ours = experts.pack_experts(StackedExperts(gate_up, down))(x, shares, ids)
    assert ours.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        ours.double(), exact(gate_up, down, x, shares, ids), atol=tolerance, rtol=tolerance
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "tile", [experts._LOW, experts._MIDDLE, experts._HIGH], ids=lambda tile: str(tile.rows)
)
def test_more_rows_than_a_block_and_experts_without_any(device, tile, monkeypatch):
    """All tokens to two of five experts, in more than one chunk of `align`."""
    monkeypatch.setattr(experts, "_tiles", lambda *_: (tile,) * 3)
    monkeypatch.setattr(experts, "_CHUNK", 32)
    torch.manual_seed(0)
    gate_up, down = torch.randn(5, 32, 24, device=device) / 5, torch.randn(5, 24, 16, device=device) / 4
    x = torch.randn(45, 24, device=device)
    ids = torch.tensor([[1, 3]], device=device).repeat(45, 1)
    ids[7:20] = torch.tensor([3, 1], device=device)
    shares = torch.rand(45, 2, device=device)
    ours = experts.pack_experts(StackedExperts(gate_up, down))(x, shares, ids)
    torch.testing.assert_close(ours.double(), exact(gate_up, down, x, shares, ids), atol=1e-5, rtol=1e-5)


def test_rows_that_were_counted_before_lie_where_each_expert_would_have_put_them(device, monkeypatch):
    """Each of E programs counted the rows of all: 128 times 65,536 for a prompt of 8,192 tokens."""
    monkeypatch.setattr(experts, "_CHUNK", 32)
    torch.manual_seed(3)
    ids = torch.randint(0, 6, (70, 2), device=device)
    ids[ids == 4] = 5  # one without any
    counting: list[tuple[int, ...]] = []
    kernel = experts._count_kernel

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            counting.append(grid)
            return kernel[grid]

    monkeypatch.setattr(experts, "_count_kernel", Counting())
    by_each = experts._align(ids, 7, 16)
    assert not counting
    monkeypatch.setattr(experts, "_COUNTED_FROM", 140)
    by_one = experts._align(ids, 7, 16)

    assert counting == [(5,)]
    num = int(by_each.num)
    assert int(by_one.num) == num > 5
    assert torch.equal(by_one.experts[:num], by_each.experts[:num])
    assert torch.equal(by_one.sorted_rows[: 16 * num], by_each.sorted_rows[: 16 * num])


class Noting:
    """Stands for a kernel: remembers for what Triton would compile it."""

    def __init__(self, kernel: Any, compiled: set[Any]) -> None:
        self._kernel, self._compiled = kernel, compiled
        options = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # interpreted, or not
        self._general = options["do_not_specialize"] or ()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *args: Any, **constants: Any) -> None:
        types = [
            "any"
            if name in self._general
            else (arg.dtype if isinstance(arg, torch.Tensor) else "1" if arg == 1 else arg % 16 == 0)
            for name, arg in zip(self._kernel.arg_names, args, strict=False)
        ]
        self._compiled.add((self._kernel.fn.__name__, *types, *sorted(constants.items())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_of_tokens_is_compiled_for_while_serving(device, dtype, monkeypatch):
    """Rows in multiples of 16 and others, one block and many; each token's sum depends on the model alone."""
    compiled: set[Any] = set()
    monkeypatch.setattr(experts, "_COUNTED_FROM", 200)
    for name in ("_count_kernel", "_align_kernel", "_product_kernel", "_combine_kernel"):
        monkeypatch.setattr(experts, name, Noting(getattr(experts, name), compiled))
    gate_up = torch.zeros(4, 32, 24, dtype=dtype, device=device)
    down = torch.zeros(4, 24, 16, dtype=dtype, device=device)
    layer = experts.pack_experts(StackedExperts(gate_up, down))
    loaded = compiled.copy()
    assert loaded
    for num_tokens in (1, 2, 5, 8, 16, 31, 32, 33, 100, 128, 129, 500):
        x = torch.zeros(num_tokens, 24, dtype=dtype, device=device)
        ids = torch.zeros(num_tokens, 2, dtype=torch.int64, device=device)
        layer(x, torch.zeros(num_tokens, 2, device=device), ids)
    assert {key[0] for key in compiled - loaded} == {"_combine_kernel"}
    assert len(compiled - loaded) == 1


def test_a_token_does_not_depend_on_its_neighbors(device):
    torch.manual_seed(1)
    gate_up, down = torch.randn(4, 32, 24, device=device) / 5, torch.randn(4, 24, 16, device=device) / 4
    x = torch.randn(4, 24, device=device)
    shares, ids = plain.route(torch.randn(4, 4, device=device), Routing(num_active=2, normalize=True))
    layer = experts.pack_experts(StackedExperts(gate_up, down))
    together = layer(x, shares, ids)
    alone = torch.cat([layer(x[n : n + 1], shares[n : n + 1], ids[n : n + 1]) for n in range(4)])
    assert torch.equal(together, alone)
