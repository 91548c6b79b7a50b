"""Pipeline stages in steps: `StagedRunner` on rank 0, and `StageRank` on the other ranks.

Rank 0 sends each plan to all ranks, computes its own stage and hands on; several steps are in flight, each in another
stage. A step's result comes from the last stage. Its tokens are the input of a later step on the first stage: rank 0
has them with the result, and sends them to the other ranks of its stage with the next plan. So a request that samples
may be in one step in flight only, as `Capacity.num_stages` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ...runtime.step_plan import (
    LaunchStep,
    PackedMasks,
    RowTokens,
    StageResult,
    TokenMasks,
    no_masks,
    to_the_end,
)
from .ranked_runner import WaitingPending

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...runtime.step_plan import GetMasks, GoOn, Pending, StepPlan, StepResult
    from .pp_link import GetResults, StageWire
    from .ranked_runner import Sender
    from .tp_group import TPGroup


class StoringRunner(Protocol):
    """The part of `ModelRunner` that stages call: it accepts tokens which it has not sampled."""

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending: ...

    def store_tokens(self, sampled: RowTokens) -> None: ...


@dataclass(slots=True, eq=False)
class StagedRunner:
    """The `Runner` of rank 0. Steps must be waited for in the order of launch."""

    runner: StoringRunner
    others: Sender
    wire: StageWire
    group: TPGroup
    _settled: list[RowTokens] = field(init=False, default_factory=list)

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Pending:
        """Asks for all masks at once, and before the step."""
        assert plan.num_rounds == 1, "the other ranks cannot know when a multi-step decode ends"
        sampled = RowTokens(
            b"".join(each.rows for each in self._settled), b"".join(each.token_ids for each in self._settled)
        )
        self._settled.clear()
        packed = None if masks is no_masks else _packed(masks())
        self.others.send(LaunchStep(plan, sampled, packed))
        get_results = self.wire.expect_results()
        self.runner.store_tokens(sampled)
        own = WaitingPending(self.runner.launch(plan), self.group)
        return StagedPending(own, plan, get_results, masks, self._settled.append)


@dataclass(slots=True, eq=False)
class StagedPending:
    """A step in flight through all stages; `wait` may be called once, and gives the tokens to `settle`."""

    pending: Pending
    plan: StepPlan
    get_results: GetResults
    masks: GetMasks
    settle: Callable[[RowTokens], None]

    def wait(self) -> StepResult:
        """The result of the last stage; its times are the sums over the stages."""
        own = self.pending.wait()
        others = [_DECODER.decode(data) for data in self.get_results()]
        last = others[-1]
        if last.unmasked:
            self.masks.unmasked(np.frombuffer(last.unmasked, dtype=np.int64))
        results = [own, *(each.result for each in others)]
        assert all(each.step_id == self.plan.step_id for each in results), [each.step_id for each in results]
        rows = np.frombuffer(self.plan.rows, dtype=np.int32)
        samples = np.frombuffer(self.plan.samples, dtype=np.bool_)
        self.settle(RowTokens(rows[samples].tobytes(), _last_tokens(last.result)))
        return replace(
            last.result,
            forward_s=sum(each.forward_s for each in results),
            swap_s=sum(each.swap_s for each in results),
        )


class StageRank:
    """Executes the steps of a rank other than 0 in a model with pipeline stages, and answers."""

    def __init__(self, runner: StoringRunner, wire: StageWire, group: TPGroup) -> None:
        self._runner = runner
        self._wire = wire
        self._answers = group.rank == 0 and not wire.stage.is_first

    def launch(self, message: LaunchStep) -> Pending:
        """Start a step; after its `wait` the result is on its way to rank 0."""
        stage, waited_s = self._wire.stage, self._wire.waited_s
        if stage.is_first:
            self._runner.store_tokens(message.sampled)
        masks = None if message.masks is None or not stage.is_last else SentMasks(message.masks)
        pending = self._runner.launch(message.plan, masks=masks or no_masks)
        if not self._answers:
            return pending
        return _AnsweringPending(pending, self._wire, masks, self._wire.waited_s - waited_s)


@dataclass(slots=True, eq=False)
class _AnsweringPending:
    """A step with a result for rank 0."""

    pending: Pending
    wire: StageWire
    masks: SentMasks | None
    waited_s: float

    def wait(self) -> StepResult:
        """Wait for the device and send the result."""
        result = self.pending.wait()
        result = replace(result, forward_s=max(0.0, result.forward_s - self.waited_s))
        unmasked = b"" if self.masks is None else self.masks.token_ids.tobytes()
        self.wire.send_result(_ENCODER.encode(StageResult(result, unmasked)))
        return result


class SentMasks:
    """A `GetMasks` with the masks that rank 0 has sent.

    Attributes:
        token_ids: see `GetMasks.unmasked`.
    """

    def __init__(self, packed: PackedMasks) -> None:
        # Copied, because torch wants memory that it could write to.
        bits = np.frombuffer(packed.bits, dtype=np.int32).reshape(-1, packed.num_words).copy()
        self._masks = TokenMasks(np.frombuffer(packed.indices, dtype=np.int64).copy(), bits)
        self.token_ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __call__(self) -> TokenMasks:
        return self._masks

    def before(self) -> TokenMasks:
        """All of them."""
        return self._masks

    def drafted(self, draft_ids: bytes) -> None:
        raise AssertionError("a model with pipeline stages has no drafter")

    def unmasked(self, token_ids: npt.NDArray[np.int64]) -> None:
        self.token_ids = token_ids

    def after(self, token_ids: npt.NDArray[np.int64]) -> None:
        """There are no others."""


def _last_tokens(result: StepResult) -> bytes:
    """[S] int32, the last token of each request that samples; with drafts a request has several."""
    if not result.num_next_tokens:
        return result.next_token_ids
    lasts = np.frombuffer(result.num_next_tokens, dtype=np.int32).cumsum() - 1
    token_ids: npt.NDArray[np.int32] = np.frombuffer(result.next_token_ids, dtype=np.int32)[lasts]
    return token_ids.tobytes()


def _packed(masks: TokenMasks | None) -> PackedMasks | None:
    if masks is None:
        return None
    return PackedMasks(masks.indices.tobytes(), masks.bits.tobytes(), masks.bits.shape[1])


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(StageResult)
