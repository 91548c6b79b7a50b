"""Attention within runs of rows, by the C++ kernels and by torch, against a product of matrices in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.model_runner.kernels.native import reasons_against_native
from engine.model_runner.kernels.whole_attention import TorchWholeAttention, native_whole_attention
from engine.model_runner.ops.whole_attention import MakeWholeAttention

CASES = {
    "one run": (130, 2, 32, None),
    "runs of several sizes, one of a single row": (150, 3, 16, [1, 70, 64, 15]),
    "a size of heads that is no multiple of 16": (80, 2, 24, [48, 32]),
    "fewer values than a vector": (20, 4, 8, None),
}


def expected(qkv: torch.Tensor, lengths: Sequence[int], scale: float) -> torch.Tensor:
    parts = []
    for run in qkv.double().split(list(lengths)):
        q, k, v = run.permute(1, 2, 0, 3)
        parts.append(((q @ k.transpose(1, 2) * scale).softmax(-1) @ v).transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.fixture(params=["native", "torch"])
def make(request: pytest.FixtureRequest) -> MakeWholeAttention:
    if request.param == "torch":
        return TorchWholeAttention
    if reasons := reasons_against_native(torch.device("cpu"), torch.float32):
        pytest.skip("; ".join(reasons))
    return native_whole_attention()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "head_dim", "lengths"), CASES.values(), ids=CASES.keys())
def test_each_row_attends_to_all_rows_of_its_run(
    make: MakeWholeAttention,
    rows: int,
    heads: int,
    head_dim: int,
    lengths: list[int] | None,
    dtype: torch.dtype,
) -> None:
    qkv = torch.randn((rows, 3, heads, head_dim), generator=torch.Generator().manual_seed(0)).to(dtype)

    attend = make(heads, head_dim, 0.3)
    found = attend(attend.padded(qkv.flatten(1)), lengths)

    assert found.dtype == dtype and found.shape == (rows, heads * head_dim)
    wanted = expected(qkv, lengths or [rows], 0.3)
    error = (found.double() - wanted).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.03), error


def test_rows_that_attend_are_those_of_the_whole_result(make: MakeWholeAttention) -> None:
    """Also the first, the last and a single row, between calls for all rows."""
    attend = make(2, 24, 0.3)
    qkv = torch.randn((140, 3, 2, 24), generator=torch.Generator().manual_seed(1))
    wanted, runs = expected(qkv, [140], 0.3), expected(qkv, [90, 50], 0.3)
    qkv = attend.padded(qkv.flatten(1))
    for at in (slice(0, 50), slice(50, 51), slice(0, 140), slice(51, 140), slice(139, 140)):
        torch.testing.assert_close(attend(qkv, at=at).double(), wanted[at], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(attend(qkv, [90, 50]).double(), runs, atol=1e-5, rtol=1e-4)


def test_a_call_with_more_rows_follows_one_with_fewer(make: MakeWholeAttention) -> None:
    attend = make(2, 16, 0.25)
    few, many = (torch.randn((rows, 3, 2, 16)) for rows in (5, 300))

    for qkv in (few, many, few):
        torch.testing.assert_close(
            attend(attend.padded(qkv.flatten(1))).double(),
            expected(qkv, [len(qkv)], 0.25),
            atol=1e-5,
            rtol=1e-4,
        )
