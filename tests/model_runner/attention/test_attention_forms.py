"""Score scale, score cap and sinks in every backend, alone and together, against dense float64 attention."""

from __future__ import annotations

import functools
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.model_runner.attention.cpu_native import CpuNativeAttention
from engine.model_runner.attention.fa3 import FlashAttention3
from engine.model_runner.attention.split import split_backend
from engine.model_runner.attention.torch_native import TorchNativeAttention
from engine.model_runner.attention.triton_paged import TritonAttention
from engine.model_runner.memory.host_kv_pool import HostKVPool
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.memory.kv_pool import KVPool
from engine.models.spec.layer_form import AttentionForm, LayerHeads
from engine.models.spec.model_spec import ModelSpec
from engine.models.spec.streams_spec import StreamsSpec
from tests.conftest import HAS_NVIDIA_DRIVER
from tests.model_runner.attention.fake_flash_attention import FakeFlashAttention
from tests.model_runner.attention.paged_batches import Pages, assert_close, spec_of
from tests.model_runner.attention.test_cpu_native import library
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

__all__ = ["library"]  # fixture

BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
TRITON_DEVICE = torch.device("cuda" if HAS_NVIDIA_DRIVER else "cpu")
FORMS = {
    "scale": (0.6, AttentionForm()),
    "cap": (1.0, AttentionForm(score_cap=2.0)),
    "sinks": (1.0, AttentionForm(sinks=True)),
    "chunks": (1.0, AttentionForm(chunked=True)),
    "all": (0.6, AttentionForm(score_cap=5.0, sinks=True)),
}
forms = pytest.mark.parametrize(("scale", "form"), FORMS.values(), ids=FORMS.keys())
windows = pytest.mark.parametrize("window", [None, 70])
LENS, NEW = [300, 150, 90, 1, 200, 129], [140, 150, 2, 1, 1, 1]
"""A prompt with a prefix, a fresh one, a short one, the first token of a text, and decodes."""


