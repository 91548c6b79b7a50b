"""The sampler against reference distributions, and against transformers' processors and warpers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.request_states import RequestStates
from engine.model_runner.sampling.logits import process_logits
from engine.model_runner.sampling.row_filters import survivors
from engine.model_runner.sampling.sampler import Sampler
from engine.model_runner.sampling.sampling_batch import SamplingBatch, plan_sampling
from engine.model_runner.sampling.token_counts import TokenCounts
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import NewReq

CPU = torch.device("cpu")
EOS = (2,)


class Bench:
    """Requests with given parameters and histories, asked for the token at a given position."""

    def __init__(self, vocab_size: int, num_rows: int = 4096) -> None:
        self.vocab_size = vocab_size
        self.states = RequestStates(num_rows, vocab_size)
        self.counts = TokenCounts(vocab_size, InputBuffers(CPU))
        self.sampler = Sampler(self.counts)
        self.rows: list[int] = []
        self.positions: list[int] = []

    def add(
        self, params: SamplingParams, prompt: Any = (1,), output: Any = (), position: int | None = None
    ) -> None:
        ids = np.array([*prompt, *output], dtype=np.int32)
        row = len(self.rows)
        self.states.add(NewReq(f"r{row}", row, ids.tobytes(), len(prompt), b"", params))
        self.counts.add(row, ids[: len(prompt)], ids[len(prompt) :])
        self.rows.append(row)
        self.positions.append(len(ids) if position is None else position)

    def batch(self) -> SamplingBatch:
        rows, positions = np.array(self.rows, dtype=np.int64), np.array(self.positions, dtype=np.int64)
        return plan_sampling(rows, positions, self.states, self.counts, EOS, lambda row: 0)

    def sample(self, logits: torch.Tensor) -> list[int]:
        return self.sampler.sample(logits, self.batch()).token_ids.tolist()

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        return process_logits(logits, self.batch(), self.counts, self.counts.buffers)

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Which tokens the filters leave: [S, V] bool; all requests must draw."""
        draw = self.batch().draw
        assert draw is not None
        assert len(draw.indices) == len(logits)
        scaled = logits / torch.from_numpy(draw.temperature)[:, None]
        floor = TorchSamplerBackend(self.counts)._floor(scaled, draw)
        return torch.ones_like(logits, dtype=torch.bool) if floor is None else scaled >= floor

    def kept_on_cpu(self, logits: torch.Tensor) -> torch.Tensor:
        """The same by the way that the CPU goes."""
        draw = self.batch().draw
        assert draw is not None
        kept = torch.zeros_like(logits, dtype=torch.bool)
        for row, scaled in enumerate((logits / torch.from_numpy(draw.temperature)[:, None]).numpy()):
            top_k = 0 if draw.top_k is None else int(draw.top_k[row])
            top_p = 1.0 if draw.top_p is None else float(draw.top_p[row])
            log_min_p = -np.inf if draw.log_min_p is None else float(draw.log_min_p[row])
            token_ids, values = survivors(scaled, top_k, top_p, log_min_p)
            assert values.tolist() == scaled[token_ids].tolist()
            kept[row, token_ids] = True
        return kept


def draws(logits: torch.Tensor, params: dict[str, Any], num: int) -> torch.Tensor:
    """Counts of each token over `num` seeds: [V]."""
    bench = Bench(len(logits), num)
    for seed in range(num):
        bench.add(SamplingParams(seed=seed, **params))
    return torch.bincount(torch.tensor(bench.sample(logits.expand(num, -1))), minlength=len(logits))


