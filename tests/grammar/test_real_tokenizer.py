"""The default model's tokenizer: masks over whole answers, and the sandbox."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from engine.grammar.backend import MaskRow
from engine.grammar.compile.compile_queue import CompileQueue
from engine.grammar.compile.worker import CompileWorker, SandboxSetup
from engine.grammar.guided import GuidedMatcher, Phase
from engine.grammar.llguidance_backend import LLGuidanceBackend
from engine.grammar.markers import allows
from engine.grammar.vocabulary import TokenizerVocabulary
from engine.models.hub.built_in.fetch import cached_model
from engine.models.source import ModelSource, resolve_source
from engine.models.tokenizer.tokenizer import load_tokenizer
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, ReasoningBlock, Whitespace

pytestmark = pytest.mark.model

SIZE = 49_152
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "mark": {"const": "<|im_end|>"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}},
    },
    "required": ["name", "mark", "age", "tags"],
    "additionalProperties": False,
}
ANSWER = {"name": "Zoë \U0001f600", "mark": "<|im_end|>", "age": 41, "tags": ["red", "green"]}


@pytest.fixture(scope="module")
def source() -> ModelSource:
    if cached_model() is None:
        pytest.skip("the default model is not cached")
    return resolve_source(None)


@pytest.fixture(scope="module")
def vocabulary(source: ModelSource) -> TokenizerVocabulary:
    tokenizer = load_tokenizer(source)
    return TokenizerVocabulary(tokenizer, SIZE, tokenizer.eos_token_ids)


@pytest.fixture(scope="module")
def backend(vocabulary: TokenizerVocabulary) -> LLGuidanceBackend:
    return LLGuidanceBackend(vocabulary)


@pytest.mark.parametrize(
    ("whitespace", "indent"), [(Whitespace.COMPACT, None), (Whitespace.PRETTY, 2), (Whitespace.ANY, 4)]
)
def test_a_whole_answer_is_allowed_token_by_token(backend, vocabulary, whitespace, indent):
    separators = (",", ":") if whitespace is Whitespace.COMPACT else None
    text = json.dumps(ANSWER, indent=indent, separators=separators, ensure_ascii=False)
    matcher = backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), whitespace)).matcher()
    mask = np.zeros(SIZE // 32, np.int32)

    for token_id in vocabulary.encode(text.encode()):
        matcher.fill(mask)
        assert allows(mask, token_id), vocabulary.tokens[token_id]
        assert not any(allows(mask, i) for i in vocabulary.special_token_ids)
        assert matcher.accept([token_id]) == 1

    assert matcher.ended


def test_every_single_token_of_a_mask_is_accepted(backend, vocabulary):
    """And no other, at a few places of an answer with much choice."""
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    matcher = backend.compile(spec).matcher()
    mask = np.zeros(SIZE // 32, np.int32)
    for text in (b'{"name"', b': "a', b'", "mark": "<|im_end|>", "age"', b": 4"):
        matcher.accept(vocabulary.encode(text))
        matcher.fill(mask)
        allowed = {i for i in range(SIZE) if allows(mask, i)}
        assert allowed == {i for i in range(SIZE) if matcher.validate([i])}


def test_a_marker_of_several_tokens_is_forced_at_the_budget(backend, vocabulary):
    reasoning = ReasoningBlock(b"<think>", b"</think>", opened=True, budget=4)
    use = GrammarUse(spec=GrammarSpec(GrammarKind.REGEX, "yes|no"), reasoning=reasoning)
    matcher = GuidedMatcher(use, (backend.compile(use.specs[0]),), vocabulary)

    assert matcher.accept(vocabulary.encode(b"I am not sure")[:4]) == 4
    end = matcher.forced()

    assert len(end) > 1
    assert b"".join(vocabulary.tokens[i] for i in end) == b"</think>"
    assert matcher.accept(end) == len(end)
    assert matcher.phase is Phase.GRAMMAR
    assert matcher.accept(vocabulary.encode(b"yes")) >= 1
    assert matcher.ended


@pytest.mark.real_process
def test_the_sandbox(source, vocabulary):
    setup = SandboxSetup(source, SIZE, vocabulary.eos_token_ids, 60.0)

    async def main() -> None:
        queue = CompileQueue(lambda: CompileWorker.start(setup), 60.0)
        use = GrammarUse(spec=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
        await queue.compile(use)
        assert queue.compiles(use)
        await queue.close()

    asyncio.run(main())


@pytest.mark.parametrize("num_tokens", [40, 41, 55, 80, 130])
def test_a_random_answer_that_is_cut_is_complete(backend, vocabulary, num_tokens):
    """The tokens are random ones of the masks, so most answers never end by themselves."""

    def random_token(mask: MaskRow) -> int:
        return int(choose.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))

    use = GrammarUse(spec=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), complete=True)
    choose = np.random.default_rng(num_tokens)
    matcher = GuidedMatcher(use, [backend.compile(use.specs[0])], vocabulary)
    matcher.limit(num_tokens)
    plain = backend.compile(use.specs[0]).matcher()
    mask, text = np.zeros(SIZE // 32, np.int32), b""
    for _ in range(num_tokens):
        if matcher.ended:
            break
        plain.fill(mask)
        matcher.validate([random_token(mask)])  # that of the model, which the grammar takes
        matcher.fill(mask)
        token_id = random_token(mask)
        assert matcher.accept([token_id]) == plain.accept([token_id]) == 1
        text += vocabulary.tokens[token_id]

    assert matcher.ended and (matcher.is_cut or num_tokens > 100)
    assert set(json.loads(text)) == set(ANSWER)


@pytest.mark.parametrize("num_tokens", [40, 50, 64, 100])
@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("value", ["violet", 12, [1, 2], {"b": None}, True])
def test_an_answer_that_ends_far_from_its_limit_is_not_cut(backend, vocabulary, value, indent, num_tokens):
    """The masks near the limit lack tokens that were not checked, for there are too many; that cuts nothing."""
    use = GrammarUse(spec=GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), complete=True)
    matcher = GuidedMatcher(use, [backend.compile(use.specs[0])], vocabulary)
    matcher.limit(num_tokens)
    mask = np.zeros(SIZE // 32, np.int32)

    for token_id in vocabulary.encode(json.dumps({"a color": value}, indent=indent).encode()):
        matcher.fill(mask)
        assert matcher.accept([token_id]) == 1

    assert (matcher.ended or matcher.accept(vocabulary.eos_token_ids[:1]) == 1) and not matcher.is_cut
