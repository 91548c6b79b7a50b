"""The table of responses against a dict: create, fork, end, delete, expire, make room, and restart."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.tokenizer_manager.state import responses
from engine.tokenizer_manager.state.responses import Group, Response, Retention
from engine.tokenizer_manager.state.tables import MIGRATIONS, used_bytes
from tests.selection import examples

OWNERS = ("", "a", "b")
KEEP_S = 100
MAX_BYTES = 60_000


def new_database() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.row_factory = sqlite3.Row
    for script in MIGRATIONS:
        db.executescript(script)
    return db


class Chains(RuleBasedStateMachine):
    """Every step does the same to the tables and to a dict; a restart keeps what runs as it is."""

    @initialize()
    def begin(self) -> None:
        self.db = new_database()
        self.model: dict[tuple[str, str], Response] = {}
        self.used_s: dict[tuple[str, str], float] = {}
        self.groups: dict[tuple[str, str], list[Group]] = {}
        self.now_s = 0.0
        self.number = 0

    def teardown(self) -> None:
        if hasattr(self, "db"):
            self.db.close()

    def _pick(self, data: st.DataObject, *, running: bool | None = None) -> tuple[str, str] | None:
        keys = [key for key, each in self.model.items() if running in (None, each.is_running)]
        return data.draw(st.sampled_from(sorted(keys))) if keys else None

    @rule(data=st.data(), owner=st.sampled_from(OWNERS), size=st.integers(0, 9000), runs=st.booleans())
    def create(self, data: st.DataObject, owner: str, size: int, runs: bool) -> None:
        keys = [key for key, each in self.model.items() if key[0] == owner and not each.is_running]
        parent = data.draw(st.none() | st.sampled_from(sorted(keys))) if keys else None
        self.number += 1
        response_id = f"resp_{self.number}"
        before = self.model[parent] if parent else None
        response = Response(
            owner,
            response_id,
            before.id if before else "",
            before.root if before else response_id,
            before.depth + 1 if before else 1,
            0,
            "queued" if runs else "completed",
            input=b"x" * size,
        )
        groups = [Group(0, b"e")] if runs else []
        responses.add(self.db, response, self.now_s, Retention(KEEP_S, MAX_BYTES), groups)
        self._make_room(response)
        self.model[owner, response_id] = response
        self.groups[owner, response_id] = groups
        self.used_s[owner, response.root] = self.now_s
        self.used_s = dict(sorted(self.used_s.items(), key=lambda each: each[0] == (owner, response.root)))

    def _make_room(self, new: Response) -> None:
        """The chains that the table has deleted must be idle, the least recently used first."""
        left = {row["id"] for row in self.db.execute("SELECT id FROM responses")} - {new.id}
        gone = {key for key in self.model if key[1] not in left}
        roots = {(owner, self.model[owner, each].root) for owner, each in gone}
        assert (new.owner, new.root) not in roots
        for owner, root in roots:
            members = {key for key, each in self.model.items() if (key[0], each.root) == (owner, root)}
            assert members <= gone and not any(self.model[key].is_running for key in members)
        order = [key for key in self.used_s if self._is_idle(key) and key != (new.owner, new.root)]
        of_owner = [key for key in order if key[0] == new.owner]
        mine = [key for key in of_owner if key in roots]
        assert mine == of_owner[: len(mine)] or roots >= set(order[: len(roots)])
        self._forget(roots)

    def _is_idle(self, chain: tuple[str, str]) -> bool:
        return not any(each.is_running for key, each in self.model.items() if (key[0], each.root) == chain)

    def _forget(self, chains: set[tuple[str, str]]) -> None:
        self.model = {key: each for key, each in self.model.items() if (key[0], each.root) not in chains}
        self.used_s = {key: used for key, used in self.used_s.items() if key not in chains}

    @rule(data=st.data(), status=st.sampled_from(["completed", "cancelled", "failed"]))
    def end(self, data: st.DataObject, status: str) -> None:
        if key := self._pick(data, running=True):
            groups = [Group(len(self.groups[key]), b"end")]
            self.model[key] = self.model[key]._replace(status=status, output=b"y" * 50, body=b"b")
            self.groups[key] += groups
            responses.finish(self.db, self.model[key], self.now_s, groups)

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        if key := self._pick(data, running=True):
            groups = [Group(len(self.groups[key]), b"event", b"rows")]
            self.groups[key] += groups
            self.model[key] = self.model[key]._replace(status="in_progress")
            responses.advance(self.db, self.model[key], self.now_s, groups, status="in_progress")

    @rule(data=st.data(), other=st.sampled_from(OWNERS))
    def delete(self, data: st.DataObject, other: str) -> None:
        if key := self._pick(data, running=False):
            if other != key[0]:
                assert not responses.delete(self.db, other, key[1])
            assert responses.delete(self.db, *key)
            assert not responses.delete(self.db, *key)
            gone = self.model.pop(key)
            if not any((k[0], each.root) == (key[0], gone.root) for k, each in self.model.items()):
                del self.used_s[key[0], gone.root]

    @rule(seconds=st.integers(1, 80))
    def expire(self, seconds: int) -> None:
        self.now_s += seconds
        over = {
            key for key, used in self.used_s.items() if used + KEEP_S <= self.now_s and self._is_idle(key)
        }
        assert responses.expire(self.db, self.now_s) == len(over)
        self._forget(over)

    @invariant()
    def all_is_as_in_the_dict(self) -> None:
        if not hasattr(self, "db"):
            return
        for key, response in self.model.items():
            assert responses.find(self.db, *key) == response
            assert responses.groups_of(self.db, *key, 0) == self.groups[key]
            chain, at = [response], response
            while at.parent and (key[0], at.parent) in self.model:
                at = self.model[key[0], at.parent]
                chain.insert(0, at)
            assert responses.chain_of(self.db, *key) == chain
        running = [each for each in self.model.values() if each.is_running]
        assert responses.unfinished(self.db) == running  # a dict keeps the order, too
        counts: Any = [
            self.db.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in ("responses", "response_events", "response_chains")
        ]
        events = sum(len(self.groups[key]) for key in self.model)
        assert counts == [len(self.model), events, len(self.used_s)]
        assert (used_bytes(self.db) == 0) == (not self.model)


TestChains = Chains.TestCase
TestChains.settings = settings(max_examples=examples(60), stateful_step_count=25)


@pytest.mark.parametrize("owner", OWNERS)
def test_a_chain_that_runs_is_never_deleted_for_room(owner: str):
    db = new_database()
    retention = Retention(KEEP_S, MAX_BYTES)
    responses.add(
        db, Response(owner, "runs", "", "runs", 1, 0, "queued", input=b"x" * 20_000), 0.0, retention
    )
    for number in range(10):
        each = Response(owner, f"r{number}", "", f"r{number}", 1, 0, "completed", input=b"x" * 9_000)
        responses.add(db, each, float(number), retention)
    assert responses.find(db, owner, "runs") is not None
    assert responses.find(db, owner, "r9") is not None
    assert responses.find(db, owner, "r0") is None
    db.close()


def test_what_is_stored_again_after_a_slow_disk_changes_nothing():
    db = new_database()
    response = Response("", "r", "", "r", 1, 0, "queued")
    responses.add(db, response, 0.0, Retention(KEEP_S, MAX_BYTES), [Group(0, b"a")])
    for _ in range(2):
        responses.advance(db, response, 0.0, [Group(1, b"b")])
    ended = response._replace(status="completed")
    for _ in range(2):
        responses.finish(db, ended, 0.0, [Group(1, b"b"), Group(2, b"c")])

    assert [group.events for group in responses.groups_of(db, "", "r", 0)] == [b"a", b"b", b"c"]
    assert responses.expire(db, KEEP_S) == 1  # it does not count as running
    assert used_bytes(db) == 0
    db.close()
