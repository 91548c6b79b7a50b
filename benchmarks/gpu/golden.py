"""Golden answers: tiny models with the tokens and log-probabilities that they give on the CPU in float32.

    python3 benchmarks/gpu/path.py benchmarks.gpu.golden [FOLDER]

`bundle.py` makes them, and `triage.py` compares a GPU with them. Weights are bfloat16 numbers, so a GPU in bfloat16
differs by rounding only. The margin of a token is how much better it was than the second best, in nats of the logits:
below `TIE` another token is right, too, and the rest of that answer is not compared. Of several prompts of each length
one is kept that the CPU answers rightly in bfloat16, too, and whose first near tie comes late.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.engine import Engine, Generated
from benchmarks.gpu.model_checks import prompts_of
from benchmarks.gpu.models import write_tiny_model
from benchmarks.gpu.path import BUNDLE
from engine.model_runner.sampling.noise import noise_keys, noise_of
from engine.runtime.sampling_params import SamplingParams

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

FOLDER: Final = BUNDLE / "golden"
MODELS: Final = ("llama", "qwen3_moe")
TIE: Final = 0.5
"""Nats: bfloat16 moves single logits of these models by up to 0.35 against each other."""
_LEAST_COMPARED: Final = 0.3
"""Share of the tokens: in bfloat16 on the CPU 0.56 and more come before the first other token of their answer."""
MOST_ERROR: Final = 0.15
"""Nats, mean over the compared tokens: bfloat16 costs these models 0.02 to 0.05 on the CPU."""
_SIZES: Final = {"hidden_size": 128, "intermediate_size": 256}
_LENGTHS: Final = (3, 9, 20, 60, 130)  # chunks of 64 tokens make mixed steps
_CANDIDATES: Final = 6  # for each length and kind of sampling, of which one is kept
_TOP: Final = 20
_MASS_SLACK: Final = 0.05
_KINDS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0, "seed": 0},
    {"temperature": 0.25, "seed": 7},
    {"temperature": 0.5, "top_k": 12, "top_p": 0.95, "min_p": 0.001, "seed": 11},
    {"temperature": 0.0, "frequency_penalty": 0.4, "presence_penalty": 0.3, "seed": 0},
)
"""Greedy, drawn, filtered and penalized requests: every kernel of the sampler."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A request, and each token of its answer with its log-probability and its margin."""

    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int]
    logprobs: list[float]
    margins: list[float] = field(default_factory=list)


class Verdict(NamedTuple):
    """The comparison of some answers.

    Attributes:
        wrong: a line for each answer with another token than the golden one where no near tie is.
        error: mean error of the log-probabilities of equal tokens, in nats.
        compared: number of these tokens, of `total`.
    """

    wrong: list[str]
    error: float
    compared: int
    total: int

    @property
    def reason(self) -> str:
        """Why the answers are not right; empty if they are."""
        if self.wrong:
            return f"{len(self.wrong)} answers are wrong, the first: {self.wrong[0]}"
        if not self.error <= MOST_ERROR:  # NaN, too
            return (
                f"log-probabilities are off by {self.error:.3f} on average, at most {MOST_ERROR} is rounding"
            )
        return ""


def compare(golden: Sequence[Answer], found: Sequence[Answer]) -> Verdict:
    """Compare answers to the same requests, each up to its first other token."""
    wrong, errors = [], []
    total = sum(len(expected.tokens) for expected in golden)
    for n, (expected, got) in enumerate(zip(golden, found, strict=True)):
        for at, (token, other) in enumerate(zip(expected.tokens, got.tokens, strict=True)):
            if token != other:
                if expected.margins[at] >= TIE:
                    kind = " ".join(f"{name}={value}" for name, value in expected.sampling.items())
                    wrong.append(
                        f"request {n} ({len(expected.prompt)} tokens, {kind}): token {at} is {other}, not {token}, "
                        f"which was better by {expected.margins[at]:.2f}"
                    )
                break
            errors.append(abs(expected.logprobs[at] - got.logprobs[at]))
    return Verdict(wrong, float(np.mean(errors)) if errors else np.nan, len(errors), total)


def engine_of(home: Path, device: str, **settings: Any) -> Engine:
    """An engine with the model in a folder, and with few recordings."""
    few = {"max_model_len": 512, "max_total_tokens": 4096, "max_running_requests": 16, "max_recorded_bs": 8}
    return Engine(home, device, **{"load_format": "auto", **few, "chunked_prefill_size": 64, **settings})


def answer(engine: Engine, requests: Sequence[Answer]) -> list[Answer]:
    """The answers of an engine to the requests of these, in one batch; without margins."""
    return [
        Answer(request.prompt, request.sampling, given.tokens, given.logprobs)
        for request, given in zip(requests, _generate(engine, requests), strict=True)
    ]


