"""Rows with everything that a request may ask of the sampler, and a reference in numpy that sorts in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.request_states import RequestStates
from engine.model_runner.sampling.noise import noise_keys
from engine.model_runner.sampling.sampler_backend import SamplerBackend
from engine.model_runner.sampling.sampling_batch import plan_sampling
from engine.model_runner.sampling.token_counts import TokenCounts
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import NewReq, TokenMasks
from tests.conftest import HAS_NVIDIA_DRIVER

DEVICE = torch.device("cuda" if HAS_NVIDIA_DRIVER else "cpu")
EOS = (1,)
UNDECIDED = 2e-5
"""Two scores, or a mass and its bound, so close together may be ordered by rounding."""

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Row:
    """One request, and the logits that it samples from."""

    params: SamplingParams
    logits: torch.Tensor
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    allowed: set[int] | None = None

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


class Batch:
    """Rows planned together, and chosen for as often as one likes."""

    def __init__(self, rows: list[Row], vocab_size: int, *, processed_logprobs: bool = False) -> None:
        self.rows, self.vocab_size = rows, vocab_size
        num = len(rows)
        states = RequestStates(max(num, 1), vocab_size)
        self.counts = TokenCounts(vocab_size, InputBuffers(DEVICE))
        for n, row in enumerate(rows):
            ids = np.array(row.prompt + row.output, dtype=np.int32)
            states.add(NewReq(f"r{n}", n, ids.tobytes(), len(row.prompt), b"", row.params))
            self.counts.add(n, ids[: len(row.prompt)], ids[len(row.prompt) :])
        positions = np.array([row.position for row in rows], dtype=np.int64)
        self.plan = plan_sampling(
            np.arange(num),
            positions,
            states,
            self.counts,
            EOS,
            lambda row: 0,
            processed_logprobs=processed_logprobs,
        )
        with_grammar = [n for n, row in enumerate(rows) if row.allowed is not None]
        if with_grammar:
            bits = np.zeros((len(with_grammar), vocab_size // 32 + 2), dtype=np.uint32)
            for line, n in enumerate(with_grammar):
                for token in rows[n].allowed or ():
                    bits[line, token // 32] |= np.uint32(1 << token % 32)
            mask = TokenMasks(np.array(with_grammar, dtype=np.int64), bits.view(np.int32))
            self.plan = self.plan.with_masks(mask)
        # Rows may lie apart, as where a vocabulary was padded.
        whole = torch.full((num, vocab_size + 3), torch.nan, device=DEVICE)
        self.logits = whole[:, :vocab_size]
        for n, row in enumerate(rows):
            self.logits[n] = row.logits.to(DEVICE)

    def sample(self, backend: SamplerBackend) -> tuple[list[int], list[bool], torch.Tensor]:
        """Tokens, whether finite, and the counts afterwards; nothing stays changed."""
        before, own = self.counts.in_output.clone(), self.logits.clone()
        choice = with_poison(backend.sample, self.logits, self.plan)
        after = self.counts.in_output.clone()
        self.counts.in_output.copy_(before)
        torch.testing.assert_close(self.logits, own, rtol=0, atol=0, equal_nan=True)
        return choice.token_ids.tolist(), choice.finite.tolist(), after

    def torch(self) -> list[int]:
        return self.sample(TorchSamplerBackend(self.counts))[0]


def with_poison(function: Any, *args: Any) -> Any:
    """Memory that nobody has written holds NaN; on the CPU, as a GPU's torch cannot do all in this way."""
    torch.use_deterministic_algorithms(not HAS_NVIDIA_DRIVER)
    try:
        return function(*args)
    finally:
        torch.use_deterministic_algorithms(False)


def exact_noise(row: Row, vocab_size: int) -> Any:
    """`gumbel_noise` in float64 from the same bits, written anew."""
    seeds = np.array([row.params.seed or 0], dtype=np.uint64)
    key_0, key_1 = noise_keys(seeds, np.array([row.position])).view(np.uint32)[0]
    with np.errstate(over="ignore"):
        x = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B1) ^ key_0
        x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
        x = ((x ^ x >> np.uint32(15)) + key_1) * np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
    uniform = ((x & np.uint32(0x7FFFFFFF)).astype(np.float32) + np.float32(0.5)) * np.float64(
        2.0**-31 * (1 - 2.0**-23)
    )
    return -np.log(-np.log1p(-uniform))


def processed(row: Row) -> Any:
    """In float32, operation by operation, as the sampler promises."""
    p, x = row.params, row.logits.numpy().astype(np.float32).copy()
    count = np.bincount(row.output, minlength=len(x)).astype(np.float32)
    seen = (count > 0) | (np.bincount(row.prompt, minlength=len(x)) > 0)
    repetition = np.float32(p.repetition_penalty)
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - np.float32(p.frequency_penalty) * count
    x = x - np.float32(p.presence_penalty) * (count > 0).astype(np.float32)
    for token, bias in (p.logit_bias or {}).items():
        x[token] += np.float32(bias)
    if len(row.output) < p.min_new_tokens:
        x[[*EOS, *p.stop_token_ids]] = -np.inf
    if row.allowed is not None:
        x[[token not in row.allowed for token in range(len(x))]] = -np.inf
    return x


