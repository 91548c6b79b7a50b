"""modules.json: the parts of a model by old and new names, and refusals of those that are not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.hf.task import Module, read_modules, transformer_fields
from engine.runtime.errors import ConfigError

OLD, NEW = "sentence_transformers.models", "sentence_transformers.sentence_transformer.modules"


def write(folder: Path, types: list[str], settings: dict[str, Any] | None = None) -> Path:
    names = [name.rpartition(".")[2] for name in types]
    paths = ["" if number == 0 else f"{number}_{name}" for number, name in enumerate(names)]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": type_name}
        for number, (type_name, path) in enumerate(zip(types, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if settings is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_without_it_is_not_of_sentence_transformers(tmp_path: Path) -> None:
    assert read_modules(tmp_path) is None


@pytest.mark.parametrize(
    "types",
    [
        [f"{OLD}.Transformer", f"{OLD}.Pooling", f"{OLD}.Normalize"],
        [
            "sentence_transformers.base.modules.transformer.Transformer",
            f"{NEW}.pooling.Pooling",
            "sentence_transformers.base.modules.normalize.Normalize",
        ],
    ],
)
def test_names_of_all_versions(tmp_path: Path, types: list[str]) -> None:
    modules = read_modules(write(tmp_path, types))

    assert modules is not None and not modules.is_scorer
    assert modules.parts == (
        Module("Transformer", ""),
        Module("Pooling", "1_Pooling"),
        Module("Normalize", "2_Normalize"),
    )


def test_dropout_has_no_effect(tmp_path: Path) -> None:
    modules = read_modules(write(tmp_path, [f"{OLD}.Transformer", f"{OLD}.Pooling", f"{OLD}.Dropout"]))

    assert modules is not None
    assert [part.kind for part in modules.parts] == ["Transformer", "Pooling"]


def test_what_scores_pairs(tmp_path: Path) -> None:
    score = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    for folder, types, settings in (
        ("by-module", [f"{OLD}.Transformer", score], {}),
        ("by-name", [f"{OLD}.Transformer"], {"model_type": "CrossEncoder"}),
    ):
        (tmp_path / folder).mkdir()
        modules = read_modules(write(tmp_path / folder, types, settings))
        assert modules is not None and modules.is_scorer


@pytest.mark.parametrize(
    "kind",
    [
        "Router",
        "Asym",
        "StaticEmbedding",
        "WordEmbeddings",
        "CLIPModel",
        "WeightedLayerPooling",
        "BoW",
        "LayerNorm",
    ],
)
def test_a_part_that_is_not_computed_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    write(tmp_path, [f"{OLD}.Transformer", f"{OLD}.{kind}"])

    with pytest.raises(
        ConfigError, match=rf"modules.json: \[1\]\.type is '{OLD}.{kind}', only Transformer, Pooling"
    ):
        read_modules(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "modules.json: not valid JSON"),
        ("{}", "modules.json: holds a JSON dict, expected a list"),
        ("[7]", "modules.json: module 0 is 7, expected an object"),
        ("[]", "the first module is nothing, expected Transformer"),
        ('[{"path": ""}]', r"the field \[0\]\.type is missing"),
        ('[{"type": "custom_st.Transformer", "path": ""}]', "code from a model's files is never run"),
        (
            f'[{{"type": "{OLD}.Pooling", "path": "1_Pooling"}}]',
            "the first module is Pooling, expected Transformer",
        ),
        (f'[{{"type": "{OLD}.Transformer", "path": "0_BERT"}}]', "path of Transformer is '0_BERT'"),
        (f'[{{"type": "{OLD}.Transformer", "path": "../x"}}]', r"path is '../x', expected a folder inside"),
        (f'[{{"type": "{OLD}.Transformer", "path": "/x"}}]', r"path is '/x', expected a folder inside"),
        (f'[{{"type": "{OLD}.Dense", "path": "a\\u0000b"}}]', r"path is 'a\\x00b', expected a folder inside"),
    ],
)
def test_a_damaged_list_is_refused(tmp_path: Path, data: str, message: str) -> None:
    (tmp_path / "modules.json").write_text(data)

    with pytest.raises(ConfigError, match=message):
        read_modules(tmp_path)


@pytest.mark.parametrize("kind", ["SparseEncoder", "MultiVectorEncoder"])
def test_other_kinds_of_models_are_refused(tmp_path: Path, kind: str) -> None:
    write(tmp_path, [f"{OLD}.Transformer", f"{OLD}.Pooling"], {"model_type": kind})

    with pytest.raises(
        ConfigError, match=f"model_type is '{kind}', only SentenceTransformer and CrossEncoder"
    ):
        read_modules(tmp_path)


def test_settings_of_the_transformer_had_the_name_of_the_model(tmp_path: Path) -> None:
    assert transformer_fields(tmp_path).get("max_seq_length") is None
    (tmp_path / "sentence_xlm-roberta_config.json").write_text('{"max_seq_length": 128}')
    assert transformer_fields(tmp_path).get("max_seq_length") == 128
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    assert transformer_fields(tmp_path).get("max_seq_length") == 64
