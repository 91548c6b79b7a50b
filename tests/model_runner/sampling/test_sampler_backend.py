"""Triton's and torch's choices against a reference in numpy, over batches that mix everything; who chooses where."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.model_runner.kernels.triton import sampler as kernels
from engine.model_runner.kernels.triton import sampler_choose as choose_kernels
from engine.model_runner.kernels.triton import sampler_logprobs as logprob_kernels
from engine.model_runner.kernels.triton.sampler_rows import from_order_key, gumbel, order_key
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.sampling import native_backend
from engine.model_runner.sampling.backend_selection import PROVIDERS, SamplerProvider, select_sampler_backend
from engine.model_runner.sampling.native_backend import NativeSamplerBackend
from engine.model_runner.sampling.noise import gumbel_noise, noise_keys
from engine.model_runner.sampling.sampler import Sampler, make_sampler
from engine.model_runner.sampling.sampler_backend import SampledTokens
from engine.model_runner.sampling.sampling_batch import LogitEdits, SamplingBatch
from engine.model_runner.sampling.token_counts import TokenCounts
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend
from engine.model_runner.sampling.triton_backend import Geometry, TritonSamplerBackend
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.sampling.sampling_rows import (
    DEVICE,
    GREEDY,
    KINDS,
    Batch,
    Row,
    check_backends,
    peaked,
    random_row,
    with_poison,
)
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

SMALL = Geometry(chunk=64, group=8, capacity=64, block=64)
"""Several chunks, several groups in each, and lists that are sometimes too short, with few tokens."""


def tokens_by_triton(batch: Batch, geometry: Geometry = SMALL) -> list[int]:
    return batch.sample(TritonSamplerBackend(batch.counts, geometry))[0]


def check(batch: Batch, geometry: Geometry = SMALL) -> int:
    """Both backends against the reference; returns how many rows could be decided."""
    backends = TorchSamplerBackend(batch.counts), TritonSamplerBackend(batch.counts, geometry)
    return check_backends(batch, *backends)


CASES = [
    (1, SMALL, 4),
    (7, SMALL, 6),
    (200, SMALL, 6),
    (200, Geometry(chunk=256, group=32, capacity=256, block=256), 14),
    (97, Geometry(chunk=32, group=32, capacity=16, block=32), 4),
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("vocab_size", "geometry", "num"), CASES[::-1])
def test_batches_that_mix_everything(vocab_size, geometry, num):
    rng = np.random.default_rng(vocab_size + num)
    batch = Batch([random_row(rng, vocab_size) for _ in range(num)], vocab_size)
    assert check(batch, geometry) >= 0.7 * num


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_many_batches_that_mix_everything(seed):
    rng = np.random.default_rng(1000 + seed)
    vocab_size = int(rng.choice([2, 31, 64, 200, 517]))
    geometry = rng.choice(np.array([case[1] for case in CASES], dtype=object))
    batch = Batch([random_row(rng, vocab_size) for _ in range(12)], vocab_size)
    assert check(batch, geometry) >= 6


def test_a_row_does_not_depend_on_the_others():
    rows = [
        Row(SamplingParams(seed=n, **options), peaked(100, n).bfloat16().float(), output=[n, n])
        for n, options in enumerate(KINDS.values())
    ]
    alone = [tokens_by_triton(Batch([row], 100))[0] for row in rows]
    assert tokens_by_triton(Batch(rows, 100)) == alone
    assert tokens_by_triton(Batch(rows[::-1], 100)) == alone[::-1]
    assert Batch(rows, 100).torch() == alone


def test_greedy_is_the_first_of_equals():
    logits = torch.zeros(500)
    logits[[499, 131, 77 + 64]] = 2.5
    drawing = Row(SamplingParams(seed=1), logits)
    assert tokens_by_triton(Batch([Row(GREEDY, logits)], 500)) == [131]
    assert tokens_by_triton(Batch([drawing, Row(GREEDY, logits)], 500))[1] == 131


def test_equal_logits_are_kept_or_dropped_together():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, -0.0, 0.0])
    hot = {"temperature": 40.0}  # nearly all alike
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"top_k": 3, **hot}, {1, 2, 3, 4, 5}),
        ({"top_k": 2, **hot}, {1, 3}),
        ({"top_p": 0.3}, {1, 3}),
        ({"top_k": 7, **hot}, set(range(9))),
    ]
    rows = [Row(SamplingParams(seed=seed, **options), logits) for options, _ in cases for seed in range(6)]
    tokens = tokens_by_triton(Batch(rows, 9), Geometry(chunk=16, group=4, capacity=16, block=16))
    for n, (_, expected) in enumerate(cases):
        found = set(tokens[6 * n : 6 * n + 6])
        assert found <= expected
        assert len(found) > len(expected) // 3
    assert tokens == Batch(rows, 9).torch()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"top_k": 3, "top_p": 0.6, "min_p": 0.5},
            {0, 1},
        ),  # the mass that counts is that of three tokens, not of two
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of two tokens
        ({"top_p": 0.6}, {0, 1}),
    ],
    ids=["top_p before min_p", "top_k before top_p", "top_p"],
)
def test_filters_apply_in_their_order(options, expected):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    rows = [Row(SamplingParams(seed=seed, **options), logits) for seed in range(8)]
    tokens = tokens_by_triton(Batch(rows, 4), Geometry(chunk=16, group=1, capacity=16, block=16))
    assert set(tokens) == expected
    assert tokens == Batch(rows, 4).torch()


def test_one_candidate_left():
    logits = peaked(100, 0)
    forbidden = {token: -100.0 for token in range(100) if token != 70}
    rows = [
        Row(SamplingParams(seed=3, top_p=1e-6), logits),
        Row(SamplingParams(seed=3, min_p=1.0), logits),
        Row(SamplingParams(seed=3), logits, allowed={70}),
        Row(SamplingParams(seed=3, top_p=0.9, top_k=5), logits, allowed={70}),
        Row(SamplingParams(seed=3, top_p=0.9, logit_bias=forbidden), logits),
        Row(GREEDY, logits, allowed={70}),
    ]
    best = int(logits.argmax())
    assert tokens_by_triton(Batch(rows, 100)) == [best, best, 70, 70, 70, 70]
    assert Batch(rows, 100).torch() == [best, best, 70, 70, 70, 70]


def test_an_edit_of_a_token_that_does_not_exist_harms_nobody():
    """Its place belongs to the next row's copy of the logits, or to other memory."""
    batch = Batch([Row(SamplingParams(temperature=0.0, logit_bias={7: 0.1}), torch.zeros(100))] * 2, 100)
    edits = LogitEdits(np.array([0, 1]), np.array([100, 7]), np.array([50.0, 0.1], dtype=np.float32))
    edited: list[torch.Tensor] = []
    empty = torch.empty

    def noting_empty(*args: Any, **options: Any) -> torch.Tensor:
        out = empty(*args, **options)
        if args[0] == (2, 100):
            edited.append(out)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", noting_empty)
        choice = TritonSamplerBackend(batch.counts, SMALL).sample(batch.logits, SamplingBatch(2, edits=edits))

    assert choice.token_ids.tolist() == [0, 7]
    (rows,) = edited
    expected = torch.zeros(2, 100, device=DEVICE)
    expected[1, 7] = 0.1
    assert torch.equal(rows, expected)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_numbers_are_found_and_harm_nobody(bad):
    rows = [Row(SamplingParams(seed=n, **options), peaked(90, n)) for n, options in enumerate(KINDS.values())]
    expected = tokens_by_triton(Batch(rows, 90))
    broken = [
        Row(row.params, torch.where(torch.arange(90) == 70, bad, row.logits)) for row in (*rows[:2], rows[-1])
    ]
    broken.append(Row(rows[-1].params, torch.full((90,), bad)))
    broken.append(Row(rows[0].params, torch.full((90,), bad)))
    batch = Batch([*rows, *broken], 90)
    tokens, finite, _ = batch.sample(TritonSamplerBackend(batch.counts, SMALL))
    assert finite == [True] * len(rows) + [False] * len(broken)
    assert tokens[: len(rows)] == expected
    assert all(0 <= token < 90 for token in tokens)


