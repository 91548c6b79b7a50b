"""Who multiplies with a quantized weight and why, and that each of them gives what the dequantized weight gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels import plain
from engine.model_runner.kernels.quantized import (
    Part,
    QuantizedLinears,
    QuantTarget,
    choose_provider,
    dequantized,
)
from engine.model_runner.kernels.quantized_linear import (
    Fp8Linear,
    Fp8WeightLinear,
    Int4Linear,
    SglMatmul,
    SideBySide,
    torch_matmul,
)
from engine.model_runner.kernels.quantized_weights import (
    FP8,
    Fp8Weight,
    IntWeight,
    quantize_to_fp8,
    stack_fp8,
)
from engine.model_runner.kernels.triton import fp8_gemm, split_k
from tests.conftest import HAS_NVIDIA_DRIVER
from tests.model_runner.kernels.sgl_operators import define_operators
from tests.model_runner.kernels.sgl_signatures import VERSIONS
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

WITH_FP8 = not HAS_NVIDIA_DRIVER or torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not WITH_FP8, reason="8-bit floats need compute capability 8.9")
HOPPER = QuantTarget(
    device=torch.device("cuda"), dtype=torch.bfloat16, capability=(9, 0), triton_reason="", sgl_reason=""
)
NO_SGL = replace(HOPPER, sgl_reason="not installed")


def fp8_weight(rows: int = 64, columns: int = 256, group_size: int = 0) -> Fp8Weight:
    """`group_size` 0: one scale per output."""
    groups = -(-columns // group_size) if group_size else 1
    numbers = torch.randn(rows, columns).mul_(100).clamp_(-448, 448).to(FP8)
    return Fp8Weight(numbers, torch.rand(rows, groups) * 0.01 + 0.001, group_size or columns)


def int4_weight(rows: int = 64, columns: int = 256, group_size: int = 64, order: bool = False) -> IntWeight:
    return IntWeight(
        torch.randint(0, 16, (columns, rows), dtype=torch.uint8),
        (torch.rand(columns // group_size, rows) * 0.05 + 0.01).to(torch.float16),
        torch.randint(0, 16, (columns // group_size, rows), dtype=torch.uint8),
        group_size,
        torch.randperm(columns) if order else None,
    )


def on(device: torch.device, weight: Any) -> Any:
    """All of a weight's tensors on a device."""
    moved = {
        name: value.to(device)
        for name in type(weight).__dataclass_fields__
        if isinstance(value := getattr(weight, name), Tensor)
    }
    return replace(weight, **moved)


@pytest.mark.parametrize(
    ("target", "weight", "provider", "why"),
    [
        (HOPPER, fp8_weight(), "sgl-kernel", ""),
        (NO_SGL, fp8_weight(), "torch._scaled_mm", "sgl-kernel: not installed"),
        (
            HOPPER,
            fp8_weight(group_size=128),
            "triton",
            "supports one scale per output, this weight has one per 128",
        ),
        (
            HOPPER,
            replace(fp8_weight(), weights_only=True),
            "triton, weights only",
            "the checkpoint says that only weights are quantized",
        ),
        (HOPPER, fp8_weight(rows=72), "triton", "takes sizes in multiples of 16, not 72 x 256"),
        (HOPPER, fp8_weight(columns=200), "triton, weights only", "reads inputs in multiples of 16, not 200"),
        (replace(HOPPER, dtype=torch.float32), fp8_weight(), "triton", "returns bfloat16, not torch.float32"),
        (
            HOPPER,
            fp8_weight(group_size=64),
            "triton, weights only",
            "supports groups of 128 inputs, not of 64",
        ),
        (HOPPER, fp8_weight(group_size=48), None, "supports groups of multiples of 64 inputs, not of 48"),
        (
            replace(HOPPER, capability=(8, 0)),
            fp8_weight(),
            "triton, weights only",
            "compute capability 8.0, 8-bit floats need 8.9",
        ),
        (replace(HOPPER, triton_reason="no compiler"), fp8_weight(), None, "by Triton: no compiler"),
        (replace(HOPPER, device=torch.device("cpu")), fp8_weight(), None, "on GPUs only, not on cpu"),
        (replace(HOPPER, capability=(8, 0)), int4_weight(), "triton", ""),
        (HOPPER, int4_weight(columns=240, group_size=48), None, "not of 48"),
        (replace(HOPPER, triton_reason="no compiler"), int4_weight(), None, "triton: no compiler"),
        (replace(HOPPER, device=torch.device("cpu")), int4_weight(), None, "on GPUs only, not on cpu"),
    ],
)
def test_who_multiplies_and_why_not_somebody_better(target, weight, provider, why):
    chosen, passed_over = choose_provider(target, weight)

    assert (chosen and chosen.name) == provider
    assert why in passed_over and bool(why) == bool(passed_over)


