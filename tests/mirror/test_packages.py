"""Models in bfloat16 on the mirror with sgl_kernel and FA3: the tokens of the CPU in bfloat16.

Their weights are large enough that rounding decides no token.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec

from .faults import Fault
from .mirror import mirror_device
from .packages import SGL_KERNEL, sgl_kernel_on
from .runners import LLAMA, load_driver, on_cpu
from .test_llama import mixed_steps

BOUND = 1.5
WIDE_LLAMA = replace(LLAMA, hidden_size=64, head_dim=64, num_heads=4, num_kv_heads=2, torch_dtype="bfloat16")
GEMMA2 = {
    "model_type": "gemma2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 8,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
"""With windows and capped scores; its norms have weights in float32, which sgl_kernel does not take."""


def check_with_sgl_kernel(
    spec: ModelSpec, operators: set[str], *, record: bool, bound: float = BOUND
) -> None:
    """FA3 attends and sgl_kernel has computed `operators`; the tokens are those of the CPU."""
    with on_cpu():
        expected = mixed_steps(load_driver(spec, None, dtype="bfloat16", bound=bound))
    assert len({token for tokens in expected for token in tokens}) > 6
    with mirror_device(kernels=SGL_KERNEL) as mirror, sgl_kernel_on(mirror) as fa3:
        driver = load_driver(spec, mirror, record=record, dtype="bfloat16", bound=bound)
        assert mixed_steps(driver) == expected
        used = {name for name in mirror.operators if name.startswith("sgl_kernel.")}
        assert used == {f"sgl_kernel.{name}.default" for name in operators}
        assert fa3.num_calls >= 2 * 8


def test_a_llama_with_fa3_and_sgl_kernel_gives_the_tokens_of_the_cpu():
    operators = {"rmsnorm", "fused_add_rmsnorm", "silu_and_mul"}
    check_with_sgl_kernel(WIDE_LLAMA, operators, record=True)


@pytest.mark.slow
def test_a_llama_without_recordings_gives_the_tokens_of_the_cpu():
    operators = {"rmsnorm", "fused_add_rmsnorm", "silu_and_mul"}
    check_with_sgl_kernel(WIDE_LLAMA, operators, record=False)


@pytest.mark.slow
@pytest.mark.parametrize("record", [True, False], ids=["recorded", "eager"])
def test_gemma_2_with_windows_and_caps_gives_the_tokens_of_the_cpu(record, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    spec = replace(read_hf_spec(tmp_path), tie_word_embeddings=False)  # else its tokens hardly differ
    check_with_sgl_kernel(spec, {"gelu_tanh_and_mul"}, record=record, bound=0.3)


def test_fa3_refuses_tensors_of_the_host():
    with mirror_device(kernels=SGL_KERNEL) as mirror, sgl_kernel_on(mirror):
        from sgl_kernel.flash_attn import get_scheduler_metadata

        lens = torch.ones(1, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="cache_seqlens must be on CUDA"):
            get_scheduler_metadata(cache_seqlens=lens)
        (fault,) = mirror.faults.take()
        assert fault == Fault("host tensor", "FA3: cache_seqlens, (1,)", "")
