"""Our C++ sampler against torch's choices, a reference in float64, and the distributions it draws from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model_runner.sampling.native_backend import NativeSamplerBackend
from engine.model_runner.sampling.noise import noise_keys
from engine.model_runner.sampling.sampler import Sampler
from engine.model_runner.sampling.sampling_batch import Draw, LogitEdits, LogprobRequest, SamplingBatch
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.kernels.cpu.conftest import best_library, library
from tests.model_runner.sampling.sampling_rows import (
    GREEDY,
    KINDS,
    UNDECIDED,
    Batch,
    Row,
    check_backends,
    exact_noise,
    peaked,
    random_row,
    with_poison,
)
from tests.selection import examples

__all__ = ["best_library", "library"]  # fixtures

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the rows of these tests lie on the GPU")

SIZES = [1, 2, 16, 17, 63, 200, 1023, 1041, 5000]
"""Of vocabularies: less than a vector, whole vectors and not, less than a block, several blocks."""


def tokens_of(library: Any, rows: list[Row]) -> list[int]:
    batch = Batch(rows, len(rows[0].logits))
    return batch.sample(NativeSamplerBackend(batch.counts, library))[0]


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_batches_that_mix_everything(library, vocab_size):
    rng = np.random.default_rng(vocab_size)
    batch = Batch([random_row(rng, vocab_size) for _ in range(24)], vocab_size)
    assert check_backends(batch, NativeSamplerBackend(batch.counts, library)) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_many_batches_that_mix_everything(best_library, seed):
    rng = np.random.default_rng(2000 + seed)
    vocab_size = int(rng.choice([*SIZES, 31, 49152]))
    batch = Batch([random_row(rng, vocab_size) for _ in range(12)], vocab_size)
    assert check_backends(batch, NativeSamplerBackend(batch.counts, best_library)) >= 6


def test_a_row_depends_on_no_other_row_and_on_no_number_of_threads(best_library):
    rows = [
        Row(SamplingParams(seed=n, **options), peaked(3000, n).bfloat16().float(), output=[n, n])
        for n, options in enumerate([*KINDS.values()] * 2)
    ]
    alone = [tokens_of(best_library, [row])[0] for row in rows]
    for num_threads in (1, 3):
        with threads(num_threads):
            assert tokens_of(best_library, rows) == alone
            assert tokens_of(best_library, rows[::-1]) == alone[::-1]


@pytest.mark.parametrize("places", [[131, 477, 499], [1023, 1024], [15, 16], [2999], [0, 2999]])
def test_greedy_is_the_first_of_equals(library, places):
    logits = torch.zeros(3000)
    logits[places] = 2.5
    drawing = Row(SamplingParams(seed=1), logits)
    assert tokens_of(library, [Row(GREEDY, logits)]) == places[:1]
    assert tokens_of(library, [drawing, Row(GREEDY, logits)])[1] == places[0]


def test_both_zeros_are_equal(library):
    logits = torch.full((40,), -1.0)
    logits[7], logits[20] = -0.0, 0.0
    assert tokens_of(library, [Row(GREEDY, logits)]) == [7]
    drawn = {
        tokens_of(library, [Row(SamplingParams(seed=seed, top_p=1e-6), logits)])[0] for seed in range(20)
    }
    assert drawn == {7, 20}


def test_equal_logits_are_kept_or_dropped_together(library):
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, -0.0, 0.0])
    hot = {"temperature": 40.0}  # nearly all alike
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"top_k": 3, **hot}, {1, 2, 3, 4, 5}),
        ({"top_k": 2, **hot}, {1, 3}),
        ({"top_p": 0.3}, {1, 3}),
        ({"top_k": 7, **hot}, set(range(9))),
    ]
    for options, expected in cases:
        rows = [Row(SamplingParams(seed=seed, **options), logits) for seed in range(200)]
        assert set(tokens_of(library, rows)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 3, "top_p": 0.6, "min_p": 0.5}, {0, 1}),  # the mass that counts is that of three tokens
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of two tokens
        ({"top_p": 0.6}, {0, 1}),
    ],
    ids=["top_p before min_p", "top_k before top_p", "top_p"],
)
def test_filters_apply_in_their_order(library, options, expected):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    rows = [Row(SamplingParams(seed=seed, **options), logits) for seed in range(40)]
    assert set(tokens_of(library, rows)) == expected


def kept(row: Row) -> Any:
    """What the filters leave in float64, and what rounding may add: two [V] bool."""
    p = row.params
    x = (row.logits.numpy() / np.float32(p.temperature)).astype(np.float64)
    surely, maybe = np.ones(len(x), dtype=bool), np.ones(len(x), dtype=bool)
    if 0 < p.top_k < len(x):
        surely &= x >= np.sort(x)[-p.top_k]
        maybe &= surely
    if p.top_p < 1:
        left = np.sort(x[surely])[::-1]
        mass = np.cumsum(np.exp(left - left[0]))
        mass /= mass[-1]
        floors = [
            left[min(int((mass < float(np.float32(p.top_p)) + error).sum()), len(left) - 1)]
            for error in (-UNDECIDED, UNDECIDED)
        ]
        surely, maybe = surely & (x >= floors[0]), maybe & (x >= floors[1])
    if p.min_p > 0:
        floor = x.max() + np.log(p.min_p)
        surely, maybe = surely & (x >= floor + UNDECIDED), maybe & (x >= floor - UNDECIDED)
    return surely, maybe


FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.1, 5.0),
        "top_k": st.integers(2, 4000),  # 1 is greedy
        "top_p": st.floats(0.01, 0.9999),
        "min_p": st.floats(1e-6, 1.0),
    },
)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
@given(
    vocab_size=st.sampled_from(SIZES),
    spread=st.floats(0.0, 12.0),
    options=FILTERS,
    offset=st.sampled_from([-1000.0, -3.0, 0.0, 20.0]),
)
def test_what_is_drawn_is_in_the_set_that_the_filters_leave(
    best_library, vocab_size, spread, options, offset
):
    logits = peaked(vocab_size, 7, spread) + offset
    rows = [Row(SamplingParams(seed=seed, **options), logits) for seed in range(30)]
    tokens = tokens_of(best_library, rows)
    surely, maybe = kept(rows[0])
    assert maybe[tokens].all()
    if surely.sum() == maybe.sum():  # then each draw is the best of exactly that set
        x = (logits.numpy() / np.float32(rows[0].params.temperature)).astype(np.float64)
        for row, token in zip(rows, tokens, strict=True):
            score = np.where(surely, x + exact_noise(row, vocab_size), -np.inf)
            assert score[token] >= score.max() - UNDECIDED * max(1.0, np.abs(x).max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(best_library, options):
    """Chi-square over 4,000 seeds: more than four standard deviations above its mean have a chance of some 1e-4."""
    num = 4000
    logits = peaked(60, 1, 2.0)
    row = Row(SamplingParams(**options), logits)
    x = np.where(kept(row)[0], logits.numpy().astype(np.float64) / row.params.temperature, -np.inf)
    expected = np.exp(x - x.max())
    expected *= num / expected.sum()
    batch = Batch([row], 60)
    draw = Draw(
        np.arange(num),
        noise_keys(np.arange(num, dtype=np.uint64), np.full(num, 1)),
        np.full(num, row.params.temperature, dtype=np.float32),
        np.full(num, row.params.top_k),
        np.full(num, row.params.top_p, dtype=np.float32),
        np.full(num, np.log(row.params.min_p) if row.params.min_p else -np.inf, dtype=np.float32),
    )
    backend = NativeSamplerBackend(batch.counts, best_library)
    tokens = backend.sample(logits.expand(num, -1), SamplingBatch(num, draw=draw)).token_ids
    counts = np.bincount(tokens.numpy(), minlength=60)
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    rest = counts[~likely].sum() - expected[~likely].sum()
    chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum() + rest**2 / max(
        expected[~likely].sum(), 1
    )
    degrees = likely.sum()
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5 + 4


def test_noise_is_that_of_torch(library):
    """The best of 5,000 equal tokens, for many seeds: where torch's two best are apart, it is the same one."""
    logits = torch.zeros(5000)
    rows = [Row(SamplingParams(seed=seed * 977), logits) for seed in range(100)]
    batch = Batch(rows, 5000)
    decided = check_backends(
        batch, NativeSamplerBackend(batch.counts, library), TorchSamplerBackend(batch.counts)
    )
    assert decided >= 98


