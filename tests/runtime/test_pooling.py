"""`with_shared_len`: the beginning that the prompts of one call share."""

from __future__ import annotations

from array import array

import pytest

from engine.runtime.pooling import PoolingKind, PoolingParams, with_shared_len

LABELS = PoolingParams(PoolingKind.LABELS, label_ids=(5,))


@pytest.mark.parametrize(
    ("prompts", "shared_len"),
    [
        ([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 300]], 2),
        ([[1, 2, 3], [1, 2, 3]], 2),  # the last token is always computed
        ([[1, 2], [1, 2, 3]], 1),
        ([[7, 2], [1, 2, 3]], 0),
        ([[256, 1], [256, 2], [1, 1]], 0),
        ([[1, 2, 3]], 0),
    ],
)
def test_the_common_beginning_of_prompts(prompts: list[list[int]], shared_len: int):
    made = with_shared_len([LABELS] * len(prompts), [array("i", prompt) for prompt in prompts])

    assert [each.shared_len for each in made] == [shared_len] * len(prompts)
    assert {each.label_ids for each in made} == {(5,)}


def test_vectors_and_texts_have_none():
    ids = [array("i", [1, 2]), array("i", [1, 3])]

    assert with_shared_len([PoolingParams()] * 2, ids) == [PoolingParams()] * 2
    assert with_shared_len((), ids) == []
