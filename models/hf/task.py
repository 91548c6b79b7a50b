"""`find_task`: what a folder's model is for: to generate text, to embed texts, or to score them.

A folder of sentence-transformers says it in modules.json, any other one with the name of its architecture. The user's
`--task` decides where a model can do both, and is refused where it cannot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

from ...runtime.config.model_choice import TaskChoice
from ...runtime.errors import ConfigError
from ..families.registry import ENCODERS
from ..fields import Fields
from .modules_json import MODULES, Modules, read_modules

CAUSAL: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
CLASSIFIER: Final = "ForSequenceClassification"
_BODY: Final = ("Model", "ForMaskedLM")
_WHOLE: Final = ("Qwen2_5OmniModel",)
"""Models that generate text, with heads, in spite of their names."""
_RERANKER: Final = "rerank"


class FoundTask(NamedTuple):
    """A task, and why it is that of the model.

    Attributes:
        modules: of sentence-transformers; None: the folder has no modules.json, or the task does not use it.
    """

    task: Literal["generate", "embed", "score"]
    reason: str
    modules: Modules | None = None


def find_task(folder: Path, fields: Fields, choice: TaskChoice, name: str = "") -> FoundTask:
    """The task of the model in `folder`.

    Args:
        folder: the model's.
        fields: of its config.json.
        choice: what the user asks for.
        name: of the model, which says whether a decoder is a reranker.

    Raises:
        ConfigError: the files are damaged, or the model cannot do what the user asks for.
    """
    modules = read_modules(folder)
    own = _own_task(fields, modules)
    task, architecture = own.task if choice.task == "auto" else choice.task, architecture_of(fields)
    if choice.pooling is not None and task != "embed":
        raise ConfigError(
            f"pooling is {choice.pooling}, but the task is {task}; pooling is chosen for --task embed only"
        )
    if task == own.task:
        return own
    is_causal = architecture.endswith(CAUSAL) or (not architecture and own.task == "generate")
    if task == "generate":
        if is_causal:
            return FoundTask("generate", "--task generate")
        raise _refused(
            fields, task, "the model has no output head for text", f"use --task auto, which is {own.task}"
        )
    if task == "embed":
        if is_causal:
            return FoundTask("embed", "--task embed on a model that generates text")
        raise _refused(
            fields, task, "the model is a classifier", "use --task score, or the model that it was made from"
        )
    if is_causal and _RERANKER in f"{name} {fields.get('_name_or_path') or ''}".lower():
        return FoundTask("score", "--task score on a model that is named a reranker")
    raise _refused(
        fields,
        task,
        f"the model has no classifier ({CLASSIFIER}) and is not named a reranker",
        "use a reranker, or --task embed and compare vectors",
    )


def architecture_of(fields: Fields) -> str:
    """The class that the weights are of; "" if the file has none.

    Raises:
        ConfigError: it is no list of names.
    """
    value = fields.get("architectures")
    if value is None or value == []:
        return ""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error("architectures", value, "expected a list of names")
    return str(value[0])


def _own_task(fields: Fields, modules: Modules | None) -> FoundTask:
    """What the files say."""
    if modules is not None:
        return FoundTask("score" if modules.is_scorer else "embed", f"it has {MODULES}", modules)
    architecture = architecture_of(fields)
    reason = f"its architecture is {architecture}"
    if architecture.endswith(CLASSIFIER):
        return FoundTask("score", reason)
    model_type = fields.get("model_type")
    if model_type in ENCODERS:  # older files have no architectures
        return FoundTask("embed", f"its model_type is {model_type}")
    if architecture.endswith(_BODY) and not architecture.endswith(CAUSAL) and architecture not in _WHOLE:
        return FoundTask("embed", reason)
    return FoundTask("generate", reason if architecture else "its files do not say otherwise")


def _refused(fields: Fields, task: str, reason: str, fix: str) -> ConfigError:
    return fields.error(
        "architectures", fields.get("architectures"), f"but the task is {task}: {reason}; {fix}"
    )
