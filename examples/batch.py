"""Answers the prompts of a JSONL file without a server; lines are {"id": ..., "prompt": ...}, answers likewise."""

import argparse
import json
import sys
from pathlib import Path

from engine import LLM, SamplingParams


def main() -> None:
    """Read all prompts, answer them in one batch, write the answers in order."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("input", type=Path)
    options.add_argument("--model", default="default")
    options.add_argument("--max-tokens", type=int, default=64)
    given = options.parse_args()

    rows = [json.loads(line) for line in given.input.read_text(encoding="utf-8").splitlines() if line.strip()]
    sampling = SamplingParams(max_new_tokens=given.max_tokens, temperature=0.0)
    with LLM(given.model, preset="batch") as llm:
        answers = llm.generate([row["prompt"] for row in rows], sampling)
    for row, answer in zip(rows, answers, strict=True):
        written = {"id": row["id"], "text": answer.text, "finish_reason": answer.finish_reason}
        sys.stdout.write(json.dumps(written, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
