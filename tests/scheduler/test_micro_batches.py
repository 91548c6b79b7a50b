"""Several pipeline stages: as many steps in flight, each with other requests, and the same tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.runtime.step_plan import GetMasks, GoOn, StepPlan, no_masks, to_the_end
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay
from tests.selection import examples

from .fake_runner import ints
from .grammar.toy_matcher import ToyGrammar
from .test_pipeline import LIVES, Piped, SlowDevice, SlowStep, launched_while, live


class StagedDevice(SlowDevice):
    """A device with stages: a plan's last tokens of requests must be settled before it is launched.

    Attributes:
        launched: the plans of all steps.
        waited: the number of steps that were waited for.
        known: row -> tokens that its request came with.
        sampled_in: row -> the last step in which it sampled.
    """

    def __init__(self, device: SlowDevice) -> None:
        super().__init__(device.runner, device.rng)
        self.launched: list[StepPlan] = []
        self.waited = 0
        self.known: dict[int, int] = {}
        self.sampled_in: dict[int, int] = {}
        self.most_in_flight = 0

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> SlowStep:
        self.launched.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.launched) - self.waited)
        self.known |= {new.row: len(ints(new.input_ids)) for new in plan.new_reqs}
        steps = zip(ints(plan.rows), ints(plan.num_computed_tokens), plan.samples, strict=True)
        for row, num_computed, samples in steps:
            if num_computed >= self.known[row]:
                assert self.sampled_in[row] <= self.waited, "its last token is not settled"
            if samples:
                self.sampled_in[row] = plan.step_id
        return super().launch(plan, go_on, masks)

    def note(self, what: str, step_id: int) -> None:
        self.waited += what == "wait"
        super().note(what, step_id)


class Staged(Piped):
    """`Piped` with stages."""

    def __init__(self, num_stages: int, **config: Any) -> None:
        super().__init__(overlapped=False, num_stages=num_stages, **config)
        self.staged = StagedDevice(self.device)
        self.device = self.staged
        self.pipeline._runner = self.staged


def test_with_stages_a_step_with_drafts_stays_in_flight():
    """Its requests are in no other step, so the next one needs none of its tokens."""
    harness = Staged(2, num_pages=128)
    for _ in range(4):
        harness.submit(grammar=ToyGrammar(seed=3, length=30, forced=((5, 12), (20, 26))), max_new_tokens=40)
    harness.run()

    drafted = {plan.step_id for plan in harness.staged.launched if plan.draft_ids}
    assert len(drafted) > 3
    assert {step + 1 for step in drafted} <= launched_while(harness, 1)


def test_two_steps_are_in_flight_each_with_half_of_the_requests():
    harness = Staged(2, num_pages=128)
    for _ in range(6):
        harness.submit(max_new_tokens=8)
    harness.run()

    decodes = [ints(plan.rows) for plan in harness.staged.launched[1:-1]]
    assert harness.device.calls[:7] == [
        "launch 1",
        "wait 1",
        "launch 2",
        "launch 3",
        "wait 2",
        "launch 4",
        "wait 3",
    ]
    assert {len(rows) for rows in decodes} == {3}
    assert [set(rows) for rows in decodes[::2]] == [set(decodes[0])] * 7
    assert set(decodes[0]).isdisjoint(decodes[1])
    assert harness.staged.most_in_flight == 2


def test_chunks_of_one_prompt_follow_each_other_without_waiting():
    harness = Staged(3, chunked_prefill_size=8, num_pages=128)
    harness.submit(prompt_len=40, max_new_tokens=2)
    harness.run()

    assert harness.device.calls[:8] == [
        *("launch 1", "launch 2", "launch 3", "wait 1", "launch 4", "wait 2", "launch 5", "wait 3"),
    ]
    plans = harness.staged.launched
    assert [ints(plan.num_computed_tokens) for plan in plans[:5]] == [[0], [8], [16], [24], [32]]
    # The last chunk samples, so the request's next step waits for its token.
    assert harness.device.calls[8:11] == ["wait 4", "wait 5", "launch 6"]


def test_prompts_and_decodes_fill_the_stages_together():
    harness = Staged(2, chunked_prefill_size=8, num_pages=128)
    harness.submit("decodes", max_new_tokens=12)
    while not harness.answers["decodes"].tokens:
        harness.advance()
    first = len(harness.staged.launched)
    harness.submit("prompt", prompt_len=40, max_new_tokens=1)
    harness.run()

    plans = [
        plan
        for plan in harness.staged.launched[first:]
        if any(count > 1 for count in ints(plan.num_scheduled_tokens))
    ]
    # A decode every second step: its token must come back first. Chunks are whole pages.
    assert [ints(plan.num_scheduled_tokens) for plan in plans] == [[4, 1], [8]] * 3 + [[4, 1]]
    assert [plan.step_id for plan in plans] == list(range(plans[0].step_id, plans[0].step_id + len(plans)))


def test_a_single_request_leaves_stages_empty_and_goes_on():
    harness = Staged(4)
    harness.submit(max_new_tokens=5)
    harness.run()

    assert harness.staged.most_in_flight == 1
    assert len(harness.answers["r0"].tokens) == 5


def test_no_request_is_left_over_for_long():
    """With requests that begin and end at different times each still decodes about once per round of the stages."""
    harness = Staged(3, num_pages=256, max_running_requests=11)
    for n in range(11):
        harness.submit(max_new_tokens=20 + 3 * n)
    harness.run()

    turns: dict[int, list[int]] = {}
    for plan in harness.staged.launched[:60]:
        for row in ints(plan.rows):
            turns.setdefault(row, []).append(plan.step_id)
    gaps = [later - earlier for steps in turns.values() for earlier, later in itertools.pairwise(steps)]
    assert max(gaps) <= 2 * 3


@pytest.mark.parametrize("num_stages", [2, 3])
def test_pages_that_run_out_retract_requests_also_in_flight(num_stages):
    harness = Staged(num_stages, num_pages=24, page_size=4, admission_estimator="none")
    for _ in range(6):
        harness.submit(prompt_len=12, max_new_tokens=24)
    harness.run()

    assert harness.scheduler.report(harness.now_s).totals.retracted_reqs > 0


def test_masks_do_not_wait_for_steps_in_flight():
    harness = Staged(2, num_pages=128)
    for n in range(4):
        harness.submit(max_new_tokens=6, grammar=ToyGrammar(seed=n))
    harness.run()

    assert harness.device.calls[4:9] == ["masks 2", "launch 3", "masks 3", "wait 2", "launch 4"]


@settings(max_examples=examples(9), suppress_health_check=[HealthCheck.too_slow])
@given(config=LIVES, seed=st.integers(0, 1 << 30), num_stages=st.integers(2, 4))
def test_with_stages_everybody_gets_the_same_tokens(config, seed, num_stages):
    harnesses = [Piped(overlapped=False, **config), Staged(num_stages, seed=seed, **config)]
    for harness in harnesses:
        live(harness, seed, aborts=False)

    assert harnesses[0].outcome() == harnesses[1].outcome()


@settings(
    max_examples=examples(6),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(config=LIVES, seed=st.integers(0, 1 << 30))
def test_with_aborts_too_and_every_decision_can_be_made_again(tmp_path, config, seed):
    path = tmp_path / "decisions.log"
    path.unlink(missing_ok=True)
    harness = Staged(3, seed=seed, log=path, **config)
    live(harness, seed, aborts=True)
    harness.recorder.close()

    (result,) = [replay(run) for run in read_runs(path)]
    assert result.difference is None, result
    assert result.num_passes == harness.scheduler.decisions.num_passes
    assert not result.raised
