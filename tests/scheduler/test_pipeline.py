"""Steps launched before the tokens of the one before are known: the same answers, in an order to rely on."""

from __future__ import annotations

import random
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.runtime.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from engine.runtime.config.server_config import LogConfig
from engine.runtime.messages import AbortRequest, Call, FinishKind, FlushCache
from engine.runtime.step_plan import RUNNER_DRAFT, GetMasks, GoOn, StepPlan, StepResult, no_masks, to_the_end
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.recorder import Recorder, make_recorder
from engine.scheduler.journal.replay import replay
from engine.scheduler.pipeline import Pipeline
from engine.scheduler.records.decision_log import PassRecord, Settled
from tests.selection import examples

from .fake_runner import FakeRunner, ints
from .grammar.toy_matcher import FixedMasks, ToyGrammar
from .harness import Harness
from .journal.recorded import SCHEDULER_FIELDS


class SlowDevice:
    """Runs plans in their order, some time after they were launched, and at the latest when somebody waits for them.

    So a plan must say everything by itself: nothing that the host does after the launch may change what it means.

    Attributes:
        calls: "launch 1", "wait 1", ... as they came; "masks 2" when a step has its masks.
        fail: "launch" or "wait" -> the step in which that raises.
    """

    def __init__(self, runner: FakeRunner, rng: random.Random | None = None) -> None:
        self.runner = runner
        self.rng = rng
        self.calls: list[str] = []
        self.queue: deque[SlowStep] = deque()
        self.fail: dict[str, int] = {}

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> SlowStep:
        self.note("launch", plan.step_id)
        step = SlowStep(self, plan)
        if masks is not no_masks and RUNNER_DRAFT in ints(plan.draft_ids):
            # The drafter waits for the device, and the masks for its drafts: nothing is left to be done later.
            self.note("masks", plan.step_id)
            step.masks, step.here = masks, self.runner.here
            self.queue.append(step)
            while step.result is None:
                self.run_next()
            return step
        if masks is not no_masks:  # the forward pass is on the device; the masks are copied after it
            found = masks()
            self.note("masks", plan.step_id)
            copied = found and found._replace(bits=found.bits.copy())
            step.masks, step.here = FixedMasks(copied, masks.unmasked), self.runner.here
        self.queue.append(step)
        self.work()
        return step

    def work(self) -> None:
        """Be done with some of what is queued, by chance."""
        while self.rng is not None and self.queue and self.rng.random() < 0.3:
            self.run_next()

    def run_next(self) -> None:
        step = self.queue.popleft()
        self.runner.here = step.here
        step.result = self.runner.launch(step.plan, masks=step.masks).wait()

    def note(self, what: str, step_id: int) -> None:
        self.calls.append(f"{what} {step_id}")
        if self.fail.get(what) == step_id:
            raise RuntimeError("the device is lost")


class SlowStep:
    def __init__(self, device: SlowDevice, plan: StepPlan) -> None:
        self.device = device
        self.plan = plan
        self.result: StepResult | None = None
        self.masks: GetMasks = no_masks
        self.here: list[bool] = []

    def wait(self) -> StepResult:
        self.device.note("wait", self.plan.step_id)
        self.device.work()
        while self.result is None:
            self.device.run_next()
        return self.result