def test_one_candidate_left(library):
    logits = peaked(100, 0)
    forbidden = {token: -100.0 for token in range(100) if token != 70}
    rows = [
        Row(SamplingParams(seed=3, top_p=1e-6), logits),
        Row(SamplingParams(seed=3, min_p=1.0), logits),
        Row(SamplingParams(seed=3), logits, allowed={70}),
        Row(SamplingParams(seed=3, top_p=0.9, top_k=5), logits, allowed={70}),
        Row(SamplingParams(seed=3, top_p=0.9, logit_bias=forbidden), logits),
        Row(GREEDY, logits, allowed={70}),
        Row(GREEDY, logits, allowed={99}),
        Row(SamplingParams(seed=3, top_k=50), logits, allowed={99}),
    ]
    best = int(logits.argmax())
    assert tokens_of(library, rows) == [best, best, 70, 70, 70, 70, 99, 99]


def test_rows_in_which_all_is_forbidden_have_some_token(library):
    rows = [
        Row(SamplingParams(seed=n, **options), peaked(90, n), allowed=set())
        for n, options in enumerate(KINDS.values())
    ]
    batch = Batch(rows, 90)
    tokens, finite, _ = batch.sample(NativeSamplerBackend(batch.counts, library))
    assert all(finite)  # the model's own logits are
    assert all(0 <= token < 90 for token in tokens)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 70, 89])
