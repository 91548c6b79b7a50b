"""`MultiStepDecode`: how many tokens in a row a step generates for each request while no request waits.

Between two steps the scheduler's process plans, settles and sends, and three other processes forward the token to the
client. On a CPU the cores that compute do this work as well: for one request of a small model it is a fifth of the
time. A multi-step decode repeats a step of decodes several times (rounds), each with the tokens of the previous round,
and does the work between steps once:

    step by step    plan [round] settle send  plan [round] settle send  plan [round] settle send
    multi-step      plan [round] [round] [round] settle send

The client gets its tokens in groups, so a multi-step decode lasts at most `--multi-step-ms`: with 40 a text still
grows 25 times a second. Other requests do not wait for it: it ends after the round in which a message arrives (a prompt
or an abort), and after the round in which an answer ends (`may_continue`). The tokens equal those of single steps,
because each is sampled at its own position. Grammars advance between rounds, and each round has its own masks. SGLang's
`--num-continuous-decode-steps` and the multi-step scheduling of vLLM V0 have the same purpose, but a fixed number of
steps that does not end early.

There is only one round in these cases:
- The step contains prompts, or requests wait: they are considered after each step.
- The step has drafts (`speculation.py`): they yield more tokens.
- A request has stop tokens of its own or logprobs: the host checks each of its tokens.
- The pages for more rounds are not available: all requests advance at the same rate, and a multi-step decode never
  causes a retraction.
- The device ran out of memory, and the caps of `StepCaps` are still in force.

The predicted time of a round is that of the last step of decodes alone. If more requests decode than in that step,
there is one round. A multi-step decode with slower rounds than predicted ends early. If devices compute while the host
plans (overlap), it saves nothing and is off (`launch/resolve/step_settings.py`).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from ..batch import ScheduleBatch
from ..grammar.grammar_rules import may_go_on
from ..memory.kv_memory import RowMemory
from ..phases import Work
from ..requests.outputs import StopRules
from ..requests.requests import Requests
from ..step_size.step_limits import StepCaps
from .drafts import Drafts

MAX_ROUNDS: Final = 8
"""More rounds save little; the last tokens of an answer are delayed by up to this many rounds."""


class MultiStepDecode:
    """See the module."""

    def __init__(
        self,
        requests: Requests,
        *,
        max_duration_s: float,
        memory: RowMemory,
        caps: StepCaps,
        stop_rules: StopRules,
    ) -> None:
        """`max_duration_s`: the longest duration of a multi-step decode; 0: there are none."""
        self._requests = requests
        self._max_duration_s = max_duration_s
        self._states, self._pool, self._kv = memory.states, memory.pool, memory.kv
        self._caps = caps
        self._stop_rules = stop_rules
        self._round_s = math.inf
        self._measured_reqs = 0

    def plan(self, work: Work, drafts: Drafts) -> int:
        """The number of rounds of a step, 1 for most; takes the pages for them."""
        rows, states = work.decode_rows, self._states
        wanted = int(min(MAX_ROUNDS, self._max_duration_s / self._round_s))
        if wanted < 2 or work.chunks or drafts or not 0 < len(rows) <= self._measured_reqs:
            return 1
        if self._caps.are_lowered:
            return 1
        requests = self._requests
        num_waiting, num_partial = requests.num_waiting, len(requests.partial)
        # Beside interactive decodes, those of the background can wait.
        if requests.num_background and not work.decode_reqs[0].background:
            num_waiting -= len(requests.background)
            num_partial = sum(not req.background for req in requests.partial)
        if num_waiting or num_partial:
            return 1
        if states.single_step[rows].any():
            return 1
        # The last token of an answer is never fed back, so it needs no slot.
        left = states.max_kv_len[rows] - states.num_computed[rows]
        return self._with_pages(work, min(wanted, int(left.min())))

    def measured(self, num_reqs: int, num_rounds: int, seconds: float) -> None:
        """A step of decodes without drafts took `seconds`."""
        self._measured_reqs = num_reqs
        self._round_s = seconds / num_rounds if seconds > 0 else math.inf

    def may_continue(
        self, batch: ScheduleBatch, next_token_ids: bytes, num_rounds: int, seconds: float
    ) -> bool:
        """Whether there may be another round. If so, the grammars have advanced over the tokens.

        Args:
            next_token_ids: [B] int32 of the last round: no answer may end with its token.
            num_rounds, seconds: completed rounds and their time: another round of the mean duration must fit.
        """
        if seconds * (num_rounds + 1) > self._max_duration_s * num_rounds:
            return False
        token_ids = np.frombuffer(next_token_ids, dtype=np.int32)
        if self._stop_rules.at_eos(self._states, batch.rows, token_ids).any():
            return False
        return not batch.has_grammar or may_go_on(batch, token_ids.tolist())

    def _with_pages(self, work: Work, num_rounds: int) -> int:
        """Take pages for as many of the rounds as possible; returns the number of rounds."""
        kv, page_size, rows = self._kv, self._kv.page_size, work.decode_rows
        computed, num_slots = self._states.num_computed[rows], self._pool.num_pages[rows] * page_size
        for rounds in range(num_rounds, 1, -1):
            missing = -(-(computed + rounds - num_slots) // page_size)
            if missing[missing > 0].sum() <= kv.available_pages:
                for page in range(int(missing.max())):
                    kv.grow_by_a_page(rows[missing > page])
                return rounds
        return 1
