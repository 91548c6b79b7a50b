"""The decision logs of a prefill and a decode scheduler replay exactly, each alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.transport.kv_transfer import PeerLost
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay
from engine.scheduler.records.decision_log import Handover
from tests.selection import examples

from ..harness import Harness
from ..journal.recorded import finish, record
from ..transfer_pair import PREFILL, Pair
from .test_pair_properties import ACTIONS, perform


class RecordedPair(Pair):
    """A pair that records both sides."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.paths: list[Path] = []

        def make(**own: Any) -> Harness:
            self.paths.append(folder / own["disaggregation_mode"])
            return record(self.paths[-1], **own)

        super().__init__(make=make, **settings)

    def replayed_events(self) -> list[set[str]]:
        """Replay both logs; the events of the handovers in them, which the replay has repeated."""
        found = []
        for harness, path in zip((self.prefill, self.decode), self.paths, strict=True):
            finish(harness)
            (result,) = [replay(run) for run in read_runs(path)]
            assert result.is_equal, result
            decisions = [record for run in read_runs(path) for record in run.decisions]
            found.append({each.event for each in decisions if isinstance(each, Handover)})
        return found


def test_chunks_hits_aborts_and_siblings(tmp_path: Path) -> None:
    pair = RecordedPair(tmp_path, prefill={"chunked_prefill_size": 8}, chunked_prefill_size=8)
    beginning = list(range(1, 14))
    for number in range(4):
        pair.submit(f"room{number}", prompt=[*beginning, *range(20, 20 + 5 * number)], max_new_tokens=4)
        pair.step()
    for number in range(2):
        sample: dict[str, Any] = {
            "rid": f"s{number}",
            "prompt": list(range(60, 78)),
            "message": {"group": "g"},
        }
        pair.submit(f"s.{number}", max_new_tokens=3, **sample)
    gone = pair.submit("gone", prompt_len=20)
    pair.step(deliver=False)
    pair.decode.abort(gone)
    del pair.decode.answers[gone]
    pair.run()

    prefill, decode = pair.replayed_events()

    assert prefill >= {"claimed", "sent", "unclaimed"}
    assert decode >= {"claimed", "received", "computed here", "unclaimed"}


@pytest.mark.parametrize("fallback", [True, False])
def test_a_prefill_engine_that_is_lost(tmp_path: Path, fallback: bool) -> None:
    pair = RecordedPair(tmp_path, disaggregation_fallback=fallback)
    rid = pair.submit("a", prompt_len=20, max_new_tokens=3)
    pair.step(deliver=False)
    pair.tell(pair.decode, PeerLost(PREFILL, "frozen"))
    while pair.decode.answers[rid].finish is None:
        pair.step(deliver=False)
    while pair.network:
        pair.deliver()

    _, decode = pair.replayed_events()

    assert decode >= {"claimed", "not received"}


@settings(max_examples=examples(40), deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40), num_pages=st.sampled_from([24, 64]))
def test_random_runs(actions: list[tuple[str, object, object]], num_pages: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pair = RecordedPair(Path(folder), num_pages=num_pages)
        perform(pair, actions, shared=True)
        pair.run()
        pair.replayed_events()


def test_a_change_of_the_log_is_seen(tmp_path: Path) -> None:
    pair = RecordedPair(tmp_path)
    pair.submit("a", prompt_len=20, max_new_tokens=3)
    pair.run()
    finish(pair.decode)

    for run in read_runs(pair.paths[1]):
        run.header.scheduler["disaggregation_mode"] = "null"
        assert not replay(run).is_equal