class Piped(Harness):
    """A harness driven by a `Pipeline` instead of its own loop."""

    def __init__(self, *, overlapped: bool, seed: int | None = None, log: Path | None = None, **config: Any):
        super().__init__(overlap=int(overlapped), **config)
        self.device = SlowDevice(self.runner, random.Random(seed) if seed is not None else None)
        self.recorder: Recorder = Recorder()
        if log is not None:
            config.setdefault("chunked_prefill_size", 64)
            wanted = {name: value for name, value in config.items() if name in SCHEDULER_FIELDS}
            settings = EngineConfig(
                scheduler=SchedulerConfig(overlap=overlapped, **wanted),
                cache=CacheConfig(radix_cache=config.get("radix_cache", True)),
                log=LogConfig(decision_log=str(log)),
            )
            self.recorder = make_recorder(
                settings, self.capacity, self.eos, self.scheduler, wall_s=1e9, now_s=self.now_s
            )
        pipeline = Pipeline(
            self.scheduler, self.device, self.recorder, lambda: self.now_s, overlap=overlapped
        )
        self.pipeline = pipeline
        core = self.scheduler

        class ThroughThePipeline:
            """What arrives takes the way of the server's messages."""

            def handle(self, message: Any, _now_s: float) -> None:
                pipeline.handle(message)

            def __getattr__(self, name: str) -> Any:
                return getattr(core, name)

        self.scheduler = ThroughThePipeline()  # type: ignore[assignment]

    def advance(self) -> bool:
        self.now_s += 0.01
        advanced = self.pipeline.advance(lambda: False)
        self.collect()
        self.scheduler.audit()
        return advanced

    def run(self) -> None:
        """Until nothing is left; then nothing may stay behind."""
        for _ in range(20_000):
            if self.advance():
                continue
            wake_s = self.scheduler.wake_s()
            if not self.scheduler.num_unfinished or wake_s is None:
                break
            self.pipeline.idle()
            self.now_s = max(self.now_s, wake_s)
        else:
            raise AssertionError(f"not idle: {self.scheduler.report(self.now_s)}")
        self.pipeline.idle()
        self.check_answers()
        assert not self.runner.rows, "the runner keeps rows of requests that have left"

    def outcome(self) -> dict[str, Any]:
        return {rid: (answer.tokens, answer.finish) for rid, answer in self.answers.items()}


# ------------------------------------------------------------ order


def test_plain_steps_are_settled_before_the_next_is_planned():
    harness = Piped(overlapped=False)
    harness.submit(max_new_tokens=3)
    harness.run()

    assert harness.device.calls == [
        *("launch 1", "wait 1", "launch 2", "wait 2", "launch 3", "wait 3"),
        *("launch 4", "wait 4"),  # the runner forgets the request
    ]


def test_overlapped_steps_are_launched_before_the_one_before_is_settled():
    harness = Piped(overlapped=True)
    harness.submit(max_new_tokens=3)
    harness.run()

    assert harness.device.calls == [
        *("launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"),
        *("launch 4", "wait 4"),
    ]


def test_all_but_the_first_step_are_launched_while_another_runs():
    """What overlap is for: the device has the next step before the host knows the tokens of the one it computes."""
    harness = Piped(overlapped=True, num_pages=128)
    for _ in range(4):
        harness.submit(prompt_len=16, max_new_tokens=50)
    harness.run()

    in_flight, alone = 0, []
    for call in harness.device.calls:
        what, _, step = call.partition(" ")
        if what == "launch" and in_flight == 0:
            alone.append(int(step))
        in_flight += 1 if what == "launch" else -1
    assert alone == [1, 51]  # 51 has the runner forget the last request


def test_at_most_two_steps_are_on_the_device():
    harness = Piped(overlapped=True)
    for n in range(12):
        harness.submit(prompt_len=30, max_new_tokens=1 + n)
    harness.run()

    in_flight = most = 0
    for call in harness.device.calls:
        in_flight += 1 if call.startswith("launch") else -1
        most = max(most, in_flight)
    assert (most, in_flight) == (2, 0)


def test_a_plan_that_waits_for_the_step_in_flight_is_made_right_after_it():
    """The second prompt is held back until the first, which begins alike, is in the prefix cache."""
    harness = Piped(overlapped=True, page_size=4)
    prompt = list(range(1, 41))
    harness.submit("first", prompt=prompt, max_new_tokens=1)
    harness.submit("second", prompt=[*prompt, 50, 51, 52, 53], max_new_tokens=1)

    assert [harness.advance() for _ in range(3)] == [True, True, True]

    assert harness.device.calls == ["launch 1", "wait 1", "launch 2"]
    harness.run()
    assert harness.answers["second"].rows[0].usage.cached_tokens == 40


# ------------------------------------------------------------ masks


def test_the_masks_of_a_step_come_after_its_forward_pass_and_the_tokens_of_the_step_before():
    harness = Piped(overlapped=True)
    harness.submit(max_new_tokens=3, grammar=ToyGrammar())
    harness.run()

    assert harness.device.calls == [
        *("launch 1", "masks 1", "launch 2", "wait 1", "masks 2", "launch 3", "wait 2", "masks 3", "wait 3"),
        *("launch 4", "wait 4"),
    ]


