"""Triton's products with quantized weights against the dequantized ones in float64, with outputs that start as NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.model_runner.kernels.quantized_weights import FP8, Fp8Weight, IntWeight, quantize_to_fp8
from engine.model_runner.kernels.triton import dequant_gemm, fp8_gemm, split_k
from tests.conftest import HAS_NVIDIA_DRIVER
from tests.selection import examples
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
SOME = settings(max_examples=examples(6))  # the interpreter takes milliseconds for each program
WITH_FP8 = not HAS_NVIDIA_DRIVER or torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_int4(num_inputs: int, width: int, group_size: int, device: torch.device) -> IntWeight:
    """`group_size` 0: one group."""
    groups = num_inputs // group_size if group_size else 1
    return IntWeight(
        torch.randint(0, 16, (num_inputs, width), dtype=torch.uint8, device=device),
        (torch.rand(groups, width, device=device) * 0.1 + 0.01).to(torch.float16),
        torch.randint(0, 16, (groups, width), dtype=torch.uint8, device=device),
        group_size or num_inputs,
    )


def rows(num_rows: int, num_inputs: int, gap: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random rows with NaN between them."""
    whole = torch.full((num_rows, num_inputs + gap), torch.nan, dtype=dtype, device=device)
    whole[:, :num_inputs] = torch.randn(num_rows, num_inputs, device=device).to(dtype)
    return whole[:, :num_inputs]


def exact_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, float]:
    """x @ weight.T + bias in float64, and the largest sum of the terms' absolute values, which bounds rounding.

    On the host: with the deterministic algorithms that poison memory, cuBLAS refuses to multiply.
    """
    x, weight = x.double().cpu(), weight.double().cpu()
    exact = x @ weight.t()
    most = (x.abs() @ weight.abs().t()).amax().item() if x.shape[0] else 0.0
    return (exact if bias is None else exact + bias.double().cpu()), most


class TestInt4:
    def test_a_word_holds_inputs_that_lie_16_apart(self, device):
        numbers = torch.zeros((130, 3), dtype=torch.uint8, device=device)
        numbers[16 * 5 + 7, 1] = 11
        numbers[128 + 1, 2] = 15

        words = dequant_gemm.pack_int4(numbers)

        assert words.shape == (32, 3)
        expected = torch.zeros_like(words)
        expected[7, 1] = 11 << 20
        expected[16 + 1, 2] = 15
        assert torch.equal(words, expected)

    @SOME
    @given(
        num_rows=st.integers(0, 64),
        blocks=st.integers(1, 5),
        width=st.sampled_from([8, 40, 64, 136]),
        group_size=st.sampled_from([0, 32, 64, 128, 256]),
        bias=st.booleans(),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 1000),
    )
    @example(1, 16, 24, 128, True, DTYPES[1], 0)  # 16 blocks of inputs: split in two
    @example(64, 2, 72, 0, True, DTYPES[1], 1)
    def test_against_the_dequantized_weight(
        self, device, num_rows, blocks, width, group_size, bias, dtype, seed
    ):
        torch.manual_seed(seed)
        # Inputs are no multiple of the kernel's blocks of 128 where the groups allow it.
        num_inputs = 128 * blocks - (24 if group_size == 0 else group_size % 128)
        num_inputs += 256 - num_inputs % 256 if group_size == 256 else 0
        weight = make_int4(num_inputs, width, group_size, device)
        x = rows(num_rows, num_inputs, 5, dtype, device)
        offset = torch.randn(width, device=device).to(dtype) if bias else None

        out = dequant_gemm.int4_gemm(
            x,
            dequant_gemm.pack_int4(weight.numbers),
            weight.scales,
            weight.zeros,
            offset,
            group_size=group_size,
            num_sms=132,
        )

        exact = x.double() @ weight.dequantized(dtype).double().t()
        if offset is not None:
            exact = exact + offset.double()
        size = (
            (x.double().abs() @ weight.dequantized(dtype).double().abs().t()).amax().item() if num_rows else 0
        )
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, rtol=ROUNDING[dtype], atol=1e-6 * size)

    @SOME
    @given(
        num_inputs=st.sampled_from([32, 128, 160, 416]),
        width=st.sampled_from([8, 136]),
        group_size=st.sampled_from([0, 32]),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 1000),
    )
    def test_the_whole_weight_is_the_same_to_the_last_bit(
        self, device, num_inputs, width, group_size, dtype, seed
    ):
        torch.manual_seed(seed)
        weight = make_int4(num_inputs, width, group_size, device)

        whole = dequant_gemm.dequantize_int4(
            dequant_gemm.pack_int4(weight.numbers),
            weight.scales,
            weight.zeros,
            num_inputs=num_inputs,
            group_size=group_size,
            dtype=dtype,
        )

        assert torch.equal(whole.t(), weight.dequantized(dtype))