def test_rows_that_are_not_numbers_are_found_and_harm_nobody(library, bad, where):
    rows = [Row(SamplingParams(seed=n, **options), peaked(90, n)) for n, options in enumerate(KINDS.values())]
    rows.append(Row(SamplingParams(temperature=0.0, logit_bias={3: 1.0}), peaked(90, 9), allowed={3, 5}))
    expected = tokens_of(library, rows)
    broken = [
        Row(row.params, torch.where(torch.arange(90) == where, bad, row.logits), allowed=row.allowed)
        for row in rows
    ]
    broken += [Row(row.params, torch.full((90,), bad), allowed=row.allowed) for row in rows]
    batch = Batch([*rows, *broken], 90)
    tokens, finite, _ = batch.sample(NativeSamplerBackend(batch.counts, library))
    assert finite == [True] * len(rows) + [False] * len(broken)
    assert tokens[: len(rows)] == expected
    assert all(0 <= token < 90 for token in tokens)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_token_of_a_row_that_is_not_numbers_exists_whatever_is_left_in_memory(library, options):
    """It is the next step's input before anybody asks whether it was chosen among numbers."""
    logits = peaked(90, 1)
    logits[0] = torch.nan
    tokens_of(library, [Row(SamplingParams(seed=1, logit_bias={3: 1.0}), peaked(5000, 1))])
    assert 0 <= tokens_of(library, [Row(SamplingParams(seed=1, **options), logits)])[0] < 90


def test_large_numbers_are_numbers(library):
    """Their sum would not be."""
    logits = torch.full((40,), 3e38)
    batch = Batch([Row(GREEDY, logits)], 40)
    assert batch.sample(NativeSamplerBackend(batch.counts, library))[:2] == ([0], [True])


def test_nobody_samples(library):
    batch = Batch([], 50)
    backend = NativeSamplerBackend(batch.counts, library)
    choice = backend.sample(batch.logits, SamplingBatch(0))
    assert choice.token_ids.shape == choice.finite.shape == (0,)
    nobody = np.empty(0, dtype=np.int64)
    logprobs = backend.logprobs(batch.logits, nobody, choice.token_ids, 2)
    assert (logprobs.token.shape, logprobs.top.shape) == ((0,), (0, 2))


def test_an_edit_of_a_token_that_does_not_exist_harms_nobody(library):
    batch = Batch([Row(SamplingParams(temperature=0.0, logit_bias={7: 0.1}), torch.zeros(100))] * 2, 100)
    values = np.array([50.0, 50.0, 0.1], dtype=np.float32)
    edits = LogitEdits(np.array([0, 0, 1]), np.array([100, -1, 7]), values)
    choice = NativeSamplerBackend(batch.counts, library).sample(batch.logits, SamplingBatch(2, edits=edits))
    assert choice.token_ids.tolist() == [0, 7]


def test_a_mask_that_is_too_short_is_refused(best_library):
    batch = Batch([Row(GREEDY, torch.zeros(100), allowed={3})], 100)
    assert batch.plan.grammar is not None
    plan = replace(batch.plan, grammar=batch.plan.grammar._replace(bits=batch.plan.grammar.bits[:, :3]))
    with pytest.raises(AssertionError, match="shorter than the vocabulary"):
        NativeSamplerBackend(batch.counts, best_library).sample(batch.logits, plan)


