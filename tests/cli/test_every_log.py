"""One decision log with every kind of request and call, read by every command that reads logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.cli import main as cli
from engine.runtime.messages import Call, GrammarReady, PinPrefix
from engine.runtime.pooling import PoolingKind, PoolingParams
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.records.decision_log import Handover, PassRecord, Settled
from engine.simulator.recorded_run import read_recorded_run
from engine.simulator.what_if import what_if
from tests.scheduler.fake_runner import expected_output
from tests.scheduler.grammar.toy_matcher import ToyGrammar
from tests.scheduler.harness import VOCAB_SIZE, Harness
from tests.scheduler.journal.recorded import finish, record
from tests.scheduler.transfer_pair import Pair

ROLES = ("drafts", "overlap", "multi-step", "prefill", "decode")
NUM_PAGES = 200
BEGINNING = list(range(1, 30))


def ask_everything(harness: Harness) -> None:
    """Requests of every kind but transfers, some at once and some in turn."""
    harness.submit("plain", prompt=BEGINNING, max_new_tokens=12, ignore_eos=False)
    harness.submit("json", prompt=[*BEGINNING, 40], max_new_tokens=40, grammar=ToyGrammar(length=9))
    harness.submit("faulty", max_new_tokens=40, grammar=ToyGrammar(fault="dead", fault_at=3))
    harness.submit("forced", max_new_tokens=20, grammar=ToyGrammar(forced=((2, 12),), length=16))
    waits = {"needs_grammar": True}
    harness.submit("late", max_new_tokens=30, grammar=ToyGrammar(length=6), message=waits)
    harness.submit("no grammar", max_new_tokens=30, grammar=ToyGrammar(length=6), message=waits)
    harness.submit("adapter", max_new_tokens=9, message={"lora_id": "french"}, extra_key="salt")
    harness.submit("vector", prompt_len=21, pooling=PoolingParams())
    harness.submit("mean", prompt_len=13, pooling=PoolingParams(all_tokens=True))
    harness.submit("score", prompt_len=13, pooling=PoolingParams(PoolingKind.LABELS, label_ids=(3, 4)))
    for number in range(3):
        harness.submit(f"n.{number}", prompt=[*BEGINNING, 50, 51], max_new_tokens=10, message={"group": "n"})
    harness.submit("urgent", max_new_tokens=5, message={"priority": 3, "tenant": "t"})
    sampling = SamplingParams(ignore_eos=True, seed=1, max_new_tokens=12)
    begun, _ = expected_output(BEGINNING[:9], sampling, harness.eos, VOCAB_SIZE, harness.memory)
    harness.submit("known", prompt=BEGINNING[:9], delivered=begun[:3], max_new_tokens=12)
    harness.submit("scored", prompt_len=18, max_new_tokens=3, prompt_logprobs=1, logprobs=2)
    harness.submit("stops", max_new_tokens=30, stop_token_ids=tuple(range(40, 97)), min_new_tokens=2)
    harness.submit("refused", prompt_len=400, max_new_tokens=400)
    harness.submit("hurried", max_new_tokens=200, message={"timeout_s": 0.15})
    aborted = harness.submit("aborted", max_new_tokens=200)
    harness.scheduler.handle(Call(99, PinPrefix(bytes(4 * 16), 5.0)), harness.now_s)
    for _ in range(4):
        harness.step()
    harness.scheduler.handle(GrammarReady("late"), harness.now_s)
    harness.scheduler.handle(GrammarReady("no grammar", error="too large"), harness.now_s)
    harness.abort(aborted)
    harness.run_until_idle()
    harness.flush()
    harness.submit("again", prompt=BEGINNING * 3, max_new_tokens=60, ignore_eos=False)
    for number in range(3):
        harness.submit(f"repeats {number}", prompt_len=6 + number, max_new_tokens=60)
    harness.run_until_idle()


def run_everything(folder: Path, role: str) -> Path:
    """The decision log of an engine with a role."""
    settings: dict[str, Any] = {
        "chunked_prefill_size": 16,
        "max_loras_per_batch": 2,
        "eos": (0, 5),
        "cache": {"pin_fraction": 0.25},
        "memory": 2,
    }
    alone: dict[str, dict[str, Any]] = {
        "drafts": {"speculative": "ngram"},
        "overlap": {"overlap": 1},
        "multi-step": {"multi_step_ms": 50.0},
    }
    if role in alone:
        harness = record(folder / role, num_pages=NUM_PAGES, **settings, **alone[role])
        ask_everything(harness)
        finish(harness)
        return folder / role

    def make(**own: Any) -> Harness:
        return record(folder / own["disaggregation_mode"], **own)

    pair = Pair(make=make, num_pages=NUM_PAGES, prefill=settings, **settings)
    for number in range(4):
        pair.submit(f"room{number}", prompt_len=18 + number, max_new_tokens=6)
        pair.step()
    pair.submit("one", prompt_len=15, max_new_tokens=1)
    for number in range(2):
        pair.submit(f"s.{number}", prompt=BEGINNING, max_new_tokens=4, message={"group": "s"})
    pair.submit("json", prompt_len=15, max_new_tokens=30, grammar=ToyGrammar(length=7))
    pair.run()
    pair.prefill.answers.clear()  # `run` has checked them on the decode side
    ask_everything(pair.decode if role == "decode" else pair.prefill)
    for harness in (pair.prefill, pair.decode):
        finish(harness)
    return folder / role


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {role: run_everything(tmp_path_factory.mktemp(role), role) for role in ROLES}


def test_the_logs_hold_what_they_should(logs):
    alone = [each for run in read_runs(logs["drafts"]) for each in run.decisions]
    assert sum(each.num_drafts for each in alone if isinstance(each, PassRecord)) > 10
    assert {rid for each in alone if isinstance(each, Settled) for rid in each.grammar_ends} >= {
        "json",
        "late",
        "faulty",
    }
    steps = [each for run in read_runs(logs["multi-step"]) for each in run.decisions]
    assert max(each.num_rounds for each in steps if isinstance(each, PassRecord)) > 1
    pair = [each for role in ("prefill", "decode") for run in read_runs(logs[role]) for each in run.decisions]
    assert {each.event for each in pair if isinstance(each, Handover)} >= {"claimed", "sent", "received"}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "command",
    [
        ["replay", "LOG"],
        ["replay", "LOG", "--set", "schedule_policy=lpm"],
        ["replay", "LOG", "--set", "max_running_requests=3"],
        ["replay", "LOG", "--set", "speculative=off", "--set", "page_size=8"],
        ["simulate", "smollm2-135m", "--device", "cpu-2", "--num-requests", "20", "--fit", "LOG"],
        ["trace", "LOG"],
        ["trace", "LOG", "--format", "perfetto"],
        ["why", "json", "--log", "LOG"],
        ["why", "vector", "--log", "LOG"],
    ],
    ids=lambda command: " ".join(command).replace("LOG", "log"),
)
def test_every_command_reads_every_log(logs, role, command, capsys):
    assert cli.run([str(logs[role]) if word == "LOG" else word for word in command]) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert "Traceback" not in captured.err
    assert "has no grammars" not in captured.err


@pytest.mark.parametrize("role", ROLES)
def test_a_what_if_answers_all_that_was_answered(logs, role, caplog):
    run = read_recorded_run(logs[role])
    result = what_if(logs[role], {"max_running_requests": 3})

    rids = {each.rid for each in run.requests}
    assert rids >= {"plain", "json", "forced", "late", "adapter", "vector", "mean", "n.0", "n.2", "known"}
    assert rids.isdisjoint({"refused", "no grammar"})
    runs = (result.recorded, result.baseline, result.changed)
    assert [each.num_requests for each in runs] == [len(rids)] * 3
    assert [each.failures for each in runs] == [{}] * 3
    assert len({each.output_tokens for each in runs}) == 1
    assert result.changed.queue_ms.p99 > result.baseline.queue_ms.p99
    assert not [each for each in caplog.records if each.levelname in ("ERROR", "CRITICAL")]


def test_prompts_of_another_engine_come_when_they_came(logs):
    run = read_recorded_run(logs["decode"])
    received = [each for each in run.requests if each.is_prefilled]
    assert len(received) >= 4
    assert run.num_transferred == len(received)
    result = what_if(logs["decode"], {"schedule_policy": "lpm"})
    assert any("came from another engine" in line for line in result.lines())


def test_a_setting_without_an_effect_says_so(logs):
    lines = what_if(logs["drafts"], {"speculative": "off", "multi_step_ms": 5.0}).lines()
    assert any(line.startswith("note: multi_step_ms, speculative changed nothing") for line in lines)


def test_a_what_if_is_a_page_of_pictures(logs, tmp_path):
    page = tmp_path / "page.html"
    command = ["replay", str(logs["drafts"]), "--html", str(page)]
    assert cli.run([*command, "--set", "max_running_requests=3"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "what if max_running_requests=3" in text
    for name in ("recorded", "simulated", "changed"):
        assert f"{name}: P50 " in text
    assert cli.run(command) == 2
