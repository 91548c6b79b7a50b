"""FA3's calls against the signatures of its wheels, and against a stand-in in torch that computes what they ask for."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.attention.fa3 import FlashAttention3
from engine.model_runner.kernels import probe
from engine.model_runner.kernels.probe import Finding, KernelProbe
from tests.model_runner.attention.fake_flash_attention import FakeFlashAttention
from tests.model_runner.attention.paged_batches import Pages, assert_close, batches, spec_of, whole_texts
from tests.model_runner.kernels import sgl_signatures
from tests.selection import examples

HOPPER = KernelProbe(Finding("0.4.10"), Finding("3.6"), (9, 0))
CUDA = torch.device("cuda")
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.fixture(params=sgl_signatures.VERSIONS, scope="module")
def fake(request):
    """In the place of sgl_kernel."""
    stand_in = FakeFlashAttention(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sgl_kernel", stand_in)
        patch.setitem(sys.modules, "sgl_kernel.flash_attn", stand_in.module)
        yield stand_in


def paged(*args: Any, **kwargs: Any) -> Pages:
    return Pages(*args, **kwargs, backend=FlashAttention3)


@settings(max_examples=examples(15))
@given(
    batch=batches(),
    heads=st.sampled_from([(1, 1, 8), (3, 1, 16), (9, 3, 64), (4, 4, 32)]),
    page_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([BF16, FP16]),
    window=st.none() | st.sampled_from([1, 7, 100, 2000]),
    layer_id=st.sampled_from([0, 1, 1]),
    seed=st.integers(0, 1000),
)
def test_is_dense_attention(fake, batch, heads, page_size, dtype, window, layer_id, seed):
    lens, extend_lens = batch
    pages = paged(spec_of(*heads, window=window), page_size, lens, dtype, seed)
    ours, expected = pages.run(extend_lens, layer_id)
    assert_close(ours, expected, dtype)


@settings(max_examples=10)
@given(
    lens=whole_texts(300),
    page_size=st.sampled_from([1, 16]),
    window=st.none() | st.sampled_from([1, 17, 129]),
    layer_id=st.sampled_from([0, 1, 1]),
)
def test_in_an_encoder_a_token_sees_those_after_it(fake, lens, page_size, window, layer_id):
    pages = paged(spec_of(4, 4, 32, window=window, causal=False), page_size, lens, BF16, 0)
    ours, expected = pages.run(lens, layer_id)
    assert_close(ours, expected, BF16)


@settings(max_examples=8)
@given(
    lens=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 16]),
    window=st.none() | st.just(50),
    num_padding=st.integers(0, 2),
)
def test_a_step_planned_on_the_device_is_dense_attention_too(fake, lens, page_size, window, num_padding):
    pages = paged(spec_of(9, 3, 16, window=window), page_size, lens, BF16, 0)
    ours, expected = pages.decode(num_padding=num_padding)
    assert_close([ours], [expected], BF16)


@pytest.mark.parametrize("extend_lens", [[40, 7, 1], [1, 1, 1]])
def test_with_an_fp8_pool_queries_are_fp8_too(fake, extend_lens):
    """And the result is as close to dense attention over the pool's values as 3 bits of mantissa allow."""
    pages = paged(spec_of(4, 2, 16), 16, [100, 33, 17], BF16, 0, kv_dtype=FP8)
    ours, expected = pages.run(extend_lens)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == BF16
        torch.testing.assert_close(one.float(), other.float(), atol=0.25, rtol=0.1)


def test_queries_beyond_the_range_of_fp8_are_cut_and_not_nan(fake):
    pages = paged(spec_of(4, 2, 16), 16, [20], BF16, 0, kv_dtype=FP8)
    pages.fill([1], 0)
    step = pages.bound().plan_step(pages.layout([1]))
    assert bool(step.forward(0, pages.q * 1000.0).isfinite().all())