class TestLogprobs:
    @pytest.mark.parametrize(
        ("vocab_size", "top_k"),
        [(1, 1), (1, 0), (16, 16), (130, 20), (3000, 3), (3000, 0), (3001, 20), (3001, 1024)],
    )
    def test_are_those_of_float64(self, library, vocab_size, top_k):
        batch = Batch([Row(GREEDY, peaked(vocab_size, n)) for n in range(4)], vocab_size)
        indices, chosen = np.array([3, 0, 2]), torch.arange(4) * 7 % vocab_size
        backend = NativeSamplerBackend(batch.counts, library)
        ours = with_poison(backend.logprobs, batch.logits, indices, chosen, top_k)
        expected = batch.logits[indices].double().log_softmax(-1)
        top = expected.topk(top_k, dim=-1)
        torch.testing.assert_close(
            ours.token, expected.gather(1, chosen[indices, None])[:, 0].float(), rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(ours.top, top.values.float(), rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.top_ids, top.indices.int())

    def test_nearly_certain_tokens_keep_their_last_bits(self, library):
        logits = torch.full((1000,), 10.0)
        logits[500] = 31.0
        batch = Batch([Row(GREEDY, logits)], 1000)
        ours = NativeSamplerBackend(batch.counts, library).logprobs(
            batch.logits, np.array([0]), torch.tensor([500]), 1
        )
        exact = -np.log1p(999 * np.exp(-21.0))
        assert ours.token.item() == pytest.approx(exact, abs=1e-7)  # 31 - log of a sum would be 0 or -1.9e-6

    def test_the_first_of_equals_comes_first(self, library):
        batch = Batch([Row(GREEDY, torch.zeros(200)), Row(GREEDY, -torch.zeros(200))], 200)
        ours = NativeSamplerBackend(batch.counts, library).logprobs(
            batch.logits, np.array([0, 1]), torch.tensor([5, 6]), 4
        )
        assert ours.top_ids.tolist() == [[0, 1, 2, 3]] * 2

    def test_forbidden_tokens_are_impossible(self, library):
        logits = peaked(100, 1)
        logits[50:] = -torch.inf
        batch = Batch([Row(GREEDY, logits)], 100)
        ours = NativeSamplerBackend(batch.counts, library).logprobs(
            batch.logits, np.array([0]), torch.tensor([60]), 2
        )
        assert ours.token.tolist() == [-torch.inf]
        torch.testing.assert_close(ours.top[0], logits.log_softmax(-1).topk(2).values)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_rows_that_are_not_numbers_harm_nobody(self, library, bad):
        rows = [Row(GREEDY, torch.full((70,), bad)), Row(GREEDY, peaked(70, 2))]
        batch = Batch(rows, 70)
        backend, chosen = NativeSamplerBackend(batch.counts, library), torch.tensor([5, 6])
        ours = with_poison(backend.logprobs, batch.logits, np.array([0, 1]), chosen, 5)
        alone = backend.logprobs(batch.logits, np.array([1]), chosen, 5)
        assert ((ours.top_ids >= 0) & (ours.top_ids < 70)).all()
        assert torch.equal(ours.top[1:], alone.top)
        assert torch.equal(ours.top_ids[1:], alone.top_ids)
        assert ours.token[0].isnan()

    def test_through_the_sampler(self, best_library):
        rows = [Row(GREEDY, peaked(300, n)) for n in range(3)]
        batch = Batch(rows, 300)
        sampler = Sampler(batch.counts, NativeSamplerBackend(batch.counts, best_library))
        plan = SamplingBatch(3, logprobs=LogprobRequest((0, 2), (0, 4), ((), ())))
        sampled = sampler.sample(batch.logits, plan)
        assert sampled.logprobs is not None
        expected = batch.logits.log_softmax(-1).amax(-1)[[0, 2]]
        torch.testing.assert_close(sampled.logprobs.token, expected)
        torch.testing.assert_close(sampled.logprobs.top[:, 0], expected)
        given_tokens = sampler.token_logprobs(batch.logits, sampled.token_ids, 0)
        assert torch.equal(given_tokens.token[[0, 2]], sampled.logprobs.token)