def filtered(row: Row) -> Any:
    """The logits whose softmax is drawn from, by sorting in float64; None where rounding may decide on a token."""
    p, x = row.params, processed(row)
    if p.temperature == 0:
        return x.astype(np.float64)
    x = (x / np.float32(p.temperature)).astype(np.float64)
    kept = np.ones(len(x), dtype=bool)
    if 0 < p.top_k < len(x):
        kept &= x >= np.sort(x)[-p.top_k]
    if p.top_p < 1:
        left = np.sort(x[kept])[::-1]
        share = np.exp(left - left[0])
        share /= share.sum()
        mass = np.cumsum(share)
        if (np.abs(mass - np.float32(p.top_p)) < UNDECIDED).any():
            return None
        kept &= x >= left[min(int((mass < np.float32(p.top_p)).sum()), len(left) - 1)]
    if p.min_p > 0:
        floor = x.max() + np.log(p.min_p)
        if (np.abs(x - floor) < UNDECIDED).any():
            return None
        kept &= x >= floor
    return np.where(kept, x, -np.inf)


def reference(row: Row) -> int | None:
    """The token of `filtered`; None where rounding may decide."""
    if row.params.greedy:
        return int(processed(row).argmax())
    x = filtered(row)
    if x is None:
        return None
    score = x + exact_noise(row, len(x))
    best, *others = np.sort(score)[::-1]
    return None if others and best - others[0] < UNDECIDED else int(score.argmax())


def random_row(rng: np.random.Generator, vocab_size: int) -> Row:
    """Anything that a request may ask for, over logits of any shape."""
    options: dict[str, Any] = {"seed": int(rng.integers(1 << 40))}
    if rng.random() < 0.2:
        options["temperature"] = 0.0
    elif rng.random() < 0.5:
        options["temperature"] = float(rng.uniform(0.2, 3.0))
    if rng.random() < 0.4:
        options["top_k"] = int(rng.integers(1, vocab_size + 2))
    if rng.random() < 0.5:
        options["top_p"] = float(rng.choice([1e-4, 0.3, 0.9, 0.999]))
    if rng.random() < 0.3:
        options["min_p"] = float(rng.choice([1e-6, 0.05, 0.7, 1.0]))
    if rng.random() < 0.3:
        options["repetition_penalty"] = float(rng.uniform(0.5, 2.0))
    if rng.random() < 0.3:
        options["frequency_penalty"] = float(rng.uniform(-2, 2))
    if rng.random() < 0.3:
        options["presence_penalty"] = float(rng.uniform(-2, 2))
    if rng.random() < 0.3:
        biased = rng.choice(vocab_size, size=rng.integers(1, vocab_size + 1), replace=False)
        options["logit_bias"] = {int(token): float(rng.uniform(-10, 10)) for token in biased}
    if rng.random() < 0.3 and vocab_size > 4:
        options["min_new_tokens"], options["stop_token_ids"] = 8, (vocab_size - 1,)
    allowed = None
    if rng.random() < 0.3 and vocab_size > 4:
        # Ends are masked, too, where an output has to go on: some other token stays allowed.
        allowed = {2, *rng.choice(vocab_size, size=rng.integers(1, vocab_size + 1)).tolist()}
    logits = torch.from_numpy(rng.normal(size=vocab_size).astype(np.float32))
    logits = logits * float(rng.choice([0.0, 0.3, 3.0, 20.0]))
    if rng.random() < 0.5:
        logits = logits.bfloat16().float()
    return Row(
        SamplingParams(**options),
        logits,
        prompt=rng.integers(0, vocab_size, 5).tolist(),
        output=rng.integers(0, vocab_size, rng.integers(0, 12)).tolist(),
        allowed=allowed,
    )


def peaked(vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "draw": {"temperature": 0.8},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.02},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.001, "temperature": 1.3, "repetition_penalty": 1.2},
}


def check_backends(batch: Batch, *backends: SamplerBackend) -> int:
    """Each against the reference; returns how many rows could be decided."""
    expected = [reference(row) for row in batch.rows]
    decided = [n for n, token in enumerate(expected) if token is not None]
    for backend in backends:
        tokens, finite, counts = batch.sample(backend)
        assert [tokens[n] for n in decided] == [expected[n] for n in decided]
        assert all(finite)
        assert all(0 <= token < batch.vocab_size for token in tokens)
        for n, row in enumerate(batch.rows):
            before = np.bincount(row.output, minlength=batch.vocab_size)
            if batch.plan.penalties is not None and n in batch.plan.penalties.indices:
                before[tokens[n]] += 1
            slot = int(batch.counts.slots([n])[0])
            assert counts[slot].tolist() == before.tolist()
    return len(decided)
