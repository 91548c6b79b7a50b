"""`StepTarget`: how long a step may take, so that running requests get their next tokens in time.

Whoever decodes waits for the prompts that share its steps: 512 prompt tokens take a GPU milliseconds, and two CPU cores
a fifth of a second. A chunk size in tokens bounds that for one device, one model and one length of context only. With
a target, the prompts of a step in which somebody decodes get the time that the decodes leave of it:

    prompts_s = max(target_s - decodes_s, decodes_s, waiting_s / 16, behind_s)     and at least a page of one prompt

and chunks are cut where the prediction reaches it. The second term is for devices on which decoding alone takes that
long: prompts must not starve, and a step that is long anyway takes some tokens of prompts for little. The third is for
a very long prompt, which should not take hundreds of steps. The fourth is for a queue: `behind_s` is what waits besides
the longest prompt, and with a whole second of that, short steps would keep the first tokens of many back for the sake
of few. While nobody decodes there is nobody to wait, and chunks are as large as configured.

Predicted is what a step takes by itself, so much per decoding request and per token of their KV, per prompt token, and
per (query, key) pair of prompts' attention; learned from the measured time of every step (`OnlineFit`). A step with
prompts has a fixed time of its own: where it is bound by arithmetic, reading the weights costs it nothing. The measured
times come in with the results and stand in the decision log, so a replay learns the same.

Order among prompts stays the policy's: at 2.2 requests a second, shortest first makes the 99th percentile of the time
to the first token worse by 0 to 9 %, because the tail is long prompts.

What a queue is worth shows where a device is nearly busy (simulated: this scheduler, step times of bfloat16 on two
Zen 4 cores fitted to a decision log, 600 requests of 64 to 512 tokens in and 64 to 128 out; P99 in ms of the time to
the first token / between tokens):

    requests a second                1.2          1.8          2.2          2.6
    waiting_s / 16               1,100 /  50  1,630 /  62  2,019 /  82  2,510 / 117
    and behind_s / 2               927 /  54  1,108 / 121  1,269 / 179  1,411 / 256
    and behind_s                   818 /  53    976 / 160  1,121 / 256  1,303 / 359
    waiting_s / 2                  735 / 133    866 / 181    973 / 241  1,211 / 328

With the third the mean time of a whole answer is up to 5 % shorter than with the first. The last one makes somebody who
reads along wait for a single long prompt, too, for whose reader it wins next to nothing. Prompts count whole, cached
beginnings included, and only those for which there are rows.

A smaller target costs first tokens little until a step holds less than about 100 prompt tokens (simulated without the
queue's term, 600 requests at 2.2 a second; left with costs measured on two CPU cores, right with those of AMX, 4,500
prompt tokens a second and 26 GB/s):

    target, ms      none   100    50    30        none   100    80    65    55    50    40    30
    P99 ITL, ms      142    98    50    30          90    90    79    65    55    51    40    30
    P99 TTFT, ms     416   420   444   516         219   218   220   206   208   208   215   215
"""

from __future__ import annotations

from typing import Final, Protocol

from ..batch import ScheduleBatch
from ..records.pass_figures import StepTime
from .online_fit import OnlineFit
from .prompt_time import PromptTime
from .step_work import work_of

MAX_PASSES: Final = 16
"""Prompts that wait are to be computed in about so many steps, even if those take longer than the target."""
_DECODE_STIFFNESS: Final = (1.0, 10.0, 10.0)  # a step; a request in it; a token of its KV
_DECODE_SOLVE_INTERVAL: Final = 8  # decode steps are many, and alike
_PROMPT_STIFFNESS: Final = (10.0, 1.0, 10.0)  # a step with prompts; a token of them; a pair
_LEAST_SHARE: Final = (
    0.05  # of a step's time that its prompts are taken to need, however long its decodes should take
)