@pytest.mark.skipif(not WITH_FP8, reason="8-bit floats need compute capability 8.9")
class TestFp8:
    @SOME
    @given(
        num_rows=st.integers(0, 9),
        num_inputs=st.sampled_from([16, 128, 200, 5000]),
        grouped=st.booleans(),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 1000),
    )
    def test_rows_are_rounded_as_torch_rounds(self, device, num_rows, num_inputs, grouped, dtype, seed):
        torch.manual_seed(seed)
        x = rows(num_rows, num_inputs, 3, dtype, device) * 10 ** (
            torch.rand(num_rows, 1, device=device) * 6 - 3
        )
        x = x.to(dtype)
        size = 128 if grouped else num_inputs

        numbers, scales = fp8_gemm.quantize_rows(x, size)

        assert scales.shape == (num_rows, -(-num_inputs // size))
        for group, part in enumerate(x.split(size, dim=1)):
            expected = quantize_to_fp8(part)
            assert torch.equal(scales[:, group : group + 1], expected.scales)
            ours = numbers[:, group * size : group * size + part.shape[1]]
            assert torch.equal(ours.view(torch.uint8), expected.numbers.view(torch.uint8))

    def test_rows_of_zeros_and_numbers_beyond_the_bound(self, device):
        x = torch.zeros((3, 40), device=device)
        x[1] = torch.linspace(-2000.0, 2000.0, 40)
        x[2, :2] = torch.tensor([3.0, torch.nan])

        numbers, scales = fp8_gemm.quantize_rows(x, 40, bound=1000.0)

        assert not numbers[0].float().any() and scales[0].item() > 0
        torch.testing.assert_close(scales[1].item(), 1000.0 / 448, rtol=1e-6, atol=0)
        assert numbers[1].float().abs().amax() == 448
        clipped = numbers[1].float() * scales[1]
        torch.testing.assert_close(clipped, x[1].clamp(-1000, 1000), rtol=2**-4, atol=0)
        assert numbers[2, 0].float() == 448 and numbers[2, 1].float().isnan()

    @SOME
    @given(
        num_rows=st.integers(0, 64),
        num_inputs=st.sampled_from([24, 128, 320]),
        width=st.sampled_from([8, 72, 130]),
        grouped=st.booleans(),
        bias=st.booleans(),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 1000),
    )
    @example(1, 2048, 24, True, True, DTYPES[1], 0)  # 16 blocks of inputs: split in two
    @example(64, 2048, 24, False, True, DTYPES[1], 0)
    def test_against_the_dequantized_product(
        self, device, num_rows, num_inputs, width, grouped, bias, dtype, seed
    ):
        torch.manual_seed(seed)
        size = 128 if grouped else num_inputs
        groups = -(-num_inputs // size)
        numbers = torch.randn((width, num_inputs), device=device).mul_(100).clamp_(-448, 448).to(FP8)
        weight = Fp8Weight(numbers, torch.rand((width, groups), device=device) * 0.01 + 0.001, size)
        x, x_scales = fp8_gemm.quantize_rows(rows(num_rows, num_inputs, 0, dtype, device), size)
        offset = torch.randn(width, device=device).to(dtype) if bias else None

        out = fp8_gemm.fp8_gemm(
            x, x_scales, numbers, weight.scales.t().contiguous(), offset, dtype, num_sms=132
        )

        meant = (Fp8Weight(x, x_scales, size).dequantized(torch.float32), weight.dequantized(torch.float32))
        exact, most = exact_product(*meant, offset)
        # Tensor cores of Hopper add 8-bit products up with 14 digits.
        atol = most * (2**-12 if HAS_NVIDIA_DRIVER else 1e-6)
        torch.testing.assert_close(out.double().cpu(), exact, rtol=ROUNDING[dtype], atol=atol)


@pytest.mark.parametrize(
    ("tiles", "blocks", "rows", "expected"),
    [
        (1, 1, 16, 1),
        (1, 7, 16, 1),  # fewer than four blocks for each
        (1, 8, 16, 2),
        (1, 1000, 16, 16),
        (64, 32, 16, 8),  # a decode step with 4096 inputs and outputs: 512 programs for 132 multiprocessors
        (64, 64, 16, 16),
        (64, 64, 64, 8),  # larger tiles: two programs for each are enough
        (528, 32, 16, 1),
    ],
)
def test_inputs_are_split_where_outputs_keep_few_multiprocessors_busy(tiles, blocks, rows, expected):
    assert split_k.num_splits(tiles, blocks, rows, 132) == expected