def warped(logits: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """The scores whose softmax transformers would draw from, -inf where filtered: [V]."""
    from transformers.generation import logits_process as hf

    scores = logits[None].clone()
    steps: list[Any] = []
    if "temperature" in params:
        steps.append(hf.TemperatureLogitsWarper(params["temperature"]))
    if params.get("top_k", 0) > 0:
        steps.append(hf.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        steps.append(hf.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        steps.append(hf.MinPLogitsWarper(params["min_p"]))
    for step in steps:
        scores = step(torch.zeros((1, 1), dtype=torch.long), scores)
    return scores[0]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 1000},
    {"top_p": 1e-6},
    {"min_p": 1.0},
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_distribution_of_transformers(params):
    num = 4000
    logits = torch.randn(60, generator=torch.Generator().manual_seed(1)) * 2
    expected = warped(logits, params).softmax(-1).double() * num
    counts = draws(logits, params, num).double()
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    rest = torch.tensor([counts[~likely].sum(), expected[~likely].sum()])
    chi2 = ((counts - expected) ** 2 / expected)[likely].sum() + (rest[0] - rest[1]) ** 2 / rest[1].clamp_min(
        1
    )
    degrees = int(likely.sum())
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5 + 4


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([7, 60, 1023, 1025, 5000]),
    spread=st.floats(0.01, 8.0),
    params=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.floats(0.1, 5.0),
                "top_k": st.integers(2, 4000),
                "top_p": st.floats(0.01, 0.999),
                "min_p": st.floats(0.001, 0.9),
            },
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 1000),
)
def test_filters_keep_what_transformers_keeps(vocab, spread, params, seed):
    """Also where the mass of top_p is not among the first candidates, and for different filters in one batch."""
    logits = torch.randn((len(params), vocab), generator=torch.Generator().manual_seed(seed)) * spread
    bench = Bench(vocab)
    for one in params:
        bench.add(SamplingParams(seed=0, **one))
    both = torch.stack((bench.kept(logits), bench.kept_on_cpu(logits)), dim=1)
    for row, one in enumerate(params):
        # Where a cumulative probability meets top_p, the last bit of a sum may decide about one token.
        expected = warped(logits[row], {k: v for k, v in one.items() if k != "top_k" or v < vocab}).isfinite()
        assert ((both[row] ^ expected).sum(dim=-1) <= (1 if "top_p" in one or "min_p" in one else 0)).all()


def test_equal_logits_are_kept_or_dropped_together():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]])
    cases = [
        (SamplingParams(seed=0, top_k=3), [1, 2, 3, 4, 5]),
        (SamplingParams(seed=0, top_k=2), [1, 3]),
        (SamplingParams(seed=0, top_p=0.3), [1, 3]),
    ]
    for params, expected in cases:
        bench = Bench(7)
        bench.add(params)
        assert bench.kept(logits)[0].nonzero()[:, 0].tolist() == expected
        assert bench.kept_on_cpu(logits)[0].nonzero()[:, 0].tolist() == expected


class TestGreedy:
    def test_is_the_first_of_equals(self):
        bench = Bench(50_000)
        bench.add(SamplingParams(temperature=0.0))
        bench.add(SamplingParams(top_k=1))
        logits = torch.zeros(2, 50_000)
        logits[:, [49_999, 31, 777]] = 2.5
        assert bench.sample(logits) == [31, 31]

    def test_alone_needs_nothing_but_the_argmax(self):
        bench = Bench(9)
        for _ in range(3):
            bench.add(SamplingParams(temperature=0.0, top_p=0.5, min_p=0.3, top_k=4))
        assert bench.batch() == SamplingBatch(3)

    def test_mixes_with_draws(self):
        logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(3))
        mixed, drawing = Bench(500), Bench(500)
        for n in range(40):
            mixed.add(SamplingParams(temperature=0.0 if n % 3 == 0 else 1.0, seed=n))
            drawing.add(SamplingParams(temperature=1.0, seed=n))
        drawn, argmax = drawing.sample(logits), logits.argmax(-1).tolist()
        assert mixed.sample(logits) == [argmax[n] if n % 3 == 0 else drawn[n] for n in range(40)]
        assert drawn != argmax


class TestSeeds:
    PARAMS: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.5},
        {"temperature": 0.3},
    )

    def test_the_batch_does_not_matter(self):
        """Not its size, not its order, not what the others ask for."""
        num = 48
        logits = (
            torch.randn(num, 2000, generator=torch.Generator().manual_seed(4)).bfloat16().float()
        )  # many equals
        params = [SamplingParams(seed=n % 5, **self.PARAMS[n % 6]) for n in range(num)]
        alone = []
        for n in range(num):
            bench = Bench(2000)
            bench.add(params[n], position=10 + n)
            alone += bench.sample(logits[n : n + 1])
        together = Bench(2000)
        order = np.random.default_rng(0).permutation(num).tolist()
        for n in order:
            together.add(params[n], position=10 + n)
        assert together.sample(logits[order]) == [alone[n] for n in order]

    def test_seed_and_position_matter(self):
        bench = Bench(5000)
        for n in range(20):
            bench.add(SamplingParams(seed=n), position=9)
            bench.add(SamplingParams(seed=0), position=10 + n)
        tokens = bench.sample(torch.zeros(40, 5000))
        assert len(set(tokens)) > 35


