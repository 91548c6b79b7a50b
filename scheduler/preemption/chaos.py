"""Fault injection (`--chaos`) for tests.

`ChaosRetract` retracts running requests. `ChaosRunner` reports steps as out of memory, makes them slow, so that a test
can act before the end of an answer on any machine, or kills the scheduler's process at a token of a prompt.

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
    """A runner with the faults that `--chaos` asks for.

    - It reports some steps as out of memory after it has computed them; never the smallest ones, because a request
      that fails in them repeatedly is answered with an error.
    - Its steps take at least `min_step_s` seconds from their launch on; each round of a multi-step decode counts.
    - It kills its process in the step that begins a request with `kill_token` in the prompt.
    """

    def __init__(self, runner: Runner, spec: ChaosSpec, seed: int, page_size: int) -> None:
        self._runner = runner
        self._spec = spec
        self._page_size = page_size
        self._num_left = spec.max_ooms
        self._random = random.Random(seed)

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        prompts = (memoryview(new.input_ids).cast("i")[: new.prompt_len] for new in plan.new_reqs)
        if self._spec.kill_token is not None and any(self._spec.kill_token in prompt for prompt in prompts):
            os.kill(os.getpid(), signal.SIGKILL)
        started_s = time.monotonic()
        pending = self._runner.launch(plan, go_on, masks)
        return _FaultyStep(pending, self._fails(plan), started_s, self._spec.min_step_s, plan.num_rounds > 1)

    def _fails(self, plan: StepPlan) -> bool:
        is_small = len(plan.samples) < 2 and plan.total_num_scheduled_tokens <= self._page_size
        if is_small or not self._num_left or self._random.random() >= self._spec.oom_probability:
            return False
        self._num_left -= 1
        return True


class _FaultyStep(NamedTuple):
    pending: Pending
    fails: bool
    started_s: float
    min_step_s: float
    is_multi_step: bool

    def wait(self) -> StepResult:
        result = self.pending.wait()
        if self.fails:
            result = StepResult(
                result.step_id,
                forward_s=result.forward_s,
                swap_s=result.swap_s,
                out_of_memory="asked for by --chaos",
            )
        if self.min_step_s:
            counts = memoryview(result.num_next_tokens).cast("i") if self.is_multi_step else ()
            min_s = self.min_step_s * max(counts, default=1)
            time.sleep(max(0.0, self.started_s + min_s - time.monotonic()))
            result = structs.replace(result, forward_s=max(result.forward_s, min_s))
        return result


def with_chaos(runner: Runner, config: SchedulerConfig, page_size: int) -> Runner:
    """The runner, with the faults that `--chaos` asks for."""
    spec = parse_chaos(config.chaos)
    if spec is None or not (spec.max_ooms or spec.min_step_s or spec.kill_token is not None):
        return runner
    return ChaosRunner(runner, spec, config.policy_seed, page_size)