def test_nobody_samples():
    batch = Batch([], 50)
    choice = TritonSamplerBackend(batch.counts, SMALL).sample(batch.logits, SamplingBatch(0))
    assert choice.token_ids.shape == choice.finite.shape == (0,)


def test_noise_is_that_of_torch():
    """Bits are the same; logarithms are rounded in other places."""

    @triton.jit
    def kernel(keys_ptr, out_ptr, BLOCK: tl.constexpr):
        token_ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + token_ids, gumbel(token_ids, tl.load(keys_ptr), tl.load(keys_ptr + 1)))

    keys = torch.from_numpy(noise_keys(np.array([2**63 - 1], dtype=np.uint64), np.array([77]))).to(DEVICE)
    ours = torch.empty(1 << 18, device=DEVICE)
    kernel[(16,)](keys, ours, BLOCK=1 << 14)
    torch.testing.assert_close(ours, gumbel_noise(keys, 1 << 18)[0], atol=2e-6, rtol=1e-6)


def test_keys_order_floats():
    @triton.jit
    def kernel(x_ptr, key_ptr, back_ptr, BLOCK: tl.constexpr):
        places = tl.arange(0, BLOCK)
        key = order_key(tl.load(x_ptr + places))
        tl.store(key_ptr + places, key)
        tl.store(back_ptr + places, from_order_key(key))

    values = [-torch.inf, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1e-3, 1.5, torch.inf]
    x = torch.tensor(values + [0.0] * 6, device=DEVICE)
    keys, back = torch.empty(16, dtype=torch.int32, device=DEVICE), torch.empty(16, device=DEVICE)
    kernel[(1,)](x, keys, back, BLOCK=16)
    ordered = keys[: len(values)].tolist()
    assert ordered == sorted(ordered)
    assert len(set(ordered)) == len(values) - 1
    assert torch.equal(back, x)


