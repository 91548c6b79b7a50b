"""`StepTarget`: how long a step may take, so that running requests get their next tokens in time.

A decoding request waits for the prompts that share its steps: 512 prompt tokens take milliseconds on a GPU, and a fifth
of a second on two CPU cores. A chunk size in tokens bounds this for only one device, one model and one context length.
With a target, prompts that share a step with decodes get the time that the decodes do not use:

    prompts_s = max(target_s - decodes_s, decodes_s, waiting_s / 16, others_s)     and at least a page of one prompt

Chunks are cut where the predicted time reaches `prompts_s`. The terms:

1. `target_s - decodes_s` keeps the step within the target.
2. `decodes_s` is for devices on which the decodes alone take the whole target. Prompts must not starve, and in a step
   that is long anyway some prompt tokens cost little.
3. `waiting_s / 16` is for a very long prompt, which should not take hundreds of steps.
4. `others_s` is for a queue: the predicted time of all waiting prompts but the longest. If it is a whole second, short
   steps would delay the first tokens of many requests to serve a few decodes.

While no request decodes there is no time limit, and chunks are as large as configured.

Tiles of images are a third kind of work: their time, learned as seconds per pixel, is a part of `prompts_s`, and at
most `tiles_s`. It is the time of the decodes alone, so that an image makes no step longer than twice a plain one; while
several requests wait for images, it is max(target_s - decodes alone, decodes alone). The tokens of a prompt up to its
last image are limited by it, too. A part is a quarter of a layer of the tower for some 256 patches, so the work on a
tile is divided among steps as tokens are. A step in which no token of a prompt can be computed before a tile does at
least one part.

The predicted time of a step has a fixed part and a part per decoding request, per token of their KV, per prompt token,
and per (query, key) pair of the prompts' attention. The coefficients are learned from the measured time of every step
(`OnlineFit`). A step with prompts has its own fixed part: if arithmetic bounds it, reading the weights costs no extra
time. The measured times arrive with the results and are in the decision log, so a replay learns the same.

The policy still decides the order of prompts. At 2.2 requests a second, shortest first makes the 99th percentile of the
time to the first token worse by 0 to 9 %, because the tail consists of long prompts.

The effect of the fourth term is visible when a device is nearly busy (simulated: this scheduler, step times of bfloat16
on two Zen 4 cores fitted to a decision log, 600 requests of 64 to 512 tokens in and 64 to 128 out; P99 in ms of the
time to the first token / between tokens):

    requests a second                1.2          1.8          2.2          2.6
    waiting_s / 16               1,100 /  50  1,630 /  62  2,019 /  82  2,510 / 117
    and others_s / 2               927 /  54  1,108 / 121  1,269 / 179  1,411 / 256
    and others_s                   818 /  53    976 / 160  1,121 / 256  1,303 / 359
    waiting_s / 2                  735 / 133    866 / 181    973 / 241  1,211 / 328

With the third line of the table the mean time of a whole answer is up to 5 % shorter than with the first. The last line
also delays decodes for a single long prompt, which gains almost nothing from it. Prompts count without what is known to
be cached, and only as many as there are free rows; all questions about one input, and parallel samples, are one prompt.

A smaller target hardly delays first tokens until a step holds less than about 100 prompt tokens (simulated without the
fourth term, 600 requests at 2.2 a second; left with costs measured on two CPU cores, right with those of AMX, 4,500
prompt tokens a second and 26 GB/s):

    target, ms      none   100    50    30        none   100    80    65    55    50    40    30
    P99 ITL, ms      142    98    50    30          90    90    79    65    55    51    40    30
    P99 TTFT, ms     416   420   444   516         219   218   220   206   208   208   215   215
"""

from __future__ import annotations

import logging
import math
from typing import Final, Self

from ..batch import ScheduleBatch, work_of
from ..records.decision_log import StepTime
from .online_fit import OnlineFit

