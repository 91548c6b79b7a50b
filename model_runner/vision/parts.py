"""`layer_parts`: a layer of a tower in parts, among which steps divide the work on a tile.

Rows are divided into shares of some `VisionSpec.part_patches`. Of each share a layer has four parts: queries, keys and
values; attention to all rows; and the MLP in halves. They take about the same time. The bits of the result depend on
the shares, so a tile that is encoded at once is computed in the same ones.
"""

# Shapes: P rows, K width of the tower, H heads of size D.

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

Place_contra = TypeVar("Place_contra", contravariant=True)
"""The places of rows in an image, in the form that the layers of a tower take, for example as angles."""


class TowerLayer(Protocol[Place_contra]):
    """A layer; `at`: the rows of a share."""

    def qkv(self, x: Tensor, place: Place_contra, at: slice) -> Tensor:
        """[rows of `at`, K] before the norm -> [rows of `at`, 3, H, D], turned, as `WholeAttention.padded` gives it."""
        ...

    def attend(self, qkv: Tensor, place: Place_contra, at: slice) -> Tensor:
        """[P, 3, H, D] -> [rows of `at`, K], to be added."""
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
    shares = shares_of(len(residual), num_shares)
    qkv = yield from in_parts(lambda at: layer.qkv(residual[at], place, at), shares)
    x = yield from in_parts(lambda at: layer.attend(qkv, place, at), attention_shares or shares)
    between = add(x, residual)
    halves = shares_of(len(residual), 2 * num_shares)
    x = yield from in_parts(lambda at: layer.mlp(between[at]), halves)
    return add(x, between)


def shares_of(num_rows: int, num: int) -> list[slice]:
    """So many shares of rows, some of them empty if there are fewer rows."""
    return [slice(i * num_rows // num, (i + 1) * num_rows // num) for i in range(num)]


def in_parts(work: Callable[[slice], Tensor], shares: Sequence[slice]) -> Generator[None, None, Tensor]:
    """The results of the work on shares of rows, one after the other; yields before each of them."""
    made = []
    for at in shares:
        yield
        if at.start < at.stop:
            made.append(work(at))
    return torch.cat(made) if len(made) > 1 else made[0]
