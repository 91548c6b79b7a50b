"""Time of grammars on the host: compilation, masks, and accepting tokens, with a model's tokenizer.

    python benchmarks/grammar_masks.py                   # the default model's tokenizer
    python benchmarks/grammar_masks.py --model PATH      # a model folder or a .gguf file
    python benchmarks/grammar_masks.py --rounds 50

A row is one grammar with one answer, which is walked token by token, `rounds` times, each time with a new matcher.
`mask` is `Matcher.fill`, `accept` is `Matcher.accept` of one token, `64 rows` the masks of 64 matchers one after the
other at the same place of the answer. Times are wall-clock times of one thread; the first walk, which fills the
library's tables, is reported as `first mask p99`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.grammar.guided import GuidedMatcher
from engine.grammar.llguidance_backend import LLGuidanceBackend
from engine.grammar.vocabulary import TokenizerVocabulary
from engine.models.source import resolve_source
from engine.models.tokenizer.tokenizer import load_tokenizer
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse

NUM_ROWS: Final = 64
NUM_COMPILATIONS: Final = 5

SIMPLE: Final = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SIMPLE_ANSWER: Final = {"name": "Ada Lovelace", "age": 36}
ADDRESS: Final = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "minLength": 1, "maxLength": 80},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": {"enum": ["DE", "FR", "IT", "PL", "US"]},
    },
    "required": ["street", "zip", "country"],
    "additionalProperties": False,
}
COMPLEX: Final = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "created": {"type": "string", "format": "date-time"},
        "email": {"type": "string", "pattern": "^[a-z0-9.]{1,30}@[a-z0-9]{1,20}\\.(com|org)$"},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "addresses": {"type": "array", "items": ADDRESS, "minItems": 1, "maxItems": 5},
        "tree": {"$ref": "#/$defs/node"},
        "value": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    },
    "required": ["id", "created", "email", "score", "addresses", "tree", "value"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["label"],
            "additionalProperties": False,
        }
    },
}
COMPLEX_ANSWER: Final = {
    "id": "123e4567-e89b-12d3-a456-426614174000",
    "created": "2024-05-17T10:20:30Z",
    "email": "ada.lovelace@engine.org",
    "score": 97.5,
    "addresses": [{"street": "12 St James's Square", "zip": "10115", "country": "DE"}],
    "tree": {"label": "root", "children": [{"label": "left"}, {"label": "right", "children": []}]},
    "value": None,
}


def tools_schema(num_tools: int) -> dict[str, Any]:
    """A call of one of many tools, as the arguments of `tool_choice: required` are constrained."""
    calls = []
    for index in range(num_tools):
        properties = {
            f"text_{index}": {"type": "string"},
            "count": {"type": "integer", "minimum": 1, "maximum": 1000},
            "mode": {"enum": ["fast", "exact", f"mode_{index}"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "address": ADDRESS,
        }
        arguments = {"type": "object", "properties": properties, "required": [f"text_{index}", "count"]}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": f"tool_{index}"}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


TOOLS_ANSWER: Final = {
    "name": "tool_41",
    "arguments": {"text_41": "find it", "count": 12, "mode": "mode_41", "tags": ["a"]},
}

CASES: Final = {
    "simple": (GrammarKind.JSON_SCHEMA, json.dumps(SIMPLE), json.dumps(SIMPLE_ANSWER)),
    "complex": (GrammarKind.JSON_SCHEMA, json.dumps(COMPLEX), json.dumps(COMPLEX_ANSWER)),
    "64 tools": (GrammarKind.JSON_SCHEMA, json.dumps(tools_schema(64)), json.dumps(TOOLS_ANSWER)),
    "any object": (GrammarKind.JSON_SCHEMA, '{"type": "object"}', json.dumps(COMPLEX_ANSWER)),
    "regex": (
        GrammarKind.REGEX,
        r"(yes|no), because [a-z ]{1,80}\.",
        "yes, because the sky is blue and so is the sea.",
    ),
}


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()

    tokenizer = load_tokenizer(resolve_source(args.model, need_weights=False))
    start = time.perf_counter()
    vocabulary = TokenizerVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    middle = time.perf_counter()
    backend = LLGuidanceBackend(vocabulary)
    end = time.perf_counter()
    print(f"tokens {vocabulary.size}, vocabulary {middle - start:.2f} s, backend {end - middle:.2f} s")
    head = (
        "grammar",
        "compile ms",
        "tokens",
        "first mask p99",
        "mask p50 us",
        "mask p99",
        "accept p50",
        "64 rows ms",
    )
    print("  ".join(f"{name:>14}" for name in head))
    for name, (kind, text, answer) in CASES.items():
        measure(backend, vocabulary, name, GrammarSpec(kind, text), answer.encode(), args.rounds)


def measure(
    backend: LLGuidanceBackend,
    vocabulary: TokenizerVocabulary,
    name: str,
    spec: GrammarSpec,
    answer: bytes,
    rounds: int,
) -> None:
    """Measure one case and print its row."""
    compile_s = [timed(backend.compile, spec) for _ in range(NUM_COMPILATIONS)]
    compiled = backend.compile(spec)
    token_ids = vocabulary.encode(answer)
    masks = np.zeros((NUM_ROWS, -(-vocabulary.size // 32)), np.int32)
    fills: list[list[float]] = []
    accepts: list[float] = []
    for _ in range(rounds + 1):
        matcher = GuidedMatcher(GrammarUse(spec=spec), (compiled,), vocabulary)
        fills.append([])
        for token_id in token_ids:
            fills[-1].append(timed(matcher.fill, masks[0]))
            accepts.append(timed(matcher.accept, (token_id,)))
        assert matcher.error == "", matcher.error
    rows = [GuidedMatcher(GrammarUse(spec=spec), (compiled,), vocabulary) for _ in range(NUM_ROWS)]
    steps = []
    for token_id in token_ids:
        steps.append(timed(fill_all, rows, masks))
        for matcher in rows:
            matcher.accept((token_id,))
    warm = np.array(fills[1:]) * 1e6
    cells = (
        name,
        f"{np.median(compile_s) * 1e3:.1f}",
        f"{len(token_ids)}",
        f"{np.percentile(fills[0], 99) * 1e6:.0f}",
        f"{np.median(warm):.1f}",
        f"{np.percentile(warm, 99):.1f}",
        f"{np.median(accepts) * 1e6:.1f}",
        f"{np.median(steps) * 1e3:.2f}",
    )
    print("  ".join(f"{cell:>14}" for cell in cells))


def fill_all(rows: Sequence[GuidedMatcher], masks: npt.NDArray[np.int32]) -> None:
    """The masks of a step, one after the other."""
    for matcher, mask in zip(rows, masks, strict=True):
        matcher.fill(mask)


def timed(call: Callable[..., object], *args: object) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