@pytest.fixture(params=VERSIONS)
def sgl_product(request):
    space = f"quantized_sgl_kernel_{request.param.replace('.', '_')}"
    library = define_operators(space, request.param)
    yield SglMatmul(getattr(torch.ops, space))
    library._destroy()


def check_fp8(linear: Callable[..., Tensor], weight: Fp8Weight, device: torch.device) -> None:
    """The product of what the two stand for, once activations are quantized."""
    for num_rows in (0, 1, 5):
        x = torch.randn(num_rows, weight.shape[1], device=device).to(torch.bfloat16)
        bias = torch.randn(weight.shape[0], device=device).to(torch.bfloat16)
        rounded = quantize_to_fp8(x).dequantized(torch.float32).double() if num_rows else x.double()
        for given in (None, bias):
            out = linear(x, given)
            exact = rounded @ weight.dequantized(torch.float32).double().t()
            if given is not None:
                exact = exact + given.double()
            assert out.dtype == torch.bfloat16 and out.shape == (num_rows, weight.shape[0])
            torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=0.02)


@needs_fp8
def test_torch_multiplies_8_bit_floats(device):
    weight = on(device, fp8_weight())
    check_fp8(Fp8Linear(weight, torch_matmul), weight, device)


@pytest.mark.skipif(HAS_NVIDIA_DRIVER, reason="stands in for the library on machines that cannot load it")
def test_sgl_kernel_is_called_as_its_schema_says(sgl_product, device):
    weight = fp8_weight()
    check_fp8(Fp8Linear(weight, sgl_product), weight, device)


@needs_fp8
def test_triton_multiplies_8_bit_floats(device):
    weight = on(device, fp8_weight(rows=40, columns=200))

    def product(x: Tensor, x_scales: Tensor, numbers: Tensor, scales: Tensor, *rest: Any) -> Tensor:
        bias, dtype = rest
        return fp8_gemm.fp8_gemm(x, x_scales, numbers, scales, bias, dtype, num_sms=132)

    check_fp8(Fp8Linear(weight, product), weight, device)