def test_without_overlap_each_step_has_its_masks_at_once():
    harness = Piped(overlapped=False)
    harness.submit(max_new_tokens=2, grammar=ToyGrammar())
    harness.run()

    assert harness.device.calls[:6] == ["launch 1", "masks 1", "wait 1", "launch 2", "masks 2", "wait 2"]


def test_steps_without_grammars_take_no_masks():
    harness = Piped(overlapped=True, chunked_prefill_size=8)
    harness.submit(max_new_tokens=9)
    for _ in range(3):
        harness.advance()
    assert harness.device.calls == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2"]
    harness.submit(prompt_len=20, max_new_tokens=2, grammar=ToyGrammar())
    harness.run()
    masks = [call for call in harness.device.calls if call.startswith("masks")]
    assert masks == ["masks 8", "masks 9"], "its prompt took steps 4 to 8"


def test_a_grammar_that_ends_leaves_a_surplus_step_without_a_mask():
    harness = Piped(overlapped=True)
    harness.submit("a", max_new_tokens=20, grammar=ToyGrammar(length=2))
    harness.submit("b", max_new_tokens=20, grammar=ToyGrammar(seed=1))
    harness.run()

    assert harness.answers["a"].finish is not None and harness.answers["a"].finish.matched == "grammar"
    assert harness.runner.num_masks == 22


# ------------------------------------------------------------ what is known one step late


def test_whoever_ends_while_his_next_token_is_computed_gets_none_of_it():
    eos = tuple(range(0, 97, 3))
    harness = Piped(overlapped=True, eos=eos)
    for _ in range(6):
        harness.submit(ignore_eos=False, max_new_tokens=40)
    harness.run()

    assert {answer.finish.kind for answer in harness.answers.values() if answer.finish} == {FinishKind.STOP}
    assert harness.device.calls[-1].startswith("wait")


def test_a_surplus_step_may_be_the_last_thing_in_flight():
    """The request ends by its stop token while its next token is computed; then nobody is there, but a step is."""
    harness = Piped(overlapped=True, eos=tuple(range(1, 97)))
    harness.submit(ignore_eos=False, max_new_tokens=40, prompt=[1, 2, 3])
    while harness.answers["r0"].finish is None:
        assert harness.advance()

    assert harness.scheduler.num_unfinished == 0
    assert harness.device.calls == ["launch 1", "launch 2", "wait 1"]
    assert harness.advance()
    harness.run()
    assert len(harness.answers["r0"].tokens) == 1


def test_no_surplus_step_where_the_length_is_the_end():
    harness = Piped(overlapped=True)
    harness.submit(max_new_tokens=1)
    harness.run()

    assert harness.device.calls == ["launch 1", "wait 1", "launch 2", "wait 2"]
    assert harness.runner.steps == 2


@pytest.mark.parametrize("num_advances", range(1, 9))
def test_an_abort_at_any_time_ends_the_request_at_once(num_advances):
    harness = Piped(overlapped=True, chunked_prefill_size=8)
    harness.submit("gone", prompt_len=20, max_new_tokens=20)
    harness.submit("stays", prompt_len=20, max_new_tokens=20)
    for _ in range(num_advances):
        harness.advance()

    harness.abort("gone", "client disconnected")

    finish = harness.answers["gone"].finish
    assert finish is not None and finish.kind is FinishKind.ABORT
    harness.run()
    assert len(harness.answers["stays"].tokens) == 20


@pytest.mark.parametrize("timeout_s", [0.015, 0.035, 0.055, 0.125])
def test_a_deadline_passes_while_a_step_is_in_flight(timeout_s):
    harness = Piped(overlapped=True, chunked_prefill_size=8)
    harness.submit("late", prompt_len=20, max_new_tokens=30, message={"timeout_s": timeout_s})
    harness.submit("stays", prompt_len=20, max_new_tokens=30)
    harness.run()

    finish = harness.answers["late"].finish
    assert finish is not None and finish.kind not in (FinishKind.STOP, FinishKind.LENGTH)
    assert len(harness.answers["stays"].tokens) == 30