class StepTarget(Protocol):
    """See the module."""

    def for_prompts(
        self, num_decodes: int, kv_tokens: int, waiting_tokens: int, tokens_behind: int, page_size: int
    ) -> PromptTime:
        """What prompts may take of a step.

        Args:
            num_decodes: requests that decode in it.
            kv_tokens: tokens whose KV those read.
            waiting_tokens: of the prompts to be computed.
            tokens_behind: of those but the longest one.
            page_size: prompts always get so many tokens.
        """
        ...

    def explain(self, time: PromptTime) -> StepTime | None:
        """What a pass decided with; None if time was no limit."""
        ...

    def measured(self, batch: ScheduleBatch, seconds: float) -> None:
        """A step took so long, swaps left out."""
        ...


class NoTarget:
    """Steps take as long as their tokens need."""

    __slots__ = ()

    def for_prompts(
        self, num_decodes: int, kv_tokens: int, waiting_tokens: int, tokens_behind: int, page_size: int
    ) -> PromptTime:
        return PromptTime.unlimited()

    def explain(self, time: PromptTime) -> StepTime | None:
        return None

    def measured(self, batch: ScheduleBatch, seconds: float) -> None:
        pass


class TimeTarget:
    """A time that steps with prompts and decodes should not exceed."""

    __slots__ = ("_decodes", "_prompts", "target_s")

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._decodes = OnlineFit(_DECODE_STIFFNESS, solve_interval=_DECODE_SOLVE_INTERVAL)
        self._prompts = OnlineFit(_PROMPT_STIFFNESS)

    def for_prompts(
        self, num_decodes: int, kv_tokens: int, waiting_tokens: int, tokens_behind: int, page_size: int
    ) -> PromptTime:
        fixed_s, token_s, pair_s = self._prompts.coefficients
        if not num_decodes or not (token_s or pair_s):
            return PromptTime.unlimited()
        decodes_s = fixed_s + self._beside_prompts_s(num_decodes, kv_tokens)
        alone_s = max(decodes_s, self._decodes.predict((1.0, num_decodes, kv_tokens)))
        waiting_s = token_s * waiting_tokens
        prompts_s = max(self.target_s - decodes_s, alone_s, waiting_s / MAX_PASSES, token_s * tokens_behind)
        return PromptTime(
            prompts_s,
            token_s=token_s,
            pair_s=pair_s,
            page_size=page_size,
            decodes_s=decodes_s,
            waiting_s=waiting_s,
        )

    def explain(self, time: PromptTime) -> StepTime | None:
        if time.is_unlimited:
            return None
        return StepTime(
            self.target_s, time.decodes_s, time.waiting_s, time.given_s, time.left_s, time.token_s
        )

    def measured(self, batch: ScheduleBatch, seconds: float) -> None:
        num_extends = batch.num_extends
        num_decodes, kv_tokens = len(batch) - num_extends, int(batch.end[num_extends:].sum())
        decodes = (1.0, num_decodes, kv_tokens)
        if not num_extends:
            if num_decodes and not batch.num_drafts:
                self._decodes.learn(decodes, seconds)
        elif num_decodes and self._decodes.predict(decodes) >= seconds:
            # Decodes are thought too dear (the first ones compiled, say): with what they leave, prompts would seem to
            # cost nothing. What this step shows is that the decodes alone take no longer than all of it.
            self._decodes.learn(decodes, seconds)
        else:
            work = work_of(batch, 1)
            prompts_s = max(seconds - self._beside_prompts_s(num_decodes, kv_tokens), _LEAST_SHARE * seconds)
            self._prompts.learn((1.0, work.prefill_tokens, work.prefill_pairs), prompts_s)

    def _beside_prompts_s(self, num_decodes: int, kv_tokens: int) -> float:
        """What decodes add to a step that computes prompts."""
        _, row_s, kv_token_s = self._decodes.coefficients
        return row_s * num_decodes + kv_token_s * kv_tokens


def make_step_target(target_step_ms: float) -> StepTarget:
    """From the setting to the object; 0 is none."""
    return TimeTarget(target_step_ms / 1000) if target_step_ms else NoTarget()