def spec_with(
    scale: float, form: AttentionForm, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> ModelSpec:
    """`scale` is relative to the usual one."""
    return spec_of(
        num_heads, num_kv_heads, head_dim, window=window, query_scale=scale * head_dim**-0.5, form=form
    )


def close(ours: list[torch.Tensor], expected: list[torch.Tensor], dtypes: tuple[torch.dtype, ...]) -> None:
    """Larger scores have larger rounding errors than those of `assert_close`."""
    if dtypes[0] == BF16:
        assert_close(ours, expected, BF16)
        return
    tolerance = 1e-3 if INT8 in dtypes else 1e-5  # queries and weights of decodes are cut to 15 bits
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.fast_cases(8)
@forms
@windows
@pytest.mark.parametrize(
    "dtypes", [(F32, F32), (BF16, BF16), (F32, INT8), (BF16, INT8)], ids=["f32", "bf16", "f32-int8", "int8"]
)
@pytest.mark.parametrize("fixed_order", [False, True])
def test_cpu_native(library, scale, form, window, dtypes, fixed_order):
    backend: Any = functools.partial(CpuNativeAttention, library=library, fixed_order=fixed_order)
    for heads in ((9, 3, 64), (4, 1, 48), (8, 2, 128)):
        spec = spec_with(scale, form, *heads, window)
        pages = Pages(spec, 16, LENS, dtypes[0], 3, backend=backend, kv_dtype=dtypes[1])
        ours, expected = pages.run(NEW)
        close(ours, expected, dtypes)


@forms
@windows
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_torch_native(scale, form, window, dtype):
    spec = spec_with(scale, form, 9, 3, 64, window)
    pages = Pages(spec, 4, LENS, dtype, 3, backend=TorchNativeAttention)
    ours, expected = pages.run(NEW)
    close(ours, expected, (dtype,))


@forms
@windows
def test_split(scale, form, window):
    spec = spec_with(scale, form, 6, 3, 16, window)
    backend = split_backend(TorchNativeAttention, TorchNativeAttention)
    ours, expected = Pages(spec, 4, LENS, F32, 3, backend=backend).run(NEW)
    close(ours, expected, (F32,))


@pytest.mark.fast_cases(1)
@forms
@windows
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_triton(scale, form, window, dtype):
    """In one step: a prompt with parts, a whole one, decodes with parts, and one without."""
    spec = spec_with(scale, form, 6, 2, 32, window)
    pages = Pages(spec, 16, [330, 40, 200, 9], dtype, 3, backend=TritonAttention, device=TRITON_DEVICE)
    ours, expected = pages.run([3, 40, 1, 1])
    close(ours, expected, (dtype,))


@pytest.mark.fast_cases(2)
@forms
@windows
def test_triton_steps_planned_on_the_device(scale, form, window):
    spec = spec_with(scale, form, 6, 2, 32, window)
    pages = Pages(spec, 16, [130, 9], BF16, 3, backend=TritonAttention, device=TRITON_DEVICE)
    ours, expected = pages.decode(num_padding=1)
    close([ours], [expected], (BF16,))


@forms
@windows
@pytest.mark.parametrize("version", ["0.4.10"])
def test_fa3(monkeypatch, scale, form, window, version):
    if form.chunked:
        found = FlashAttention3.reasons_against(spec_of(4, 2, 64, form=form), torch.device("cpu"), BF16, BF16)
        assert "attends to windows, not to chunks" in found
        return
    fake = FakeFlashAttention(version)
    monkeypatch.setitem(sys.modules, "sgl_kernel", fake)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", fake.module)
    spec = spec_with(scale, form, 9, 3, 64, window)
    pages = Pages(spec, 16, LENS, BF16, 3, backend=FlashAttention3)
    if pages.sinks is not None:
        pages.sinks = pages.sinks.to(BF16).float()
    ours, expected = pages.run(NEW)
    close(ours, expected, (BF16,))


@pytest.mark.parametrize("kv_dtype", [BF16, INT8])
def test_sinks_far_from_the_scores(library, kv_dtype):
    """A sink far above takes all the weight, one far below none, whatever the scores are."""
    backend: Any = functools.partial(CpuNativeAttention, library=library)
    spec = spec_of(4, 2, 32, form=AttentionForm(sinks=True))
    pages = Pages(spec, 4, [200, 100], BF16, 0, backend=backend, kv_dtype=kv_dtype)
    pages.sinks = torch.tensor([3000.0, -3000.0, 90.0, -torch.inf])
    for keys in pages.keys:
        keys.mul_(3)
    ours, expected = pages.run([100, 1])
    for got, want in zip(ours, expected, strict=True):
        assert not got.view(-1, 4, 32)[:, 0].any()
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


def spec_with_two_kinds_of_heads(tested: LayerHeads, other: LayerHeads, window: int | None) -> ModelSpec:
    """The second layer, which is tested, has the first kind."""
    spec = spec_of(8, tested.num_kv_heads, tested.head_dim, window=window, query_scale=tested.head_dim**-0.5)
    return msgspec.structs.replace(spec, streams=StreamsSpec(layer_heads=(other, tested)))


NARROW, WIDE = LayerHeads(head_dim=32, num_kv_heads=4), LayerHeads(head_dim=64, num_kv_heads=1)
two_kinds = pytest.mark.parametrize(("tested", "other"), [(NARROW, WIDE), (WIDE, NARROW)])


@two_kinds
@windows
@pytest.mark.parametrize("kv_dtype", [BF16, INT8])
def test_heads_by_layer_on_the_cpu(library, tested, other, window, kv_dtype):
    spec = spec_with_two_kinds_of_heads(tested, other, window)
    backend: Any = functools.partial(CpuNativeAttention, library=library)
    pages = Pages(spec, 16, LENS, BF16, 3, backend=backend, kv_dtype=kv_dtype)
    ours, expected = pages.run(NEW)
    close(ours, expected, (BF16,))


@two_kinds
@windows
def test_heads_by_layer_in_torch(tested, other, window):
    spec = spec_with_two_kinds_of_heads(tested, other, window)
    backend = split_backend(TorchNativeAttention, TorchNativeAttention)
    ours, expected = Pages(spec, 4, LENS, F32, 3, backend=backend).run(NEW)
    close(ours, expected, (F32,))


@two_kinds
def test_heads_by_layer_in_triton(tested, other):
    spec = spec_with_two_kinds_of_heads(tested, other, 70)
    pages = Pages(spec, 16, [230, 9], BF16, 3, backend=TritonAttention, device=TRITON_DEVICE)
    ours, expected = pages.run([3, 1])
    close(ours, expected, (BF16,))


def test_heads_of_512_numbers(library):
    """In the interpreter, and in the CPU's kernels with keys and values of 8 bits."""
    wide, narrow = LayerHeads(head_dim=512, num_kv_heads=1), LayerHeads(head_dim=256, num_kv_heads=2)
    spec = spec_with_two_kinds_of_heads(wide, narrow, None)
    pages = Pages(spec, 16, [100, 9], BF16, 3, backend=TritonAttention, device=TRITON_DEVICE)
    ours, expected = pages.run([5, 1])
    close(ours, expected, (BF16,))
    backend: Any = functools.partial(CpuNativeAttention, library=library)
    for kv_dtype in (BF16, INT8):
        pages = Pages(spec, 16, [200, 90], BF16, 3, backend=backend, kv_dtype=kv_dtype)
        ours, expected = pages.run([50, 1])
        close(ours, expected, (BF16,))


@two_kinds
def test_heads_by_layer_in_fa3(monkeypatch, tested, other):
    fake = FakeFlashAttention("0.4.10")
    monkeypatch.setitem(sys.modules, "sgl_kernel", fake)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", fake.module)
    spec = spec_with_two_kinds_of_heads(tested, other, 70)
    ours, expected = Pages(spec, 16, LENS, BF16, 3, backend=FlashAttention3).run(NEW)
    close(ours, expected, (BF16,))


def test_a_pool_of_two_kinds_of_heads_is_swapped_and_copied_in_pages():
    spec = spec_with_two_kinds_of_heads(NARROW, WIDE, None)
    pool = KVPool(
        num_layers=2,
        num_pages=5,
        page_size=4,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=INT8,
        device=torch.device("cpu"),
        layer_heads=(WIDE, NARROW),
    )
    assert pool.page_bytes == 4 * spec.kv_bytes_per_token(1, 4)
    for seed, view in enumerate((*pool.page_views, *pool.scale_views)):
        torch.manual_seed(seed)
        view.copy_((torch.rand(view.shape) * 100).to(view.dtype))
    before = [view.clone() for view in (*pool.page_views, *pool.scale_views)]
    host = HostKVPool(pool, 3, InputBuffers(torch.device("cpu")))
    host.copy_out(np.array([2, 4]), np.array([0, 2]))
    host.copy_in(np.array([2, 0]), np.array([1, 3]))
    pool.copy_pages(torch.tensor([1]), torch.tensor([5]))
    for view, old in zip((*pool.page_views, *pool.scale_views), before, strict=True):
        assert torch.equal(view[[1, 3, 5, 2, 4]], old[[4, 2, 4, 2, 4]])
