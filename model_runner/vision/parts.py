"""`layer_parts`: a layer of a tower in parts, among which steps divide the work on a tile.

Rows are divided into shares of some `VisionSpec.PART_PATCHES`. Of each share a layer has four parts: queries, keys and
values; attention to all rows; and the MLP in halves. They take about the same time. The bits of the result depend on
the shares, so a tile that is encoded at once is computed in the same ones. On a GPU, where small products are slow, the
first share has all rows.
"""

# Shapes: P rows, K width of the tower.

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

Place_contra = TypeVar("Place_contra", contravariant=True)
"""What the layers of a tower know about the places of rows in an image, for example their angles."""


class TowerLayer(Protocol[Place_contra]):
    """A layer; `at`: the rows of a share."""

    def qkv(self, x: Tensor, place: Place_contra, at: slice) -> Tensor:
        """[rows of `at`, K] before the norm -> [rows of `at`, 3 * K], also turned."""
        ...

    def attend(self, qkv: Tensor, place: Place_contra, at: slice) -> Tensor:
        """[P, 3 * K] -> [rows of `at`, K], to be added."""
        ...

    def mlp(self, x: Tensor) -> Tensor:
        """[any, K] before the norm -> [any, K], to be added."""
        ...


def layer_parts(
    layer: TowerLayer[Place_contra],
    residual: Tensor,
    place: Place_contra,
    num_shares: int,
    add: Callable[[Tensor, Tensor], Tensor],
    attention_shares: Sequence[slice] | None = None,
) -> Generator[None, None, Tensor]:
    """[P, K] -> [P, K]; yields before each of 4 * `num_shares` parts.

    Args:
        add: see `Ops.add`.
        attention_shares: rows of which attention is computed together, `num_shares` of them; None: as for the rest.
    """
    shares = shares_of(len(residual), num_shares, residual.device)
    qkv = yield from _in_parts(lambda at: layer.qkv(residual[at], place, at), shares)
    x = yield from _in_parts(lambda at: layer.attend(qkv, place, at), attention_shares or shares)
    between = add(x, residual)
    halves = shares_of(len(residual), 2 * num_shares, residual.device)
    x = yield from _in_parts(lambda at: layer.mlp(between[at]), halves)
    return add(x, between)


def shares_of(num_rows: int, num: int, device: torch.device) -> list[slice]:
    """So many shares of rows, some of them empty if there are fewer rows."""
    most = 1 if device.type == "cuda" else num
    return [slice(min(i, most) * num_rows // most, min(i + 1, most) * num_rows // most) for i in range(num)]


def _in_parts(work: Callable[[slice], Tensor], shares: Sequence[slice]) -> Generator[None, None, Tensor]:
    made = []
    for at in shares:
        yield
        if at.start < at.stop:
            made.append(work(at))
    return torch.cat(made) if len(made) > 1 else made[0]