logger = logging.getLogger(__name__)

UNLIMITED: Final = 1 << 60
"""A number of tokens that is never reached."""


class PromptTime:
    """The seconds that the prompts of one step may take; each chunk spends a part.

    Attributes:
        decodes_s, waiting_s: predicted time of the step's decodes, and of the waiting prompts; for the log.
        given_s: time that prompts may take.
        left_s: the part of it that is not spent.
        token_s, pair_s: predicted time of a prompt token, and of one (query, key) pair of its attention.
        pixel_s: predicted time of the work on a pixel of a tile; 0 while none was measured.
        tiles_s: time that tiles may take, at most `left_s`.
    """

    def __init__(
        self,
        given_s: float,
        *,
        token_s: float,
        pair_s: float,
        page_size: int,
        decodes_s: float = 0.0,
        waiting_s: float = 0.0,
        pixel_s: float = 0.0,
        tiles_s: float = math.inf,
    ) -> None:
        """Start a pass; the first chunk may always take a page, so that prompts make progress."""
        self.decodes_s = decodes_s
        self.waiting_s = waiting_s
        self.given_s = self.left_s = given_s
        self.token_s = token_s
        self.pair_s = pair_s
        self.pixel_s = pixel_s
        self.tiles_s = tiles_s
        self._page_size = page_size
        self._spent_nothing = True

    @classmethod
    def unlimited(cls) -> Self:
        """A budget without a limit."""
        return cls(math.inf, token_s=0.0, pair_s=0.0, page_size=1)

    @property
    def is_unlimited(self) -> bool:
        """Whether time is no limit."""
        return self.given_s == math.inf

    @property
    def is_spent(self) -> bool:
        """Whether there is no time for one more token, at any position."""
        return self.most_tokens(0) < 1

    def most_tokens(self, start: int) -> int:
        """The longest run of prompt tokens from position `start` that fits in the remaining time.

        The m for which token_s · m + pair_s · (m · start + m (m + 1) / 2) = left_s.
        """
        return self._most_tokens(start, self.left_s)

    def _most_tokens(self, start: int, left_s: float) -> int:
        if self.is_unlimited:
            return UNLIMITED
        least = self._page_size if self._spent_nothing else 0
        if left_s <= 0:
            return least
        first_s = self.token_s + self.pair_s * (start + 0.5)
        # the root of the quadratic in the form without cancellation when pair_s is close to 0
        root = math.sqrt(first_s * first_s + 2 * self.pair_s * left_s)
        return max(int(min(2 * left_s / (first_s + root), UNLIMITED)), least)

    def spend(self, start: int, length: int) -> None:
        """Subtract the predicted time of a chunk of `length` tokens from position `start`."""
        self._spent_nothing = False
        self.left_s -= self._tokens_s(start, length)

    def most_tokens_with_tiles(self, start: int) -> int:
        """As `most_tokens`, within the time for tiles."""
        return self._most_tokens(start, min(self.left_s, self.tiles_s))

    def has_tiles(self, pixels: float, start: int, num_tokens: int) -> bool:
        """Whether there is time for work on so many pixels, and for the tokens from `start` on that need it."""
        if self.tiles_s == math.inf:
            return True
        needed_s = self.pixel_s * pixels + self._tokens_s(start, num_tokens)
        return self.pixel_s > 0 and needed_s <= min(self.left_s, self.tiles_s)

    def most_pixels(self) -> float:
        """Pixels of tiles for the work on which there is time."""
        return max(0.0, min(self.left_s, self.tiles_s) / self.pixel_s) if self.pixel_s else 0.0

    def spend_pixels(self, pixels: float) -> None:
        """Subtract the predicted time of work on tiles, unless it takes more than there is: see `TileBudget`."""
        work_s = self.pixel_s * pixels
        if work_s <= min(self.left_s, self.tiles_s):
            self.left_s -= work_s
            self.tiles_s -= work_s

    def spend_beside_tiles(self, start: int, length: int) -> None:
        """Subtract the predicted time of tokens from the time of tiles; it is subtracted from `left_s` by `spend`."""
        self.tiles_s -= self._tokens_s(start, length)

    def _tokens_s(self, start: int, length: int) -> float:
        pairs = length * start + length * (length + 1) / 2
        return self.token_s * length + self.pair_s * pairs


