"""`all_reduce`, a section of `bench.py` for machines with several GPUs: what a sum over ranks costs a layer.

    nccl        what serving calls
    one-shot    each rank reads the others' memory (torch's symmetric memory): one kernel, for small sums
    multimem    the switch adds up, where there is one (NVLS)

A layer has two sums of [batch, hidden] in bfloat16: 8 KiB for one request of Llama-3.1-8B, 2 MiB for 256. The size from
which NCCL is faster decides whether, and below which size, a one-shot sum is worth its memory.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.attention import time_of
from benchmarks.gpu.sections import Figure, Report

SIZES_KIB: Final = (8, 32, 128, 256, 512, 1024, 2048)


def all_reduce(report: Report) -> None:
    """See the module."""
    num_ranks = 2 if report.device == "cpu" else torch.cuda.device_count()
    if num_ranks < 2:
        report.skip("needs several GPUs")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (num_ranks, report.device, report.tiny, folder), nprocs=num_ranks)
        for line in (Path(folder) / "figures").read_text().splitlines():
            found = json.loads(line)
            if "failed" in found:
                report.note(found["failed"])
            else:
                report.figure(Figure(**found))


def _rank(rank: int, num_ranks: int, device_type: str, tiny: bool, folder: str) -> None:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/ranks",
        rank=rank,
        world_size=num_ranks,
        device_id=device if device_type == "cuda" else None,
    )
    lines = [
        line for kib in SIZES_KIB[: 1 if tiny else None] for line in _figures(kib << 10, num_ranks, device)
    ]
    if rank == 0:
        (Path(folder) / "figures").write_text("\n".join(lines))
    dist.destroy_process_group()


def _figures(num_bytes: int, num_ranks: int, device: torch.device) -> list[str]:
    """Of one size, as JSON."""
    what = f"sum of {num_bytes >> 10} KiB over {num_ranks} ranks"
    ordinary = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    seconds = time_of(partial(dist.all_reduce, ordinary), device)
    lines = [json.dumps({"name": f"{what}: {dist.get_backend()}", "value": 1e6 * seconds, "unit": "us"})]
    if device.type != "cuda":
        return lines
    try:
        from torch.distributed import _symmetric_memory as symmetric  # no public name yet

        group: Any = dist.group.WORLD
        shared = symmetric.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).fill_(1.0)
        symmetric.rendezvous(shared, group.group_name)
        ops: Any = torch.ops.symm_mem
        for name, op in (
            ("one-shot", ops.one_shot_all_reduce),
            ("multimem", ops.multimem_one_shot_all_reduce),
        ):
            result = op(shared, "sum", group.group_name)
            assert bool((result == num_ranks).all()), f"{name}: a wrong sum"
            seconds = time_of(partial(op, shared, "sum", group.group_name), device)
            lines.append(json.dumps({"name": f"{what}: {name}", "value": 1e6 * seconds, "unit": "us"}))
    except (RuntimeError, AttributeError, ImportError, AssertionError) as error:
        lines.append(json.dumps({"failed": f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}"}))
    return lines
