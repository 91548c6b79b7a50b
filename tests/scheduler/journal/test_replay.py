"""A recorded run, made again, decides the same in everything; and where it does not, the first difference is named."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.runtime.config.engine_config import (
    EstimatorName,
    EvictionPolicyName,
    SchedulePolicyName,
    StepPhases,
)
from engine.runtime.messages import (
    Call,
    FinishKind,
    FlushCache,
    GenerateRequest,
    GrammarReady,
    HintAction,
    HintSession,
    LoadAdapter,
    PinPrefix,
    UnloadAdapter,
)
from engine.runtime.pooling import PoolingKind, PoolingParams
from engine.runtime.step_plan import ForwardMode
from engine.scheduler.journal import replay as replay_module
from engine.scheduler.journal.log_file import RECORD_HEAD, RUN_HEAD, Input, LogFileError, LogRecord, read_runs
from engine.scheduler.journal.log_writer import LogWriter
from engine.scheduler.journal.replay import Replay, replay
from engine.scheduler.records.decision_log import MatcherDrafts, PassRecord, RefusedToken, Settled
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.grammar.toy_matcher import ToyGrammar
from tests.scheduler.harness import Harness
from tests.scheduler.journal.recorded import finish, record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.log"


class Unchecked(Harness):
    """Deadlines pass inside `next_batch`, which the count of verdicts does not expect; other tests check those."""

    def check_verdicts(self, records: list[PassRecord], queued: int | None) -> None:
        pass

    def collect(self) -> None:
        self.scheduler.take_outputs()


def random_life(harness: Harness, seed: int, num_events: int = 120) -> None:
    """Anything that may happen to a scheduler, then peace."""
    rng = random.Random(seed)
    for idx in range(num_events):
        dice = rng.random()
        if dice < 0.3:
            message = {
                "priority": rng.choice([0, 0, 5, 50]),
                "tenant": rng.choice("abc"),
                "arrival_s": harness.now_s,
                "lora_id": rng.choice(["", "", "a", "b"]),
                "needs_grammar": rng.random() < 0.1,
                "timeout_s": rng.choice([None, None, 0.5]),
                "queue_timeout_s": rng.choice([None, None, 0.3]),
                "background": rng.random() < 0.3,
            }
            prompt = [1 + position % 7 for position in range(rng.randint(0, 20))] + rng.choices(
                range(1, 97), k=9
            )
            max_new_tokens, extra_key = rng.randint(1, 40), rng.choice(["", "", "salt"])
            num_siblings = rng.choice([1, 1, 1, 3])
            grammar = random_grammar(rng) if rng.random() < 0.4 else None
            delivered = rng.choices(range(1, 97), k=1) if rng.random() < 0.1 and max_new_tokens > 1 else []
            if grammar is not None and delivered and grammar.allowed([]) and rng.random() < 0.8:
                delivered = [min(grammar.allowed([]))]  # else it is refused, mostly
            for sibling in range(num_siblings):
                harness.submit(
                    f"r{idx}-{sibling}",
                    prompt=prompt,
                    max_new_tokens=max_new_tokens,
                    extra_key=extra_key,
                    message=message | {"group": f"g{idx}" if num_siblings > 1 else ""},
                    grammar=grammar,
                    delivered=delivered,
                )
        elif dice < 0.34 and harness.answers:
            harness.abort(rng.choice(list(harness.answers)))
        elif dice < 0.36:
            pin = PinPrefix(bytes(64), rng.choice([0.0, 0.1, 5.0]))
            harness.scheduler.handle(Call(idx, pin), harness.now_s)
        elif dice < 0.40 and harness.answers:
            harness.scheduler.handle(GrammarReady(rng.choice(list(harness.answers))), harness.now_s)
        elif dice < 0.43:
            shared_len = rng.randint(1, 24)
            pooling = PoolingParams(PoolingKind.LABELS, label_ids=(5, 6), shared_len=shared_len)
            for question in range(rng.randint(2, 4)):
                prompt = [1 + position % 7 for position in range(shared_len)] + rng.choices(range(1, 97), k=5)
                harness.submit(f"r{idx}-{question}", prompt=prompt, pooling=pooling)
        else:
            harness.step()
    for rid in harness.answers:
        harness.scheduler.handle(GrammarReady(rid), harness.now_s)
    for _ in range(5000):
        harness.step()
        if not harness.scheduler.num_unfinished and not harness.in_flight:
            break
    else:
        raise AssertionError("no peace")
    while harness.step() is not None:
        pass
    harness.scheduler.on_idle()


def random_grammar(rng: random.Random) -> ToyGrammar:
    """Any grammar, also one that fails."""
    begin = rng.randint(0, 9)
    return ToyGrammar(
        seed=rng.randint(0, 99),
        length=rng.choice([1, 2, 7, 30]),
        ends_early=rng.random() < 0.3,
        free_until=rng.choice([0, 0, 3]),
        forced=rng.choice([(), ((begin, begin + rng.randint(1, 9)),)]),
        fault=rng.choice(
            ["", "", "", "dead", "refuse", "accept", "fill", "validate", "forced", "fill_drafts"]
        ),
        fault_at=rng.randint(3, 12),
    )


def replay_file(path: Path) -> Replay:
    (result,) = [replay(run) for run in read_runs(path)]
    return result


CONFIGS = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from([12, 20, 40]),
        "num_host_pages": st.sampled_from([0, 16]),
        "overlap": st.sampled_from([0, 1]),
        "speculative": st.sampled_from(["off", "ngram", "suffix", "mtp"]),
        "memory": st.sampled_from([None, 1]),  # outputs that can be guessed
        "schedule_policy": st.sampled_from(get_args(SchedulePolicyName)),
        "phases": st.sampled_from(get_args(StepPhases)),
        "admission_estimator": st.sampled_from(get_args(EstimatorName)),
        "preemption_mode": st.sampled_from(["cost", "recompute", "swap"]),
        "chunked_prefill_size": st.sampled_from([-1, 8, 24]),
        "target_step_ms": st.sampled_from([0.0, 3.0, 30.0]),
        "multi_step_ms": st.sampled_from([0.0, 30.0, 1e9]),
        "max_loras_per_batch": st.sampled_from([1, 8]),
        "max_num_partial_prefills": st.sampled_from([1, 3]),
        "schedule_conservativeness": st.sampled_from([0.01, 0.3, 1.0]),
        "length_estimate": st.sampled_from(["max-tokens", "tenant-average"]),
        "chaos": st.sampled_from([None, "retract=0.2:20"]),
        "static_batch_wait": st.just(0.05),
        "cache": st.fixed_dictionaries(
            {
                "eviction_policy": st.sampled_from(get_args(EvictionPolicyName)),
                "kv_host_size": st.sampled_from([0.0, 1.0]),
            }
        ),
    }
)


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(config=CONFIGS, seed=st.integers(0, 1 << 30))
def test_every_decision_is_made_again(tmp_path, config, seed):
    path = tmp_path / "decisions.log"
    path.unlink(missing_ok=True)
    if config["overlap"]:
        config |= {"speculative": "off", "multi_step_ms": 0.0}
    harness = record(path, kind=Unchecked, max_model_len=120, **config)
    noise = random.Random(seed)  # chunks depend on measured times, which only the log remembers
    harness.runner.step_s = lambda plan: noise.lognormvariate(-5, 1) + 1e-3 * plan.total_num_scheduled_tokens
    harness.has_news = lambda: noise.random() < 0.2
    random_life(harness, seed)
    finish(harness)

    result = replay_file(path)

    assert result.difference is None, result
    assert result.num_equal == result.num_passes == harness.scheduler.decisions.num_passes
    assert result.num_passes > 20
    assert not result.raised


@pytest.mark.parametrize("speculative", ["off", "ngram", "suffix", "mtp"])
@pytest.mark.parametrize("multi_step_ms", [0.0, 40.0])
def test_drafts_and_ends_of_grammars_are_those_of_the_run(path, speculative, multi_step_ms):
    """A replay has no grammars: which tokens they force, which drafts they refuse and where they end is in the log."""
    harness = record(
        path,
        memory=1,
        num_pages=300,
        max_running_requests=16,
        overlap=0,
        speculative=speculative,
        multi_step_ms=multi_step_ms,
    )
    circle = [11, 12, 13, 14] * 4
    for seed in range(8):
        grammar = ToyGrammar(seed=seed, length=20 + 5 * seed, free_until=seed, forced=((9, 16), (20, 24)))
        harness.submit(prompt=circle, max_new_tokens=40, grammar=grammar)
    harness.submit(prompt=circle, max_new_tokens=60)
    harness.run_until_idle()
    finish(harness)

    result = replay_file(path)

    assert result.difference is None, result
    assert result.num_passes == harness.scheduler.decisions.num_passes
    records = [each for run in read_runs(path) for each in run.decisions]
    said = [
        each
        for record in records
        if isinstance(record, PassRecord)
        for each in record.grammar_drafts.values()
    ]
    assert any(each.forced for each in said)
    ends = [end for each in records if isinstance(each, Settled) for end in each.grammar_ends.items()]
    assert dict(ends) == {f"r{seed}": "" for seed in range(5)}, "the fifth at its length, too"
    left = [each for record in records if isinstance(record, Settled) for each in record.left]
    usages = {rid: answer.rows[-1].usage.grammar for rid, answer in harness.answers.items()}
    assert {each.rid: each.num_overruled for each in left} == {
        rid: 0 if usage is None else usage.overruled_tokens for rid, usage in usages.items()
    }
    assert sum(each.num_overruled for each in left) > 50

    def forget(each: LogRecord) -> LogRecord:
        if isinstance(each, PassRecord):
            each.grammar_drafts = {}
        return each

    rewrite(path, forget)
    assert replay_file(path).difference is not None


def test_a_request_that_its_grammar_ends_before_a_step_ends_in_the_replay(path):
    """The delivered tokens are the whole answer, or are refused; or there is no matcher."""
    harness = record(path)
    grammar = ToyGrammar(length=2)
    first = min(grammar.allowed([]))
    whole = [first, min(grammar.allowed([first]))]
    refused = next(token for token in range(97) if token not in grammar.allowed([]))
    for waits in (False, True):
        fields = {"needs_grammar": waits}
        rids = [f"{what}-{waits}" for what in ("whole", "refused", "none")]
        harness.submit(rids[0], delivered=whole, max_new_tokens=9, grammar=grammar, message=fields)
        harness.submit(rids[1], delivered=[refused], max_new_tokens=9, grammar=grammar, message=fields)
        harness.submit(rids[2], max_new_tokens=9, message=fields | {"grammar": grammar.use})
        harness.submit(f"goes on-{waits}", delivered=whole[:1], grammar=grammar, message=fields)
        if waits:
            for rid in (*rids, f"goes on-{waits}"):
                harness.scheduler.handle(GrammarReady(rid), harness.now_s)
            harness.collect()
        ends = [harness.answers[rid].finish for rid in rids]
        kinds = [end.kind for end in ends if end is not None]
        assert kinds == [FinishKind.STOP, FinishKind.ERROR, FinishKind.ERROR]
    harness.step()
    for _ in range(4):
        harness.step()
    finish(harness)

    result = replay_file(path)

    assert result.difference is None, result
    assert result.num_requests == 8


def test_a_log_without_the_newest_fields_can_be_read():
    """Records are arrays, and these fields are the last ones, so older logs are shorter."""
    encoder = msgspec.msgpack.Encoder()
    refused = [RefusedToken(0, 1, 2)]
    for record_, names in (
        (
            Settled(
                1.0,
                2,
                grammar_ends={"a": ""},
                refused=refused,
                vectors={0: b"digest"},
                encode_s=0.5,
                draft_s=0.5,
            ),
            ("grammar_ends", "refused", "vectors", "encode_s", "draft_s"),
        ),
        (
            PassRecord(1.0, grammar_drafts={"a": MatcherDrafts([1], 2)}, num_tiles={"a": 1}),
            ("grammar_drafts", "num_tiles"),
        ),
    ):
        kind = type(record_)
        assert kind.__struct_fields__[-len(names) :] == names
        values = msgspec.msgpack.decode(encoder.encode(record_))
        assert msgspec.msgpack.decode(encoder.encode(values), type=kind) == record_
        for num_missing in range(1, 1 + len(names)):
            older = msgspec.msgpack.decode(encoder.encode(values[:-num_missing]), type=kind)
            assert not any(getattr(older, name) for name in names[-num_missing:]) and older.now_s == 1.0


def test_a_replay_in_another_process_decides_the_same(path):
    # Another seed of str hashes: an order that depends on them would show.
    harness = record(
        path, kind=Unchecked, num_pages=16, schedule_policy="lpm", preemption_mode="swap", num_host_pages=16
    )
    random_life(harness, seed=3, num_events=300)
    finish(harness)
    code = (
        "import sys; from engine.scheduler.journal.log_file import read_runs\n"
        "from engine.scheduler.journal.replay import replay\n"
        "for run in read_runs(sys.argv[1]): result = replay(run); print(result.is_equal, result.digest)"
    )

    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }

    assert outputs == {f"True {replay_file(path).digest}\n"}


def rewrite(path: Path, change: Any) -> None:
    """Write a log again with each record as `change` returns it; None leaves it out."""
    ((header, records),) = [(run.header, list(run.records)) for run in read_runs(path)]
    path.unlink()
    writer = LogWriter(path, header)
    for each in records:
        changed = change(each)
        if changed is not None:
            writer.add(changed)
    writer.close()


@pytest.fixture
def recorded(path: Path) -> Path:
    harness = record(path, max_running_requests=2, num_pages=24)
    for _ in range(6):
        harness.submit(prompt_len=12, max_new_tokens=8)
    harness.run_until_idle()
    finish(harness)
    return path


def test_the_figures_of_a_run(recorded):
    result = replay_file(recorded)

    assert result.is_equal
    assert (result.num_requests, result.num_equal) == (6, result.num_passes)
    decisions = [record for run in read_runs(recorded) for record in run.decisions]
    modes = [record.mode for record in decisions if isinstance(record, PassRecord) and record.step_id]
    assert result.num_steps == len(modes) - modes.count(ForwardMode.IDLE) > 1


def test_the_first_field_that_differs_is_named(recorded):
    def lie(each: LogRecord) -> LogRecord:
        if isinstance(each, PassRecord) and each.step_id == 5:
            each.num_running += 1
            each.plan_crc ^= 1
        return each

    rewrite(recorded, lie)
    result = replay_file(recorded)

    difference = result.difference
    assert difference is not None
    assert (difference.step_id, difference.num_passes_before, result.num_equal) == (5, 4, 4)
    assert result.num_passes > 10
    assert difference.what == "the pass of step 5 differs in num_running, plan_crc"
    assert difference.fields[0] == ("num_running", "3", "2")


def test_a_verdict_that_differs_is_named_by_its_field(recorded):
    def lie(each: LogRecord) -> LogRecord:
        if isinstance(each, PassRecord) and each.step_id == 1:
            each.verdicts[1] = each.verdicts[1]._replace(need=1)
        return each

    rewrite(recorded, lie)
    difference = replay_file(recorded).difference

    assert difference is not None
    ((field, logged, replayed),) = difference.fields
    assert (field, logged) == ("verdicts[1].need", "1")
    assert replayed != "1"


def test_a_token_that_ends_a_request_earlier_is_found_out(recorded):
    def lie(each: LogRecord) -> LogRecord:
        if isinstance(each, Settled) and each.step_id == 4:
            each.errors = {0: "logits are not finite"}
        return each

    rewrite(recorded, lie)
    difference = replay_file(recorded).difference

    assert difference is not None
    assert difference.what == "the result of step 4 differs in left"


def test_other_code_is_found_out(recorded, monkeypatch):
    class Other(Scheduler):
        def __init__(self, config: Any, *parts: Any, **more: Any) -> None:
            super().__init__(type(config)(chunked_prefill_size=4), *parts, **more)

    monkeypatch.setattr(replay_module, "Scheduler", Other)

    result = replay_file(recorded)

    assert result.difference is not None
    assert result.difference.num_passes_before == 0
    assert "verdicts" in result.difference.what


@pytest.mark.parametrize("step_id", [1, 3])
def test_a_record_that_is_missing_is_found_out(recorded, step_id):
    rewrite(recorded, lambda each: None if isinstance(each, PassRecord) and each.step_id == step_id else each)

    difference = replay_file(recorded).difference

    assert difference is not None
    assert difference.num_passes_before == step_id - 1


def test_a_log_that_ends_early_is_replayed_as_far_as_it_goes(recorded):
    data = recorded.read_bytes()
    recorded.write_bytes(data[: len(data) * 2 // 3])

    result = replay_file(recorded)

    assert result.is_equal
    assert result.num_passes > 5


def test_a_run_that_ended_in_a_bug_ends_in_it_again(path, monkeypatch):
    def die(_scheduler: Scheduler, _message: object, _now_s: float) -> None:
        raise AssertionError("a page is missing")

    harness = record(path)
    harness.submit("r1")
    harness.run_until_idle()
    monkeypatch.setattr(Scheduler, "_receive", die)
    with pytest.raises(AssertionError):
        harness.submit("r2")
    finish(harness)
    last = [each for run in read_runs(path) for each in run.records][-1]
    assert isinstance(last, Input) and isinstance(last.message, GenerateRequest)
    monkeypatch.undo()
    real = Scheduler._receive

    def die_of_r2(scheduler: Scheduler, message: GenerateRequest, now_s: float) -> None:
        if message.rid == "r2":
            raise AssertionError("a page is missing")
        real(scheduler, message, now_s)

    monkeypatch.setattr(Scheduler, "_receive", die_of_r2)

    result = replay_file(path)

    assert result.is_equal
    assert result.raised == "AssertionError: a page is missing"


def test_a_bug_that_the_run_did_not_have_is_a_difference(recorded, monkeypatch):
    def die(*_args: object) -> None:
        raise AssertionError("a page is missing")

    monkeypatch.setattr(Scheduler, "settle", die)

    result = replay_file(recorded)

    assert result.difference is not None
    assert "the replay ended here: AssertionError: a page is missing" in result.difference.what
    assert result.num_equal == 1


def test_settings_of_another_engine_are_refused(recorded):
    ((header, records),) = [(run.header, list(run.records)) for run in read_runs(recorded)]
    recorded.unlink()
    header.scheduler["warp_factor"] = 9
    writer = LogWriter(recorded, header)
    for each in records:
        writer.add(each)
    writer.close()

    with pytest.raises(LogFileError, match="warp_factor"):
        replay_file(recorded)


def test_a_log_of_version_2_is_read_and_replayed(path):
    """It had a message for each kind of call; `[tag, id, field, ...]`."""
    harness = record(path, kind=Unchecked, num_pages=20, cache={"pin_fraction": 0.5})
    random_life(harness, seed=2)
    harness.scheduler.handle(Call(7, FlushCache()), harness.now_s)
    harness.scheduler.handle(Call(8, UnloadAdapter(1)), harness.now_s)
    finish(harness)
    [new] = [list(run.records) for run in read_runs(path)]
    path.write_bytes(as_version_2(path.read_bytes()))
    [old] = [list(run.records) for run in read_runs(path)]

    calls = {type(each.message.request) for each in inputs_of(old) if isinstance(each.message, Call)}
    assert calls == {FlushCache, PinPrefix, LoadAdapter, UnloadAdapter}
    assert inputs_of(old) == inputs_of(new)
    assert replay_file(path).is_equal


def test_sessions_that_are_closed_are_replayed(path):
    harness = record(path, num_pages=20, page_size=4, cache={"pin_fraction": 0.5})
    rng = random.Random(5)
    for idx in range(60):
        prompt = [1 + rng.randrange(3)] * 12 + [rng.randrange(1, 90) for _ in range(8)]
        session = rng.choice(["", "a", "b"])
        harness.submit(prompt=prompt, message={"session": session}, max_new_tokens=3)
        if idx % 3 == 0:
            hint = HintSession(rng.choice("ab"), rng.choice(list(HintAction)), 0.5)
            harness.scheduler.handle(Call(idx + 1, hint), harness.now_s)
        for _ in range(rng.randrange(6)):
            harness.step()
    finish(harness)
    [log] = [list(run.records) for run in read_runs(path)]
    assert sum(isinstance(each.message, Call) for each in inputs_of(log)) == 20
    assert replay_file(path).is_equal


def as_version_2(log: bytes) -> bytes:
    """The bytes of a log with one run as version 2 of the format had them."""
    magic, _ = RUN_HEAD.unpack_from(log)
    old, at = bytearray(RUN_HEAD.pack(magic, 2)), RUN_HEAD.size
    while at < len(log):
        length, _ = RECORD_HEAD.unpack_from(log, at)
        payload = log[at + RECORD_HEAD.size : at + RECORD_HEAD.size + length]
        at += RECORD_HEAD.size + length
        match msgspec.msgpack.decode(payload):
            case ["input", now_s, ["Call", call_id, [tag, *fields]]]:
                payload = msgspec.msgpack.encode(["input", now_s, [tag, call_id, *fields]])
        old += RECORD_HEAD.pack(len(payload), zlib.crc32(payload)) + payload
    return bytes(old)


def inputs_of(records: list[LogRecord]) -> list[Input]:
    return [each for each in records if isinstance(each, Input)]