class TestLogprobs:
    @pytest.mark.parametrize(
        ("vocab_size", "top_k"), [(1, 1), (1, 0), (130, 20), (300, 3), (300, 0), (300, 21)]
    )
    def test_are_those_of_torch(self, vocab_size, top_k):
        batch = Batch([Row(GREEDY, peaked(vocab_size, n)) for n in range(4)], vocab_size)
        indices, chosen = np.array([3, 0, 2]), torch.randint(vocab_size, (4,), device=DEVICE)
        ours = with_poison(
            TritonSamplerBackend(batch.counts, SMALL).logprobs, batch.logits, indices, chosen, top_k
        )
        expected = batch.logits[indices].double().log_softmax(-1)
        top = expected.topk(top_k, dim=-1)
        torch.testing.assert_close(ours.token, expected.gather(1, chosen[indices, None])[:, 0].float())
        torch.testing.assert_close(ours.top, top.values.float())
        assert torch.equal(ours.top_ids, top.indices.int())

    def test_the_first_of_equals_comes_first(self):
        batch = Batch([Row(GREEDY, torch.zeros(200)), Row(GREEDY, -torch.zeros(200))], 200)
        chosen = torch.tensor([5, 6], device=DEVICE)
        ours = TritonSamplerBackend(batch.counts, SMALL).logprobs(batch.logits, np.array([0, 1]), chosen, 4)
        assert ours.top_ids.tolist() == [[0, 1, 2, 3]] * 2

    def test_forbidden_tokens_are_impossible(self):
        logits = peaked(100, 1)
        logits[50:] = -torch.inf
        batch = Batch([Row(GREEDY, logits)], 100)
        chosen = torch.tensor([60], device=DEVICE)
        ours = TritonSamplerBackend(batch.counts, SMALL).logprobs(batch.logits, np.array([0]), chosen, 2)
        assert ours.token.tolist() == [-torch.inf]
        torch.testing.assert_close(ours.top[0].cpu(), logits.log_softmax(-1).topk(2).values)


