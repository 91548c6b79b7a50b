"""`PoolingHead`: the layers after pooling."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.model_runner.pooling.head import load_pooling_head
from engine.model_runner.weights.dummy import DummyStore
from engine.model_runner.weights.reader import WeightReader
from engine.models.spec.encoder_spec import DenseSpec, PoolingSpec


def test_the_bits_of_a_text_do_not_depend_on_the_others_of_its_step():
    dense = DenseSpec(
        folder="2_Dense", weight="linear.weight", bias="linear.bias", in_features=384, out_features=96
    )
    spec = PoolingSpec(task="embed", pooling="mean", size=96, dense=(dense,))
    device = torch.device("cpu")
    reader = WeightReader(DummyStore(1), torch.float32, device)
    head = load_pooling_head(spec, reader, Path(), device, seed=1)
    assert head is not None
    pooled = torch.randn(33, 384, generator=torch.Generator().manual_seed(1))

    together = head(pooled)

    assert together.shape == (33, 96)
    for n in range(len(pooled)):
        torch.testing.assert_close(together[n], head(pooled[n : n + 1])[0], rtol=0, atol=0)
