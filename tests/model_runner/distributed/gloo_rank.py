"""`python gloo_rank.py JSON`: one rank of a group over gloo, for `test_tp_group.py`.

Generates with each of the given models, tries every operation, and then loses the others: they exit in the middle of
things, or, with `silent`, stay away from a sum. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.model_runner.distributed.tp_group import Rendezvous, TorchGroup
from engine.models.hf.hf_config import read_hf_spec
from engine.runtime.errors import RankLostError
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import TinyModel
from tests.model_runner.distributed.test_tensor_parallel import generate


def operations(group: TorchGroup) -> dict[str, Any]:
    rank = group.rank
    return {
        "sum": group.all_reduce(torch.full((2, 3), 1.0 + rank, dtype=torch.bfloat16)).tolist(),
        "gathered": group.all_gather(torch.arange(6).view(2, 3) + 100 * rank).tolist(),
        "contiguous": group.all_gather(torch.zeros(2, 3)).is_contiguous(),
        "broadcast": group.broadcast(torch.tensor([7 + rank, 8])).tolist(),
        "same": group.differing("model", "one"),
        "differing": group.differing("rank", str(rank)),
        "min": group.min_over_ranks(50 - rank),
    }


def meet_again(group: TorchGroup) -> tuple[float, float]:
    """When this rank came to the second meeting at one place, the last one late, and when it left."""
    group.meet("sampler")
    time.sleep(0.2 if group.rank == group.size - 1 else 0.0)
    came_s = time.monotonic()
    group.meet("sampler")
    return came_s, time.monotonic()


def listening_addresses() -> list[str]:
    """Where this process listens on TCP."""
    inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            number = bytes.fromhex(fields[1].partition(":")[0])[::-1]
            found.append(".".join(map(str, number)))
    return found


def tell(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, size = arguments["rank"], arguments["size"]
    group = TorchGroup(
        Rendezvous(
            rank=rank,
            size=size,
            device=torch.device("cpu"),
            file=Path(arguments["file"]),
            step_timeout_s=arguments["step_timeout_s"],
            start_timeout_s=60.0,
        )
    )
    result: dict[str, Any] = {"operations": operations(group), "listening": listening_addresses()}
    result["met"] = meet_again(group)
    result["tokens"] = []
    for folder in map(Path, arguments["models"]):
        tiny = TinyModel(None, folder, read_hf_spec(folder))
        for params in arguments["params"]:
            result["tokens"].append(generate(tiny, msgspec.convert(params, SamplingParams), group, num=4)[0])
    group.meet("end")
    if rank > 0:
        tell(result)
        if arguments["silent"]:
            threading.Event().wait()  # until it is killed
        os._exit(0)
    began_s = time.monotonic()
    try:
        while True:
            group.all_reduce(torch.ones(4))
    except RankLostError as error:
        result["lost"] = str(error)
    result["lost_after_s"] = time.monotonic() - began_s
    result["waiting"] = group.waiting
    tell(result)


if __name__ == "__main__":
    main()
