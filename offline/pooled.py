"""`PooledCalls`: the calls of `LLM` that return vectors and scores: embed, rerank, score."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..runtime.errors import EngineDeadError, RequestError
from ..runtime.feasibility import longest_input
from ..runtime.messages import FinishKind, GenerateRequest
from ..runtime.pooling import with_shared_len
from ..runtime.request_checks import check_flag, check_integer, check_text, plain, plain_items, wrong_type
from ..runtime.sampling_params import MAX_COUNT
from ..tokenizer_manager.pooling.embedding import (
    POOLING_SAMPLING,
    Want,
    check_instruction,
    check_ranking,
    check_task,
    embedding_params,
    prompt_text,
    with_prompt,
)
from ..tokenizer_manager.pooling.scoring import (
    Pair,
    ScoredInputs,
    joined_inputs,
    label_id,
    label_inputs,
    label_scores,
    scores_of,
    text_inputs,
    uses_pairs,
)
from ..tokenizer_manager.preparation import check_pooled_length, truncated
from .batch import progress_of, shows_bar
from .prompts import as_prompts, checked_token_ids

if TYPE_CHECKING:
    from ..models.spec.encoder_spec import PoolingSpec
    from ..models.spec.model_spec import ModelSpec
    from ..models.tokenizer.tokenizer import Tokenizer
    from ..tokenizer_manager.generation import Prompt
    from ..tokenizer_manager.scheduling_options import Scheduling
    from .engine import EngineThread, RowQueue

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document's relevance to a query.

    Attributes:
        index: its place in the list that was passed.
        score: larger is more relevant; the scale is the model's.
        text: the document.
    """

    index: int
    score: float
    text: str