def test_a_failing_request_ends_alone_while_its_next_token_is_computed():
    harness = Piped(overlapped=True)
    harness.submit("bad", max_new_tokens=20)
    harness.submit("good", max_new_tokens=20)
    for _ in range(3):
        harness.advance()
    harness.runner.fail_next.add("bad")
    harness.run()

    finish = harness.answers["bad"].finish
    assert finish is not None and finish.kind is FinishKind.ERROR
    assert len(harness.answers["good"].tokens) == 20


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("what", ["launch", "wait"])
def test_a_device_that_is_lost_ends_the_loop(what, overlapped):
    harness = Piped(overlapped=overlapped)
    harness.device.fail = {what: 3}
    harness.submit(max_new_tokens=20)

    with pytest.raises(RuntimeError, match="the device is lost"):
        harness.run()


def test_idle_is_refused_while_a_step_is_in_flight():
    harness = Piped(overlapped=True)
    harness.submit(max_new_tokens=5)
    harness.advance()

    with pytest.raises(AssertionError, match="1 steps are in flight"):
        harness.pipeline.idle()


# ------------------------------------------------------------ drafts


def launched_while(harness: Piped, ahead_of: int) -> set[int]:
    """The steps that were launched before the step so many before them was waited for."""
    at = {call: place for place, call in enumerate(harness.device.calls)}
    steps = [int(call.split()[1]) for call in harness.device.calls if call.startswith("launch")]
    return {step for step in steps[ahead_of:] if at[f"launch {step}"] < at[f"wait {step - ahead_of}"]}


def test_steps_with_drafts_are_planned_ahead_and_the_next_one_when_they_are_settled():
    """The unknown token is taken for the first draft, and the drafts of the step are those that follow it."""
    harness = Piped(overlapped=True, speculative="ngram", memory=2, num_pages=200)
    circle = [11, 12, 13, 14, 15, 16]
    harness.submit("a", prompt=circle, max_new_tokens=120)
    harness.submit("b", prompt=[21, *circle], max_new_tokens=60)
    harness.run()  # checks the answers

    passes = [each for each in harness.scheduler.decisions if isinstance(each, PassRecord) and each.step_id]
    drafted = {each.step_id for each in passes if each.num_drafts}
    plain = {each.step_id for each in passes} - drafted
    ahead = launched_while(harness, 1)
    assert len(drafted) > 10
    assert not {step for step in ahead if step - 1 in drafted}
    assert drafted & ahead, "drafts that follow a token which nobody on the host knows"
    last = max(each.step_id for each in passes)
    assert {step + 1 for step in plain if step < last} <= ahead | {last}
    taken = [
        len(each.next_token_ids) - len(each.num_next_tokens)
        for each in harness.scheduler.decisions
        if isinstance(each, Settled) and each.step_id in drafted & ahead
    ]
    assert taken and statistics.mean(taken) > 4, "bytes of tokens beyond one for each request"


@pytest.mark.parametrize("max_new_tokens", range(8, 20))
def test_drafts_after_an_unknown_token_end_where_the_answer_must(monkeypatch, max_new_tokens):
    """The last token of an answer is no input: its slot belongs to nobody."""
    harness = Piped(overlapped=True, speculative="ngram", memory=2, num_pages=200, page_size=1)
    plans: list[StepPlan] = []
    launch = harness.device.launch

    def noting(plan: StepPlan, *more: Any, **named: Any) -> SlowStep:
        plans.append(plan)
        return launch(plan, *more, **named)

    monkeypatch.setattr(harness.device, "launch", noting)
    circle = [11, 12, 13, 14, 15, 16]
    harness.submit("warm", prompt=circle, max_new_tokens=100)
    harness.run()
    plans.clear()
    harness.submit("a", prompt=circle * 3, max_new_tokens=max_new_tokens)
    harness.run()

    assert any(plan.num_drafts for plan in plans)
    for plan in plans:
        end = sum(np.frombuffer(plan.num_computed_tokens + plan.num_scheduled_tokens, dtype=np.int32))
        assert end < 18 + max_new_tokens


def test_with_drafts_a_step_with_grammars_is_settled_before_the_next_one():
    """Forced tokens follow what the grammar has accepted, so the next plan needs the tokens."""
    harness = Piped(overlapped=True, speculative="ngram", num_pages=200)
    grammar = ToyGrammar(seed=3, length=30, forced=((5, 12), (20, 26)))
    harness.submit("a", grammar=grammar, max_new_tokens=40)
    harness.run()

    assert harness.scheduler.report(0.0).totals.accepted_draft_tokens >= 10
    assert launched_while(harness, 1) <= {2}  # after the step of the prompt


# ------------------------------------------------------------ the same tokens, whatever happens

