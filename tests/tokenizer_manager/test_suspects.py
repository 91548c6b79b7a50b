from __future__ import annotations

from array import array

from engine.runtime.messages import GenerateRequest, Usage
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.generation import Choice, Generation
from engine.tokenizer_manager.request_log import LoggedRequest, RequestLog
from engine.tokenizer_manager.suspects import MIN_PROGRESS_TOKENS, Suspects

PROMPT = array("i", [1, 2, 3])


class Engine:
    """A request log whose requests are with a process that is lost now and then."""

    def __init__(self, *names: str, siblings: int = 1) -> None:
        self.log = RequestLog()
        self.suspects = Suspects()
        for name in names:
            choices = [Choice(f"{name}-{i}", i, PROMPT, 1) for i in range(siblings)]
            generation = Generation(name, choices, siblings, 0.0, lambda _: None)
            for choice in choices:
                message = GenerateRequest(
                    choice.rid, PROMPT.tobytes(), SamplingParams(max_new_tokens=100, seed=1)
                )
                logged = LoggedRequest(message, generation, choice)
                self.log.add(logged)
                logged.send()

    def __getitem__(self, name: str) -> LoggedRequest:
        [logged] = [each for each in self.log if each.rid.partition("+")[0] == f"{name}-0"]
        return logged

    def deliver(self, name: str, num_tokens: int) -> list[str]:
        """Tokens arrive; who is submitted because of it."""
        logged = self[name]
        logged.delivered_ids += bytes(4 * num_tokens)
        logged.usage = Usage(3, len(logged.delivered_ids) // 4)
        return self._submit(self.suspects.next_to_try(logged, ended=False))

    def end(self, name: str) -> list[str]:
        """A request ends; who is submitted because of it."""
        logged = self.log.remove(self[name].rid)
        return self._submit(self.suspects.next_to_try(logged, ended=True))

    def lose(self) -> tuple[list[str], list[str]]:
        """The process is lost and back: who is guilty, and who is submitted."""
        self.suspects.lost(self.log)
        guilty = self.suspects.judge(list(self.log))
        for logged in guilty:
            self.log.remove(logged.rid)
        submitted = self.suspects.to_submit(list(self.log))
        self.log.send_again(submitted)
        return names(guilty), names(submitted)

    def _submit(self, logged: LoggedRequest | None) -> list[str]:
        submitted = [logged] if logged is not None else []
        self.log.send_again(submitted)
        return names(submitted)


def names(requests: list[LoggedRequest]) -> list[str]:
    return [logged.rid.partition("-")[0] for logged in requests]


def test_one_loss_is_nobodys_fault():
    engine = Engine("a", "b")

    assert engine.lose() == ([], ["a", "b"])


def test_who_is_alone_at_two_losses_without_getting_on_is_guilty():
    engine = Engine("a", "b")
    engine.lose()
    engine.deliver("b", MIN_PROGRESS_TOKENS)

    assert engine.lose() == (["a"], ["b"])
    assert engine.lose() == ([], ["b"])


def test_who_gets_on_between_losses_is_never_guilty():
    engine = Engine("a")
    for _ in range(5):
        engine.deliver("a", MIN_PROGRESS_TOKENS)

        assert engine.lose() == ([], ["a"])


def test_siblings_are_guilty_together():
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
    assert engine.lose() == (["b"], ["a", "c"])
    assert engine.suspects.num_on_trial == 1


def test_who_ends_while_waiting_for_its_trial_is_left_out():
    engine = Engine("a", "b", "c")
    engine.lose()
    engine.lose()

    assert engine.end("b") == []
    assert engine.end("a") == ["c"]


def test_a_loss_before_anything_was_submitted_again_accuses_nobody():
    engine = Engine("a")
    engine.suspects.lost(engine.log)
    engine.suspects.lost(engine.log)

    assert engine.suspects.judge(list(engine.log)) == []


def test_who_is_left_alone_because_another_suspect_went_is_tried_and_not_condemned():
    engine = Engine("a", "b")
    engine.lose()
    engine.suspects.lost(engine.log)
    engine.end("b")  # its client left while nothing could be judged

    assert engine.suspects.judge(list(engine.log)) == []
    assert names(engine.suspects.to_submit(list(engine.log))) == ["a"]
    assert engine.suspects.num_on_trial == 1
