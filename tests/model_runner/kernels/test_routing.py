"""Routers of families: plain torch against those of transformers, and the kernels against plain torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels import native_experts, plain
from engine.model_runner.kernels.cpu.library import load_library, reasons_against_library
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.triton import route as triton_route
from engine.model_runner.recording.programs.arena import Arena
from engine.model_runner.recording.programs.native_program import record
from engine.models.spec.experts_spec import Routing
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

IN_GROUPS = Routing(
    num_active=4,
    scores="sigmoid",
    has_bias=True,
    num_groups=4,
    num_active_groups=2,
    group_best=2,
    scale=2.5,
    float32_logits=True,
)
ROUTINGS = {
    "softmax of all": Routing(num_active=3, normalize=False),
    "softmax of the chosen": Routing(num_active=3),
    "softmax and bias": Routing(num_active=5, has_bias=True),
    "best groups": Routing(
        num_active=3, normalize=False, num_groups=4, num_active_groups=2, scale=16.0, float32_logits=True
    ),
    "one of a group": Routing(num_active=2, num_groups=8, num_active_groups=3),
    "softmax, groups of two": Routing(num_active=1, num_groups=4, num_active_groups=1, group_best=2),
    "sigmoid": Routing(num_active=3, scores="sigmoid", normalize=False),
    "sigmoid, bias, groups": IN_GROUPS,
    "mixer": Routing(num_active=2, scores="mixer", mixer_tolerance=0.2),
    "mixer of all": Routing(num_active=2, scores="mixer", mixer_tolerance=1e9),
}
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
NUM_EXPERTS = 16


@pytest.fixture
def library() -> ctypes.CDLL:
    """The kernels that this CPU serves with."""
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    return load_library()


def logits_of(num_tokens: int, seed: int = 0, num_experts: int = NUM_EXPERTS) -> Tensor:
    return 2 * torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))


def bias_of(routing: Routing) -> Tensor | None:
    return torch.linspace(-0.4, 0.4, NUM_EXPERTS)[torch.randperm(NUM_EXPERTS)] if routing.has_bias else None


def by_id(shares: Tensor, ids: Tensor) -> Tensor:
    """Shares of all experts: transformers does not always sort them."""
    return torch.zeros(len(ids), NUM_EXPERTS).scatter_(1, ids, shares.float())


def router_of(name: str, class_name: str, **config: Any) -> Any:
    """A router whose logits are its inputs."""
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    sizes = {"hidden_size": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "num_experts": NUM_EXPERTS}
    router = getattr(module, class_name)(SimpleNamespace(**sizes, **config))
    torch.nn.init.eye_(router.weight)
    return router


def theirs(case: str, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    groups = {
        "num_experts_per_tok": routing.num_active,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.num_groups,
        "topk_group": routing.num_active_groups,
        "norm_topk_prob": routing.normalize,
    }
    match case:
        case "sigmoid, bias, groups":
            router = router_of("deepseek_v3", "DeepseekV3TopkRouter", **groups)
            router.e_score_correction_bias.copy_(bias)
        case "best groups":
            router = router_of(
                "deepseek_v2", "DeepseekV2TopkRouter", topk_method="group_limited_greedy", **groups
            )
        case "softmax of all":
            router = router_of("qwen2_moe", "Qwen2MoeTopKRouter", **groups)
        case "softmax of the chosen":
            router = router_of("granitemoe", "GraniteMoeTopKRouter", **groups)
        case "mixer" | "mixer of all":
            router = router_of(
                "phimoe",
                "PhimoeTopKRouter",
                router_jitter_noise=routing.mixer_tolerance / 2,
                input_jitter_noise=0.0,
                **groups,
            ).eval()
        case _:
            pytest.skip("no router of transformers")
    _, shares, ids = router(logits)
    return shares.detach(), ids


@pytest.mark.parametrize("case", ROUTINGS)
def test_it_is_the_router_of_transformers(case):
    routing = ROUTINGS[case]
    logits, bias = logits_of(200), bias_of(routing)
    with torch.no_grad():
        expected = theirs(case, logits, routing, bias)
    torch.testing.assert_close(by_id(*plain.route(logits, routing, bias)), by_id(*expected))


@routings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_the_native_router_chooses_as_torch_does(library, routing, dtype, num_tokens):
    logits, bias = logits_of(num_tokens, seed=1), bias_of(routing)
    if dtype == torch.bfloat16:  # without equals, about which torch promises nothing
        rows = [torch.randperm(NUM_EXPERTS) / 4 - 2.125 for _ in range(num_tokens)]
        logits = torch.stack([*rows, torch.zeros(NUM_EXPERTS)])[:num_tokens].to(dtype)
    shares, ids = native_experts.route(library, logits, routing, bias)
    expected_shares, expected_ids = plain.route(logits, routing, bias)
    assert (shares.dtype, ids.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(by_id(shares, ids), by_id(expected_shares, expected_ids), rtol=1e-5, atol=1e-6)


@pytest.mark.fast_cases(2)
@routings
def test_the_triton_router_chooses_as_torch_does(device, routing):
    logits, bias = logits_of(7, seed=2).to(device), bias_of(routing)
    bias = None if bias is None else bias.to(device)
    shares, ids = triton_route.route(logits, routing, bias)
    expected = plain.route(logits, routing, bias)
    assert (shares.dtype, ids.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(by_id(shares.cpu(), ids.cpu()), by_id(*(one.cpu() for one in expected)))


@pytest.mark.fast_cases(4)
@routings
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_is_no_number_still_goes_to_experts_that_exist(library, device, routing, bad, everywhere):
    logits, bias = logits_of(NUM_EXPERTS, seed=3), bias_of(routing)
    logits.fill_(bad) if everywhere else logits.diagonal().fill_(bad)
    found = [native_experts.route(library, logits, routing, bias)]
    on_device = None if bias is None else bias.to(device)
    found.append(triton_route.route(logits[:3].to(device), routing, on_device))
    for _, ids in found:
        assert ((ids >= 0) & (ids < NUM_EXPERTS)).all()
    assert all(len(set(row)) == routing.num_active for row in found[0][1].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (300, 100)])
def test_a_gated_sum_is_rounded_once(library, dtype, shape):
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    gate = 3 * torch.randn(shape[0], 1)
    expected = (x.double() + gate.double().sigmoid() * y.double()).to(dtype)
    for add_gated in (NativeOps(library).add_gated, plain.add_gated):
        ours = add_gated(y, gate, x.clone())
        torch.testing.assert_close(ours, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@routings
def test_a_recorded_router_reads_the_logits_each_time(library, routing):
    logits, bias = torch.zeros(9, NUM_EXPERTS), bias_of(routing)

    def compute() -> Tensor:
        return native_experts.route(library, logits, routing, bias)[0]

    recorded = record(library, Arena(), compute)
    assert recorded.program is not None, recorded.reason_against
    for seed in range(3):
        logits.copy_(logits_of(9, seed))
        recorded.program.run()
        assert torch.equal(recorded.result, compute())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_active": 17}, "17 experts for each token, but there are only 16"),
        ({"num_active": 4, "num_groups": 3}, "16 experts cannot form 3 groups evenly"),
        ({"num_active": 4, "num_active_groups": 2}, "experts of 2 groups, but there are only 1"),
        ({"num_active": 5, "num_groups": 4}, "5 experts for each token, but its groups have only 4"),
        (
            {"num_active": 1, "num_groups": 16, "group_best": 2},
            "compared by their best 2 experts, but have only 1",
        ),
        ({"num_active": 3, "scores": "mixer"}, "3 experts for each token, but this kind of router chooses 2"),
    ],
)
def test_what_cannot_be_routed_is_said(change, message):
    assert message in (Routing(**change).contradiction(NUM_EXPERTS) or "")