LIVES = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from([20, 40, 64]),
        "num_host_pages": st.sampled_from([0, 16]),
        "page_size": st.sampled_from([1, 4]),
        "chunked_prefill_size": st.sampled_from([-1, 8, 24]),
        "phases": st.sampled_from(["mixed", "prefill-first", "decode-first"]),
        "preemption_mode": st.sampled_from(["recompute", "swap", "cost"]),
        "schedule_policy": st.sampled_from(["fcfs", "lpm", "priority"]),
        "schedule_conservativeness": st.sampled_from([0.05, 1.0]),
        "max_num_partial_prefills": st.sampled_from([1, 2]),
        "radix_cache": st.booleans(),
        "chaos": st.sampled_from([None, "retract=0.3:15"]),
        "speculative": st.sampled_from(["off", "ngram", "suffix", "mtp"]),
        "memory": st.sampled_from([None, 2]),
    }
)


def live(harness: Piped, seed: int, *, aborts: bool) -> None:
    """Requests of all kinds come, and some of them go, while steps run; then all are finished."""
    rng = random.Random(seed)
    for n in range(80):
        dice = rng.random()
        if dice < 0.25:
            prompt = [1 + position % 5 for position in range(rng.randint(0, 12))]
            prompt += rng.choices(range(1, 97), k=rng.randint(1, 8))
            sampling: dict[str, Any] = {
                "max_new_tokens": rng.randint(1, 20),
                "min_new_tokens": rng.choice([0, 0, 1]),
                "stop_token_ids": rng.choice([(), tuple(range(0, 97, 9))]),
                "logprobs": rng.choice([None, None, 0]),
            }
            fields = {"priority": rng.choice([0, 50])}
            num_siblings = rng.choice([1, 1, 3])
            grammar = None
            if rng.random() < 0.4:
                grammar = ToyGrammar(
                    seed=rng.randint(0, 99),
                    length=rng.choice([1, 3, 12, 90]),
                    ends_early=rng.random() < 0.3,
                    free_until=rng.choice([0, 0, 3]),
                    forced=rng.choice([(), ((2, 7),), ((0, 20),)]),
                )
            for sibling in range(num_siblings):
                harness.submit(
                    f"r{n}-{sibling}",
                    prompt=prompt,
                    ignore_eos=rng.random() < 0.5,
                    message=fields | {"group": f"g{n}" if num_siblings > 1 else ""},
                    grammar=grammar,
                    **sampling,
                )
        elif dice < 0.3 and aborts and harness.answers:
            harness.scheduler.handle(AbortRequest(rng.choice(list(harness.answers)), "gone"), harness.now_s)
            harness.collect()
        elif dice < 0.32:
            harness.scheduler.handle(Call(n, FlushCache()), harness.now_s)
            harness.collect()
        else:
            harness.advance()
    harness.run()


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(config=LIVES, seed=st.integers(0, 1 << 30))
def test_overlapped_or_not_everybody_gets_the_same_tokens(config, seed):
    harnesses = [Piped(overlapped=False, **config), Piped(overlapped=True, seed=seed, **config)]
    for harness in harnesses:
        live(harness, seed, aborts=False)

    assert harnesses[0].outcome() == harnesses[1].outcome()


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(config=LIVES, seed=st.integers(0, 1 << 30))
def test_with_aborts_too_and_every_decision_can_be_made_again(tmp_path, config, seed):
    path = tmp_path / "decisions.log"
    path.unlink(missing_ok=True)
    harness = Piped(overlapped=True, seed=seed, log=path, **config)
    live(harness, seed, aborts=True)
    harness.recorder.close()

    (result,) = [replay(run) for run in read_runs(path)]
    assert result.difference is None, result
    assert result.num_passes == harness.scheduler.decisions.num_passes
    assert not result.raised


def test_a_log_that_ends_in_a_lost_device_is_replayed_to_its_end(tmp_path):
    path = tmp_path / "decisions.log"
    harness = Piped(overlapped=True, log=path)
    harness.device.fail = {"wait": 4}
    harness.submit(max_new_tokens=20)
    with pytest.raises(RuntimeError):
        harness.run()
    harness.recorder.close()

    (result,) = [replay(run) for run in read_runs(path)]

    assert result.is_equal
    assert result.num_passes == 5  # the last one was planned and launched before the device was lost