class PooledCalls:
    """See the module. The arguments are those of the methods of `LLM` with the same names."""

    def __init__(self, engine: EngineThread, tokenizer: Tokenizer, spec: ModelSpec) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._spec = spec
        self._numbers = itertools.count()

    def embed(
        self,
        inputs: object,
        scheduling: Scheduling,
        *,
        dimensions: int | None,
        normalize: bool | None,
        prompt_name: str | None,
        input_type: str | None,
        truncate: bool,
        progress_bar: bool | None,
    ) -> Vectors:
        pooling = self._pooling("embed")
        check_flag("truncate", truncate)
        if dimensions is not None:
            dimensions = check_integer("dimensions", plain(dimensions), 1, MAX_COUNT)
        if normalize is not None:
            check_flag("normalize", normalize)
        _check_texts(prompt_name=prompt_name, input_type=input_type)
        items, is_single = as_prompts(inputs, "inputs")
        prompts = [
            self._prompt(item, f"input[{n}]" if len(items) > 1 else "input") for n, item in enumerate(items)
        ]
        params = embedding_params(pooling, dimensions=dimensions, normalize=normalize)
        text = prompt_text(pooling, prompt_name=prompt_name, input_type=input_type)
        asked = "prompt_name" if prompt_name else "input_type" if input_type else ""
        given = ScoredInputs(with_prompt(prompts, text, asked), [params] * len(prompts), [])
        vectors = self._run(given, scheduling, param="input", truncate=truncate, progress_bar=progress_bar)
        width = params.dimensions or pooling.size
        result = np.frombuffer(b"".join(vectors), dtype=np.float32).reshape(-1, width).copy()
        return result[0] if is_single else result

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        scheduling: Scheduling,
        *,
        top_n: int | None,
        instruction: str | None,
        truncate: bool,
        progress_bar: bool | None,
    ) -> list[RankedDocument]:
        if not isinstance(query, str):
            raise wrong_type("query", query, "a text", has_default=False)
        check_ranking(self._spec, "score()")
        [query] = _texts("query", query)
        texts = _texts("documents", documents)
        top_n = len(texts) if top_n is None else check_integer("top_n", plain(top_n), 0, MAX_COUNT)
        scores = self._scores(
            [(query, text) for text in texts], scheduling, instruction, truncate, progress_bar
        )
        ranked = [
            RankedDocument(n, score, text)
            for n, ((score,), text) in enumerate(zip(scores, texts, strict=True))
        ]
        ranked.sort(key=lambda document: (-document.score, document.index))
        return ranked[:top_n]

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        scheduling: Scheduling,
        *,
        instruction: str | None,
        truncate: bool,
        progress_bar: bool | None,
    ) -> list[float] | list[list[float]]:
        ones, others = _texts("first", first), _texts("second", second)
        if len(ones) == 1:
            ones *= len(others)
        if len(ones) != len(others):
            raise RequestError(
                f"first has {len(ones)} texts and second has {len(others)}; pass one text for all, or as many"
            )
        pairs = list(zip(ones, others, strict=True))
        scores = self._scores(pairs, scheduling, instruction, truncate, progress_bar)
        return [each[0] for each in scores] if scores and len(scores[0]) == 1 else scores

    def label_probabilities(
        self, prompts: object, labels: Sequence[str | int], scheduling: Scheduling, *, among_labels: bool
    ) -> list[list[float]]:
        check_task(self._spec, "labels")
        check_flag("among_labels", among_labels)
        items, _ = as_prompts(prompts)
        each = plain_items(labels)
        if not isinstance(each, tuple):
            raise wrong_type("labels", labels, "a list of texts or token ids", has_default=False)
        ids = [
            label_id(self._tokenizer, label, "labels")
            if isinstance(label, str)
            else check_integer("labels", plain(label), 0, self._spec.vocab_size - 1)
            for label in each
        ]
        if not ids:
            raise RequestError("labels is empty; pass at least one", param="labels", code="invalid_value")
        given = label_inputs([self._prompt(item, "prompt") for item in items], ids)
        return label_scores(self._run(given, scheduling, param="prompt"), apply_softmax=among_labels)

    # ------------------------------------------------------------ internals

    def _pooling(self, wanted: Want) -> PoolingSpec:
        check_task(self._spec, wanted)
        assert self._spec.pooling is not None
        return self._spec.pooling

    def _prompt(self, item: object, name: str) -> Prompt:
        if isinstance(item, str):
            if not item:
                raise RequestError(
                    f"{name} is empty; it has at least one token", param=name, code="empty_prompt"
                )
            return item
        return checked_token_ids(item, self._spec.vocab_size, name)

    def _scores(
        self,
        pairs: Sequence[Pair],
        scheduling: Scheduling,
        instruction: str | None,
        truncate: bool,
        progress_bar: bool | None,
    ) -> list[list[float]]:
        pooling = self._pooling("score")
        check_flag("truncate", truncate)
        _check_texts(instruction=instruction)
        check_instruction(pooling, instruction)
        if uses_pairs(pooling):
            most = longest_input(self._engine.capacity) if truncate else None
            inputs = joined_inputs(pooling, self._tokenizer.encode_pairs(pairs, most))
        else:
            inputs = text_inputs(pooling, self._tokenizer, pairs, instruction)
        try:
            vectors = self._run(
                inputs, scheduling, param="pair", truncate=truncate, progress_bar=progress_bar
            )
        except RequestError as error:
            raise inputs.located(error, "pair") from None
        return scores_of(pooling, inputs, vectors)

    def _run(
        self,
        inputs: ScoredInputs,
        scheduling: Scheduling,
        *,
        param: str,
        truncate: bool = False,
        progress_bar: bool | None = False,
    ) -> list[bytes]:
        """The results of all prompts. Unfinished ones are aborted if the call ends early."""
        has_bar = shows_bar(progress_bar, len(inputs.prompts))
        requests = self._requests(inputs, scheduling, param, truncate)
        numbers = {request.rid: n for n, request in enumerate(requests)}
        vectors: list[bytes | None] = [None] * len(requests)
        rows: RowQueue = queue.SimpleQueue()
        self._engine.check_usable()
        show = progress_of(len(requests), "Texts") if has_bar else contextlib.nullcontext(_ignore)
        with show as advance:
            try:
                self._engine.submit_all(requests, rows)
                for _ in requests:
                    row = rows.get()
                    if isinstance(row, EngineDeadError):
                        raise EngineDeadError(str(row)) from row
                    number = numbers.pop(row.rid)
                    assert row.finish is not None
                    if row.finish.kind is not FinishKind.STOP:
                        message = row.finish.message or "it was aborted"
                        name = _name(param, number, len(requests))
                        raise RequestError(
                            f"{name}: {message}",
                            param=name,
                            code="generation_failed",
                            status=row.finish.status,
                        )
                    vectors[number] = row.vector
                    advance(row.usage.prompt_tokens)
            finally:
                for rid in numbers:
                    self._engine.abort(rid, "the caller ended the call")
        return [vector for vector in vectors if vector is not None]

    def _requests(
        self, inputs: ScoredInputs, scheduling: Scheduling, param: str, truncate: bool
    ) -> list[GenerateRequest]:
        capacity, tokenizer = self._engine.capacity, self._tokenizer
        texts = [prompt for prompt in inputs.prompts if isinstance(prompt, str)]
        encoded = iter(tokenizer.encode_batch(texts, inputs.add_special_tokens))
        special = tokenizer.special_ending if truncate and inputs.add_special_tokens else ()
        now_s = time.monotonic()
        prompts, requests = [], []
        for n, prompt in enumerate(inputs.prompts):
            ids = array("i", next(encoded) if isinstance(prompt, str) else prompt)
            if truncate:
                ids = truncated(ids, -1, special, inputs.num_kept_tokens, capacity)
            check_pooled_length(len(ids), capacity, _name(param, n, len(inputs.prompts)))
            prompts.append(ids)
        for ids, pooling in zip(prompts, with_shared_len(inputs.poolings, prompts), strict=True):
            requests.append(
                GenerateRequest(
                    rid=f"pooled-{next(self._numbers)}",
                    input_ids=ids.tobytes(),
                    sampling=POOLING_SAMPLING,
                    arrival_s=now_s,
                    priority=scheduling.priority,
                    extra_key=scheduling.extra_key,
                    tenant=scheduling.tenant,
                    lora_id=scheduling.lora_id,
                    queue_timeout_s=scheduling.queue_timeout_s,
                    timeout_s=scheduling.timeout_s,
                    pooling=pooling,
                )
            )
        return requests


def _ignore(num_tokens: int, *, finished: bool = True) -> None:
    return


def _name(param: str, number: int, total: int) -> str:
    return f"{param}[{number}]" if total > 1 else param


def _check_texts(**values: object) -> None:
    """Check arguments that are texts or None."""
    for name, value in values.items():
        if value is not None:
            check_text(name, plain(value))


def _texts(name: str, value: Any) -> list[str]:
    """The texts of an argument: one text, or several."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts):
        if texts:
            _check_texts(
                **{name if len(texts) == 1 else f"{name}[{n}]": text for n, text in enumerate(texts)}
            )
            return list(texts)
        raise RequestError(f"{name} is empty; pass at least one text", param=name, code="invalid_value")
    raise wrong_type(name, value, "a text or a list of texts", has_default=False)
