"""`read_scorer`: how the model in a folder scores texts or pairs of texts: its classifier, or its answer "yes" or "no".

Cross-encoders and other classifiers are `...ForSequenceClassification`: the layers after pooling are those of their
class in transformers. A reward model scores an answer to a question. A generative reranker has no head: its score is
the probability of a word as the next token, which has a meaning only with the prompt it was trained with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...runtime.config.model_choice import PoolingType
from ...runtime.errors import ConfigError
from ..fields import Fields
from ..spec.encoder_spec import DenseSpec, HeadActivation, PoolingSpec, ScoreActivation
from .embedder import read_dense, read_pooling_mode, read_prompts
from .task import CAUSAL, MODULES, REWARD, FoundTask, Module, Modules, architecture_of, part_fields

logger = logging.getLogger(__name__)

_ACTIVATIONS: Final[dict[str, ScoreActivation]] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
_MAX_LABELS: Final = 1 << 16
_NORM_EPS: Final = 1e-5  # of `PoolingHead`
_YES_NO: Final = ("yes", "no")
_QWEN3_RERANKER: Final = "qwen3"
_QWEN3_TEMPLATE: Final = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Prompt from the model card of Qwen3-Reranker, in all sizes."""
_QWEN3_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_NAME: Final = "qwen3-reranker"
_INTERNLM2_REWARD: Final = (
    "<s><|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n{document}<|im_end|>\n<|reward|>"
)
"""A question and its answer as InternLM2-Reward was trained with them; the last token has the score."""


def read_scorer(
    folder: Path, fields: Fields, found: FoundTask, hidden_size: int, name: str = ""
) -> PoolingSpec:
    """Options of the model for scores.

    Args:
        folder: the model's.
        fields: of its config.json.
        found: the task score, and the folder's modules.
        hidden_size: of the model.
        name: of the model.

    Raises:
        ConfigError: a file is missing or damaged, or asks for what the engine does not compute.
    """
    modules = found.modules
    kinds = [part.kind for part in modules.parts[1:]] if modules is not None else []
    if architecture_of(fields).endswith(CAUSAL) and kinds in ([], ["LogitScore"]):
        return _generative(folder, fields, found)
    if architecture_of(fields).endswith(REWARD):
        return _reward(fields, found, hidden_size)
    _check_prompts(modules)
    if kinds == ["Pooling", "Dense"]:
        assert modules is not None
        return _from_modules(folder, modules, found, hidden_size)
    if kinds:
        raise ConfigError(
            f"{folder / MODULES}: the modules of a CrossEncoder are {', '.join(['Transformer', *kinds])}; expected "
            "Transformer alone, or with Pooling and Dense, or with LogitScore"
        )
    num_labels, labels = _labels(fields)
    pooling, dense = _head(fields, hidden_size, num_labels)
    template = _template(fields, name)
    return PoolingSpec(
        task="score",
        pooling=pooling,
        size=num_labels,
        dense=dense,
        activation=_activation(fields, modules, num_labels),
        labels=labels,
        template=template,
        instruction=_QWEN3_INSTRUCTION if template else "",
        reason=found.reason,
    )


def _reward(fields: Fields, found: FoundTask, hidden_size: int) -> PoolingSpec:
    """A reward model, with the head and the prompt of its own code."""
    model_type = fields.text("model_type")
    if model_type != "internlm2":
        raise fields.error("model_type", model_type, "the only reward model that is supported is InternLM2's")
    return PoolingSpec(
        task="score",
        pooling="last",
        size=1,
        dense=(_linear("v_head", (1, hidden_size), has_bias=False),),
        template=_INTERNLM2_REWARD,
        reason=f"{found.reason}; the prompt is that of InternLM2-Reward",
    )


def _check_prompts(modules: Modules | None) -> None:
    """Refuse a text that sentence-transformers would put before each pair."""
    if modules is None:
        return
    prompts, default = read_prompts(modules)
    if prompts.get(default):
        raise modules.settings.error(
            "default_prompt_name",
            default,
            "pairs with a prompt are not supported; remove it if the model was trained without one",
        )


def _linear(
    name: str,
    shape: tuple[int, int],
    activation: HeadActivation = "identity",
    norm: str = "",
    has_bias: bool = True,
) -> DenseSpec:
    """A layer of the model's own files; `shape` is (outputs, inputs)."""
    return DenseSpec(
        weight=f"{name}.weight",
        bias=f"{name}.bias" if has_bias else "",
        out_features=shape[0],
        in_features=shape[1],
        activation=activation,
        norm=norm,
    )


def _head(fields: Fields, hidden_size: int, num_labels: int) -> tuple[PoolingType, tuple[DenseSpec, ...]]:
    """Pooling and layers of the class in transformers."""
    square, last = (hidden_size, hidden_size), (num_labels, hidden_size)
    match fields.text("model_type"):
        case "bert":
            return "cls", (_linear("bert.pooler.dense", square, "tanh"), _linear("classifier", last))
        case "roberta" | "xlm-roberta":
            return "cls", (_linear("classifier.dense", square, "tanh"), _linear("classifier.out_proj", last))
        case "distilbert":
            return "cls", (_linear("pre_classifier", square, "relu"), _linear("classifier", last))
        case "modernbert":
            pooling, has_bias = _modernbert_settings(fields)
            dense = _linear("head.dense", square, "gelu", "head.norm.weight", has_bias)
            return pooling, (dense, _linear("classifier", last))
        case _:
            return "last", (_linear("score", last, has_bias=False),)


