"""Fault injection (`--chaos`) for tests.

- Running requests are retracted (`ChaosRetract`), and steps report that they found no memory (`ChaosRunner`).
- Steps are slow (`SlowRunner`), so that a test can act before the end of an answer on any machine.
- A token in a prompt kills the scheduler's process (`DeadlyRunner`).

vLLM had such a switch (`VLLM_TEST_ENABLE_ARTIFICIAL_PREEMPT`), SGLang has one (`SGLANG_TEST_RETRACT`).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from ...runtime.config.chaos_spec import ChaosSpec, parse_chaos
from ...runtime.config.engine_config import SchedulerConfig
from ...runtime.step_plan import GetMasks, GoOn, Pending, Runner, StepPlan, StepResult, no_masks, to_the_end
from ..requests.req import Req


class ChaosRetract:
    """Retracts one random running request with a probability per pass, up to `max_retractions` times."""

    def __init__(self, spec: ChaosSpec | None, seed: int) -> None:
        spec = spec or ChaosSpec()
        self._probability = spec.retract_probability
        self._left = spec.max_retractions
        self._random = random.Random(seed)

    def victim(self, reqs: Sequence[Req]) -> Req | None:
        """The request to retract in this pass; usually None. Called once per pass."""
        if not reqs or not self._left or self._random.random() >= self._probability:
            return None
        self._left -= 1
        return self._random.choice(reqs)


class ChaosRunner:
    """A runner that reports some steps as out of memory after it has computed them.

    The smallest steps never fail: a request that fails in them repeatedly is answered with an error.
    """

    def __init__(self, runner: Runner, spec: ChaosSpec, seed: int, page_size: int) -> None:
        self._runner = runner
        self._page_size = page_size
        self._probability = spec.oom_probability
        self._left = spec.max_ooms
        self._random = random.Random(seed)

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        pending = self._runner.launch(plan, go_on, masks)
        is_small = len(plan.samples) < 2 and plan.total_num_scheduled_tokens <= self._page_size
        if is_small or not self._left or self._random.random() >= self._probability:
            return pending
        self._left -= 1
        return _WithoutMemory(pending)


class _WithoutMemory(NamedTuple):
    pending: Pending

    def wait(self) -> StepResult:
        result = self.pending.wait()
        return StepResult(
            result.step_id,
            forward_s=result.forward_s,
            swap_s=result.swap_s,
            out_of_memory="asked for by --chaos",
        )


class SlowRunner:
    """A runner with steps that take at least `min_step_s` seconds from their launch on."""

    def __init__(self, runner: Runner, min_step_s: float) -> None:
        self._runner = runner
        self._min_step_s = min_step_s

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        started_s = time.monotonic()
        return _NotBefore(
            self._runner.launch(plan, go_on, masks), started_s, self._min_step_s, plan.num_rounds > 1
        )


class _NotBefore(NamedTuple):
    pending: Pending
    started_s: float
    min_step_s: float
    is_multi_step: bool

    def wait(self) -> StepResult:
        """Each round of a multi-step decode counts as a step."""
        result = self.pending.wait()
        counts = memoryview(result.num_next_tokens).cast("i") if self.is_multi_step else ()
        min_s = self.min_step_s * max(counts, default=1)
        time.sleep(max(0.0, self.started_s + min_s - time.monotonic()))
        return structs.replace(result, forward_s=max(result.forward_s, min_s))


class DeadlyRunner:
    """A runner that kills its process in the step that begins a request with `token_id` in the prompt."""

    def __init__(self, runner: Runner, token_id: int) -> None:
        self._runner = runner
        self._token_id = token_id

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        prompts = (memoryview(new.input_ids).cast("i")[: new.prompt_len] for new in plan.new_reqs)
        if any(self._token_id in prompt for prompt in prompts):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._runner.launch(plan, go_on, masks)


def with_chaos(runner: Runner, config: SchedulerConfig, page_size: int) -> Runner:
    """The runner, with the faults that `--chaos` asks for."""
    spec = parse_chaos(config.chaos)
    if spec is None:
        return runner
    if spec.max_ooms:
        runner = ChaosRunner(runner, spec, config.policy_seed, page_size)
    if spec.min_step_s:
        runner = SlowRunner(runner, spec.min_step_s)
    if spec.kill_token is not None:
        runner = DeadlyRunner(runner, spec.kill_token)
    return runner
