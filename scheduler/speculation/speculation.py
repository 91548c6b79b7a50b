"""`Speculation`: which running requests get draft tokens in a step, and how many. No draft model is needed.

A decode reads all weights to make one token; with k drafts behind the last token the same pass tells what the model
would say after each of them, and as many are right as the model would have said itself:

    plan     last token, d1 d2 d3 d4      one request's input: 1 + k tokens, as of a prompt chunk with a prefix
    runner   a    b  c  x  y              sampled at each position, each with its own noise; d1 = a, d2 = b, d3 = c,
    settle   a b c x                      d4 is not x: x is what the model says after c, y is worth nothing

So a step yields 1 to k + 1 tokens, always those of plain decoding: what is compared is the token that would be sampled
at that position (greedy or with noise, which depends on seed and position alone), not a probability. The KV of d4 is
garbage behind the request's end; `num_computed` never counted it, so the next step writes over it, and neither the
prefix cache nor a swap ever sees it. An answer that ends within the run (end of sequence, stop token, length) drops the
rest. Only rounding can differ from plain decoding: kernels for one token and for several add up in other orders.

Who guesses is `ngram_proposer.py`. How many drafts a step carries is decided in each pass, for all requests together:
the next best draft is added as long as expected tokens per second grow, by the requests' hit rates and by what steps
of so many tokens have taken here (`step_costs.py`). Hence where computing is the limit (large batches), or nothing is
copied, the number falls to 0 by itself: hit rates are learned from plain steps as well, costs by rare trials.

Not drafted for, and why:
- requests with penalties: the logits at a position depend on the tokens before it, which the drafts only guess;
- requests with a grammar: its state does, too;
- requests with log-probabilities: their rows are packed one token at a time;
- steps with prompts in them: they are long already, and the prompts' requests wait;
- a request whose next page is not there: drafts never cost anybody a place, and leave a page for each that runs;
- steps after the device ran out of memory, until the caps of `step_caps.py` are gone.

Refused together (`resolve.py`): overlap, since the next step is planned before anybody knows how many tokens
this one yields.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import numpy as np

from ...runtime.config.engine_config import SchedulerConfig
from ...runtime.feasibility import pages_for
from ...runtime.sampling_params import SamplingParams
from ..drafts import NO_DRAFTS, Drafts, drafts_of
from ..memory.row_memory import RowMemory
from ..phases import Work
from ..requests.req import Req
from ..step_size.step_caps import StepCaps
from ..step_size.step_limits import StepLimits
from .ngram_proposer import HitRates, NgramProposer
from .step_costs import MAX_TOKENS, StepCosts

logger = logging.getLogger(__name__)

_MIN_GAIN: Final = 1.03
"""Tokens per second that drafts must promise, as a multiple of a plain step's: less is within the error of both."""


