"""Drafters of the runner where other tests have only drafts of the scheduler: bits, hybrids, adapters, grammars.

Answers and log-probabilities are those of plain decoding, as in `test_drafts.py`, which has the other lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

from engine import LLM, SamplingParams
from engine.models.hf.hf_config import read_hf_spec
from engine.runtime.errors import RequestError
from engine.scheduler.speculation.ngram_proposer import NgramProposer
from engine.scheduler.speculation.runner_drafts import RunnerDrafts
from tests.adapter_files import write_adapter
from tests.e2e.random_schemas import question
from tests.model_runner.drafting.eagle3_files import write_head
from tests.scheduler.speculation.proposers import free_drafts

from .test_drafts import LIVES, PROMPTS, SETTINGS, WORK, run
from .test_mtp import add_mtp, glm
from .test_state_layers import save_tiny, tiny_lfm2, tiny_qwen

__all__ = ["glm", "tiny_lfm2", "tiny_qwen"]  # fixtures

pytestmark = pytest.mark.slow
QWEN_MTP = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "norm": "mtp.norm.weight",
    "projection": "mtp.fc.weight",
}


@pytest.fixture(scope="module")
def wide(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose heads are as wide as the kernels in a fixed order need them."""
    return save_tiny("llama", tiny_model, tmp_path_factory.mktemp("wide") / "llama", head_dim=16)


@pytest.fixture(scope="module")
def wide_qwen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 with a layer that predicts further tokens."""
    folder = save_tiny(
        "qwen3_5_text",
        tiny_model,
        tmp_path_factory.mktemp("wide") / "qwen",
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    add_mtp(folder, "model.layers.1", **QWEN_MTP)
    return folder


@pytest.fixture(scope="module")
def wide_glm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-4.5 with such a layer, without experts in most layers."""
    folder = save_tiny(
        "glm4_moe",
        tiny_model,
        tmp_path_factory.mktemp("wide") / "glm",
        head_dim=16,
        first_k_dense_replace=4,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        num_nextn_predict_layers=1,
    )
    names = {name: f"model.layers.4.{name}.weight" for name in ("enorm", "hnorm")}
    names |= {
        "norm": "model.layers.4.shared_head.norm.weight",
        "projection": "model.layers.4.eh_proj.weight",
    }
    add_mtp(folder, "model.layers.3", "model.layers.4", **names)
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head over every second token, of models of this size."""
    folder = tmp_path_factory.mktemp("heads") / "head"
    return write_head(folder, 272, draft_ids=torch.arange(136) * 2 + 1)


@contextmanager
def only_the_runner() -> Iterator[None]:
    """All drafts are the runner's, in each step as many as there may be."""
    with (
        free_drafts(),
        mock.patch.object(NgramProposer, "chances", return_value=[]),
        mock.patch.object(
            RunnerDrafts, "chances", lambda self, req, count: [0.9**n for n in range(1, count + 1)]
        ),
        mock.patch.object(
            RunnerDrafts, "limit", lambda self, reqs, counts, intervals: counts or [0] * len(reqs)
        ),
    ):
        yield


def check(folder: Path, drafter: dict[str, Any], *, tolerance: float, **settings: Any) -> None:
    """Compare with the same life without drafts; `tolerance`: of log-probabilities."""
    tokens, logprobs, _, drafts = run(folder, **settings)
    assert drafts == (0, 0)
    with only_the_runner():
        found, found_logprobs, _, (num_drafts, _) = run(folder, **drafter, **settings)
    assert found == tokens
    for ours, theirs in zip(found_logprobs, logprobs, strict=True):
        assert [each.logprob for each in ours or ()] == pytest.approx(
            [each.logprob for each in theirs or ()], abs=tolerance, rel=0.0
        )
    assert num_drafts > 100


@pytest.mark.parametrize("drafter", ["draft", "eagle3", "mtp", "mtp with states"])
@pytest.mark.parametrize("life", ["plain", "chunks", "retraction", "overlap", "int8 KV"])
def test_bits_are_those_without(
    wide: Path, wide_glm: Path, wide_qwen: Path, head: Path, drafter: str, life: str
):
    """With --deterministic, of the tokens and of their log-probabilities."""
    method = drafter.split(maxsplit=1)[0]
    folder = {"mtp": wide_glm, "mtp with states": wide_qwen}.get(drafter, wide)
    models = {"draft": {"speculative_model": wide}, "eagle3": {"speculative_model": head}}
    settings = {"deterministic": True, "dtype": "bfloat16", **LIVES[life]}
    check(folder, {"speculative": method, **models.get(drafter, {})}, tolerance=0.0, **settings)


