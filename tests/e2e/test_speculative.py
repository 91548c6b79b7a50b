"""`--speculative` on a real server: the same answers as without, also to clients that leave."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import StartServe
from .serving import DEADLINE_S, EngineServe
from .test_overlap import answers, body

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

ARGUMENTS = (
    *("--dtype", "float32", "--page-size", "4", "--max-total-tokens", "1200", "--max-running-requests", "6"),
    *("--chunked-prefill-size", "32", "--chaos", "retract=0.02:10"),
)


def metric(engine: EngineServe, name: str) -> int:
    page = httpx.get(f"{engine.url}/metrics", timeout=DEADLINE_S).text
    assert f"# TYPE engine:{name} counter" in page
    found = re.findall(
        rf'^engine:{name}{{.*method="(?:ngram|suffix|draft)",position="\d"}} (\d+)$', page, re.MULTILINE
    )
    return sum(map(int, found))


@pytest.mark.parametrize(
    "options", [("ngram",), ("suffix",), ("suffix", "--tp", "2"), ("draft", "--tp", "2")], ids=" ".join
)
def test_answers_are_the_same_in_fewer_steps(
    start_serve: StartServe, model: Path, tmp_path: Path, options: tuple[str, ...]
):
    log = tmp_path / "decisions.log"
    plain = start_serve(str(model), *ARGUMENTS, *options[1:])
    # Whether drafts pay is measured: where a step takes 20 ms, whatever is in it, they do.
    slow = ("--chaos", "retract=0.02:10,slow=0.02")
    arguments = (*ARGUMENTS, *slow, "--speculative", *options, "--decision-log", str(log))
    if options[0] == "draft":
        arguments = (*arguments, "--speculative-model", str(model))
    ngram = start_serve(str(model), *arguments)
    for engine in (plain, ngram):
        engine.wait_until_ready()
    # A text of one word, over and over: no model keeps out of it, and what follows can be guessed.
    again: list[dict[str, Any]] = [
        body(number, prompt="fox " * 60, max_tokens=60, min_tokens=60, temperature=0)
        | {"logit_bias": {"5": 50}}
        for number in range(3)
    ]
    others = [body(20 + number) for number in range(6)] + [
        body(30, n=2, temperature=1.0),
        body(31, logprobs=2),
    ]

    expected = [answers(plain, bodies) for bodies in (again, others)]
    assert [answers(ngram, bodies, num_leaving=2) for bodies in (again, others)] == expected

    # On a busy machine a step may take longer, and speaks against drafts until it is forgotten.
    for _ in range(30):
        if metric(ngram, "accepted_draft_tokens_total") > 50:
            break
        assert answers(ngram, again) == expected[0]
    assert metric(ngram, "accepted_draft_tokens_total") > 50
    assert metric(plain, "draft_tokens_total") == 0
    info = json.loads(httpx.get(f"{ngram.url}/server_info", timeout=DEADLINE_S).text)
    assert f'"speculative": "{options[0]}"' in json.dumps(info)
    for engine in (plain, ngram):
        assert engine.stop() == 0, engine.log
        assert "Traceback" not in engine.log

    from engine.scheduler.journal.log_file import read_runs
    from engine.scheduler.journal.replay import replay

    (result,) = [replay(run) for run in read_runs(log)]
    assert result.is_equal, result.difference
