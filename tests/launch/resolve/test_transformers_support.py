"""What the installed transformers can compute, read from its files: equal to what its own tables and classes say."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.launch.resolve.transformers_support import Installed, find_transformers, why_not_transformers


def test_the_installed_package_is_found_as_it_is() -> None:
    found = find_transformers()
    assert found is not None
    assert found.version == transformers.__version__
    assert found.folder == Path(str(transformers.__file__)).parent


def test_every_language_model_is_known() -> None:
    installed = find_transformers()
    reasons = {name: why_not_transformers(name, installed) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert not [name for name, reason in reasons.items() if reason and "no built-in" in reason]
    assert [reasons[name] for name in ("mixtral", "olmo2", "granite", "cohere2", "glm4_moe")] == [None] * 5
    for name in ("nemotron_h", "jamba", "qwen3_next", "mamba", "falcon_h1", "bamba"):
        assert "layers with a state" in str(reasons[name])
    for name in ("bloom", "mpt", "gptj", "codegen"):
        assert "does not support external attention" in str(reasons[name])


@pytest.mark.parametrize(
    "name", ["baichuan", "xverse", "internlm2", "qwen", "phi3small", "phi3_v", "vit", "", "a/b"]
)
def test_code_from_a_folder_is_no_way_out(name: str) -> None:
    reason = why_not_transformers(name, find_transformers())
    assert reason is not None and f"no built-in language model for model_type {name!r}" in reason


def test_packages_that_cannot_be_used(tmp_path: Path) -> None:
    assert "not installed" in str(why_not_transformers("olmo2", None))
    assert "4.57.1 is too old" in str(why_not_transformers("olmo2", Installed("4.57.1", tmp_path)))
    assert why_not_transformers("olmo2", Installed("6.0", tmp_path)) is None  # its tables are elsewhere
