"""`OneShotGroup`: sums of few numbers in one kernel, in which each GPU reads the memory of the others.

NCCL needs two to three times as long for the sums of a decode step, some 8 to 512 KiB, because it sends each number
twice. torch's symmetric memory maps a buffer of every rank into all of them: one kernel copies this rank's numbers into
its buffer, waits for the others, and adds all buffers, in the order of the ranks, so that all have the same bits. (The
same idea as the custom all-reduce of vLLM and SGLang, and their use of symmetric memory.) From some size on, where
every rank reads everything, NCCL is faster.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .tp_group import TPGroup

logger = logging.getLogger(__name__)

ALIGNMENT: Final = 16
"""Bytes: of the kernel's loads."""
DTYPE: Final = torch.bfloat16


class SymmetricSum:
    """The sum of all ranks' tensors, [n] of `DTYPE`, by torch's symmetric memory, on GPUs."""

    def __init__(self, torch_group: Any, max_bytes: int, device: torch.device) -> None:
        """Allocate the buffer and map those of the other ranks; all ranks of the group do so at the same time.

        Raises:
            RuntimeError: the GPUs cannot read each other's memory, or torch lacks the operation.
        """
        try:
            from torch.distributed import _symmetric_memory as symmetric  # no public name yet

            self._op: Any = torch.ops.symm_mem.one_shot_all_reduce_copy
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"torch {torch.__version__} has no symmetric memory: {error}") from error
        self._name: str = torch_group.group_name
        self._buffer: Tensor = symmetric.empty(max_bytes // DTYPE.itemsize, dtype=DTYPE, device=device)
        symmetric.rendezvous(self._buffer, self._name)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._op(self._buffer[: x.numel()], x, "sum", self._name)
        return result


class OneShotGroup:
    """The ranks of `group`, with another way to add small tensors.

    Attributes:
        rank, size: those of `group`.
    """

    def __init__(self, group: TPGroup, one_shot: Callable[[Tensor], Tensor], max_bytes: int) -> None:
        """Add tensors of at most `max_bytes` with `one_shot`."""
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._one_shot = one_shot
        self._max_bytes = max_bytes

    def wait_for_others(self) -> AbstractContextManager[None]:
        return self._group.wait_for_others()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Ranks call it with equal shapes, so all of them choose the same way."""
        num_bytes = x.nbytes
        if x.dtype != DTYPE or not 0 < num_bytes <= self._max_bytes or num_bytes % ALIGNMENT:
            return self._group.all_reduce(x)
        flat = x.contiguous().view(-1)
        if flat.data_ptr() % ALIGNMENT:  # ranks may differ here, but not in the sum that follows
            flat = flat.clone()
        return self._one_shot(flat).view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._group.all_gather(x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._group.broadcast(x)

    def min_over_ranks(self, value: int) -> int:
        return self._group.min_over_ranks(value)

    def meet(self, place: str) -> None:
        self._group.meet(place)


def with_one_shot_sums(group: TPGroup, torch_group: Any, max_bytes: int, device: torch.device) -> TPGroup:
    """The group with one-shot sums up to `max_bytes`, if all ranks can; otherwise as it is, with a warning.

    A small sum is tried: its result must be right, or the buffers are not what they should be. It waits on the GPU for
    the other ranks, so it is tried only when all have their buffers.
    """
    if not max_bytes or group.size == 1:
        return group
    reason, one_shot = "", None
    try:
        one_shot = SymmetricSum(torch_group, max_bytes, device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    if group.min_over_ranks(int(one_shot is not None)):
        assert one_shot is not None
        tried = one_shot(torch.full((ALIGNMENT,), float(group.rank + 1), dtype=DTYPE, device=device))
        wanted = group.size * (group.size + 1) / 2
        if not bool((tried == wanted).all()):
            reason = f"a sum of {wanted:g} was {float(tried[0]):g}"
        if group.min_over_ranks(int(not reason)):
            logger.info("one_shot_sums max_kib=%d", max_bytes >> 10)
            return OneShotGroup(group, one_shot, max_bytes)
    logger.warning(
        "sums over ranks go through NCCL alone, although one_shot_all_reduce_kib is %d: %s",
        max_bytes >> 10,
        reason or "another rank cannot read the memory of this one",
    )
    return group
