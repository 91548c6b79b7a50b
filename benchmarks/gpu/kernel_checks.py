"""`check.py`'s sections about kernels: each alone against float32, and the GPU's own tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.sections import Report

ROOT: Final = Path(__file__).resolve().parents[2]
KERNEL_TESTS: Final = (
    "tests/model_runner/kernels",
    "tests/model_runner/attention",
    "tests/model_runner/weights",
    "tests/model_runner/sampling/test_sampler.py",
    "tests/model_runner/sampling/test_sampler_backend.py",
)
"""They compare with float32 over random shapes, and run on the GPU where there is one."""
TEST_PACKAGES: Final = ("pytest", "pytest_timeout", "xdist", "hypothesis")


def sgl_kernel(report: Report) -> None:
    """The kernel package loads, and FA3 over pages agrees with float32: decode, and prefill after a prefix."""
    report.note(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {torch.cuda.get_device_capability()}"
    )
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except (ImportError, OSError) as error:
        report.skip(f"sgl_kernel cannot be imported ({error}); Triton is used instead: make gpu-bundle")
    generator = torch.Generator("cuda").manual_seed(0)
    for name, head_dim, heads, kv_heads, page_size, prefixes, lengths in (
        ("decode", 128, 32, 8, 16, (700, 5, 99), (1, 1, 1)),
        ("decode, three heads to one", 64, 9, 3, 16, (130, 17), (1, 1)),
        ("prefill", 128, 16, 8, 16, (0, 0), (200, 33)),
        ("prefill after a prefix", 128, 16, 8, 64, (128, 70), (40, 1)),
        ("head dim 256", 256, 4, 1, 16, (60,), (30,)),
    ):
        with report.part(f"FA3 {name}"):
            q, k, v, table = _paged(head_dim, heads, kv_heads, page_size, prefixes, lengths, generator)
            starts = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(
                0, dtype=torch.int32
            )
            totals = torch.tensor([sum(pair) for pair in zip(prefixes, lengths, strict=True)])
            out = flash_attn_with_kvcache(
                q=q,
                k_cache=k,
                v_cache=v,
                cache_seqlens=totals.to("cuda", torch.int32),
                page_table=table,
                cu_seqlens_q=starts,
                max_seqlen_q=max(lengths),
                softmax_scale=head_dim**-0.5,
                causal=True,
            )
            expected = _attention(q, k, v, table, prefixes, lengths)
            torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def _paged(
    head_dim: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    prefixes: Sequence[int],
    lengths: Sequence[int],
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q [T, heads, D], pages of k and v [pages, page_size, kv_heads, D], and the page table: [B, max pages]."""
    most = -(-max(sum(pair) for pair in zip(prefixes, lengths, strict=True)) // page_size)
    num_pages = 1 + most * len(lengths)
    shape = (num_pages, page_size, kv_heads, head_dim)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    pages = torch.randperm(num_pages - 1, device="cuda", generator=generator) + 1
    return (
        torch.randn(sum(lengths), heads, head_dim, **options),
        torch.randn(shape, **options),
        torch.randn(shape, **options),
        pages.view(len(lengths), most).to(torch.int32),
    )


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    prefixes: Sequence[int],
    lengths: Sequence[int],
) -> torch.Tensor:
    """Reference attention in float32, one request after the other."""
    outs, start, group = [], 0, q.shape[1] // k.shape[2]
    for n, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        keys, values = (
            pool[table[n].long()].flatten(0, 1)[: prefix + length].float().repeat_interleave(group, dim=1)
            for pool in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start : start + length].float(), keys) * q.shape[2] ** -0.5
        later = torch.arange(prefix + length, device=q.device) > (
            torch.arange(length, device=q.device)[:, None] + prefix
        )
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        start += length
    return torch.cat(outs)


def kernels(report: Report) -> None:
    """Our kernels' own tests, on this device."""
    tests = ["tests/model_runner/memory/test_device_timer.py"] if report.tiny else list(KERNEL_TESTS)
    _pytest(report, ["-m", "not slow and not model", *tests], workers=0 if report.tiny else 6)


def gpu_tests(report: Report) -> None:
    """All tests that need a GPU."""
    _pytest(report, ["-m", "gpu", "tests/model_runner", "tests/scheduler", "tests/offline"], workers=4)


def _pytest(report: Report, arguments: list[str], *, workers: int) -> None:
    if missing := [name for name in TEST_PACKAGES if importlib.util.find_spec(name) is None]:
        report.fail(
            f"the tests need {', '.join(missing)}: make gpu-bundle, or pip install them into that Python"
        )
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    command += ["-n", str(workers)] if workers else []
    run = subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout[-6000:])
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    for line in lines[:10]:
        report.note(line[:200])
    last = (run.stdout.strip().splitlines() or ["no output"])[-1]
    if run.returncode:
        report.fail(f"pytest ended with {run.returncode}: {last}")
    report.note(last)