def test_a_page_table_is_as_wide_as_the_longest_request_or_for_recordings_as_any():
    """A recording is replayed with longer requests than it was made with."""
    fake = FakeFlashAttention("0.4.5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sgl_kernel", fake)
        patch.setitem(sys.modules, "sgl_kernel.flash_attn", fake.module)
        pages = paged(spec_of(4, 2, 16), 16, [100, 33, 17], BF16, 0)
        pages.lens = [20, 33, 17]
        backend = pages.bound()
        planned = backend.plan_step(pages.layout([1, 1, 1]))
        recorded = backend.decode_step(torch.tensor([0, 1]), torch.tensor([3, 4], dtype=torch.int32))
    assert planned.arguments[0]["page_table"].shape == (3, 3)
    assert recorded.arguments[0]["page_table"].shape == (2, 7)


def test_drafts_may_be_more_rows_than_requests_can_run(fake):
    """A row for each token of a request, with its own length; attention is that of the tokens one by one."""
    pages = paged(spec_of(4, 2, 16), 16, [40], BF16, 0)
    (expected,) = pages.fill([7])
    rows = torch.from_numpy(pages.rows).repeat(7)
    seq_lens = torch.arange(34, 41, dtype=torch.int32)
    step = pages.bound().decode_step(rows, seq_lens)
    assert_close([step.forward(1, pages.q)], [expected], BF16)


def test_metadata_are_made_once_per_step_and_window(fake):
    pages = paged(spec_of(4, 2, 16, window=20), 16, [100, 33], BF16, 0)
    pages.fill([1, 1], 0)
    pages.fill([1, 1], 1)
    plans, calls = fake.num_plans, fake.num_calls
    step = pages.bound().plan_step(pages.layout([1, 1]))
    for layer_id in (0, 1, 0, 1):
        step.forward(layer_id, pages.q)
    assert (fake.num_plans - plans, fake.num_calls - calls) == (2, 4)


def test_an_empty_batch_is_nothing(fake):
    pages = paged(spec_of(4, 2, 16), 4, [3], BF16, seed=0)
    pages.lens, pages.rows = [], pages.rows[:0]
    step = pages.bound().plan_step(pages.layout([]))
    assert step.forward(0, torch.empty(0, 4, 16, dtype=BF16)).shape == (0, 64)


# ---------------------------------------------------------------- reasons against it


def reasons(
    monkeypatch: pytest.MonkeyPatch,
    probe: KernelProbe,
    *,
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype = BF16,
) -> list[str]:
    monkeypatch.setattr("engine.model_runner.kernels.probe.probe_kernels", lambda: probe)
    return FlashAttention3.reasons_against(spec_of(4, 2, head_dim), CUDA, dtype, kv_dtype)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_nothing_speaks_against_it_where_its_wheels_have_code(fake, monkeypatch, capability):
    assert reasons(monkeypatch, HOPPER._replace(capability=capability)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 320}, "head_dim is 320, it must be a multiple of 8 and at most 256"),
        ({"head_dim": 20}, "head_dim is 20, it must be a multiple of 8 and at most 256"),
        (
            {"dtype": torch.float32, "kv_dtype": torch.float32},
            "computes in bfloat16 and float16, not in float32",
        ),
        ({"kv_dtype": FP16}, "needs queries and keys in one precision, not bfloat16 and float16"),
        ({"kv_dtype": FP8}, "has no code on this GPU for fp8 KV and head_dim 128"),
    ],
)
def test_reasons_of_the_model(fake, monkeypatch, changes, reason):
    assert reasons(monkeypatch, HOPPER, **changes) == [reason]


def test_an_fp8_pool_is_read_where_there_is_code_and_on_request(fake, monkeypatch):
    assert reasons(monkeypatch, HOPPER._replace(flash_fp8_dims=(128,)), kv_dtype=FP8) == []
    assert FlashAttention3.reasons_to_ask(BF16, FP8)
    assert not FlashAttention3.reasons_to_ask(BF16, BF16)


def test_reasons_of_the_machine(fake, monkeypatch):
    blackwell = HOPPER._replace(capability=(10, 0))
    assert reasons(monkeypatch, blackwell) == [
        "is built for compute capabilities 8.x and 9.0, this GPU has 10.0"
    ]
    missing = HOPPER._replace(sgl_kernel=Finding(None, "not installed", "pip install it"))
    assert reasons(monkeypatch, missing) == ["sgl_kernel: not installed"]