class TestPenalties:
    @pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
    def test_repetition_is_that_of_transformers(self, penalty):
        from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

        logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(5))
        bench = Bench(30)
        bench.add(SamplingParams(repetition_penalty=penalty), prompt=[3, 4, 4], output=[9, 9, 1])
        bench.add(SamplingParams(), prompt=[3], output=[9])
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(torch.tensor([[3, 4, 4, 9, 9, 1]]), logits[:1].clone())
        processed = bench.processed(logits)
        torch.testing.assert_close(processed[:1], expected)
        assert torch.equal(processed[1], logits[1])

    def test_frequency_counts_and_presence_does_not_and_the_prompt_is_free(self):
        bench = Bench(8)
        bench.add(
            SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25), prompt=[1, 1], output=[3, 3, 3, 6]
        )
        expected = torch.zeros(1, 8)
        expected[0, 3] = -3 * 0.5 + 0.25
        expected[0, 6] = -0.5 + 0.25
        torch.testing.assert_close(bench.processed(torch.zeros(1, 8)), expected)

    def test_sampled_tokens_count_at_once(self):
        """Each presence penalty pushes the last choice below the next best token."""
        bench = Bench(6)
        bench.add(SamplingParams(temperature=0.0, presence_penalty=2.0))
        bench.add(SamplingParams(temperature=0.0))
        logits = torch.tensor([[0.0, 1.5, 1.0, 0.5, -5.0, -5.0]] * 2)
        assert [bench.sample(logits) for _ in range(5)] == [[1, 1], [2, 1], [3, 1], [0, 1], [1, 1]]

    def test_counts_of_a_freed_line_are_forgotten(self):
        counts = TokenCounts(10, InputBuffers(CPU))
        nothing = np.zeros(0, dtype=np.int32)
        for row in range(9):
            counts.add(row, np.array([1, 2], dtype=np.int32), np.array([row], dtype=np.int32))
        counts.remove(4)
        counts.remove(4)
        counts.add(20, np.array([7], dtype=np.int32), nothing)
        slot = int(counts.slots([20])[0])
        assert counts.in_prompt[slot].nonzero()[:, 0].tolist() == [7]
        assert counts.in_output[slot].sum() == 0
        assert counts.in_output[int(counts.slots([8])[0])].nonzero()[:, 0].tolist() == [8]


class TestEdits:
    def test_bias_is_added_to_the_penalized_logit(self):
        bench = Bench(6)
        bench.add(SamplingParams(repetition_penalty=2.0, logit_bias={1: 10.0, 5: -100.0}), prompt=[1])
        expected = torch.tensor([[4.0, 12.0, 4.0, 4.0, 4.0, -96.0]])
        torch.testing.assert_close(bench.processed(torch.full((1, 6), 4.0)), expected)

    def test_ends_are_masked_until_enough_tokens_exist(self):
        bench = Bench(6)
        params = SamplingParams(min_new_tokens=3, stop_token_ids=(4,), logit_bias={2: 1.0})
        bench.add(params, prompt=[1, 1], output=[5, 5])
        bench.add(params, prompt=[1, 1], output=[5, 5, 5])
        masked = bench.processed(torch.zeros(2, 6)).isinf()
        assert masked.tolist() == [[False, False, True, False, True, False], [False] * 6]

    def test_the_models_own_logits_stay_as_they_are(self):
        bench = Bench(6)
        bench.add(SamplingParams(logit_bias={0: 5.0}, presence_penalty=1.0), output=[3])
        logits = torch.zeros(1, 6)
        bench.sample(logits)
        assert torch.equal(logits, torch.zeros(1, 6))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_numbers_are_found_and_harm_nobody(bad):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(6))
    healthy, mixed = Bench(100), Bench(100)
    for n in range(3):
        for bench in (healthy, mixed):
            bench.add(SamplingParams(seed=n, top_p=0.9, temperature=float(n != 0)))
    expected = healthy.sample(logits)
    logits[1, 50] = bad
    sampled = mixed.sampler.sample(logits, mixed.batch())
    assert sampled.finite.tolist() == [True, False, True]
    tokens = sampled.token_ids.tolist()
    assert tokens[::2] == expected[::2]
    assert 0 <= tokens[1] < 100
