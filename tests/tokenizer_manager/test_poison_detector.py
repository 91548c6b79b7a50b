from __future__ import annotations

from array import array

import pytest

from engine.runtime.messages import GenerateRequest, Usage
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.generation import Choice, Generation
from engine.tokenizer_manager.recovery import MAX_GROUP_S, MIN_PROGRESS_TOKENS, PoisonDetector, group_size
from engine.tokenizer_manager.request_log import LoggedRequest, RequestLog

PROMPT = array("i", [1, 2, 3])


class Engine:
    """A request log whose requests are with a process that is lost now and then."""

    def __init__(self, *names: str, siblings: int = 1, restarts_left: int = 1) -> None:
        self.log = RequestLog()
        self.detector = PoisonDetector()
        self.restarts_left = restarts_left
        self.now_s = 0.0
        for name in names:
            choices = [Choice(f"{name}-{i}", i, PROMPT, 1) for i in range(siblings)]
            generation = Generation(name, choices, siblings, 0.0, lambda _: None)
            for choice in choices:
                message = GenerateRequest(
                    choice.rid, PROMPT.tobytes(), SamplingParams(max_new_tokens=100, seed=1)
                )
                logged = LoggedRequest(message, generation, choice)
                self.log.opened(logged)
                logged.send()

    def __getitem__(self, name: str) -> LoggedRequest:
        [logged] = [each for each in self.log if each.rid.partition("+")[0] == f"{name}-0"]
        return logged

    def deliver(self, name: str, num_tokens: int) -> list[str]:
        """Tokens arrive; the requests submitted because of it."""
        logged = self[name]
        logged.delivered_ids += bytes(4 * num_tokens)
        logged.usage = Usage(3, len(logged.delivered_ids) // 4)
        return self._submit(self.detector.next_group(logged, self.now_s, ended=False))

    def end(self, name: str) -> list[str]:
        """A request ends; the requests submitted because of it."""
        logged = self[name]
        self.log.ended(logged, self.now_s)
        return self._submit(self.detector.next_group(logged, self.now_s, ended=True))

    def wait(self, seconds: float) -> list[str]:
        """Time passes; the requests submitted then."""
        self.now_s += seconds
        return self._submit(self.detector.overdue_group(self.now_s))

    def lose(self, *started: str) -> tuple[list[str], list[str]]:
        """The process is lost and back: the poison requests, and those submitted; `started`: had begun, if known."""
        known = {self[name].rid for name in started} if started else None
        self.detector.lost(self.log, known)
        poison = self.detector.isolate(self.log, self.restarts_left, self.now_s)
        for logged in poison:
            self.log.ended(logged, self.now_s)
        submitted = self.detector.to_submit(list(self.log))
        self.log.resubmit(submitted)
        return names(poison), names(submitted)

    def _submit(self, submitted: list[LoggedRequest]) -> list[str]:
        self.log.resubmit(submitted)
        return names(submitted)


def names(requests: list[LoggedRequest]) -> list[str]:
    return [logged.rid.partition("-")[0] for logged in requests]


def test_one_loss_is_nobodys_fault():
    engine = Engine("a", "b")

    assert engine.lose() == ([], ["a", "b"])


def test_who_is_alone_at_two_losses_without_getting_on_is_poison():
    engine = Engine("a", "b")
    engine.lose()
    engine.deliver("b", MIN_PROGRESS_TOKENS)

    assert engine.lose() == (["a"], ["b"])
    assert engine.lose() == ([], ["b"])


def test_who_gets_on_between_losses_is_never_poison():
    engine = Engine("a")
    for _ in range(5):
        engine.deliver("a", MIN_PROGRESS_TOKENS)

        assert engine.lose() == ([], ["a"])


def test_siblings_are_poison_together():
    engine = Engine("a", siblings=2)
    engine.lose()

    assert engine.lose() == (["a", "a"], [])


def test_several_suspects_are_tried_one_after_the_other_while_others_run():
    engine = Engine("a", "b", "c", "d")
    engine.lose()
    engine.deliver("d", MIN_PROGRESS_TOKENS)

    assert engine.lose() == ([], ["a", "d"])
    assert engine.deliver("a", MIN_PROGRESS_TOKENS - 1) == []
    assert engine.deliver("d", 1) == []
    assert engine.deliver("a", 1) == ["b"]
    assert engine.end("b") == ["c"]
    assert engine.end("c") == []


def test_a_loss_during_a_trial_has_one_suspect():
    engine = Engine("a", "b", "c")
    engine.lose()

    assert engine.lose() == ([], ["a"])
    assert engine.deliver("a", MIN_PROGRESS_TOKENS) == ["b"]
    assert engine.lose() == (["b"], ["a", "c"])  # what c was suspected of has its cause
    assert engine.detector.num_quarantined == 0
    assert engine.lose() == (["c"], ["a"])  # it has one of its own


def test_who_ends_while_waiting_for_its_trial_is_left_out():
    engine = Engine("a", "b", "c")
    engine.lose()
    engine.lose()

    assert engine.end("b") == []
    assert engine.end("a") == ["c"]


def test_a_loss_before_anything_was_submitted_again_accuses_nobody():
    engine = Engine("a")
    engine.detector.lost(engine.log)
    engine.detector.lost(engine.log)

    assert engine.detector.isolate(engine.log, 1, 0.0) == []


def test_who_is_left_alone_because_another_suspect_went_is_tried_and_not_condemned():
    engine = Engine("a", "b")
    engine.lose()
    engine.detector.lost(engine.log)
    engine.end("b")  # its client left while nothing could be judged

    assert engine.detector.isolate(engine.log, 1, 0.0) == []
    assert names(engine.detector.to_submit(list(engine.log))) == ["a"]
    assert engine.detector.num_quarantined == 1


def test_who_only_waited_in_the_queue_is_no_suspect():
    engine = Engine("a", "b", "c")
    engine.lose("a")

    assert engine.lose("a") == (["a"], ["b", "c"])


def test_who_has_tokens_had_begun_whatever_the_scheduler_left_behind():
    engine = Engine("a", "b", "c")
    engine.deliver("b", 1)
    engine.lose("a")
    engine.deliver("b", 1)

    assert engine.lose("a") == ([], ["a", "c"])
    assert engine.deliver("a", MIN_PROGRESS_TOKENS) == ["b"]


def test_if_nobody_had_begun_whoever_waited_is_suspect():
    engine = Engine("a")
    engine.detector.lost(engine.log, set())
    assert engine.detector.isolate(engine.log, 1, 0.0) == []
    engine.log.resubmit(list(engine.log))
    engine.detector.lost(engine.log, set())

    assert names(engine.detector.isolate(engine.log, 1, 0.0)) == ["a"]


def test_who_waits_while_others_get_on_is_no_suspect_either():
    engine = Engine("a", "b")
    for _ in range(3):
        engine.deliver("a", MIN_PROGRESS_TOKENS)

        assert engine.lose("a") == ([], ["a", "b"])


@pytest.mark.parametrize("number", range(16))
def test_with_restarts_to_spare_suspects_are_halved_until_one_is_left(number):
    everybody, culprit = [f"r{i}" for i in range(16)], f"r{number}"
    engine = Engine(*everybody, restarts_left=20)
    engine.lose()
    poison, tried = engine.lose()
    num_losses = num_groups = 0
    while not poison:
        num_groups += 1
        assert num_groups <= 8
        if culprit in tried:
            num_losses += 1
            poison, tried = engine.lose()
            continue
        following = [name for each in tried for name in engine.deliver(each, MIN_PROGRESS_TOKENS)]
        assert set(tried).isdisjoint(following)
        tried = following

    assert poison == [culprit]
    assert num_losses <= 4  # of groups of 8, 4, 2, 1
    assert len(tried) == 15  # nobody waits any more
    assert engine.detector.num_quarantined == 0


@pytest.mark.parametrize(
    ("num", "num_losses", "size"),
    [
        (1, 1, 1),
        (5, 1, 1),
        (32, 1, 1),
        (33, 1, 2),
        (256, 1, 8),
        (64, 2, 8),
        (64, 3, 16),
        (64, 6, 32),
        (64, 100, 32),
        (5, 0, 1),
    ],
)
def test_groups_are_as_large_as_the_restarts_that_are_left_allow(num, num_losses, size):
    assert group_size(num, num_losses) == size


def test_siblings_are_tried_together():
    engine = Engine("a", "b", "c", siblings=2)
    engine.lose()

    assert engine.lose() == ([], ["a", "a"])


def test_who_does_not_get_on_holds_up_the_others_for_a_while_only():
    engine = Engine("a", "b", "c", "d", "e")
    engine.lose()

    assert engine.lose() == ([], ["a"])
    assert engine.wait(MAX_GROUP_S) == []
    assert engine.wait(1.0) == ["b"]
    assert engine.wait(MAX_GROUP_S + 1.0) == ["c", "d"]
    assert engine.lose() == ([], ["a"])  # with e, who had not been tried, behind the others
    assert engine.detector.num_quarantined == 5


def test_losses_during_a_trial_are_not_held_against_those_who_have_passed_theirs():
    passed = list("abcdefgh")
    engine = Engine(*passed, *"ijklmnop", restarts_left=20)
    engine.lose()
    engine.lose()
    following = [name for each in passed for name in engine.deliver(each, MIN_PROGRESS_TOKENS)]

    assert following == ["i", "j", "k", "l"]
    assert engine.lose() == ([], [*passed, "i", "j"])
    assert engine.lose() == ([], [*passed, "i"])
    assert engine.lose() == (["i"], [*passed, *"jklmnop"])


def test_who_kills_by_coming_is_found_although_it_never_ran():
    engine = Engine("running", "further", "deadly")
    engine.deliver("further", MIN_PROGRESS_TOKENS)

    assert engine.lose("running", "further", "deadly") == ([], ["running", "further", "deadly"])
    assert engine.lose() == ([], ["running", "further"])  # before any pass, so nobody knows
    assert engine.deliver("running", MIN_PROGRESS_TOKENS) == ["deadly"]
    assert engine.lose() == (["deadly"], ["running", "further"])


def test_the_time_of_a_recovery_is_no_time_of_a_trial():
    engine = Engine("a", "b", "c", "other")
    engine.deliver("other", MIN_PROGRESS_TOKENS)
    engine.lose()
    assert engine.lose() == ([], ["a", "other"])
    engine.deliver("other", MIN_PROGRESS_TOKENS)
    engine.now_s += MAX_GROUP_S + 1.0

    assert engine.lose("other") == ([], ["a", "other"])
    assert engine.wait(1.0) == []
    assert engine.wait(MAX_GROUP_S) == ["b"]