def _generate(engine: Engine, requests: Sequence[Answer]) -> list[Generated]:
    params = [SamplingParams(**request.sampling, ignore_eos=True, logprobs=_TOP) for request in requests]
    return engine.answer([request.prompt for request in requests], params)


# ---------------------------------------------------------------- making them


def make(
    folder: Path,
    models: Sequence[str] = MODELS,
    lengths: Sequence[int] = _LENGTHS,
    num_candidates: int = _CANDIDATES,
    max_new_tokens: int = 22,
    **sizes: int,
) -> None:
    """Write models and answers; a minute on two cores.

    Args:
        lengths: of the prompts; each is asked for with each kind of sampling.
        num_candidates: prompts of each length and kind, of which one is kept.
        max_new_tokens: most tokens of an answer. Answers end in different steps, so batches shrink.
        sizes: fields of the models' configuration.
    """
    for model_type in models:
        home = folder / model_type
        write_tiny_model(home, model_type, "bfloat16", **{**_SIZES, **sizes})
        exact, rough = (engine_of(home, "cpu", dtype=dtype) for dtype in ("float32", "bfloat16"))
        kept = []
        for n, length in enumerate(lengths):
            more = {"max_new_tokens": max(1, max_new_tokens - 3 * (n % 4))}
            prompts = prompts_of([length] * num_candidates)
            requests = [Answer(prompt, {**kind, **more}, [], []) for kind in _KINDS for prompt in prompts]
            answers = [
                (_with_margins(request, given), rounded)
                for request, given, rounded in zip(
                    requests, _generate(exact, requests), answer(rough, requests), strict=True
                )
            ]
            kept += [
                max(answers[start : start + num_candidates], key=_steadiness)[0]
                for start in range(0, len(answers), num_candidates)
            ]
        (home / "answers.json").write_text(json.dumps([asdict(each) for each in kept]))


def load(folder: Path, model_type: str) -> list[Answer]:
    """The golden answers of a model."""
    return [Answer(**each) for each in json.loads((folder / model_type / "answers.json").read_text())]


def _steadiness(both: tuple[Answer, Answer]) -> tuple[bool, int]:
    """Whether rounding keeps an answer right, and the number of tokens before its first near tie."""
    exact, rounded = both
    certain = (at for at, margin in enumerate(exact.margins) if margin < TIE)
    return not compare([exact], [rounded]).wrong, next(certain, len(exact.margins))


def _with_margins(request: Answer, given: Generated) -> Answer:
    margins = [
        _margin(request, given.tokens[:at], token, {token: logprob, **top})
        for at, (token, logprob, top) in enumerate(zip(*given, strict=True))
    ]
    return Answer(request.prompt, request.sampling, given.tokens, given.logprobs, margins)


def _margin(request: Answer, before: list[int], chosen: int, logprobs: dict[int, float]) -> float:
    """How much better the chosen token was than the second best: scores are with penalties and noise.

    A token that rounding may take in or out by the filters counts as another one that is in.
    """
    sampling = request.sampling
    ids = np.array(list(logprobs), dtype=np.int32)
    scores = np.array(list(logprobs.values()))
    counts = np.array([before.count(token) for token in logprobs])
    scores -= sampling.get("frequency_penalty", 0.0) * counts + sampling.get("presence_penalty", 0.0) * (
        counts > 0
    )
    own = ids == chosen
    if temperature := sampling["temperature"]:
        surely, maybe = _filtered(scores / temperature, sampling, TIE / temperature)
        if not surely[own][0]:
            return 0.0
        scores[~maybe] = -np.inf
        position = len(request.prompt) + len(before)
        keys = noise_keys(np.array([sampling["seed"]], np.uint64), np.array([position]))
        scores += temperature * noise_of(torch.from_numpy(keys), torch.from_numpy(ids))[0].double().numpy()
    return float(scores[own][0] - scores[~own].max())


def _filtered(logits: Floats, sampling: dict[str, Any], slack: float) -> tuple[Flags, Flags]:
    """The tokens that pass the filters for sure, and those that may pass, with logits that are off by `slack`."""
    ranks = np.argsort(np.argsort(-logits))
    descending = np.sort(logits)[::-1]
    top_k = min(sampling.get("top_k", len(logits)), len(logits) - 1)
    surely = logits > descending[top_k] + slack
    maybe = logits > descending[top_k - 1] - slack
    shares = np.exp(descending[:top_k] - descending[0])
    mass = np.append(0.0, np.cumsum(shares) / shares.sum())[
        np.minimum(ranks, top_k)
    ]  # of the tokens before each one
    top_p, floor = sampling.get("top_p", 1.0), descending[0] + np.log(sampling.get("min_p", 1e-30))
    surely &= (mass < top_p - _MASS_SLACK) & (logits > floor + slack)
    maybe &= (mass < top_p + _MASS_SLACK) & (logits > floor - slack)
    return (surely, maybe) if "top_k" in sampling else (np.ones_like(surely), np.ones_like(surely))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
