"""Folders that sentence-transformers has saved, of tiny models: what is read is what it computes with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules.logit_score import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.encoder_spec import DenseSpec, PoolingSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.runtime.config.model_choice import TaskChoice
from engine.runtime.errors import ConfigError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "yes", "no", "fox", "dog"]
SIZE = 32
BERT = BertConfig(
    vocab_size=len(WORDS),
    hidden_size=SIZE,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=40,
    num_labels=1,
)
QWEN3 = Qwen3Config(
    vocab_size=len(WORDS),
    hidden_size=SIZE,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=3,
    pad_token_id=0,
)


def save_tokenizer(folder: Path) -> None:
    core = CoreTokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=24, **named).save_pretrained(folder)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """An encoder, as transformers saves it."""
    BertModel(BERT).save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert")
    return tmp_path / "bert"


def read(folder: Path, choice: TaskChoice | None = None, name: str = "") -> PoolingSpec:
    """The spec, after a check that the weights of the folder are those that it asks for."""
    spec = read_hf_spec(folder, choice or TaskChoice(), name)
    check_folder_weights(folder, spec)
    assert spec.pooling is not None
    return spec.pooling


@pytest.mark.parametrize(("mode", "pooling"), [("cls", "cls"), ("mean", "mean"), ("lasttoken", "last")])
def test_an_embedder_with_a_projection(bert: Path, tmp_path: Path, mode: str, pooling: str) -> None:
    dense = Dense(SIZE, 8, activation_function=torch.nn.GELU())
    modules = [Transformer(str(bert)), Pooling(SIZE, mode), dense, Normalize()]
    prompts = {"query": "fox: ", "document": ""}
    model = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    model.max_seq_length = 17
    model.save_pretrained(str(tmp_path / "saved"))

    spec = read(tmp_path / "saved")

    assert (spec.pooling, spec.size, spec.normalize, spec.prompts) == (pooling, 8, True, prompts)
    assert spec.dense == (
        DenseSpec(
            folder="2_Dense",
            weight="linear.weight",
            bias="linear.bias",
            in_features=SIZE,
            out_features=8,
            activation="gelu",
        ),
    )
    assert read_hf_spec(tmp_path / "saved").max_position_embeddings == 17


def test_an_encoder_that_sentence_transformers_opens_without_modules(bert: Path) -> None:
    reference = SentenceTransformer(str(bert), device="cpu")

    spec = read_hf_spec(bert)

    assert spec.pooling is not None
    assert spec.pooling.pooling == reference[1].pooling_mode == "mean"
    assert len(reference) == 2  # nothing is normalized
    assert not spec.pooling.normalize
    assert spec.max_position_embeddings == reference.max_seq_length == 24


def test_modes_in_a_row_are_refused(bert: Path, tmp_path: Path) -> None:
    model = SentenceTransformer(
        modules=[Transformer(str(bert)), Pooling(SIZE, ("cls", "mean"))], device="cpu"
    )
    model.save_pretrained(str(tmp_path / "saved"))

    with pytest.raises(ConfigError, match=r"1_Pooling/config.json: pooling_mode is \['cls', 'mean'\]"):
        read(tmp_path / "saved")


def test_a_cross_encoder(tmp_path: Path) -> None:
    BertForSequenceClassification(BERT).save_pretrained(tmp_path / "plain")
    save_tokenizer(tmp_path / "plain")
    assert read(tmp_path / "plain").activation == "sigmoid"  # as CrossEncoder's own default

    model = CrossEncoder(str(tmp_path / "plain"), activation_fn=torch.nn.Identity(), device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    spec = read(tmp_path / "saved")

    assert (spec.task, spec.size, spec.activation, spec.pooling) == ("score", 1, "identity", "cls")
    assert [dense.weight for dense in spec.dense] == ["bert.pooler.dense.weight", "classifier.weight"]


def test_a_decoder_without_a_head(tmp_path: Path) -> None:
    Qwen3Model(QWEN3).save_pretrained(tmp_path / "plain")
    save_tokenizer(tmp_path / "plain")
    model = SentenceTransformer(
        modules=[Transformer(str(tmp_path / "plain")), Pooling(SIZE, "lasttoken"), Normalize()], device="cpu"
    )
    model.save_pretrained(str(tmp_path / "saved"))

    spec = read(tmp_path / "saved")

    assert (spec.task, spec.pooling, spec.normalize) == ("embed", "last", True)


def test_a_reranker_that_generates(tmp_path: Path) -> None:
    Qwen3ForCausalLM(QWEN3).save_pretrained(tmp_path / "plain")
    save_tokenizer(tmp_path / "plain")
    assert read(tmp_path / "plain", TaskChoice("score"), "Qwen3-Reranker-0.6B").label_tokens == ("yes", "no")

    for name, ids in (("saved", (4, 5)), ("other", (6, 7))):
        transformer = Transformer(str(tmp_path / "plain"), transformer_task="text-generation")
        CrossEncoder(modules=[transformer, LogitScore(*ids)], device="cpu").save_pretrained(
            str(tmp_path / name)
        )

    assert read(tmp_path / "saved").label_tokens == ("yes", "no")
    with pytest.raises(ConfigError, match=r"true_token_id is 6, only the token 'yes', 4, is supported"):
        read(tmp_path / "other")