MAX_PASSES: Final = 16
"""Waiting prompts are computed in about this many steps, even if those take longer than the target."""
_DECODE_STIFFNESS: Final = (1.0, 10.0, 10.0)  # a step; a request in it; a token of its KV
_DECODE_SOLVE_INTERVAL: Final = 8  # decode steps are many, and alike
_PROMPT_STIFFNESS: Final = (10.0, 1.0, 10.0)  # a step with prompts; a token of them; a pair
_PIXEL_STIFFNESS: Final = (1.0,)
_LEAST_SHARE: Final = 0.05  # least share of a step's time that is attributed to its prompts


class StepTarget:
    """A time that steps with prompts and decodes should not exceed; 0: steps take as long as their tokens need."""

    def __init__(self, target_s: float, tile_parts: int = 1) -> None:
        """`tile_parts`: see `Capacity.encoder_tile_parts`."""
        self.target_s = target_s
        self._tile_parts = tile_parts
        self._decodes = OnlineFit(_DECODE_STIFFNESS, solve_interval=_DECODE_SOLVE_INTERVAL)
        self._prompts = OnlineFit(_PROMPT_STIFFNESS)
        self._pixels = OnlineFit(_PIXEL_STIFFNESS)

    def limits_beside(self, num_decodes: int) -> bool:
        """Whether time is a limit for prompts beside so many decodes."""
        return num_decodes > 0 and self.target_s > 0

    def for_prompts(
        self,
        num_decodes: int,
        kv_tokens: int,
        waiting_tokens: int,
        tokens_behind: int,
        page_size: int,
        *,
        num_with_images: int = 0,
    ) -> PromptTime:
        """The time that prompts may take in a step.

        Args:
            num_decodes: requests that decode in it.
            kv_tokens: tokens of KV that the decodes read.
            waiting_tokens: tokens of the prompts to be computed; it and the next one count only if time is a limit.
            tokens_behind: the same without the longest prompt.
            page_size: tokens that prompts always get.
            num_with_images: waiting and partial prompts with images.
        """
        fixed_s, token_s, pair_s = self._prompts.coefficients
        if not self.limits_beside(num_decodes):
            return PromptTime.unlimited()
        (pixel_s,) = self._pixels.coefficients
        # Without the fixed cost of prompts, which work on tiles does not have: such a step is at most twice as long.
        tiles_s = alone_s = self._decodes.predict((1.0, num_decodes, kv_tokens))
        if num_with_images > 1:
            tiles_s = max(self.target_s - alone_s, alone_s)
        if not (token_s or pair_s):
            return PromptTime(
                math.inf, token_s=0.0, pair_s=0.0, page_size=1, pixel_s=pixel_s, tiles_s=tiles_s
            )
        decodes_s = fixed_s + self._beside_prompts_s(num_decodes, kv_tokens)
        alone_s = max(decodes_s, alone_s)
        waiting_s = token_s * waiting_tokens
        prompts_s = max(self.target_s - decodes_s, alone_s, waiting_s / MAX_PASSES, token_s * tokens_behind)
        return PromptTime(
            prompts_s,
            token_s=token_s,
            pair_s=pair_s,
            page_size=page_size,
            decodes_s=decodes_s,
            waiting_s=waiting_s,
            pixel_s=pixel_s,
            tiles_s=tiles_s,
        )

    def tokens_of(self, pixels: float) -> int:
        """Tokens of a prompt that take as long as so many pixels of tiles, at least 1; 0 until both are measured."""
        (pixel_s,), token_s = self._pixels.coefficients, self._prompts.coefficients[1]
        return max(1, round(pixels * pixel_s / token_s)) if pixel_s and token_s else 0

    def predict(
        self,
        num_decodes: int,
        kv_tokens: int,
        prompt_tokens: int = 0,
        prompt_pairs: float = 0.0,
        *,
        with_decodes: bool = False,
        with_prompts: bool = False,
    ) -> float:
        """The predicted time of a step; 0 before the first measurements.

        Args:
            num_decodes: requests that decode in it.
            kv_tokens: tokens of KV that the decodes read.
            prompt_tokens, prompt_pairs: tokens of prompts, and (query, key) pairs of their attention.
            with_decodes, with_prompts: count the fixed part of a step with decodes, or with prompts, in any case.
        """
        decodes_s = 0.0
        if num_decodes or with_decodes:
            decodes_s = self._decodes.predict((1.0, num_decodes, kv_tokens))
        if not (prompt_tokens or with_prompts):
            return decodes_s
        prompts_s = self._prompts.predict((1.0, prompt_tokens, prompt_pairs))
        return max(decodes_s, prompts_s + self._beside_prompts_s(num_decodes, kv_tokens))

    @property
    def decode_costs(self) -> tuple[float, float]:
        """Seconds of a decoding request, and of a token of its KV."""
        _, row_s, kv_token_s = self._decodes.coefficients
        return row_s, kv_token_s

    @property
    def prompt_costs(self) -> tuple[float, float, float]:
        """Seconds of a prompt token, of a (query, key) pair, and of a pixel of a tile."""
        _, token_s, pair_s = self._prompts.coefficients
        return token_s, pair_s, self._pixels.coefficients[0]

    def explain(self, time: PromptTime) -> StepTime | None:
        """The figures that a pass decided with; None if time was no limit."""
        if time.is_unlimited:
            return None
        return StepTime(
            self.target_s, time.decodes_s, time.waiting_s, time.given_s, time.left_s, time.token_s
        )

    def measured(self, batch: ScheduleBatch, seconds: float, encode_s: float = 0.0) -> None:
        """Learn from a step that took `seconds`, without swaps, and besides `encode_s` for tiles of images."""
        if batch.plan.encodes:
            pixels = sum(each.work_pixels(self._tile_parts) for each in batch.plan.encodes)
            if encode_s > 0 and not self._pixels.coefficients[0]:
                _, height, width, _ = batch.plan.encodes[0].shape
                seconds_each = encode_s / pixels * height * width
                logger.info("encoding %d x %d pixels takes %.2g s here", width, height, seconds_each)
            self._pixels.learn((pixels,), encode_s)
        num_extends = batch.num_extends
        num_decodes, kv_tokens = len(batch) - num_extends, int(batch.end[num_extends:].sum())
        decodes = (1.0, num_decodes, kv_tokens)
        if not num_extends:
            if num_decodes and not batch.num_drafts:
                self._decodes.learn(decodes, seconds)
        elif num_decodes and self._decodes.predict(decodes) >= seconds:
            # The prediction for decodes is too high (the first ones compiled, for example): the difference would
            # make prompts seem free. This step shows that the decodes alone take no longer than the whole step.
            self._decodes.learn(decodes, seconds)
        else:
            work = work_of(batch, 1)
            prompts_s = max(seconds - self._beside_prompts_s(num_decodes, kv_tokens), _LEAST_SHARE * seconds)
            self._prompts.learn((1.0, work.prefill_tokens, work.prefill_pairs), prompts_s)

    def _beside_prompts_s(self, num_decodes: int, kv_tokens: int) -> float:
        """The predicted time that decodes add to a step with prompts."""
        _, row_s, kv_token_s = self._decodes.coefficients
        return row_s * num_decodes + kv_token_s * kv_tokens
