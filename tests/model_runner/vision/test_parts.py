"""Parts of the layers of towers: their number and their rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, cast

import pytest
import torch

from engine.model_runner.vision.parts import TowerLayer, layer_parts, shares_of


class Layer(NamedTuple):
    """Notes the rows of its calls."""

    rows: list[int]

    def qkv(self, x: torch.Tensor, place: None, at: slice) -> torch.Tensor:
        self.rows.append(len(x))
        return x.repeat(1, 3)

    def attend(self, qkv: torch.Tensor, place: None, at: slice) -> torch.Tensor:
        self.rows.append(at.stop - at.start)
        return qkv[at, :1] + qkv[:, :1].sum()

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        return 3 * x


@pytest.mark.parametrize(("num_rows", "num_shares"), [(10, 2), (11, 3), (3, 5), (1, 1)])
def test_a_layer_has_four_parts_for_each_share(num_rows: int, num_shares: int) -> None:
    layer, x = Layer([]), torch.arange(num_rows, dtype=torch.float64)[:, None]
    parts = layer_parts(cast(TowerLayer[None], layer), x, None, num_shares, lambda x, y: x + y)
    result: list[torch.Tensor] = []

    def steps() -> Iterator[None]:
        result.append((yield from parts))

    calls = [len(layer.rows) for _ in steps()]
    assert len(calls) == 4 * num_shares and all(after - before <= 1 for before, after in pairwise(calls))
    assert torch.equal(result[0], 4 * (2 * x + x.sum()))
    assert sum(layer.rows) == 3 * num_rows and max(layer.rows) <= -(-num_rows // num_shares)


def test_shares_have_about_as_many_rows() -> None:
    assert shares_of(10, 3) == [slice(0, 3), slice(3, 6), slice(6, 10)]
    assert shares_of(2, 3) == [slice(0, 0), slice(0, 1), slice(1, 2)]