@pytest.mark.parametrize("life", [life for life in LIVES if life != "swap"])
@pytest.mark.parametrize("method", ["draft", "eagle3"])
@pytest.mark.parametrize("name", ["tiny_lfm2", "tiny_qwen"])
def test_models_with_state_layers_have_drafters_too(
    request: pytest.FixtureRequest, tiny_model: Path, head: Path, name: str, method: str, life: str
):
    """The model's states follow the accepted tokens, the drafter has keys and values only. States are not swapped."""
    drafter = {"speculative": method, "speculative_model": tiny_model if method == "draft" else head}
    # A sum in another order may round a value of int8 KV to the next integer, as chunks do.
    tolerance = 1e-2 if life == "int8 KV" else 1e-4
    check(request.getfixturevalue(name), drafter, tolerance=tolerance, **LIVES[life])


def adapted(folder: Path, adapters: Sequence[Path], **settings: Any) -> Any:
    """Tokens and log-probabilities without an adapter and with each of them, in steps together; drafts."""
    names = [f"a{n}={path}" for n, path in enumerate(adapters)]
    with LLM(str(folder), **SETTINGS | settings, lora=names) as llm:
        outputs = []
        for _ in range(2):  # the second time prefixes are known, those of an adapter to it alone
            streams = [
                llm.generate(prompt, replace(params, max_new_tokens=12), lora=lora, stream=True)
                for prompt, params in zip(PROMPTS, WORK, strict=True)
                for lora in (None, "a0", "a1")
            ]
            outputs += [list(stream) for stream in streams]
    tokens = [[token for chunk in chunks for token in chunk.token_ids] for chunks in outputs]
    return tokens, sum(chunks[-1].usage.draft_tokens for chunks in outputs)


@pytest.mark.parametrize("method", ["draft", "eagle3", "mtp"])
def test_a_drafter_without_adapters_drafts_for_all(
    wide: Path, glm: Path, head: Path, tmp_path: Path, method: str
):
    folder = glm if method == "mtp" else wide
    drafter: dict[str, Any] = {"speculative": method}
    if method != "mtp":
        drafter["speculative_model"] = wide if method == "draft" else head
    adapters = [
        write_adapter(tmp_path / f"a{seed}", read_hf_spec(folder), seed=seed, size=3.0) for seed in range(2)
    ]
    settings = {"chunked_prefill_size": 24, "chaos": "retract=0.05:8"}
    expected, num_drafts = adapted(folder, adapters, **settings)
    assert num_drafts == 0 and expected[0] != expected[1] != expected[2]
    with only_the_runner():
        found, num_drafts = adapted(folder, adapters, **drafter, **settings)
    assert found == expected
    assert num_drafts > 50


def guided(folder: Path, **settings: Any) -> tuple[list[Any], int, int]:
    """Answers that match random schemas, several to each, some of them cut; drafts, and right ones."""
    found, num_drafts, num_accepted = [], 0, 0
    with LLM(str(folder), **SETTINGS | settings) as llm:
        for number in range(24):
            asked = question(number)
            params = SamplingParams(
                temperature=asked.temperature, seed=asked.seed, max_new_tokens=asked.max_tokens, logprobs=0
            )
            try:
                outputs = llm.generate(PROMPTS[:3], params, json_schema=asked.schema)
            except RequestError:  # its shortest answer is longer
                continue
            for output in outputs:
                found.append((output.token_ids, output.finish_reason, output.error))
                num_drafts += output.usage.draft_tokens
                num_accepted += output.usage.accepted_draft_tokens
    return found, num_drafts, num_accepted


@pytest.mark.parametrize("overlap", [False, True], ids=["settled", "overlap"])
@pytest.mark.parametrize("method", ["ngram", "draft", "eagle3", "mtp"])
def test_answers_that_match_a_schema_have_drafts(
    wide: Path, glm: Path, head: Path, method: str, overlap: bool
):
    """The runner drafts without the grammar; a draft that the grammar refuses is never right."""
    folder = glm if method == "mtp" else wide
    drafter: dict[str, Any] = {"speculative": method, "overlap": overlap}
    if method in ("draft", "eagle3"):
        drafter["speculative_model"] = wide if method == "draft" else head
    expected, *_ = guided(folder, overlap=overlap, multi_step_ms=0.0)
    with free_drafts() if method == "ngram" else only_the_runner():
        found, num_drafts, num_accepted = guided(folder, **drafter)
    assert found == expected
    assert {reason for _, reason, _ in expected} >= {"stop", "length"}
    assert num_drafts > 300 and num_accepted > 20
