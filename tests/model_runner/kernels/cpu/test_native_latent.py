"""Our operations of latent attention for the CPU against torch, over shapes, strides and dtypes."""

from __future__ import annotations

import pytest
import torch

from engine.model_runner.kernels import latent as plain
from engine.model_runner.kernels.latent import NativeHeadMatmul, NativeLatentOps
from engine.model_runner.ops.rotation import LayerKV, RotaryStore

from .test_native_ops import BF16, F32, close, guarded


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(2, 1), (16, 32), (128, 512), (192, 130), (512, 128), (30, 97)]
)
def test_each_head_has_its_own_matrix(library, inputs, outputs):
    """Heads are parts of wider ones, in x and in the output, of which the rest stays as it is."""
    weight = guarded((5, outputs, inputs), BF16, 0) / inputs**0.5
    multiply = NativeHeadMatmul(library, weight)
    for num_tokens in (0, 1, 2, 7, 33, 130):
        x = guarded((num_tokens, 5, inputs + 6), BF16, 1)[..., 4 : 4 + inputs]
        whole = torch.full((num_tokens, 5, outputs + 3), 7.0, dtype=BF16)
        multiply(x, whole[..., :outputs])
        exact = torch.einsum("thk,hnk->thn", x.double(), weight.double())
        close(whole[..., :outputs], exact, extra=1e-6 * inputs)
        assert (whole[..., outputs:] == 7.0).all()


def test_a_token_gets_the_same_bits_in_every_batch(library):
    multiply = NativeHeadMatmul(library, guarded((3, 200, 832), BF16, 0))
    x, together, alone = guarded((70, 3, 832), BF16, 1), torch.empty((70, 3, 200), dtype=BF16), torch.empty(0)
    multiply(x, together)
    for first, last in ((0, 1), (20, 22), (40, 47), (3, 64)):
        alone = torch.empty((last - first, 3, 200), dtype=BF16)
        multiply(x[first:last], alone)
        assert torch.equal(alone, together[first:last])


def test_matrices_that_the_kernel_does_not_take_are_torch_s(library):
    ops = NativeLatentOps(library)
    assert isinstance(ops.pack_heads(guarded((2, 4, 6), BF16, 0)), NativeHeadMatmul)
    assert isinstance(ops.pack_heads(guarded((2, 4, 5), BF16, 0)), plain.PlainHeadMatmul)
    assert isinstance(ops.pack_heads(guarded((2, 4, 6), F32, 0)), plain.PlainHeadMatmul)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dtype", "angles", "norms"), [(F32, F32, F32), (BF16, BF16, BF16), (BF16, F32, F32)]
)
@pytest.mark.parametrize(("size", "rotary_dim"), [(32, 16), (512, 64), (19, 6)])
def test_rows_are_normalized_rotated_and_stored(library, interleaved, dtype, angles, norms, size, rotary_dim):
    num_tokens = 9
    q = guarded((num_tokens, 3, 11 + rotary_dim), dtype, 0)[..., 11:]
    row = guarded((num_tokens, size + rotary_dim), dtype, 1)
    norm = guarded((size,), norms, 2), 1e-6
    turns = torch.randn((num_tokens, rotary_dim // 2), generator=torch.Generator().manual_seed(3))
    cos = torch.cat((turns.cos(), turns.cos()), dim=-1).to(angles)
    sin = torch.cat((-turns.sin(), turns.sin()), dim=-1).to(angles)
    loc = torch.tensor([5, 3, 11, 7, 2, 8, 9, 1, 4])
    pool = torch.full((12, 1, size + rotary_dim), torch.nan, dtype=dtype)
    out = torch.full((num_tokens, 3, 5 + rotary_dim), 7.0, dtype=dtype)

    NativeLatentOps(library).store_latent(
        q, out[..., 5:], row, norm, RotaryStore(cos, sin, LayerKV(pool, pool), loc, interleaved=interleaved)
    )

    exact = torch.zeros((12, 1, size + rotary_dim), dtype=torch.float64)
    expected = torch.zeros((num_tokens, 3, rotary_dim), dtype=torch.float64)
    weight, eps = norm
    plain.store_latent(
        q.double(),
        expected,
        row.double(),
        (weight.double(), eps),
        RotaryStore(cos.double(), sin.double(), LayerKV(exact, exact), loc, interleaved=interleaved),
    )
    close(out[..., 5:], expected, extra=1e-6)
    assert (out[..., :5] == 7.0).all()
    close(pool[loc], exact[loc], extra=1e-6)
    assert pool[[0, 6, 10]].isnan().all()
