"""`Lag` against lists of tokens, with random steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model_runner.attention.backend import BatchLayout
from engine.model_runner.drafting.lag import Lag, Run
from engine.model_runner.input_batch import InputBatch

NUM_ROWS, PAGE = 3, 4


class Life:
    """Rows with tokens; `seen` has those that a drafter was given, by position."""

    def __init__(self) -> None:
        self.lag = Lag(NUM_ROWS, PAGE, 9, torch.from_numpy)
        self.tokens: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.seen: list[dict[int, int]] = [{} for _ in range(NUM_ROWS)]
        self.next_id = 100
        for row in range(NUM_ROWS):
            self.restart(row, 5 + row)

    def restart(self, row: int, length: int) -> None:
        self.tokens[row] = list(range(length))
        self.seen[row] = dict(enumerate(range(length)))
        self.lag.start(row, length)

    def see(self, run: Run) -> None:
        assert (np.diff((run.extend_lens > 1).astype(int)) <= 0).all()
        assert run.lasts.tolist() == (np.cumsum(run.extend_lens) - 1).tolist()
        for row, position, token, loc in zip(
            run.token_rows.tolist(),
            run.positions.tolist(),
            run.input_ids.tolist(),
            run.out_cache_loc.tolist(),
            strict=True,
        ):
            assert loc == 1000 * row + position
            assert position == len(self.seen[row])
            self.seen[row][position] = token
        self.lag.computed(run)

    def step(self, rows: list[int], lens: list[int], valid: list[int]) -> None:
        prefix = [len(self.tokens[row]) for row in rows]
        ids, loc = [], []
        for row, start, length, right in zip(rows, prefix, lens, valid, strict=True):
            new = list(range(self.next_id, self.next_id + length))
            self.next_id += length
            ids += new
            loc += [1000 * row + start + n for n in range(length)]
            self.tokens[row] += new[:right]
        positions = np.concatenate([np.arange(p, p + n) for p, n in zip(prefix, lens, strict=True)])
        batch = SimpleNamespace(
            layout=BatchLayout(np.array(rows), np.array(prefix), np.array(lens), 0),
            token_rows=np.repeat(rows, lens),
            positions=positions,
            out_cache_loc=np.array(loc),
        )
        input_ids, idx = torch.tensor(ids), np.arange(len(rows))
        self.lag.add(cast(InputBatch, batch), input_ids, idx, np.array(valid))
        full = self.lag.full(np.array(rows))
        if len(full):
            self.see(self.lag.take(full))
        for row in rows:  # a full page is never waiting
            assert len(self.seen[row]) // PAGE == len(self.tokens[row]) // PAGE

    def draft(self, rows: list[int]) -> None:
        positions = np.array([len(self.tokens[row]) for row in rows])
        last = torch.tensor([self.next_id + n for n in range(len(rows))])
        run = self.lag.take_with(np.array(rows), positions, last, 1000 * np.array(rows) + positions)
        self.see(run)
        assert (run.input_ids[run.lasts] == last[torch.from_numpy(run.idx)]).all()
        for row, position, token in zip(rows, positions.tolist(), last.tolist(), strict=True):
            assert self.seen[row].pop(position) == token  # the step computes it, and then it is done
            self.tokens[row].append(token)
            self.seen[row][position] = token
            self.lag.done(np.array([row]), np.array([position + 1]))
        self.next_id += len(rows)


@given(st.data())
def test_every_valid_token_is_given_once_and_in_order(data: st.DataObject) -> None:
    life = Life()
    subset = st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, unique=True)
    for _ in range(data.draw(st.integers(1, 25))):
        rows = data.draw(subset)
        match data.draw(st.sampled_from(["step", "draft", "restart", "leave"])):
            case "step":
                lens = [data.draw(st.integers(1, 9)) for _ in rows]
                life.step(rows, lens, [data.draw(st.integers(1, length)) for length in lens])
            case "draft":
                life.draft(rows)
            case "restart":
                life.restart(rows[0], data.draw(st.integers(0, 9)))
            case _:
                waiting = life.lag.waiting(np.array(rows))
                if len(waiting):
                    life.see(life.lag.take(waiting))
    for row in range(NUM_ROWS):
        waiting = life.lag.waiting(np.array([row]))
        if len(waiting):
            life.see(life.lag.take(waiting))
        assert [life.seen[row][n] for n in range(len(life.tokens[row]))] == life.tokens[row]
