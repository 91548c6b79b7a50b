"""Two backends as one: each sees its part of a batch, and the result is that of one."""

from __future__ import annotations

import pytest
import torch

from engine.model_runner.attention.split import split_backend
from engine.model_runner.attention.torch_native import TorchNativeAttention
from tests.model_runner.attention.paged_batches import Pages, assert_close, spec_of


class Prompts(TorchNativeAttention):
    """Sees extends only."""

    name = "prompts"

    def plan_step(self, layout):
        assert layout.num_extends == len(layout.rows) > 0
        return super().plan_step(layout)


class Decodes(TorchNativeAttention):
    """Sees decodes only."""

    name = "decodes"

    @staticmethod
    def reasons_against(spec, device, dtype, kv_dtype):
        return ["it is a test"]

    def plan_step(self, layout):
        assert layout.num_extends == 0 < len(layout.rows)
        return super().plan_step(layout)


class CapturableDecodes(Decodes):
    def capturable(self):
        return self

    def decode_step(self, rows, seq_lens):
        return rows, seq_lens


@pytest.mark.parametrize(
    ("lens", "extend_lens"),
    [([20, 9, 5], [10, 9, 5]), ([20, 9, 5], [1, 1, 1]), ([20, 9, 7, 5, 30], [10, 1, 7, 1, 1])],
)
def test_is_dense_attention(lens, extend_lens):
    pages = Pages(spec_of(4, 2, 16), 4, lens, torch.float32, seed=0, backend=split_backend(Prompts, Decodes))
    ours, expected = pages.run(extend_lens)
    assert_close(ours, expected, torch.float32)


def test_tokens_of_an_image_see_all_of_it():
    lens = [20, 9, 7, 5, 30]
    pages = Pages(spec_of(4, 2, 16), 4, lens, torch.float32, seed=0, backend=split_backend(Prompts, Decodes))
    pages.images = [[(12, 18)], [], [(0, 7)], [], [(1, 9)]]
    ours, expected = pages.run([10, 1, 7, 1, 1])
    assert_close(ours, expected, torch.float32)


def test_speaks_for_both():
    backend = split_backend(Prompts, Decodes)
    assert backend.name == "prompts,decodes"
    found = backend.reasons_against(spec_of(4, 2, 16), torch.device("cpu"), torch.float32, torch.float32)
    assert found == ["decodes: it is a test"]


def test_its_decodes_can_be_recorded_where_those_of_the_second_can():
    def bound(prompts, decodes):
        backend = split_backend(prompts, decodes)
        return Pages(spec_of(4, 2, 16), 4, [3], torch.float32, seed=0, backend=backend).bound()

    assert bound(CapturableDecodes, Decodes).capturable() is None
    rows, seq_lens = torch.zeros(1), torch.ones(1)
    capturable = bound(Prompts, CapturableDecodes).capturable()
    assert capturable.decode_step(rows, seq_lens) == (rows, seq_lens)
