"""`Speculation`: which running requests get draft tokens in a step, and how many.

A decode reads all weights to make one token. With k drafts after the last token the same forward pass also samples the
token after each draft; a draft is accepted if it equals the token that the model samples at its position:

    plan     last token, d1 d2 d3 d4      one request's input: 1 + k tokens, like a prompt chunk with a prefix
    runner   a    b  c  x  y              sampled at each position, each with its own noise; d1 = a, d2 = b, d3 = c,
    settle   a b c x                      d4 is not x: x is the token after c; y follows a wrong token and is dropped

So a step yields 1 to k + 1 tokens, the same as plain decoding: a draft is compared with the token that is sampled at
its position, not with a probability. Sampling is greedy, or with noise that depends only on seed and position. The KV
of d4 is garbage after the request's end: `num_computed` never counts it, so the next step overwrites it, and it never
reaches the prefix cache or a swap. If the answer ends within the accepted tokens (end of sequence, stop token, length),
the rest is dropped. Only rounding can differ from plain decoding: kernels for one token and for several tokens add in
different orders.

`ngram_proposer.py` proposes the drafts, from the request's own text and, with `--speculative suffix`, from finished
answers (`suffix_index.py`). With a drafter in the runner a plan may also say only how many drafts a request gets, and
the runner makes them before the batch (`runner_drafts.py`). In a step all drafts of a request come from the scheduler,
if its first one is at least as likely right, or all from the runner.

Each pass decides the number of drafts for all requests together: it adds the next best draft while the expected tokens
per second grow. The expectation comes from the requests' hit rates and the measured intervals of steps with as many
tokens (`step_costs.py`), to which the runner's drafts add the time to make them. So if computing is the limit (large
batches), or no text is copied, the number falls to 0: hit rates are learned from plain steps as well, costs by rare
exploration steps. With more than two requests, a pass that found no drafts that gain is followed by a few that do not
look for any, unless a request has a grammar, whose forced tokens are certain.

The matcher of a request with a grammar cuts its drafts at the first token that the grammar refuses, and adds the tokens
that the grammar forces, which come first and have probability 1 (`GrammarDrafts`). The step has a mask for each of
their positions. The runner's drafts are cut when they are known, before the masks are filled (`GetMasks.drafted`).

There are no drafts in these cases:
- A request has penalties: the logits at a position depend on the tokens before it, which drafts only propose.
- A request says `speculative: false`.
- Drafts of the runner: a request has images in a model whose tokens have positions on three axes (M-RoPE); drafters
  have one.
- The step contains prompts: it is long already, and the requests of the prompts wait.
- The next page of a request is not available: drafts never cause a retraction, and leave a page per running request.
- The device ran out of memory, and the caps of `StepCaps` are still in force.

With overlap a step may be planned while the one before it is computed, whose tokens are unknown (`pipeline.py`). The
first draft of a request then stands for its unknown token, which the device has, and the others follow it:

    known    ... a         in flight: one token      drafts: d1 d2 d3
    input        the token on the device, d2 d3      if it is not d1, d2 and d3 are hardly right, but nothing is wrong

A step with drafts yields an unknown number of tokens, so the next one is planned after it. So is the one after a step
with grammars, whose drafts and masks follow from known tokens.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import numpy.typing as npt

from ...runtime.config.engine_config import SchedulerConfig
from ...runtime.step_plan import MAX_DRAFT_STEP_TOKENS, RUNNER_DRAFT, StepResult
from ..arrays import IntArray
from ..batch import ScheduleBatch
from ..grammar.grammar_rules import GrammarDrafts
from ..memory.kv_memory import RowMemory
from ..phases import Work
from ..records.stats import DRAFT_METHODS, FORCED, NGRAM, RUNNER_METHODS
from ..requests.req import Req
from ..step_size.step_limits import StepCaps, StepLimits
from .drafts import NO_DRAFTS, DraftMemory, Drafts, drafts_of, may_speculate
from .ngram_proposer import HitRates, NgramProposer
from .runner_drafts import RunnerDrafts
from .step_costs import MAX_TOKENS, Float64s, StepCosts
from .suffix_index import MAX_MATCH, SuffixIndex

logger = logging.getLogger(__name__)

_MIN_GAIN: Final = 1.05
"""Least gain in tokens per second over a plain step; a smaller one is within the error of the estimates."""
_MIN_CHANCE: Final = 1e-9
_FEW: Final = 2
"""Up to so many requests it costs less to look for drafts than to estimate times of steps."""
_REST: Final = 4
"""With more requests: decode rounds from a look that found no drafts to the next one, as looks cost time too."""


class Speculation:
    """Chooses drafts and learns from their results; a `RowObserver`. This base drafts nothing: one token per step."""

    def plan(self, work: Work) -> Drafts:
        """The drafts of a step; takes the pages for them."""
        return NO_DRAFTS

    def needs_result(self, batch: ScheduleBatch) -> bool:
        """Whether a step must be settled before the next one is planned."""
        return False

    def measured(
        self, num_reqs: int, num_drafts: int, seconds: float, *, between_s: float, num_rounds: int
    ) -> None:
        """A step of decodes alone was settled; see `StepCosts.measured` for the times."""

    def checked(self, batch: ScheduleBatch, result: StepResult, num_accepted: IntArray) -> None:
        """A step with drafts was settled; [B] drafts of each request were right."""

    def answered(self, req: Req) -> None:
        """The request has generated its last token, and still has its row."""

    def started(self, req: Req) -> None:
        """The request got a row."""

    def stopped(self, req: Req) -> None:
        """The request lost its row."""


class NgramSpeculation(Speculation):
    """See the module."""

    def __init__(
        self,
        *,
        max_drafts: int,
        most_drafts: int | None = None,
        limits: StepLimits,
        memory: RowMemory,
        caps: StepCaps,
        grammar_drafts: GrammarDrafts,
        answers: SuffixIndex | None = None,
        runner_method: int | None = None,
        runner_len: int | None = None,
    ) -> None:
        """Take the parts.

        Args:
            max_drafts: the most n-gram drafts of one request in one step.
            most_drafts: the most drafts of any kind; None: no such limit.
            answers: gets the finished answers, in which drafts are looked up as well; None: drafts come from the
                request's own text only.
            runner_method: the method of the runner's drafter, an index into `DRAFT_METHODS`; None: it has none.
            runner_len: positions that it knows; None: all.
        """
        self._max_step_tokens = min(MAX_TOKENS, limits.max_num_batched_tokens or MAX_TOKENS)
        self._max_drafts = min(
            max_drafts, self._max_step_tokens
        )  # each step computes this many probabilities per request
        self._states, self._memory = memory.states, DraftMemory(memory, most_drafts)
        self._caps = caps
        self._grammar_drafts = grammar_drafts
        self._guided: dict[Req, tuple[list[int], int]] = {}
        self._costs = StepCosts()
        self._rest = 0  # decode rounds until the next look for drafts of many requests
        self._shared = HitRates()
        self._answers = answers
        self._proposers: dict[Req, NgramProposer | None] = {}  # None: it has failed
        self._runner = None if runner_method is None else RunnerDrafts(runner_method, self._max_drafts)
        self._runner_len = runner_len

    def plan(self, work: Work) -> Drafts:
        num_reqs = len(work.decode_reqs)
        # A step has room for a draft of each request, or none are looked for: at least half would find no place.
        if work.chunks or not 0 < 2 * num_reqs <= self._max_step_tokens or self._caps.are_lowered:
            return NO_DRAFTS
        if not self._costs.knows_plain(num_reqs):
            return NO_DRAFTS
        if num_reqs > _FEW:
            rests = self._rest > 0 and not self._grammar_drafts.concerns(work.decode_rows)
            if rests or not self._may_pay(num_reqs):
                return NO_DRAFTS  # not even if all were right; the proposers see these tokens later
        self._rest = _REST
        self._guided.clear()
        if self._runner is not None:
            self._runner.begin_step()
        chances = [self._chances_or_none(req, self._max_step_tokens - num_reqs) for req in work.decode_reqs]
        if not any(chances):
            return NO_DRAFTS
        intervals = self._costs.intervals(num_reqs, self._max_step_tokens)
        counts = self._choose(chances, intervals, self._seconds_of_drafts(work.decode_reqs))
        if counts:
            self._rest = 0
        if self._runner is not None:
            counts = self._runner.limit(work.decode_reqs, counts, intervals)
        if not any(counts):
            return NO_DRAFTS
        counts = self._memory.take_pages(work.decode_reqs, counts)
        drafts = [
            self._drafts(req, count) if count else []
            for req, count in zip(work.decode_reqs, counts, strict=True)
        ]
        return drafts_of(
            drafts,
            [self._methods(req, len(each)) for req, each in zip(work.decode_reqs, drafts, strict=True)],
        )

    def needs_result(self, batch: ScheduleBatch) -> bool:
        """Forced tokens follow the tokens that a grammar has accepted."""
        return batch.num_drafts > 0 or batch.has_grammar

    def measured(
        self, num_reqs: int, num_drafts: int, seconds: float, *, between_s: float, num_rounds: int
    ) -> None:
        self._rest -= num_rounds
        self._costs.measured(
            num_reqs + num_drafts,
            seconds,
            plain=not num_drafts,
            between_s=between_s,
            num_rounds=num_rounds,
        )
        if self._runner is not None:
            self._runner.passed(num_rounds * seconds + between_s, num_rounds, plain=not num_drafts)

    def checked(self, batch: ScheduleBatch, result: StepResult, num_accepted: IntArray) -> None:
        if self._runner is not None:
            self._runner.checked(batch, num_accepted, result.draft_s, self._costs)

    def answered(self, req: Req) -> None:
        if self._answers is not None:
            start = max(0, req.prompt_len - MAX_MATCH)
            text = self._states.token_ids[req.row, start : self._states.known_len[req.row]]
            self._answers.add(SuffixIndex.owner_of(req.tenant, req.extra_key), text.tolist())

    def started(self, req: Req) -> None:
        """Nothing to do: the tokens of a request are indexed at its first decode."""

    def stopped(self, req: Req) -> None:
        """Drop the index; a retracted request is indexed again. Its text may be long, and so may its wait."""
        self._proposers.pop(req, None)
        if self._runner is not None:
            self._runner.stopped(req)

    def _may_pay(self, num_reqs: int) -> bool:
        """Whether drafts that are all right would gain enough."""
        intervals = self._costs.intervals(num_reqs, self._max_step_tokens)
        return _best(num_reqs + np.arange(len(intervals)), intervals) > 0

    def _chances_or_none(self, req: Req, most: int) -> list[float]:
        """For each possible draft of the request, the probability that it and all before it are correct.

        Args:
            req: the request.
            most: bound on its forced tokens.
        """
        if not may_speculate(req):
            return []
        try:
            chances = self._chances(req)
        except Exception:  # an error in one request's drafts must not end any request
            self._give_up(req)
            chances = []
        if req.matcher is not None:
            chances = self._guided_chances(req, chances, most)
        if self._runner is None or (req.images is not None and req.images.rope):
            return chances
        most = min(self._max_drafts, self._memory.room(req), most)
        if self._runner_len is not None:
            most = min(most, self._runner_len - int(self._states.num_computed[req.row]))
        theirs = self._runner.chances(req, most)
        if not theirs:
            return chances
        if chances and chances[0] >= theirs[0]:
            return chances
        self._runner.by_runner.add(req)
        return theirs

    def _seconds_of_drafts(self, reqs: list[Req]) -> list[float]:
        """Seconds to make one draft of each request: its part of those that are made together."""
        if self._runner is None or not self._runner.by_runner:
            return [0.0] * len(reqs)
        draft_s = self._runner.draft_s / len(self._runner.by_runner)
        return [draft_s if req in self._runner.by_runner else 0.0 for req in reqs]

    def _guided_chances(self, req: Req, chances: list[float], most: int) -> list[float]:
        ngram_ids = self._ngram_drafts(req, len(chances)) if chances else []
        token_ids, num_forced = self._grammar_drafts.propose(
            req, min(most, self._memory.room(req)), ngram_ids
        )
        if not token_ids:
            return []
        self._guided[req] = token_ids, num_forced
        if not num_forced:
            return chances[: len(token_ids)]
        known = chances[num_forced - 1] if num_forced < len(token_ids) else 1.0
        following = chances[num_forced : len(token_ids)]
        return [1.0] * num_forced + [chance / max(known, _MIN_CHANCE) for chance in following]

    def _drafts(self, req: Req, count: int) -> list[int]:
        if self._runner is not None and req in self._runner.by_runner:
            return [RUNNER_DRAFT] * count
        guided = self._guided.get(req)
        return self._ngram_drafts(req, count) if guided is None else guided[0][:count]

    def _methods(self, req: Req, count: int) -> bytes:
        """The methods of the `count` drafts of a request: forced ones come first."""
        if self._runner is not None and req in self._runner.by_runner:
            return bytes([self._runner.method] * count)
        num_forced = min(count, self._guided[req][1]) if req in self._guided else 0
        proposer = self._proposers.get(req)
        return bytes([FORCED] * num_forced + [proposer.method if proposer else NGRAM] * (count - num_forced))

    def _ngram_drafts(self, req: Req, count: int) -> list[int]:
        proposer = self._proposers[req]
        try:
            num_unknown = self._num_unknown(req)
            return [] if proposer is None else proposer.drafts(num_unknown + count)[num_unknown:]
        except Exception:  # as above
            self._give_up(req)
            return []

    def _give_up(self, req: Req) -> None:
        logger.error("proposing drafts failed, the request continues rid=%s", req.rid, exc_info=True)
        self._proposers[req] = None

    def _chances(self, req: Req) -> list[float]:
        states, row = self._states, req.row
        known_len = int(states.known_len[row])
        if req not in self._proposers:
            owner = SuffixIndex.owner_of(req.tenant, req.extra_key)
            self._proposers[req] = NgramProposer(
                states.token_ids[row, :known_len], self._shared, self._answers, owner
            )
        proposer = self._proposers[req]
        if proposer is None:
            return []
        if len(proposer) < known_len:
            proposer.observe(states.token_ids[row, len(proposer) : known_len].tolist())
        num_unknown = self._num_unknown(req)
        return proposer.chances(num_unknown + min(self._max_drafts, self._memory.room(req)))[num_unknown:]

    def _num_unknown(self, req: Req) -> int:
        """1 if the last token of the request is still being computed, else 0."""
        return int(self._states.num_computed[req.row]) + 1 - int(self._states.known_len[req.row])

    def _choose(self, chances: list[list[float]], intervals: Float64s, draft_s: list[float]) -> list[int]:
        """The number of drafts per request with the most tokens per second; empty for a plain step.

        Args:
            chances: of each request.
            intervals: seconds of a step with 0, 1, ... drafts.
            draft_s: seconds to make one draft of each request.
        """
        num_reqs = len(chances)
        owners = [idx for idx, each in enumerate(chances) for _ in each]
        if not owners:
            return []
        gains = np.array([chance for each in chances for chance in each])
        # Stable, and the probabilities of a request never rise, so the first drafts of each request are taken.
        order = np.argsort(-gains, kind="stable")[: self._max_step_tokens - num_reqs]
        tokens = num_reqs + np.concatenate([[0.0], np.cumsum(gains[order])])
        making = np.array(draft_s)[np.array(owners)[order]]
        best = _best(tokens, intervals[: len(tokens)] + np.concatenate([[0.0], np.cumsum(making)]))
        if not best:
            return []
        counts = [0] * num_reqs
        for idx in order[:best].tolist():
            counts[owners[idx]] += 1
        return counts


def _best(tokens: Float64s | npt.NDArray[np.int64], intervals: Float64s) -> int:
    """The number of drafts with the most expected tokens per second; 0 if the best one gains less than `_MIN_GAIN`."""
    rates = tokens / intervals
    best = int(rates.argmax())
    return best if rates[best] >= _MIN_GAIN * rates[0] else 0


def make_speculation(
    config: SchedulerConfig,
    limits: StepLimits,
    *,
    memory: RowMemory,
    caps: StepCaps,
    grammar_drafts: GrammarDrafts,
    keeps_states: bool = False,
) -> Speculation:
    """The class that `--speculative` and `--overlap` name.

    `keeps_states`: the model has state layers, and as many states of a request as `--speculative` has drafts. So it
    drafts no forced tokens without that setting, and with it at most as many as other drafts.
    """
    if config.speculative == "off":
        if config.overlap or keeps_states:
            return Speculation()
        return ForcedSpeculation(limits=limits, memory=memory, caps=caps, grammar_drafts=grammar_drafts)
    return NgramSpeculation(
        max_drafts=config.speculative_num_draft_tokens,
        most_drafts=config.speculative_num_draft_tokens if keeps_states else None,
        limits=limits,
        memory=memory,
        caps=caps,
        grammar_drafts=grammar_drafts,
        answers=None if config.speculative == "ngram" else SuffixIndex(config.speculative_cache_tokens),
        runner_method=(
            DRAFT_METHODS.index(config.speculative) if config.speculative in RUNNER_METHODS else None
        ),
        runner_len=config.speculative_len,
    )


_REQS_PER_DRAFT: Final = 4
"""With multi-step decodes: most requests of a step per draft of it."""


class ForcedSpeculation(Speculation):
    """`--speculative off`, where forced tokens of grammars are still drafts.

    A request whose grammar allows only one text gets its tokens as drafts, and verifies all of them in one step
    (`GrammarDrafts`). No hit rate has to be learned. With `--speculative ngram`, `NgramSpeculation` does the same.

    Steps with drafts have no inner steps (`multi_step.py`). Inner steps save the work between steps, about a fifth of a
    step of a small model on a CPU, while a draft saves its request a whole step. So where multi-step decodes are on, a
    step has drafts if there is at least one per four requests.

    With overlap there are no forced drafts: the next step is planned before the number of tokens of this one is known.
    """

    def __init__(
        self, *, limits: StepLimits, memory: RowMemory, caps: StepCaps, grammar_drafts: GrammarDrafts
    ) -> None:
        self._max_step_tokens = min(
            MAX_DRAFT_STEP_TOKENS, limits.max_num_batched_tokens or MAX_DRAFT_STEP_TOKENS
        )
        self._has_inner_steps = limits.multi_step_ms > 0
        self._memory = DraftMemory(memory)
        self._caps = caps
        self._grammar_drafts = grammar_drafts

    def plan(self, work: Work) -> Drafts:
        """A step without a grammar costs one array look-up."""
        reqs = work.decode_reqs
        left = self._max_step_tokens - len(reqs)
        if work.chunks or not reqs or left <= 0 or self._caps.are_lowered:
            return NO_DRAFTS
        if not self._grammar_drafts.concerns(work.decode_rows):
            return NO_DRAFTS
        proposed: list[list[int]] = []
        for req in reqs:
            token_ids: list[int] = []
            if left and req.matcher is not None and may_speculate(req):
                token_ids, _ = self._grammar_drafts.propose(req, min(left, self._memory.room(req)))
                left -= len(token_ids)
            proposed.append(token_ids)
        num_drafts = sum(map(len, proposed))
        if not num_drafts or (self._has_inner_steps and num_drafts * _REQS_PER_DRAFT < len(reqs)):
            return NO_DRAFTS
        counts = self._memory.take_pages(reqs, [len(token_ids) for token_ids in proposed])
        drafts = [token_ids[:count] for token_ids, count in zip(proposed, counts, strict=True)]
        return drafts_of(drafts, [bytes([FORCED]) * count for count in counts])

    def needs_result(self, batch: ScheduleBatch) -> bool:
        return batch.num_drafts > 0
