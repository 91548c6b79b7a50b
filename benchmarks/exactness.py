"""How far 4 and 8 bits move the next token: the engine and others with one GGUF file, against float32.

    python benchmarks/exactness.py [--model FILE.gguf] [--positions 500] [--threads N]

The reference is the engine with the file's weights in float32 (`--quantization none --dtype float32`). Positions are in
prose, in code and in chats, in equal parts; at each one a side has read the same tokens and says how likely each next
token is. Printed are, for each side, the mean KL divergence from the reference over the reference's 16 likeliest tokens
with all others as one, and at how many positions its likeliest token is the reference's. The others are the peers of
`cpu_vs_peers.py setup` that read GGUF files. mistral.rs takes text: positions before which the text has other tokens
are left out for it. OpenVINO GenAI returns one token alone, so its model is run without its pipeline.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.results import short_reason
from benchmarks.peers.server import HOST, ServerError, Side, library_side, llama_side, running
from benchmarks.peers.setup import LIBRARIES, Library, LlamaCpp, Peers
from engine import LLM, SamplingParams
from engine.launch.child.process_resources import shorten_spinning
from engine.models.hub.built_in.fetch import ensure_model
from engine.runtime.installation import cache_dir

ROOT: Final = Path(__file__).resolve().parent.parent
PEERS: Final = ("llama.cpp", *LIBRARIES)
KL_TARGET: Final = 0.5
"""Of the engine's mean KL to llama.cpp's, at most."""
COMPARED: Final = 16
ASKED: Final = 20
"""Likeliest tokens that a side returns; a compared one that is not among them counts with the others."""
CONTEXT: Final = 64
"""Tokens before the first position of a text."""
REFUSED: Final = 422
"""Status with which a server refuses a position."""
_START_S: Final = 600.0

Likely = dict[int, float]
"""Log-probabilities of the likeliest next tokens at a position."""


class Row(NamedTuple):
    """A side's result; `agree`: positions at which its likeliest token is the reference's."""

    side: str
    kl: float
    kl_error: float
    agree: int
    positions: int


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF file; the default model's, if none is named")
    parser.add_argument("--positions", type=int, default=500)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--sides", nargs="+", choices=PEERS, default=PEERS, help="beside the engine")
    parser.add_argument("--port", type=int, default=18_340)
    options = parser.parse_args()
    model = options.model or ensure_model()
    with LLM(model, quantization="none", dtype="float32", num_threads=options.threads) as llm:
        prompts = make_prompts(llm, options.positions)
        reference = engine_likely(llm, prompts)
        (plain,) = llm.tokenizer.encode("x")
    with LLM(model, num_threads=options.threads) as llm:
        rows = [row_of("engine", engine_likely(llm, prompts), reference)]
    peers = Peers.of(options.peers_dir)
    slots = ("--parallel", "1", "--ctx-size", "2048")
    llama = llama_side(peers.llama, "llama.cpp", options.port, str(model), options.threads, *slots)
    asked: dict[str, tuple[LlamaCpp | Library, Side]] = {"llama.cpp": (peers.llama, llama)}
    for name, library in peers.libraries.items():
        asked[name] = (
            library,
            library_side(library, name, options.port, str(model), options.threads, 2048, 1),
        )
    failed = []
    for name, (peer, side) in asked.items():
        if name not in options.sides:
            continue
        if missing := peer.missing():
            print(f"without {name}: {missing}", file=sys.stderr)
            continue
        try:
            rows.append(row_of(name, peer_likely(side, prompts, plain), reference))
        except (ServerError, OSError, ValueError, KeyError) as error:
            failed.append(f"{name:<12}failed: {short_reason(str(error))}")
    print("\n".join([table(rows), *failed]))


def make_prompts(llm: LLM, positions: int) -> list[list[int]]:
    """Token ids of the texts; the last positions of each are compared, `positions` over all."""
    files = (ROOT / "docs" / "architecture.md", ROOT / "scheduler" / "scheduler.py")
    texts = [llm.tokenizer.encode(file.read_text(encoding="utf-8")) for file in files]
    texts.append(llm.render_chat(conversation()))
    prompts = []
    for number, text in enumerate(texts):
        share = positions * (number + 1) // len(texts) - positions * number // len(texts)
        ids = text[: CONTEXT + share]
        if len(ids) < CONTEXT + share:
            raise SystemExit(f"a text has {len(ids)} tokens, which is too few for {positions} positions")
        prompts.append(ids)
    return prompts


def conversation() -> list[dict[str, str]]:
    """Questions from the headings of a page of the documentation, answered with the text below them."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    messages = []
    for section in page.split("\n## ")[1:]:
        heading, _, answer = section.partition("\n")
        messages.append({"role": "user", "content": f"Tell me about: {heading}"})
        messages.append({"role": "assistant", "content": answer.strip()})
    return messages


