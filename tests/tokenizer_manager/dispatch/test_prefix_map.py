"""`PrefixMap` beside a tree of blocks that is searched from the root."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer_manager.dispatch.policies import BLOCK, PrefixMap, block_hashes

FREE = ("", "")


def prompt(*blocks: int, rest: int = 0) -> bytes:
    """Each block repeats one token; `rest` more tokens follow."""
    return array("i", [token for block in blocks for token in [block] * BLOCK] + [0] * rest).tobytes()


def test_blocks_are_whole_and_depend_on_all_before_them_and_on_the_namespace():
    names = block_hashes(prompt(1, 2, 1, rest=BLOCK - 1), FREE)

    assert len(names) == 3 == len(set(names))
    assert block_hashes(prompt(1, 2), FREE) == names[:2]
    assert not set(block_hashes(prompt(2, 2, 1), FREE)) & set(names)
    assert not set(block_hashes(prompt(1, 2, 1), ("salt", ""))) & set(names)
    assert not set(block_hashes(prompt(1, 2, 1), ("", "adapter"))) & set(names)
    assert block_hashes(prompt(rest=BLOCK - 1), FREE) == []


def test_the_oldest_prompts_leave_when_the_pool_is_full():
    known = PrefixMap(max_tokens=4 * BLOCK + BLOCK // 2)
    first, second, third = (block_hashes(prompt(*blocks), FREE) for blocks in ((1, 2), (3, 4), (1, 5)))
    known.add(first)
    known.add(second)
    known.add(third)  # the block that it shares with the first is new again

    assert [known.match(each) for each in (first, second, third)] == [1, 2, 2]
    assert len(known) == 4
    known.missed(1)
    assert [known.match(each) for each in (first, second, third)] == [1, 1, 2]
    known.missed(100)
    assert len(known) == 0


def test_a_prompt_that_is_larger_than_the_pool():
    known = PrefixMap(max_tokens=2 * BLOCK)
    names = block_hashes(prompt(1, 2, 3, 4), FREE)
    known.add(names)

    assert known.match(names) == len(known) == 2
    known.clear()
    assert known.match(names) == 0


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=5), max_size=12),
    max_blocks=st.integers(1, 8),
    missed=st.lists(st.integers(0, 3), max_size=12),
)
def test_a_known_block_has_all_blocks_before_it(prompts, max_blocks, missed):
    known = PrefixMap(max_blocks * BLOCK)
    everything = [block_hashes(prompt(*each), FREE) for each in prompts]
    for number, names in enumerate(everything):
        known.add(names)
        assert known.match(names) == min(len(names), max_blocks)
        if number < len(missed):
            known.missed(missed[number])
        assert len(known) <= max_blocks
        for each in everything:
            found = [name in known._blocks for name in each]
            assert found == sorted(found, reverse=True)
            assert known.match(each) == sum(found)
