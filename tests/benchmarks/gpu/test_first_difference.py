"""`Comparer` on a mirror of a GPU: all operators of a mixture of experts agree, and each saved call can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.gpu import first_difference, golden
from benchmarks.gpu.first_difference import Comparer, replay
from benchmarks.gpu.tensor_difference import difference_of
from tests.benchmarks.gpu import mirror_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}


def test_operators_agree_and_are_replayed(tmp_path: Path) -> None:
    golden.make(tmp_path, ("qwen3_moe",), (5,), 1, 4, num_hidden_layers=2, **SIZES)
    requests = golden.load(tmp_path, "qwen3_moe")
    real: list[str] = []

    def forced(*results: Any) -> str:
        real.append(difference_of(*results))
        return "so that the call is saved"

    with (
        mirror_faults.clean({"compare": True}),
        mock.patch.object(first_difference, "difference_of", forced),
        Comparer(tmp_path, lambda _difference: None) as comparer,
    ):
        engine = golden.engine_of(tmp_path / "qwen3_moe", "cuda", record_steps=False, overlap=False)
        assert golden.compare(requests, golden.answer(engine, requests)).reason == ""

    assert len(real) == comparer.num_calls and not any(real)
    replayed = {op for op in comparer.differences if op not in ("sample", "logprobs")}
    assert replayed >= {"rms_norm", "rotate_and_store", "attention", "add_rms_norm", "route", "pack_experts"}
    assert {op: replay(tmp_path / f"wrong-{op}.pt") for op in replayed} == dict.fromkeys(replayed, "")
