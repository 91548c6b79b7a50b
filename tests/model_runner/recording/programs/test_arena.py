"""Memory of recordings: nobody's block is another's while both live, and it comes back with the last view."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest
import torch

from engine.model_runner.recording.programs.arena import Arena

BF16 = torch.bfloat16


def address_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_block_is_like_the_tensor_and_comes_back_with_its_last_view():
    arena = Arena()
    first = arena.like(torch.empty(6, 5, dtype=BF16))
    assert (first.shape, first.stride(), first.dtype) == ((6, 5), (5, 1), BF16)
    view, address = first[2:].view(torch.int16), address_of(first)
    del first
    assert address_of(arena.like(torch.empty(60))) != address, "a view still reads there"
    del view
    assert address_of(arena.like(torch.empty(6, 5, dtype=BF16))) == address


def test_strides_are_kept():
    tensor = torch.empty(4, 6).t()
    assert Arena().like(tensor).stride() == tensor.stride() == (1, 6)


@pytest.mark.parametrize("seed", range(3))
def test_living_blocks_do_not_overlap_and_memory_is_used_again(seed):
    source, arena = random.Random(seed), Arena()
    living: list[tuple[torch.Tensor, int]] = []
    for n in range(600):
        if living and source.random() < 0.5:
            tensor, number = living.pop(source.randrange(len(living)))
            assert (tensor == number).all()
            del tensor
        else:
            size = source.choice([0, 1, 16, 100, 5000])
            living.append((arena.like(torch.empty(size, dtype=torch.int32)).fill_(n), n))
            assert address_of(living[-1][0]) % 64 == 0
    while living:
        tensor, number = living.pop()
        assert (tensor == number).all()
        del tensor
    num_bytes = arena.num_bytes
    for chunk in arena._chunks:
        chunk._collect()
        assert chunk._free == [(0, len(chunk.memory))]
    whole = arena.like(torch.empty(1 << 20, dtype=torch.uint8))
    assert arena.num_bytes == num_bytes, "all of it is one piece again"
    del whole


@pytest.mark.parametrize("what", ["take", "_give_back"])
def test_a_block_may_come_back_at_any_moment(what):
    """The garbage collector, also in another thread, runs where it likes: here behind each single bytecode."""

    def drops_at(moment: int) -> bool:
        """Drop a block at a moment of a call of that name; False if it was over before."""
        arena, living = Arena(), []
        held = [arena.like(torch.empty(16)) for _ in range(6)]
        del held[3]
        left = [moment]

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_name != what:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left[0] -= 1
                if left[0] == 0:
                    held[1] = held[2]
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            held[4] = arena.like(torch.empty(16))
            living.append(arena.like(torch.empty(16)))
        finally:
            sys.settrace(before)
        living += [arena.like(torch.empty(16)) for _ in range(4)] + held
        addresses = {address_of(tensor) for tensor in living}
        assert len(addresses) == len(living) - 1 + (left[0] > 0), "held[2] is there twice"
        del held[:], living[:]
        chunk = arena._chunks[0]
        chunk._collect()
        assert chunk._free == [(0, len(chunk.memory))]
        return left[0] <= 0

    moments = itertools.takewhile(drops_at, range(1, 1000))
    assert len(list(moments)) > 20


def test_more_than_there_is_comes_from_another_chunk_and_nothing_moves():
    arena = Arena()
    small = arena.like(torch.empty(8)).fill_(3.0)
    large = arena.like(torch.empty(1 << 20)).fill_(5.0)
    assert (small == 3.0).all() and (large == 5.0).all()
    assert arena.num_bytes >= 4 << 20


def test_a_borrowed_tensor_holds_nothing():
    arena = Arena()
    own = arena.like(torch.empty(4, 3)).fill_(1.0)
    borrowed = arena.borrowed(own)
    assert torch.equal(borrowed, own)
    del own
    arena.like(torch.empty(4, 3)).fill_(2.0)
    assert (borrowed == 2.0).all()
    with pytest.raises(AssertionError, match="not of this arena"):
        arena.borrowed(torch.empty(3))
