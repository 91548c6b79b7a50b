"""The cost of one request with a rare sampler for many others: the CPU time of a decode step with and without it.

    python benchmarks/rare_samplers.py [--threads 1] [--rounds 30] [--requests 64] [--kinds xtc dry]

In process, with random bfloat16 weights in the shape of SmolLM2-135M. All requests draw at temperature 0.8; in the
second kind of step one of them has a rare sampler of the table as well. The steps of both kinds take turns, and the
ratio is the median of a step without divided by that of a step with: the rate that the others keep, of 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from msgspec.structs import replace

from benchmarks.player import MAX_REQUESTS, VOCAB, Player, make_player
from engine.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS: Final[dict[str, dict[str, Any]]] = {
    "top_n_sigma": {"top_n_sigma": 1.0},
    "typical_p": {"typical_p": 0.9},
    "dynatemp": {"dynatemp_range": 0.5},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 1e-4},
    "dry": {"dry_multiplier": 0.8},
    "all": {"top_n_sigma": 1.0, "typical_p": 0.9, "dynatemp_range": 0.5, "top_p": 0.9, "dry_multiplier": 0.8},
}
PROMPT_LEN: Final = 64
TARGET: Final = 0.99


def step_seconds(player: Player, sampling: list[SamplingParams], rounds: int) -> Iterator[float]:
    """Seconds of CPU of each decode of new requests with these parameters; the first one is left out."""
    prompts = [[random.Random(n).randrange(VOCAB) for _ in range(PROMPT_LEN)] for n in range(len(sampling))]
    plan = player.plan([PROMPT_LEN] * len(sampling), PROMPT_LEN, prompts)
    new_reqs = tuple(replace(new, sampling=mine) for new, mine in zip(plan.new_reqs, sampling, strict=True))
    player.runner.launch(replace(plan, new_reqs=new_reqs)).wait()
    for number in range(rounds + 1):
        plan = player.plan([PROMPT_LEN + number + 1] * len(sampling), 1, None)
        start = time.process_time()
        player.runner.launch(plan).wait()
        if number:
            yield time.process_time() - start
    player.finished = list(range(len(sampling)))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=MAX_REQUESTS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    player = make_player(args.threads)
    common = [SamplingParams(temperature=0.8, seed=n) for n in range(args.requests)]
    for name in args.kinds:
        rare = [replace(common[0], **KINDS[name]), *common[1:]]
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3):
            for has_rare in (False, True):
                rates[has_rare] += step_seconds(player, rare if has_rare else common, args.rounds)
        without, with_rare = (statistics.median(rates[has_rare]) * 1e3 for has_rare in (False, True))
        verdict = "" if without / with_rare >= TARGET else f"  below {TARGET}"
        print(
            f"{name:12} without {without:7.2f} ms  with {with_rare:7.2f} ms  ratio {without / with_rare:.3f}{verdict}"
        )


if __name__ == "__main__":
    main()
