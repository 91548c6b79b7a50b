"""`find_task`: what a folder's model is for: to generate text, to embed texts, or to score them.

A folder of sentence-transformers says it in modules.json, any other one with the name of its architecture. The user's
`--task` decides where a model can do both, and is refused where it cannot.

modules.json lists what is computed, in order: `Transformer`, `Pooling`, then `Dense` and `Normalize`. Files of all
versions up to 6 are read: they differ in the names of Python modules, which do not matter, and of fields, which
`embedder` and `scorer` read. A part that the engine does not compute is refused by name: without it the vectors would
be others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from ...runtime.config.model_choice import TaskChoice
from ...runtime.errors import ConfigError
from ..families.registry import ENCODERS
from ..fields import Fields
from ..model_files import damage, read_json

MODULES: Final = "modules.json"
SETTINGS: Final = "config_sentence_transformers.json"
TRANSFORMER_FILES: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Old versions of sentence-transformers named the settings of its `Transformer` after the model."""

_PACKAGE: Final = "sentence_transformers."
_WITHOUT_EFFECT: Final = "Dropout"
_COMPUTED: Final = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
_SCORER: Final = "CrossEncoder"
_EMBEDDER: Final = "SentenceTransformer"
_MAX_BYTES: Final = 1 << 20


class Module(NamedTuple):
    """One part: its class, and its folder relative to the model's, "" for the model's own."""

    kind: str
    path: str


class Modules(NamedTuple):
    """The parts in order, and the settings of the whole."""

    parts: tuple[Module, ...]
    settings: Fields

    @property
    def is_scorer(self) -> bool:
        """Whether it scores pairs of texts; else it embeds texts."""
        return self.settings.get("model_type") == _SCORER or self.parts[-1].kind == "LogitScore"


def read_modules(folder: Path) -> Modules | None:
    """The parts of the model in `folder`; None: it is not of sentence-transformers.

    Raises:
        ConfigError: a file is damaged, or there is a part that the engine does not compute.
    """
    path = folder / MODULES
    if not path.exists():
        return None
    parts = tuple(part for part in _read_list(path) if part.kind != _WITHOUT_EFFECT)
    settings_path = folder / SETTINGS
    settings = Fields(settings_path, read_json(settings_path) if settings_path.exists() else {})
    kind = settings.text("model_type", default=_EMBEDDER)
    if kind not in (_EMBEDDER, _SCORER):
        raise settings.error("model_type", kind, f"only {_EMBEDDER} and {_SCORER} are supported")
    if not parts or parts[0].kind != "Transformer":
        first = parts[0].kind if parts else "nothing"
        raise ConfigError(f"{path}: the first module is {first}, expected Transformer; use another model")
    if parts[0].path:
        raise ConfigError(
            f"{path}: path of Transformer is {parts[0].path!r}, only the model's own folder is supported; save the "
            "model again with a new version of sentence-transformers"
        )
    return Modules(parts, settings)


def part_fields(folder: Path, part: Module) -> Fields:
    """The settings of a part, which has none if it has no file."""
    path = folder / part.path / "config.json"
    return Fields(path, read_json(path) if part.path and path.exists() else {})


def transformer_fields(folder: Path) -> Fields:
    """The settings of the `Transformer`: how texts become tokens."""
    path = next((folder / name for name in TRANSFORMER_FILES if (folder / name).exists()), None)
    return Fields(folder / TRANSFORMER_FILES[0], {}) if path is None else Fields(path, read_json(path))


def _read_list(path: Path) -> list[Module]:
    try:
        data = path.read_bytes()
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, this cannot be a list of modules")
        listed = json.loads(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(damage(path, f"not valid JSON ({error}); download it again")) from error
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: holds a JSON {type(listed).__name__}, expected a list of modules")
    return [_module(path, number, item) for number, item in enumerate(listed)]


def _module(path: Path, number: int, item: object) -> Module:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{path}: module {number} is {item!r}, expected an object with type and path")
    fields = Fields(path, item, f"[{number}].")
    type_name, folder = fields.text("type"), fields.text("path", default="")
    kind = type_name.rpartition(".")[2]
    if not type_name.startswith(_PACKAGE):
        raise fields.error("type", type_name, "code from a model's files is never run; use another model")
    if kind not in (*_COMPUTED, _WITHOUT_EFFECT):
        raise fields.error("type", type_name, f"only {', '.join(_COMPUTED)} are supported; use another model")
    parts = Path(folder).parts
    if Path(folder).is_absolute() or ".." in parts or not folder.isprintable():
        raise fields.error("path", folder, "expected a folder inside of the model's")
    return Module(kind, "" if folder == "." else folder)


CAUSAL: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
CLASSIFIER: Final = "ForSequenceClassification"
REWARD: Final = "ForRewardModel"
"""Ends of the names of models with a head for scores."""
_BODY: Final = ("Model", "ForMaskedLM")
_WHOLE: Final = ("Qwen2_5OmniModel", "ChatGLMModel")
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
    return next(iter(architectures_of(fields)), "")


def architectures_of(fields: Fields) -> tuple[str, ...]:
    """The classes of `architectures` without `AutoModelForCausalLM` and its like, which stand for any class.

    Raises:
        ConfigError: it is no list of names.
    """
    value = fields.get("architectures")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error("architectures", value, "expected a list of names")
    return tuple(name for name in value if not name.startswith("AutoModel"))


def check_architectures(fields: Fields, supported: tuple[str, ...], model_type: str) -> None:
    """Check that the file names no class, or one of the supported ones.

    Makers spell the name of one class in several ways: PhiMoEForCausalLM, Ernie4_5_ForCausalLM, LLaMAForCausalLM. So
    case and underscores do not count.

    Raises:
        ConfigError: it names another class, or several.
    """
    found = tuple(_plain(name) for name in architectures_of(fields))
    if found and found not in [(_plain(name),) for name in supported]:
        raise fields.error(
            "architectures",
            fields.get("architectures"),
            f"only ['{supported[0]}'] is supported for {model_type}",
        )


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _own_task(fields: Fields, modules: Modules | None) -> FoundTask:
    """Find the task in the model's own files."""
    if modules is not None:
        return FoundTask("score" if modules.is_scorer else "embed", f"it has {MODULES}", modules)
    architecture = architecture_of(fields)
    reason = f"its architecture is {architecture}"
    if architecture.endswith((CLASSIFIER, REWARD)):
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
