"""Random batches over a paged KV pool, and what attention must make of them; for the tests of all backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.model_runner.attention.backend import AttentionBackend, BatchLayout
from engine.model_runner.kernels.plain import store_kv
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.memory.kv_pool import KVPool
from engine.models.spec.encoder_spec import EncoderSpec
from engine.models.spec.layer_form import PLAIN_ATTENTION, AttentionForm, WindowsSpec
from engine.models.spec.model_spec import ModelSpec
from engine.models.spec.vision_spec import ImageProcessing, VisionSpec

CPU = torch.device("cpu")
_NARROW_SIGHT = VisionSpec(
    family="gemma4",
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    norm_eps=1e-6,
    activation="gelu_tanh",
    image_size=0,
    patch_size=1,
    scale_factor=1,
    sees_whole=True,
    only_in_windows=True,
    image_token_id=0,
    image_token="",
    begin_token="",
    end_token="",
    marker="",
    processing=ImageProcessing(
        longest_edge=None,
        tile_size=1,
        splits=True,
        resample=3,
        rescale_factor=1.0,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    ),
)


def spec_of(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    causal: bool = True,
    query_scale: float | None = None,
    form: AttentionForm = PLAIN_ATTENTION,
    only_in_windows: bool = False,
) -> ModelSpec:
    """Two layers, the second one with the window; `only_in_windows`: where tokens of images attend to all of it."""
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
        windows=None if window is None else WindowsSpec(size=window, layers=(False, True)),
        encoder=None if causal else EncoderSpec(post_norm=True, activation="gelu"),
        attention=msgspec.structs.replace(form, query_scale=query_scale),
        vision=_NARROW_SIGHT if only_in_windows else None,
    )


class Pages:
    """A KV pool with NaN wherever nothing was written, and requests on random pages.

    The slot table is full of slots of others behind the end of each request, as it is when rows are used again.
    """

    def __init__(
        self,
        spec: ModelSpec,
        page_size: int,
        lens: list[int],
        dtype: torch.dtype,
        seed: int,
        *,
        backend: type[AttentionBackend],
        kv_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.spec, self.lens, self.dtype, self.device = spec, lens, dtype, device
        self.backend = backend
        kv_dtype = kv_dtype or dtype
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        per_req = [-(-length // page_size) for length in lens]
        num_pages = sum(per_req) + 3
        self.pool = KVPool(
            num_layers=spec.num_kv_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=kv_dtype,
            device=device,
            layer_heads=[spec.heads_of(layer_id) for layer_id in spec.kv_layers],
        )
        for pool in (*self.pool.k, *self.pool.v):
            pool.fill_(77 if kv_dtype == torch.int8 else torch.nan)
        for scales in (*self.pool.k_scale, *self.pool.v_scale):
            scales.fill_(torch.nan)
        pages = random.permutation(np.arange(1, num_pages + 1))
        self.rows = random.permutation(len(lens) + 2)[: len(lens)].astype(np.int64)
        # Whole pages: what a backend may take from a page's first slot.
        shape = (len(lens) + 2, -(-(max(lens) + 5) // page_size))
        strangers = random.integers(0, num_pages + 1, shape)[:, :, None] * page_size + np.arange(page_size)
        table = strangers.reshape(shape[0], -1).astype(np.int32)
        self.slots = []
        for row, length, count in zip(self.rows, lens, per_req, strict=True):
            mine, pages = pages[:count], pages[count:]
            slots = (mine[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]
            table[row, :length] = slots
            self.slots.append(torch.from_numpy(slots).to(device))
        self.table = torch.from_numpy(table).to(device)
        heads = (spec.num_kv_heads, spec.head_dim)
        kept = torch.float32 if kv_dtype == torch.int8 else kv_dtype  # made int8 when they are stored
        self.keys = [torch.randn(length, *heads).to(kept).to(device) for length in lens]
        self.values = [torch.randn(length, *heads).to(kept).to(device) for length in lens]
        self.q: Tensor = torch.empty(0)
        self.images: list[list[tuple[int, int]]] = [[] for _ in lens]  # of each request: (start, end)
        # Some sinks are far above the scores, some far below.
        self.sinks = torch.randn(spec.num_heads).mul_(4.0).to(device) if spec.attention.sinks else None

    def fill(self, extend_lens: list[int], layer_id: int = 1) -> list[Tensor]:
        """Make queries of the last `extend_lens` tokens of each request, and store all keys and values.

        Returns:
            what attention must be, in float64: [extend_len, Hq * D] of each request.
        """
        q, k, expected = [], [], []
        columns = (self.slots, self.keys, self.values, extend_lens, self.images)
        for slots, keys, values, new, images in zip(*columns, strict=True):
            if self.pool.k_scale:
                keys, values = self._store_quantized(layer_id, slots, keys, values)
            else:
                store(self.pool.layer(layer_id).k, slots, keys)
                store(self.pool.layer(layer_id).v, slots, values)
            q.append(torch.randn(new, self.spec.num_heads, self.spec.head_dim).to(self.dtype).to(self.device))
            k.append(keys[len(keys) - new :].to(self.dtype))
            window, form = self.spec.window_of(layer_id), self.spec.attention
            scores = (self.spec.score_scale, form.score_cap, self.sinks)
            expected.append(
                dense(
                    q[-1],
                    keys,
                    values,
                    window,
                    *scores,
                    chunked=form.chunked,
                    causal=self.spec.causal,
                    images=() if self.spec.view_of(layer_id).causal_images else images,
                )
            )
        # As the model makes it: q is a view into a tensor with q and k.
        self.q = torch.cat((torch.cat(q), torch.cat(k)), dim=1)[:, : self.spec.num_heads]
        return expected

    def _store_quantized(
        self, layer_id: int, slots: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns what they are as int8, in float64."""
        kv, exact = self.pool.layer(layer_id), []
        store_kv(kv, keys, values, slots)
        for numbers, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
            assert scales is not None
            exact.append(numbers[slots].double() * scales[slots].double().unsqueeze(-1))
        return exact[0], exact[1]

    def layout(self, extend_lens: list[int]) -> BatchLayout:
        several = [idx for idx, new in enumerate(extend_lens) if new > 1]
        return BatchLayout(
            rows=self.rows,
            prefix_lens=np.array(self.lens, dtype=np.int64) - extend_lens,
            extend_lens=np.array(extend_lens, dtype=np.int64),
            num_extends=several[-1] + 1 if several else 0,
            sees_to=self._sees_to(extend_lens) if any(self.images) else None,
        )

    def _sees_to(self, extend_lens: list[int]) -> np.ndarray:
        ends = []
        for length, new, images in zip(self.lens, extend_lens, self.images, strict=True):
            mine = np.arange(1, length + 1)
            for start, end in images:
                mine[start:end] = end
            ends.append(mine[length - new :])
        return np.concatenate(ends)

    def bound(self) -> Any:
        """The backend over this pool."""
        return self.backend(self.spec, self.pool, self.table, InputBuffers(self.device))

    def run(self, extend_lens: list[int], layer_id: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Attention of the last `extend_lens` tokens of each request: ours, and dense in float64.

        Every other number of tokens, the result goes to given memory, beyond which nothing is written.
        """
        expected = self.fill(extend_lens, layer_id)
        num_tokens, num_heads, head_dim = self.q.shape
        memory = torch.full(
            (num_tokens + 3, num_heads * head_dim), 55.0, dtype=self.dtype, device=self.device
        )
        given = memory[:num_tokens] if num_tokens % 2 == 0 else None
        with poisoned_memory():
            step = self.bound().plan_step(self.layout(extend_lens))
            out = step.forward(layer_id, self.q, self.sinks, given)
        assert given is None or out.data_ptr() == memory.data_ptr()
        assert bool((memory[num_tokens:] == 55.0).all())
        return list(out.split(extend_lens)), expected

    def decode(self, layer_id: int = 1, num_padding: int = 0) -> tuple[Tensor, Tensor]:
        """One token of each request, planned from device tensors; behind them requests of one dummy token."""
        expected = self.fill([1] * len(self.lens), layer_id)
        rows = torch.from_numpy(self.rows).to(self.device)
        seq_lens = torch.tensor(self.lens, dtype=torch.int32, device=self.device)
        store(self.pool.k[layer_id], torch.tensor([0]), torch.ones_like(self.pool.k[0][:1]))
        store(self.pool.v[layer_id], torch.tensor([0]), torch.ones_like(self.pool.k[0][:1]))
        spare = next(row for row in range(len(self.lens) + 2) if row not in self.rows)
        self.table[spare] = 0
        with poisoned_memory():
            step = self.bound().decode_step(
                torch.cat((rows, rows.new_full((num_padding,), spare))),
                torch.cat((seq_lens, seq_lens.new_ones(num_padding))),
            )
            q = torch.cat((self.q, self.q.new_zeros(num_padding, *self.q.shape[1:])))
            out = step.forward(layer_id, q, self.sinks)
        assert self.sinks is not None or bool((out[len(self.lens) :] == 1).all())
        return out[: len(self.lens)], torch.cat(expected)


def store(pool: Tensor, slots: Tensor, numbers: Tensor) -> None:
    """pool[slots] = numbers, in any dtype."""
    pool.view(torch.uint8)[slots] = numbers.view(torch.uint8)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    *,
    chunked: bool = False,
    causal: bool = True,
    images: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """Attention of the last len(q) of len(k) tokens, in float64: [n, Hq * D]; `images` see all of themselves."""
    group = q.shape[1] // k.shape[1]
    k, v = (numbers.to(torch.float64).repeat_interleave(group, 1) for numbers in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * (scale or q.shape[-1] ** -0.5)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    key = torch.arange(k.shape[0], device=q.device)
    query = key[k.shape[0] - q.shape[0] :, None]
    visible = key <= query if causal else torch.ones_like(query >= key)
    for start, end in images:
        visible |= (query >= start) & (query < end) & (key >= start) & (key < end)
    if window is not None and chunked:
        visible &= key // window == query // window
    elif window is not None:
        visible &= key > query - window if causal else (key - query).abs() <= window // 2
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@st.composite
def seeing_batches(
    draw: st.DrawFn, max_len: int = 400
) -> tuple[list[int], list[int], list[list[tuple[int, int]]]]:
    """Total lengths, new tokens, and images of each request, each of which is in the prefix or in the new tokens."""
    lens, extend_lens, images = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        mine, length = [], draw(st.integers(0, 20))
        for _ in range(draw(st.integers(0, 3))):
            start = length + draw(st.integers(0, 9))
            length = start + draw(st.integers(1, 20) | st.integers(1, max_len // 3))
            mine.append((start, length))
        length += draw(st.integers(0 if mine else 1, 20))
        cuts = [cut for cut in range(length) if not any(start < cut < end for start, end in mine)]
        lens.append(length)
        extend_lens.append(length - draw(st.sampled_from(cuts)))
        images.append(mine)
    for _ in range(draw(st.integers(0, 2))):  # decodes
        lens.append(draw(st.integers(1, max_len)))
        extend_lens.append(1)
        images.append([])
    return lens, extend_lens, images


def whole_texts(max_len: int = 700) -> st.SearchStrategy[list[int]]:
    """Lengths of texts, which an encoder computes whole."""
    return st.lists(st.integers(1, 80) | st.integers(1, max_len), min_size=1, max_size=8)


@st.composite
def batches(
    draw: st.DrawFn, max_len: int = 300, max_extends: int = 4, max_decodes: int = 8
) -> tuple[list[int], list[int]]:
    """Total lengths and new tokens: extends (fresh, with prefix, of one token among them), then decodes."""
    extends = draw(
        st.lists(st.tuples(st.integers(0, max_len), st.integers(1, max_len)), max_size=max_extends)
    )
    decodes = draw(st.lists(st.integers(1, 2 * max_len), max_size=max_decodes))
    if not extends and not decodes:
        decodes = [1]
    lens = [prefix + new for prefix, new in extends] + decodes
    return lens, [new for _, new in extends] + [1] * len(decodes)


def assert_close(ours: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    """Equal but for rounding, of the results and of the weights."""
    tolerance = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    if dtype == torch.float32 and ours[0].is_cuda:
        tolerance = 2e-5  # fast exponentials
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
