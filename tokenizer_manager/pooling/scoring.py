"""Scores of pairs of texts and of items: the prompts that a model computes for them, and the scores of its results.

How a model scores a pair is in its `PoolingSpec`:

    a head (cross-encoder)     both texts in one prompt; the classifier's output, after its activation
    label tokens (Qwen3)       both texts in a template; the probability of the first label among all of them
    vectors (embedder)         a prompt for each text; the cosine of the angle between their vectors
    none (generator)           items with labels: the probability of each label as the next token
"""

from __future__ import annotations

import math
import operator
import re
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from ...models.spec.encoder_spec import PoolingSpec
from ...models.tokenizer.tokenizer import Tokenizer
from ...runtime.errors import RequestError
from ...runtime.pooling import PoolingKind, PoolingParams
from ...runtime.request_checks import shown
from ..generation import Prompt
from .embedding import embedding_params, prompt_text

_ITEM: Final = re.compile(r"(\w+)\[(\d+)\]")
_NAME: Final = re.compile(r"\{(instruction|query|document)\}")

Pair = tuple[str, str]
"""A query and a document."""


class ScoredInputs(NamedTuple):
    """The prompts of some pairs.

    Attributes:
        prompts: texts, or token ids.
        poolings: of each prompt.
        pairs: of each score: the index of its prompt, or those of the document and of the query.
        add_special_tokens: whether the texts get special tokens.
        num_kept_tokens: last tokens of each text that stay where it is cut: the end of a template.
    """

    prompts: list[Prompt]
    poolings: list[PoolingParams]
    pairs: Sequence[tuple[int, ...]]
    add_special_tokens: bool = True
    num_kept_tokens: int = 0

    def located(self, error: RequestError, param: str) -> RequestError:
        """An error about the prompt `param[n]`, with the number of the pair that it belongs to; or about a query."""
        match = _ITEM.fullmatch(error.param or "")
        if match is None or match[1] != param:
            return error
        number = int(match[2])
        name = next((f"{param}[{n}]" for n, pair in enumerate(self.pairs) if pair[0] == number), "the query")
        message = error.message.replace(match[0], name, 1)
        return RequestError(message, param=name.removeprefix("the "), code=error.code, status=error.status)


def uses_pairs(pooling: PoolingSpec) -> bool:
    """Whether the tokenizer must join the two texts of a pair (`Tokenizer.encode_pairs`)."""
    return pooling.task == "score" and not pooling.template


def joined_inputs(pooling: PoolingSpec, encoded: Sequence[tuple[list[int], int]]) -> ScoredInputs:
    """The inputs of a model with a head, from the tokenizer's token ids and `second_start` of each pair."""
    poolings = [
        PoolingParams(PoolingKind.SCORE, all_tokens=pooling.pooling != "last", second_start=second_start)
        for _, second_start in encoded
    ]
    return ScoredInputs(
        [ids for ids, _ in encoded], poolings, [(n,) for n in range(len(encoded))], add_special_tokens=False
    )


def text_inputs(
    pooling: PoolingSpec, tokenizer: Tokenizer, pairs: Sequence[Pair], instruction: str | None
) -> ScoredInputs:
    """The inputs of all other models."""
    if pooling.task == "embed":
        return _vector_inputs(pooling, pairs)
    if pooling.label_tokens:
        label_ids = tuple(label_id(tokenizer, text, "label_tokens") for text in pooling.label_tokens)
        params = PoolingParams(PoolingKind.LABELS, label_ids=label_ids)
    else:
        params = PoolingParams(PoolingKind.SCORE, all_tokens=pooling.pooling != "last")
    words = {"instruction": pooling.instruction if instruction is None else instruction}
    prompts = [
        _filled(pooling.template, words | {"query": query, "document": document}) for query, document in pairs
    ]
    _, _, ending = pooling.template.rpartition("{document}")
    return ScoredInputs(
        list(prompts),
        [params] * len(prompts),
        [(n,) for n in range(len(prompts))],
        add_special_tokens=False,
        num_kept_tokens=len(tokenizer.encode(ending, add_special_tokens=False)),
    )


def _filled(template: str, words: dict[str, str]) -> str:
    """The template with its names replaced, all at once: what replaces a name is not looked at again."""
    return _NAME.sub(lambda name: words[name[1]], template)


def _vector_inputs(pooling: PoolingSpec, pairs: Sequence[Pair]) -> ScoredInputs:
    """One prompt for each different text of each side, with the prompt of its side."""
    queries: dict[str, int] = {}
    documents: dict[str, int] = {}
    for query, document in pairs:
        documents.setdefault(document, len(documents))
        queries.setdefault(query, len(queries))
    before_query = prompt_text(pooling, input_type="query")
    before_document = prompt_text(pooling, input_type="document")
    prompts: list[Prompt] = [before_document + document for document in documents]
    prompts += [before_query + query for query in queries]
    params = embedding_params(pooling, normalize=True)
    numbers: list[tuple[int, ...]] = [
        (documents[document], len(documents) + queries[query]) for query, document in pairs
    ]
    return ScoredInputs(prompts, [params] * len(prompts), numbers)


def scores_of(pooling: PoolingSpec, inputs: ScoredInputs, vectors: Sequence[bytes]) -> list[list[float]]:
    """The scores of each pair; one number, or one per label of a classifier."""
    if pooling.task == "embed":
        return [[_product(vectors[one], vectors[other])] for one, other in inputs.pairs]
    if pooling.label_tokens:
        return [[softmax(_numbers(vectors[n]))[0]] for (n,) in inputs.pairs]
    return [_activated(pooling, _numbers(vectors[n])) for (n,) in inputs.pairs]


def _numbers(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


def _product(one: bytes, other: bytes) -> float:
    return math.fsum(map(operator.mul, array("f", one), array("f", other)))


def _activated(pooling: PoolingSpec, logits: list[float]) -> list[float]:
    match pooling.activation:
        case "sigmoid":
            return [_sigmoid(logit) for logit in logits]
        case "softmax":
            return softmax(logits)
        case "identity":
            return logits


def label_inputs(prompts: Sequence[Prompt], label_ids: Sequence[int]) -> ScoredInputs:
    """The inputs of items whose next token is judged."""
    params = PoolingParams(PoolingKind.LABELS, label_ids=tuple(label_ids))
    return ScoredInputs(list(prompts), [params] * len(prompts), [(n,) for n in range(len(prompts))])


def label_scores(vectors: Sequence[bytes], *, apply_softmax: bool) -> list[list[float]]:
    """Probabilities of the labels: among them, or (as in SGLang) among all tokens."""
    logprobs = [_numbers(vector) for vector in vectors]
    return [softmax(each) if apply_softmax else [math.exp(value) for value in each] for each in logprobs]


def label_id(tokenizer: Tokenizer, text: str, param: str) -> int:
    """The token of a label.

    Raises:
        RequestError: it is not one token.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise RequestError(
            f"{param} has {shown(text)}, which is {len(ids)} tokens; a label is one token, choose others or send "
            "label_token_ids",
            param=param,
            code="invalid_value",
        )
    return ids[0]


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities in proportion to exp(logit)."""
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