@pytest.mark.parametrize("group_size", [0, 128])
def test_weights_only_on_older_gpus(device, group_size):
    weight = on(device, fp8_weight(rows=40, columns=200, group_size=group_size))
    linear = Fp8WeightLinear(weight, num_sms=132)
    for num_rows in (0, 1, 70):
        x = torch.randn(num_rows, 200, device=device).to(torch.bfloat16)
        bias = torch.randn(40, device=device).to(torch.bfloat16)

        exact = x.double() @ weight.dequantized(torch.float32).double().t()

        torch.testing.assert_close(linear(x).double(), exact, rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(linear(x, bias).double(), exact + bias.double(), rtol=2**-7, atol=1e-3)


def test_weights_with_one_scale_per_output_share_a_compilation(monkeypatch, device):
    """How many inputs there are is no constant of the kernel."""
    launched = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_arguments, **constants: launched.append(constants)

    monkeypatch.setattr(fp8_gemm, "_fp8_weight_gemm_kernel", Recorder())
    for columns in (128, 512):
        weight = on(device, fp8_weight(columns=columns))
        Fp8WeightLinear(weight, num_sms=132)(torch.randn(3, columns, device=device))
    assert len(launched) == 2 and launched[0] == launched[1]


def test_every_8_bit_number_is_what_torch_makes_of_it(device):
    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    numbers = numbers[numbers.view(FP8).float().isfinite()].view(FP8).unsqueeze(1)  # [254, 1]
    one = torch.ones((1, 1), device=device)

    out = fp8_gemm.fp8_weight_gemm(one, numbers, torch.ones((1, 254), device=device), None, 1, num_sms=132)

    assert torch.equal(out[0], numbers[:, 0].float())


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("num_rows", [0, 3, 300])
def test_4_bit_weights_for_few_and_for_many_tokens(device, num_rows, order):
    weight = on(device, int4_weight(rows=40, order=order))
    linear = Int4Linear(weight, num_sms=132)
    x = torch.randn(num_rows, 256, device=device).to(torch.bfloat16)
    bias = torch.randn(40, device=device).to(torch.bfloat16)

    exact = x.double() @ weight.dequantized(torch.bfloat16).double().t()

    torch.testing.assert_close(linear(x).double(), exact, rtol=2**-7, atol=2e-3)
    torch.testing.assert_close(linear(x, bias).double(), exact + bias.double(), rtol=2**-7, atol=2e-3)


def test_sorted_inputs_mean_the_same_weight():
    weight = int4_weight(rows=8, columns=64, group_size=32, order=True)
    assert weight.order is not None

    whole = weight.dequantized(torch.float32)

    group = torch.arange(64) // 32
    for row, column in enumerate(weight.order.tolist()):
        expected = (weight.numbers[row].float() - weight.zeros[group[row]].float()) * weight.scales[
            group[row]
        ]
        torch.testing.assert_close(whole[:, column], expected)


class TestPack:
    """`QuantizedLinears.pack` on the CPU, where all is dequantized, and on a machine with kernels."""

    def test_modules_with_nothing_in_common_become_one_product_where_all_are_dequantized(self):
        cpu = replace(HOPPER, device=torch.device("cpu"), dtype=torch.float32)
        parts: list[Part] = [fp8_weight(16, 64), int4_weight(8, 64), torch.randn(24, 64)]

        linear = QuantizedLinears(cpu, plain.pack_linear).pack(parts)

        assert isinstance(linear, plain.PlainLinear)
        assert torch.equal(linear.weight, torch.cat([dequantized(part, torch.float32) for part in parts]))

    def test_what_stacks_is_one_product_and_the_rest_stand_side_by_side(self, monkeypatch):
        monkeypatch.setattr(split_k, "num_sms_of", lambda _device: 132)
        first, second, third = int4_weight(8, 64), int4_weight(16, 64), int4_weight(8, 64, order=True)
        rest = torch.randn(24, 64)

        linear = QuantizedLinears(replace(HOPPER, dtype=torch.float32), plain.pack_linear).pack(
            [first, second, third, rest]
        )

        assert isinstance(linear, SideBySide)
        assert [type(one) for one in linear.weights] == [Int4Linear, Int4Linear, plain.PlainLinear]
        if HAS_NVIDIA_DRIVER:
            return  # the weights lie on the host
        whole = torch.cat([*(part.dequantized(torch.float32) for part in (first, second, third)), rest])
        x, bias = torch.randn(2, 64), torch.randn(56)
        torch.testing.assert_close(linear(x, bias), x @ whole.t() + bias)

    @pytest.mark.parametrize(
        ("device", "level"), [("cuda", logging.WARNING), ("cpu", logging.INFO)], ids=["cuda", "cpu"]
    )
    def test_what_no_kernel_takes_is_said_with_its_cost(self, caplog, device, level):
        """Once for all weights of a kind; on a GPU it is nothing that one expects."""
        target = replace(HOPPER, device=torch.device(device))
        odd = int4_weight(columns=240, group_size=48)
        with caplog.at_level(logging.INFO):
            QuantizedLinears(target, plain.pack_linear).pack([odd, odd])

        (record,) = caplog.records
        assert record.levelno == level
        assert (
            "provider=dequantized while loading (3.6 times the memory) passed over: triton" in record.message
        )

    def test_weights_that_mean_other_activations_do_not_stack(self):
        assert not fp8_weight().stacks_with(replace(fp8_weight(), weights_only=True))
        assert stack_fp8([replace(fp8_weight(), weights_only=True)] * 2).weights_only

    def test_side_by_side(self):
        first, second = torch.randn(3, 8), torch.randn(5, 8)
        x, bias = torch.randn(4, 8), torch.randn(8)

        linear = SideBySide([plain.PlainLinear(first), plain.PlainLinear(second)], [3, 5])

        torch.testing.assert_close(linear(x), x @ torch.cat((first, second)).t())
        torch.testing.assert_close(linear(x, bias), x @ torch.cat((first, second)).t() + bias)
