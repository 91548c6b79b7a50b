"""Who computes what: sgl-kernel, Triton, oneDNN or torch, and a table that says why somebody was passed over."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import msgspec
import pytest
import torch

from engine.model_runner.kernels import plain, probe, sgl
from engine.model_runner.kernels.probe import Finding, KernelProbe
from engine.model_runner.op_selection import PROVIDERS, Target, select_ops, table_lines
from engine.model_runner.ops.ops import Ops
from engine.models.spec.layer_form import LayerForm
from engine.models.spec.model_spec import ModelSpec

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    torch_dtype="float32",
)
BOTH = KernelProbe(Finding("0.4.10"), Finding("3.8.0"), (9, 0))
TRITON = BOTH._replace(sgl_kernel=Finding(None, "not installed", "pip install it"))
NEITHER = TRITON._replace(triton=Finding(None, "no C compiler", "install one"))
GPU = torch.device("cuda")
SGL_OPS = {"rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul"}
TRITON_OPS = SGL_OPS | {"rotate_and_store", "route", "pack_experts", "short_conv", "gated_delta", "mamba2"}


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    """Those of sgl_kernel, without a GPU that could run them."""
    names = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "gelu_tanh_and_mul")
    fake = SimpleNamespace(**{name: SimpleNamespace(default=name) for name in names})
    monkeypatch.setattr(sgl, "operators", lambda: fake)


def providers(target: Target) -> dict[str, str]:
    return {choice.op: choice.provider for choice in select_ops(target).choices}


def reasons(target: Target) -> dict[str, str]:
    return {choice.op: choice.why for choice in select_ops(target).choices}


def test_every_operation_has_makers_and_the_last_can_do_everything():
    assert [*PROVIDERS] == [field.name for field in fields(Ops) if field.name != "choices"]
    for candidates in PROVIDERS.values():
        assert candidates[-1].name == "torch"
        assert candidates[-1].device_type is None


def test_sgl_kernel_is_preferred_where_it_covers_the_case():
    chosen = providers(Target(SPEC, GPU, torch.bfloat16, BOTH))
    assert {op for op, provider in chosen.items() if provider == "sgl-kernel"} == SGL_OPS
    assert chosen["rotate_and_store"] == "triton"
    assert chosen["pack_linear"] == "torch"
    ops = select_ops(Target(SPEC, GPU, torch.bfloat16, BOTH))
    assert isinstance(ops.silu_and_mul, sgl.SglGatedActivation)
    assert ops.gelu_and_mul._operator == "gelu_tanh_and_mul"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "dtype", "op", "reason"),
    [
        (SPEC, torch.float32, "rms_norm", "sgl-kernel: computes in bfloat16 and float16, not in float32"),
        (
            msgspec.structs.replace(SPEC, form=LayerForm(float32_norms=True)),
            torch.bfloat16,
            "add_rms_norm",
            "sgl-kernel: needs norm weights in the activations' dtype",
        ),
        (
            msgspec.structs.replace(SPEC, intermediate_size=100),
            torch.bfloat16,
            "silu_and_mul",
            "sgl-kernel: needs a width that is a multiple of 8, not 100",
        ),
    ],
)
def test_triton_takes_what_sgl_kernel_does_not_cover(spec, dtype, op, reason):
    target = Target(spec, GPU, dtype, BOTH)
    assert providers(target)[op] == "triton"
    assert reasons(target)[op].startswith(reason)


def test_without_sgl_kernel_triton_computes():
    target = Target(SPEC, GPU, torch.bfloat16, TRITON)
    assert {op for op, provider in providers(target).items() if provider == "triton"} == TRITON_OPS
    assert reasons(target)["rms_norm"] == "sgl-kernel: not installed"


def test_without_either_torch_serves_and_the_table_says_why(caplog):
    target = Target(SPEC, GPU, torch.bfloat16, NEITHER)
    with caplog.at_level("DEBUG"):
        ops = select_ops(target)
    assert {choice.provider for choice in ops.choices} == {"torch"}
    assert ops.rms_norm is plain.rms_norm
    (line,) = (line for line in caplog.messages if line.startswith("op=rms_norm "))
    assert line.endswith("passed over: sgl-kernel: not installed; triton: no C compiler")
    assert caplog.messages == [*table_lines(ops.choices), f"ops: {len(ops.choices)} by torch"]


def test_a_gpu_is_looked_at_once_and_only_where_nobody_has(monkeypatch):
    looked: list[int] = []

    def look():
        looked.append(1)
        return NEITHER

    monkeypatch.setattr(probe, "probe_kernels", look)
    select_ops(Target(SPEC, GPU, torch.bfloat16, TRITON))
    select_ops(Target(SPEC, torch.device("cpu"), torch.bfloat16))
    assert looked == []
    assert set(providers(Target(SPEC, GPU, torch.bfloat16)).values()) == {"torch"}
    assert looked == [1]


def test_kernels_for_gpus_are_not_even_mentioned_on_the_cpu():
    choices = select_ops(Target(SPEC, torch.device("cpu"), torch.float32)).choices
    assert not any(name in choice.provider + choice.why for choice in choices for name in ("sgl", "triton"))


def test_a_cpu_needs_neither_triton_nor_a_trial(monkeypatch):
    def nobody(*_args, **_kwargs):
        raise AssertionError("somebody looked for a GPU")

    monkeypatch.setattr(probe, "gather_facts", nobody)
    monkeypatch.setattr(probe, "probe_kernels", nobody)
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"] + ["triton"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    select_ops(Target(SPEC, torch.device("cpu"), torch.float32))


@pytest.mark.slow  # imports torch
def test_start_up_on_a_cpu_loads_nothing_for_gpus():
    """Start-up there is a matter of seconds, and importing Triton takes one of them."""
    code = """
import sys, torch
before = set(sys.modules)
from engine.model_runner.op_selection import Target, select_ops
select_ops(Target(None, torch.device("cpu"), torch.float32))
names = ("triton", "sgl_kernel", "engine.model_runner.kernels.")
print(sorted(name for name in set(sys.modules) - before if name.startswith(names)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert "triton" not in done.stdout and "sgl_kernel" not in done.stdout and "probe" not in done.stdout
    assert "engine.model_runner.kernels.plain" in done.stdout