class Speculation(Protocol):
    """Chooses drafts, and learns from what becomes of them. Told which requests hold a row (`RowObserver`)."""

    def plan(self, work: Work) -> Drafts:
        """The drafts of a step; takes the pages for them."""
        ...

    def measured(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        """A step of decodes alone has taken so long."""
        ...

    def started(self, req: Req) -> None:
        """See `RowObserver`."""
        ...

    def stopped(self, req: Req) -> None:
        """See `RowObserver`."""
        ...


class NoSpeculation:
    """One token per request and step."""

    __slots__ = ()

    def plan(self, work: Work) -> Drafts:
        return NO_DRAFTS

    def measured(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        pass

    def started(self, req: Req) -> None:
        pass

    def stopped(self, req: Req) -> None:
        pass


class NgramSpeculation:
    """See the module."""

    __slots__ = (
        "_caps",
        "_costs",
        "_kv",
        "_max_drafts",
        "_max_step_tokens",
        "_pool",
        "_proposers",
        "_shared",
        "_states",
    )

    def __init__(
        self,
        *,
        max_drafts: int,
        limits: StepLimits,
        memory: RowMemory,
        caps: StepCaps,
    ) -> None:
        """`max_drafts`: of one request in one step."""
        self._max_step_tokens = min(MAX_TOKENS, limits.max_num_batched_tokens or MAX_TOKENS)
        self._max_drafts = min(
            max_drafts, self._max_step_tokens
        )  # chances are computed for so many in each step
        self._states, self._pool, self._kv = memory.states, memory.pool, memory.kv
        self._caps = caps
        self._costs = StepCosts()
        self._shared = HitRates()
        self._proposers: dict[Req, NgramProposer | None] = {}  # None: it has failed

    def plan(self, work: Work) -> Drafts:
        """See `Speculation`."""
        num_reqs = len(work.decode_reqs)
        if work.chunks or not 0 < num_reqs < self._max_step_tokens or self._caps.are_lowered:
            return NO_DRAFTS
        if not self._costs.knows_plain(num_reqs):
            return NO_DRAFTS
        chances = [self._chances_or_none(req) for req in work.decode_reqs]
        counts = self._choose(chances)
        if not any(counts):
            return NO_DRAFTS
        counts = self._with_pages(work.decode_reqs, counts)
        return drafts_of(
            [
                self._drafts(req, count) if count else []
                for req, count in zip(work.decode_reqs, counts, strict=True)
            ]
        )

    def measured(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        """See `Speculation`."""
        self._costs.measured(num_reqs + num_drafts, seconds, plain=not num_drafts)

    def started(self, req: Req) -> None:
        """Its tokens are indexed when it decodes."""

    def stopped(self, req: Req) -> None:
        """Who comes back begins again: its text may be long, and it may wait for long."""
        self._proposers.pop(req, None)

    def _chances_or_none(self, req: Req) -> list[float]:
        """Of each draft that the request could have, the chance that it and all before it are right."""
        if not may_speculate(req):
            return []
        try:
            return self._chances(req)
        except Exception:  # one request's trouble must not end everyone's, nor do its drafts make its answer
            self._give_up(req)
            return []

    def _drafts(self, req: Req, count: int) -> list[int]:
        proposer = self._proposers[req]
        try:
            return [] if proposer is None else proposer.drafts(count)
        except Exception:  # as above
            self._give_up(req)
            return []

    def _give_up(self, req: Req) -> None:
        logger.error("guessing failed, the request goes on without rid=%s", req.rid, exc_info=True)
        self._proposers[req] = None

    def _chances(self, req: Req) -> list[float]:
        states, row = self._states, req.row
        known_len = int(states.known_len[row])
        if req not in self._proposers:
            self._proposers[req] = NgramProposer(states.token_ids[row, :known_len], self._shared)
        proposer = self._proposers[req]
        if proposer is None:
            return []
        if len(proposer) < known_len:
            proposer.observe(states.token_ids[row, len(proposer) : known_len].tolist())
        # The last token of an answer is never fed back, so it needs no slot, and no drafts behind it.
        room = int(states.max_kv_len[row]) - known_len
        return proposer.chances(min(self._max_drafts, room))

    def _choose(self, chances: list[list[float]]) -> list[int]:
        """How many drafts each request gets, so that the step yields most tokens per second; all 0 for a plain one."""
        num_reqs = len(chances)
        owners = [idx for idx, each in enumerate(chances) for _ in each]
        if not owners:
            return []
        gains = np.array([chance for each in chances for chance in each])
        # Stable, and each request's chances fall, so what is taken of its drafts are always the first ones.
        order = np.argsort(-gains, kind="stable")[: self._max_step_tokens - num_reqs]
        tokens = num_reqs + np.concatenate([[0.0], np.cumsum(gains[order])])
        rates = tokens / self._costs.seconds(num_reqs, num_reqs + len(order))
        best = int(rates.argmax())
        if rates[best] < _MIN_GAIN * rates[0]:
            return []
        counts = [0] * num_reqs
        for idx in order[:best].tolist():
            counts[owners[idx]] += 1
        return counts

    def _with_pages(self, reqs: list[Req], counts: list[int]) -> list[int]:
        """As many of them as there are slots for, each with its page."""
        kv, page_size = self._kv, self._kv.page_size
        granted = []
        for req, count in zip(reqs, counts, strict=True):
            computed, num_pages = int(self._states.num_computed[req.row]), int(self._pool.num_pages[req.row])
            # A page for each that runs must be left: it may need it in the next step.
            missing = pages_for(computed + 1 + count, page_size) - num_pages
            missing = max(0, min(missing, kv.available_pages - len(reqs)))
            count = min(count, (num_pages + missing) * page_size - computed - 1)
            kv.grow(req.row, computed + 1 + count)
            granted.append(count)
        return granted


def may_speculate(req: Req) -> bool:
    """Whether what is sampled for it at a position depends on the tokens before it through the model alone."""
    return not (_has_penalties(req.sampling) or req.sampling.logprobs is not None or req.has_grammar)


def _has_penalties(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty)


def make_speculation(
    config: SchedulerConfig,
    limits: StepLimits,
    *,
    memory: RowMemory,
    caps: StepCaps,
) -> Speculation:
    """What `--speculative` asks for."""
    if config.speculative == "off":
        return NoSpeculation()
    return NgramSpeculation(
        max_drafts=config.speculative_num_draft_tokens,
        limits=limits,
        memory=memory,
        caps=caps,
    )