def engine_likely(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Likely]:
    """What the engine says at each position."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1, prompt_logprobs=ASKED)
    found: list[Likely] = []
    for output in llm.generate([list(prompt) for prompt in prompts], params):
        assert output.prompt_logprobs is not None
        found += (token.top for token in output.prompt_logprobs[CONTEXT - 1 :])
    return found


def peer_likely(side: Side, prompts: Sequence[Sequence[int]], plain: int) -> list[Likely | None]:
    """What a peer's server says: one token after each prefix, whose beginning it keeps; None where it refuses one.

    Args:
        plain: a token of whole characters; llama.cpp says nothing of a token that ends the answer.
    """
    found: list[Likely | None] = []
    with tempfile.TemporaryDirectory() as folder, running(side, Path(folder) / "log", _START_S):
        for prompt in prompts:
            for length in range(CONTEXT, len(prompt)):
                # The bias chooses the token, and the probabilities are those before it.
                body = {
                    "prompt": list(prompt[:length]),
                    "n_predict": 1,
                    "n_probs": ASKED,
                    "cache_prompt": True,
                    "logit_bias": [[plain, 100.0]],
                }
                try:
                    answer = ask(f"http://{HOST}:{side.port}/completion", body)
                except urllib.error.HTTPError as error:
                    if error.code != REFUSED:
                        raise ValueError(
                            f"HTTP {error.code}: {error.read().decode(errors='replace')}"
                        ) from error
                    found.append(None)
                    continue
                likely = answer["completion_probabilities"][0]["top_logprobs"]
                found.append({int(one["id"]): float(one["logprob"]) for one in likely})
    return found


def ask(url: str, body: Mapping[str, Any]) -> Any:
    """POST JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_START_S) as answer:
        return json.load(answer)


def row_of(side: str, likely: Sequence[Likely | None], reference: Sequence[Likely]) -> Row:
    """The side's line of the table, over the positions at which it answered.

    Raises:
        ValueError: it answered at fewer than two.
    """
    pairs = [(true, said) for true, said in zip(reference, likely, strict=True) if said is not None]
    if len(pairs) < 2:
        raise ValueError(f"{side} answered at {len(pairs)} of {len(likely)} positions")
    divergences = [divergence(true, said) for true, said in pairs]
    agree = sum(max(true, key=true.__getitem__) == max(said, key=said.__getitem__) for true, said in pairs)
    error = statistics.stdev(divergences) / math.sqrt(len(divergences))
    return Row(side, statistics.fmean(divergences), error, agree, len(divergences))


def divergence(true: Likely, said: Likely) -> float:
    """KL(true || said) over the likeliest tokens of `true`, with all others as one. It is never above the whole KL."""
    common = sorted((token for token in true if token in said), key=lambda token: -true[token])[:COMPARED]
    pairs = [(math.exp(true[token]), math.exp(said[token])) for token in common]
    smallest = 1e-12  # what is left of 1 is rounded
    pairs.append(tuple(max(smallest, 1 - sum(column)) for column in zip(*pairs, strict=True)))
    return sum(p * math.log(p / q) for p, q in pairs)


def table(rows: Sequence[Row]) -> str:
    """A line for each side, and the ratio."""
    lines = [f"{'side':<12}{'mean KL':>10}{'+-':>10}{'same likeliest token':>24}"]
    lines += (
        f"{row.side:<12}{row.kl:>10.5f}{row.kl_error:>10.5f}{f'{row.agree} of {row.positions}':>24}"
        for row in rows
    )
    for row in rows[1:]:
        lines.append(f"KL, engine to {row.side}: {rows[0].kl / row.kl:.2f} (target {KL_TARGET} or less)")
    return "\n".join(lines)


if __name__ == "__main__":
    shorten_spinning()
    main()