def _modernbert_settings(fields: Fields) -> tuple[PoolingType, bool]:
    """Pooling of a classifier, and whether its first layer has a bias."""
    activation = fields.text("classifier_activation", default="gelu")
    if activation != "gelu":
        raise fields.error("classifier_activation", activation, "only gelu is supported")
    if fields.boolean("norm_bias", default=False):
        raise fields.error("norm_bias", True, "only norms without a bias are supported")
    eps = fields.number("norm_eps", 1e-30, 1.0, default=_NORM_EPS)
    if eps != _NORM_EPS:
        raise fields.error("norm_eps", eps, f"only {_NORM_EPS:g} is supported")
    has_bias = fields.boolean("classifier_bias", default=False)
    match fields.text("classifier_pooling", default="cls"):
        case "cls":
            return "cls", has_bias
        case "mean":
            return "mean", has_bias
        case other:
            raise fields.error("classifier_pooling", other, "only cls and mean are supported")


def _labels(fields: Fields) -> tuple[int, tuple[str, ...]]:
    """Number of scores, and their names; transformers has two without a name if the file has none."""
    value = fields.get("id2label")
    names = value if isinstance(value, Mapping) else {}
    if value is not None and (
        not isinstance(value, Mapping)
        or sorted(value, key=str) != sorted(map(str, range(len(value))))
        or not all(isinstance(label, str) for label in value.values())
    ):
        raise fields.error("id2label", value, "expected an object of names, with the numbers from 0 as keys")
    number = fields.integer("num_labels", 1, _MAX_LABELS, default=len(names) or 2)
    if names and len(names) != number:
        raise fields.error("num_labels", number, f"but id2label has {len(names)}")
    return number, tuple(str(names[str(label)]) for label in range(number)) if names else ()


def _activation(fields: Fields, modules: Modules | None, num_labels: int) -> ScoreActivation:
    """Find the function that turns outputs of the classifier into scores, as sentence-transformers decides it."""
    inner = fields.get("sentence_transformers")
    places = [
        *([(modules.settings, "activation_fn")] if modules is not None else []),
        (
            Fields(fields.path, inner if isinstance(inner, Mapping) else {}, "sentence_transformers."),
            "activation_fn",
        ),
        (fields, "sbert_ce_default_activation_function"),
    ]
    for place, name in places:
        if place.get(name) is None:
            continue
        path = place.text(name)
        kind = path.rpartition(".")[2]
        if not path.startswith("torch.nn.") or kind not in _ACTIVATIONS:
            raise place.error(name, path, f"only {', '.join(_ACTIVATIONS)} of torch.nn are supported")
        return _ACTIVATIONS[kind]
    return "sigmoid" if num_labels == 1 else "identity"


def _from_modules(folder: Path, modules: Modules, found: FoundTask, hidden_size: int) -> PoolingSpec:
    """A CrossEncoder of sentence-transformers 6 on a plain model: Transformer, Pooling, Dense."""
    _, pooling_part, dense_part = modules.parts
    pooling = read_pooling_mode(folder, pooling_part, hidden_size, {})
    dense = read_dense(folder, dense_part, hidden_size, output="scores")
    return PoolingSpec(
        task="score",
        pooling=pooling,
        size=dense.out_features,
        dense=(dense,),
        activation=_activation(Fields(folder, {}), modules, dense.out_features),
        reason=found.reason,
    )


def _generative(folder: Path, fields: Fields, found: FoundTask) -> PoolingSpec:
    """A reranker that answers "yes" or "no"; only with a prompt that is known."""
    model_type = fields.text("model_type")
    if model_type != _QWEN3_RERANKER:
        raise fields.error(
            "model_type",
            model_type,
            "the prompt of this reranker is not known; only Qwen3-Reranker and classifiers are",
        )
    if found.modules is not None and found.modules.parts[1:]:
        _check_label_ids(folder, found.modules.parts[1])
    return PoolingSpec(
        task="score",
        pooling="last",
        size=1,
        label_tokens=_YES_NO,
        template=_QWEN3_TEMPLATE,
        instruction=_QWEN3_INSTRUCTION,
        reason=f"{found.reason}; the prompt is that of Qwen3-Reranker",
    )


def _check_label_ids(folder: Path, part: Module) -> None:
    """Check that the token ids of a `LogitScore` module are those of "yes" and "no"."""
    from tokenizers import Tokenizer as CoreTokenizer

    from ..model_files import library_errors

    fields = part_fields(folder, part)
    path = folder / "tokenizer.json"
    with library_errors(f"{path}: not a valid tokenizer (", "); download it again"):
        core = CoreTokenizer.from_file(str(path))
    for name, token in zip(("true_token_id", "false_token_id"), _YES_NO, strict=True):
        if (token_id := fields.integer(name, 0, 1 << 24)) != core.token_to_id(token):
            raise fields.error(
                name, token_id, f"only the token {token!r}, {core.token_to_id(token)}, is supported"
            )


def _template(fields: Fields, name: str) -> str:
    """The prompt of a classifier that was made from Qwen3-Reranker; "" for any other: the two texts of a pair."""
    names = f"{name} {fields.get('_name_or_path') or ''}".lower()
    is_made_of_it = fields.text("model_type") == _QWEN3_RERANKER and _QWEN3_NAME in names
    return _QWEN3_TEMPLATE if is_made_of_it else ""
