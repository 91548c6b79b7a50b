"""`Engine`: scheduler, runner and pipeline of a model on one thread; measures its steps, or returns its answers."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.sections import settings_that_passed
from engine.launch.resolve.memory_budget import capacity_of
from engine.launch.resolve.prepare import prepare
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.messages import BatchTokenOutput, FinishKind, GenerateRequest, TokenOutput
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import (
    ForwardMode,
    GetMasks,
    GoOn,
    Pending,
    Runner,
    StepPlan,
    StepResult,
    no_masks,
    to_the_end,
)


class Step(NamedTuple):
    """One settled step; times in seconds."""

    mode: ForwardMode
    num_rows: int
    num_tokens: int
    mean_context: float
    forward_s: float
    waited_s: float
    ended_s: float


class TimedRunner:
    """A runner that records the times of each step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[Step] = []
        self.waited_s = 0.0  # total

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        return _TimedStep(self, plan, self._runner.launch(plan, go_on, masks))


@dataclass(frozen=True, slots=True)
class _TimedStep:
    runner: TimedRunner
    plan: StepPlan
    pending: Pending

    def wait(self) -> StepResult:
        started_s = time.perf_counter()
        result = self.pending.wait()
        ended_s = time.perf_counter()
        self.runner.waited_s += ended_s - started_s
        lengths = np.frombuffer(self.plan.num_computed_tokens, np.int32) + 1
        self.runner.steps.append(
            Step(
                self.plan.mode,
                len(lengths),
                self.plan.total_num_scheduled_tokens,
                float(lengths.mean()) if len(lengths) else 0.0,
                result.forward_s,
                ended_s - started_s,
                ended_s,
            )
        )
        return result


class Work(NamedTuple):
    """One request: tokens in and out."""

    prompt_len: int
    output_len: int


class Run(NamedTuple):
    """The result of some requests."""

    steps: list[Step]
    host_s: list[float]  # of each pass, without waiting
    num_output_tokens: int
    seconds: float


class Generated(NamedTuple):
    """The answer to one request; `tops`: for each token the log-probabilities of the likeliest tokens."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[dict[int, float]]


class Engine:
    """Scheduler, runner and pipeline of a model, by default with dummy weights."""

    def __init__(self, folder: Path, device: str, **settings: Any) -> None:
        from engine.model_runner.load import load_model_runner
        from engine.scheduler.journal.recorder import Recorder
        from engine.scheduler.pipeline import Pipeline
        from engine.scheduler.scheduler import Scheduler

        arguments: dict[str, Any] = {
            "model": str(folder),
            "load_format": "dummy",
            "device": device,
            "dtype": "bfloat16",
        }
        arguments |= {"seed": 1, "multi_step_ms": 0.0}  # each step is measured alone
        prepared = prepare(merge(from_arguments({**arguments, **settings_that_passed(), **settings})))
        config, self.spec = prepared.config, prepared.spec
        runner = load_model_runner(config, prepared.source, self.spec, capacity_of(config, self.spec))
        self._model_runner = runner
        self._runner = TimedRunner(runner)
        self._scheduler = Scheduler(config.scheduler, config.cache, runner.capacity, frozenset())
        overlap = config.scheduler.overlap
        assert overlap != "auto"
        self._pipeline = Pipeline(self._scheduler, self._runner, Recorder(), time.monotonic, overlap=overlap)
        self._random = np.random.default_rng(0)
        self._num_requests = 0
        gc.collect()
        gc.freeze()

    def run(self, work: Sequence[Work]) -> Run:
        """Run all requests at once, to the end."""
        for one in work:
            ids = self._random.integers(0, self.spec.vocab_size, one.prompt_len, dtype=np.int32)
            sampling = SamplingParams(
                temperature=0.0, seed=self._num_requests, max_new_tokens=one.output_len, ignore_eos=True
            )
            self._submit(ids, sampling)
        self._runner.steps.clear()
        host_s: list[float] = []
        num_tokens = 0
        started_s = time.perf_counter()
        while self._scheduler.num_unfinished:
            began_s, waited_s = time.perf_counter(), self._runner.waited_s
            self._pipeline.advance(lambda: False)
            for output in self._scheduler.take_outputs():
                if isinstance(output, BatchTokenOutput):
                    num_tokens += sum(len(row.token_ids) // 4 for row in output.outputs)
            host_s.append(time.perf_counter() - began_s - (self._runner.waited_s - waited_s))
        seconds = time.perf_counter() - started_s
        while self._pipeline.advance(lambda: False):  # surplus steps of overlapped planning
            pass
        self._pipeline.idle()  # every page is accounted for
        assert num_tokens == sum(one.output_len for one in work), "a request did not get all its tokens"
        return Run(list(self._runner.steps), host_s, num_tokens, seconds)

    @contextlib.contextmanager
    def without_recordings(self) -> Iterator[None]:
        """In such a block steps are launched kernel by kernel."""
        executor = self._model_runner.executor
        self._model_runner.executor = getattr(executor, "eager", executor)
        try:
            yield
        finally:
            self._model_runner.executor = executor

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Generated]:
        """Run requests that ask for log-probabilities, all at once, to the end."""
        answers = {
            self._submit(np.array(prompt, dtype=np.int32), sampling): Generated([], [], [])
            for prompt, sampling in zip(prompts, params, strict=True)
        }
        busy = True
        while self._scheduler.num_unfinished or busy:
            busy = self._pipeline.advance(lambda: False)
            for output in self._scheduler.take_outputs():
                for row in output.outputs:
                    if row.finish is not None and row.finish.kind != FinishKind.LENGTH:
                        raise RuntimeError(f"a request ended by {row.finish}")
                    _add(answers[row.rid], row)
        self._pipeline.idle()
        return list(answers.values())

    def _submit(self, ids: npt.NDArray[np.int32], sampling: SamplingParams) -> str:
        self._num_requests += 1
        rid = f"r{self._num_requests}"
        self._pipeline.handle(GenerateRequest(rid, ids.tobytes(), sampling, arrival_s=time.monotonic()))
        return rid


def _add(answer: Generated, row: TokenOutput) -> None:
    tokens = np.frombuffer(row.token_ids, np.int32).tolist()
    if not tokens:
        return
    assert row.logprobs is not None, "the request does not ask for log-probabilities"
    shape = len(tokens), row.logprobs.top_k
    top_ids = np.frombuffer(row.logprobs.top_ids, np.int32).reshape(shape).tolist()
    top_logprobs = np.frombuffer(row.logprobs.top_logprobs, np.float32).reshape(shape).tolist()
    answer.tokens.extend(tokens)
    answer.logprobs.extend(np.frombuffer(row.logprobs.token_logprobs, np.float32).tolist())
    answer.tops.extend(dict(zip(*one, strict=True)) for one in zip(top_ids, top_logprobs, strict=True))