@pytest.mark.parametrize(
    ("head_dim", "found"),
    [(64, []), (96, ["sgl_kernel 0.4.10 has no code for head_dim 96 on this GPU"]), (128, []), (40, [])],
)
def test_a_wheel_without_code_for_the_models_heads(fake, monkeypatch, head_dim, found):
    """The reduced one that is carried to a GPU machine; the first step would end with "no kernel image"."""
    reduced = HOPPER._replace(flash_dims=(128, 64, 256))
    assert reasons(monkeypatch, reduced, head_dim=head_dim) == found
    assert reasons(monkeypatch, HOPPER, head_dim=head_dim) == []
    told = reasons(monkeypatch, reduced._replace(flash_error="no kernel image"), head_dim=head_dim)
    assert told == [f"{reason} (no kernel image)" for reason in found]


@pytest.mark.parametrize("version", sgl_signatures.VERSIONS)
def test_the_trial_calls_the_kernel_with_arguments_that_it_has(version):
    """A call that it would refuse would look like a wheel without any code."""
    calls = [
        node
        for node in ast.walk(ast.parse(probe._TRIAL))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "flash_attn_with_kvcache"
    ]
    (call,) = calls
    names = {str(keyword.arg): None for keyword in call.keywords}
    signature = sgl_signatures.function(version, "flash_attn.flash_attn_with_kvcache")
    bound = signature.bind(*call.args, **names)
    assert list(bound.arguments)[:3] == ["q", "k_cache", "v_cache"]


def test_a_wheel_without_the_library_of_fa3(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", FakeFlashAttention("0.4.5"))
    (reason,) = reasons(monkeypatch, HOPPER)
    assert reason.startswith("sgl_kernel 0.4.10 does not contain it: ")


def test_all_reasons_come_at_once():
    found = FlashAttention3.reasons_against(
        spec_of(4, 2, 12), torch.device("cpu"), torch.float32, torch.float32
    )
    assert len(found) == 3
    assert found[0] == "needs a CUDA device, not cpu"


@pytest.mark.parametrize(
    ("head_dim", "page_size", "advice"),
    [
        (64, 64, ""),
        (128, 64, ""),
        (128, 128, "64"),
        (192, 64, ""),
        (192, 96, "64"),
        (256, 32, ""),
        (256, 64, "32"),
    ],
)
def test_pages_as_large_as_a_block_of_keys_are_refused(head_dim, page_size, advice):
    """They are loaded whole, with what another request has left in them, and 0 * NaN is NaN."""
    found = FlashAttention3.reasons_against_pages(spec_of(4, 2, head_dim), page_size)
    assert [reason.rpartition(" ")[2] for reason in found] == ([advice] if advice else [])


# ---------------------------------------------------------------- the real one


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("heads", [(8, 2, 128), (9, 3, 64), (4, 4, 64)])
def test_sgl_kernel_itself_is_dense_attention(heads, page_size, window):
    spec = spec_of(*heads, window=window)
    found = FlashAttention3.reasons_against(spec, CUDA, BF16, BF16)
    if found:
        pytest.skip("; ".join(found))
    lens = [700, 300, 90, 1, 513, 33]
    for extend_lens in ([700, 129, 7, 1, 1, 1], [1] * 6):
        pages = Pages(spec, page_size, lens, BF16, 0, backend=FlashAttention3, device=CUDA)
        for pool in pages.pool.v:
            pool.zero_()  # see `KVPool`
        ours, expected = pages.run(extend_lens)
        assert_close(ours, expected, BF16)


@pytest.mark.gpu
def test_sgl_kernel_itself_is_replayed_with_other_lengths():
    spec = spec_of(8, 2, 128)
    found = FlashAttention3.reasons_against(spec, CUDA, BF16, BF16)
    if found:
        pytest.skip("; ".join(found))
    pages = Pages(spec, 16, [700, 300, 90], BF16, 0, backend=FlashAttention3, device=CUDA)
    expected = pages.fill([1, 1, 1])
    rows = torch.from_numpy(pages.rows).to(CUDA)
    seq_lens = torch.ones(3, dtype=torch.int32, device=CUDA)
    backend, q = pages.bound(), pages.q.contiguous()
    backend.decode_step(rows, seq_lens).forward(1, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.decode_step(rows, seq_lens).forward(1, q)
    seq_lens.copy_(torch.tensor(pages.lens))
    graph.replay()
    assert_close([out], [torch.cat(expected)], BF16)