class Recorder:
    """Stands for a kernel: remembers its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


def test_triton_waits_for_nothing_and_uploads_once(monkeypatch):
    """On a device without data, where whoever looks at a value gets an error; see test_asynchrony."""
    survey, shortlist, sample, of_logprobs = Recorder(), Recorder(), Recorder(), Recorder()
    monkeypatch.setattr(kernels, "survey_kernel", survey)
    monkeypatch.setattr(kernels, "shortlist_kernel", shortlist)
    monkeypatch.setattr(choose_kernels, "choose_kernel", sample)
    for name in ("survey_logprobs_kernel", "collect_logprobs_kernel"):
        monkeypatch.setattr(logprob_kernels, name, of_logprobs)
    rows = [
        Row(SamplingParams(seed=n, logprobs=3, **one), peaked(60, n)) for n, one in enumerate(KINDS.values())
    ]
    rows.append(Row(SamplingParams(temperature=0.0, logit_bias={3: 1.0}), peaked(60, 9), allowed={3, 5}))
    batch, nowhere = Batch(rows, 60), torch.device("meta")
    buffers = InputBuffers(nowhere)
    uploads: list[int] = []
    put_all = buffers.put_all

    def counted(arrays: list[Any]) -> list[torch.Tensor]:
        uploads.append(len(arrays))
        return put_all(arrays)

    monkeypatch.setattr(buffers, "put_all", counted)
    backend = TritonSamplerBackend(TokenCounts(60, buffers))
    logits = torch.empty((len(rows), 60), device=nowhere)

    sampled = Sampler(backend._counts, backend).sample(logits, batch.plan)
    assert (sampled.token_ids.shape, sampled.token_ids.dtype) == ((len(rows),), torch.int64)
    assert (sampled.finite.shape, sampled.finite.dtype) == ((len(rows),), torch.bool)
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids.shape == (len(KINDS), 3)
    assert survey.grids == shortlist.grids == [(1, len(rows))]
    assert sample.grids == [(len(rows),)]
    assert of_logprobs.grids == [(1, len(KINDS)), (len(KINDS),)]
    assert uploads == [4]

    backend.sample(logits, SamplingBatch(len(rows)))
    assert (len(survey.grids), len(shortlist.grids), len(sample.grids), len(uploads)) == (2, 1, 2, 1)


def mixed_rows(vocab_size: int) -> list[Row]:
    rng = np.random.default_rng(11)
    return [replace(random_row(rng, vocab_size), allowed=None) for _ in range(4)]


def rows_of_all_kinds(vocab_size: int) -> list[Row]:
    return [
        Row(SamplingParams(seed=n, **options), peaked(vocab_size, n))
        for n, options in enumerate(KINDS.values())
    ]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("vocab_size", [130, 200])
@pytest.mark.parametrize("rows_of", [mixed_rows, rows_of_all_kinds])
def test_logits_of_16_bits_give_the_tokens_and_logprobs_of_the_same_numbers_in_32(
    monkeypatch, rows_of, vocab_size
):
    """A GPU's head leaves them in the serving dtype: a fifth of the bytes that pass through memory."""
    batch = Batch(rows_of(vocab_size), vocab_size)
    narrow = batch.logits.bfloat16()
    batch.logits = narrow.float()
    indices, token_ids = np.arange(len(batch.rows)), torch.arange(len(batch.rows), device=DEVICE)
    for backend in (TritonSamplerBackend(batch.counts, SMALL), TorchSamplerBackend(batch.counts)):
        expected = batch.sample(backend)
        expected_logprobs = backend.logprobs(batch.logits, indices, token_ids, 3)
        with monkeypatch.context() as patch:
            patch.setattr(batch, "logits", narrow)
            found, logprobs = batch.sample(backend), backend.logprobs(narrow, indices, token_ids, 3)
        assert found[:2] == expected[:2] and torch.equal(found[2], expected[2])
        for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warming_up_launches_what_serving_will(monkeypatch, dtype):
    """Each variant that any of many batches asks for was compiled before."""
    launched: set[Any] = set()

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.launch

        def launch(self, *args: Any, **constants: Any) -> None:
            types = [arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args]
            launched.add((self.name, *types, *sorted(constants.items())))

    for module in (kernels, choose_kernels, logprob_kernels):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Noting(name))
    rng = np.random.default_rng(5)
    rows = [random_row(rng, 40) for _ in range(20)]
    rows += [Row(SamplingParams(seed=1), peaked(40, 1)), Row(GREEDY, peaked(40, 2))]
    everything = Batch(rows, 40)
    backend = TritonSamplerBackend(everything.counts, SMALL)
    backend.warm_up(40, dtype)
    compiled = launched.copy()
    assert {name for name, *_ in compiled} == {
        "survey_kernel",
        "shortlist_kernel",
        "choose_kernel",
        "survey_logprobs_kernel",
        "collect_logprobs_kernel",
    }
    for part in (rows, rows[-1:], rows[-2:], *([row] for row in rows)):
        batch = Batch(part, 40)
        TritonSamplerBackend(batch.counts, SMALL).sample(batch.logits.to(dtype), batch.plan)
    table = torch.zeros((len(rows), backend.table_width), dtype=torch.int32, device=DEVICE)
    for lines_or_none in (None, table):
        backend.sample_rows(everything.logits.to(dtype), lines_or_none, backend.results(len(rows)))
    for top_k in (0, 1, 2, 20):
        backend.logprobs(
            everything.logits.to(dtype), np.array([1, 0]), torch.zeros(len(rows), device=DEVICE).long(), top_k
        )
    assert launched == compiled


