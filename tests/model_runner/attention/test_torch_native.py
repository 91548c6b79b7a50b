"""Paged attention against dense float64 attention over random page tables, lengths and head shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.attention.backend import BatchLayout
from engine.model_runner.attention.torch_native import TorchNativeAttention, group_by_length
from engine.model_runner.input_buffers import InputBuffers
from engine.model_runner.kv_pool import KVPool
from engine.runtime.model_files.model_spec import ModelSpec

CPU = torch.device("cpu")


def spec_of(num_heads: int, num_kv_heads: int, head_dim: int, *, window: int | None = None) -> ModelSpec:
    """Two layers, the second one with the window."""
    return ModelSpec(
        model_type="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        torch_dtype="float32",
        sliding_window=window,
        windowed_layers=(False, window is not None),
    )


class Pages:
    """A KV pool with NaN wherever nothing was written, and requests on random pages."""

    def __init__(
        self, spec: ModelSpec, page_size: int, lens: list[int], dtype: torch.dtype, seed: int
    ) -> None:
        self.spec, self.lens = spec, lens
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        per_req = [-(-length // page_size) for length in lens]
        num_pages = sum(per_req) + 3
        self.pool = KVPool(
            num_layers=2,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=CPU,
        )
        for pool in (*self.pool.k, *self.pool.v):
            pool.fill_(torch.nan)
        pages = self.random.permutation(np.arange(1, num_pages + 1))
        self.rows = self.random.permutation(len(lens) + 2)[: len(lens)]
        self.table = torch.zeros((len(lens) + 2, max(lens) + 5), dtype=torch.int32)
        self.slots = []
        for row, length, count in zip(self.rows, lens, per_req, strict=True):
            mine, pages = pages[:count], pages[count:]
            slots = (mine[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]
            self.table[row, :length] = torch.from_numpy(slots.astype(np.int32))
            self.slots.append(torch.from_numpy(slots))
        shape = (spec.num_kv_heads, spec.head_dim)
        self.keys = [torch.randn(length, *shape).to(dtype) for length in lens]
        self.values = [torch.randn(length, *shape).to(dtype) for length in lens]

    def run(self, extend_lens: list[int], layer_id: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Attention of the last `extend_lens` tokens of each request: ours, and dense in float64."""
        spec = self.spec
        prefix_lens = [total - new for total, new in zip(self.lens, extend_lens, strict=True)]
        q, k, v, loc, expected = [], [], [], [], []
        for idx, (prefix, new) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
            self.pool.k[layer_id][self.slots[idx][:prefix]] = self.keys[idx][:prefix]
            self.pool.v[layer_id][self.slots[idx][:prefix]] = self.values[idx][:prefix]
            q.append(torch.randn(new, spec.num_heads, spec.head_dim).to(self.keys[idx].dtype))
            k.append(self.keys[idx][prefix:])
            v.append(self.values[idx][prefix:])
            loc.append(self.slots[idx][prefix:])
            expected.append(dense(q[-1], self.keys[idx], self.values[idx], spec.window_of(layer_id)))
        several = [idx for idx, new in enumerate(extend_lens) if new > 1]
        layout = BatchLayout(
            rows=self.rows.astype(np.int64),
            prefix_lens=np.array(prefix_lens, dtype=np.int64),
            extend_lens=np.array(extend_lens, dtype=np.int64),
            num_extends=several[-1] + 1 if several else 0,
        )
        backend = TorchNativeAttention(spec, self.pool, self.table, InputBuffers(CPU))
        step = backend.plan_step(layout, torch.cat(loc))
        # As the model makes them: q and k are views into one tensor.
        qk = torch.cat((torch.cat(q), torch.cat(k)), dim=1)
        out = step.forward(layer_id, qk[:, : spec.num_heads], qk[:, spec.num_heads :], torch.cat(v))
        return list(out.split(extend_lens)), expected


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of the last len(q) of len(k) tokens, in float64: [n, Hq * D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[-1] ** 0.5
    visible = torch.arange(k.shape[0]) <= torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    if window is not None:
        visible &= (
            torch.arange(k.shape[0]) > torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - window
        )
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Total lengths and new tokens: extends (fresh, with prefix, of one token among them), then decodes."""
    extends = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=4))
    decodes = draw(st.lists(st.integers(1, 600), max_size=8))
    if not extends and not decodes:
        decodes = [1]
    lens = [prefix + new for prefix, new in extends] + decodes
    return lens, [new for _, new in extends] + [1] * len(decodes)


@settings(max_examples=100, deadline=None)
@given(
    batch=batches(),
    heads=st.sampled_from([(1, 1, 8), (3, 1, 16), (9, 3, 64), (4, 4, 32), (8, 2, 40)]),
    page_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.sampled_from([1, 2, 7, 64, 100, 256, 257, 599, 2000]),
    layer_id=st.sampled_from([0, 1, 1]),
    seed=st.integers(0, 1000),
)
def test_is_dense_attention(batch, heads, page_size, dtype, window, layer_id, seed):
    lens, extend_lens = batch
    pages = Pages(spec_of(*heads, window=window), page_size, lens, dtype, seed)
    ours, expected = pages.run(extend_lens, layer_id)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_writes_only_the_new_slots_of_its_layer():
    pages = Pages(spec_of(4, 2, 8), 4, [7, 9, 3], torch.float32, seed=0)
    pages.run([7, 1, 1])
    assert pages.pool.k[0].isnan().all()
    written = ~pages.pool.k[1].isnan().all(dim=-1).all(dim=-1)
    assert written.nonzero()[:, 0].tolist() == sorted(torch.cat(pages.slots).tolist())
    assert torch.equal(pages.pool.v[1][pages.slots[0]], pages.values[0])


def test_a_window_reads_no_token_before_it():
    pages = Pages(spec_of(4, 2, 8, window=50), 4, [300, 200, 90], torch.float32, seed=2)
    for idx, seen in enumerate([100 + 49, 50, 50]):
        pages.keys[idx][:-seen] = torch.nan
        pages.values[idx][:-seen] = torch.nan
    ours, _ = pages.run([100, 1, 1])
    assert all(out.isfinite().all() for out in ours)


def test_a_request_with_nan_does_not_touch_its_neighbours():
    pages = Pages(spec_of(4, 2, 8), 4, [200, 30, 90], torch.float32, seed=1)
    pages.keys[0][5] = torch.nan
    pages.values[0][6] = torch.inf
    ours, expected = pages.run([1, 1, 1])
    assert ours[0].isnan().any()
    torch.testing.assert_close(
        torch.stack(ours[1:]).double(), torch.stack(expected[1:]), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("lens", "groups"),
    [
        ([], []),
        ([5], [[0]]),
        ([100, 90, 110, 80], [[0, 1, 2, 3]]),
        ([2000, 10, 2000, 20], [[0, 2], [1, 3]]),
        ([3000, 2500, 1], [[0, 1], [2]]),
    ],
)
def test_decodes_are_grouped_by_length(lens, groups):
    assert [group.tolist() for group in group_by_length(np.array(lens, dtype=np.int64))] == groups


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64))
def test_every_decode_is_in_one_group_and_padding_is_bounded(lens):
    array = np.array(lens, dtype=np.int64)
    groups = group_by_length(array)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lens)))
    for group in groups:
        assert array[group].max() * len(group) - array[group].sum() <= 1024
