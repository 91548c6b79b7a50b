"""`Lag` against lists of tokens, with random steps."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model_runner.drafting.lag import MOST, Lag, Run

NUM_ROWS = 3


class Life:
    """Rows with tokens; `seen` has those that a drafter was given, by position."""

    def __init__(self) -> None:
        self.lag = Lag(NUM_ROWS, 9, torch.from_numpy)
        self.tokens: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.seen: list[dict[int, int]] = [{} for _ in range(NUM_ROWS)]
        self.next_id = 100
        for row in range(NUM_ROWS):
            self.restart(row, 5 + row)

    def restart(self, row: int, length: int) -> None:
        self.tokens[row] = list(range(length))
        self.seen[row] = dict(enumerate(range(length)))
        self.lag.start(row, length, length)

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

    def step(self, rows: list[int], lens: list[int]) -> None:
        prefix = [len(self.tokens[row]) for row in rows]
        full = self.lag.full(np.array(rows))
        if len(full):
            self.see(self.lag.take(full))
        ids, of_rows, positions = list[int](), list[int](), list[int]()
        for row, start, length in zip(rows, prefix, lens, strict=True):
            new = list(range(self.next_id, self.next_id + length))
            self.next_id += length
            ids += new
            of_rows += [row] * length
            positions += range(start, start + length)
            self.tokens[row] += new
        token_rows, places = np.array(of_rows), np.array(positions)
        self.lag.add(token_rows, places, 1000 * token_rows + places, torch.tensor(ids))

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
                life.step(rows, [data.draw(st.sampled_from([1, 4, MOST])) for _ in rows])
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