class TestSelection:
    class Nobody:
        recorded_bytes = ()

        def __init__(self, counts: TokenCounts, logits_dtype: torch.dtype) -> None:
            self.counts = counts

        def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
            raise NotImplementedError

        def logprobs(self, *args: Any) -> Any:
            raise NotImplementedError

        def capturable(self) -> None:
            raise NotImplementedError

    def test_our_kernels_choose_on_the_cpu_and_the_log_says_why(self, caplog, monkeypatch):
        monkeypatch.setattr(native_backend, "reasons_against_library", list)
        monkeypatch.setattr(native_backend, "load_library", lambda: Mock(name="library"))
        caplog.set_level("DEBUG", "engine.model_runner.sampling.backend_selection")
        counts = TokenCounts(9, InputBuffers(torch.device("cpu")))
        assert isinstance(make_sampler(counts, torch.device("cpu"))._backend, NativeSamplerBackend)
        assert "provider=native passed over: triton: runs on CUDA devices, not on cpu" in caplog.text

    def test_torch_chooses_without_our_kernels(self, caplog, monkeypatch):
        monkeypatch.setattr(native_backend, "reasons_against_library", lambda: ["no compiler"])
        caplog.set_level("DEBUG", "engine.model_runner.sampling.backend_selection")
        counts = TokenCounts(9, InputBuffers(torch.device("cpu")))
        assert isinstance(make_sampler(counts, torch.device("cpu"))._backend, TorchSamplerBackend)
        assert "native: no compiler" in caplog.text

    def test_our_kernels_for_the_cpu_choose_on_no_other_device(self):
        assert native_backend.reasons_against_native_backend(torch.device("meta")) == [
            "runs on CPUs only, not on meta"
        ]

    def test_the_first_with_nothing_against_it_chooses(self):
        counts, device = TokenCounts(9, InputBuffers(torch.device("cpu"))), torch.device("cpu")
        willing = SamplerProvider("willing", lambda _device: [], self.Nobody)
        refusing = SamplerProvider(
            "refusing", lambda _device: ["no"], lambda _counts, _dtype: pytest.fail("was made")
        )
        providers = (refusing, willing, *PROVIDERS)
        assert isinstance(select_sampler_backend(counts, device, providers=providers), self.Nobody)

    def test_a_sampler_without_a_chooser_has_torch(self):
        counts = TokenCounts(9, InputBuffers(torch.device("cpu")))
        assert isinstance(Sampler(counts)._backend, TorchSamplerBackend)
