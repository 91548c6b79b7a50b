"""`read_pooling`: tasks, poolings, layers, lengths and prompts of folders, and their refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.models.fields import Fields
from engine.models.hf.sentence_transformers import read_pooling, token_limit
from engine.models.hf.task import find_task
from engine.models.spec.encoder_spec import DenseSpec, PoolingSpec
from engine.runtime.config.model_choice import NO_CHOICE, TaskChoice
from engine.runtime.errors import ConfigError

SIZE = 32
BERT: dict[str, Any] = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": SIZE}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": SIZE}
MODELS = "sentence_transformers.models"

WriteFolder = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteFolder:
    """A folder: config.json, and modules as name -> settings of the part; more files as name -> object."""

    def write_folder(
        config: Mapping[str, Any],
        modules: Mapping[str, Mapping[str, Any]] | None = None,
        **files: Mapping[str, Any],
    ) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        if modules is not None:
            listed = [{"idx": 0, "name": "0", "path": "", "type": f"{MODELS}.Transformer"}]
            for number, (kind, settings) in enumerate(modules.items(), 1):
                path = f"{number}_{kind}"
                listed.append({"idx": number, "name": str(number), "path": path, "type": f"{MODELS}.{kind}"})
                (tmp_path / path).mkdir(exist_ok=True)
                (tmp_path / path / "config.json").write_text(json.dumps(settings))
            (tmp_path / "modules.json").write_text(json.dumps(listed))
        for name, value in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return write_folder


def read(folder: Path, choice: TaskChoice = NO_CHOICE, name: str = "") -> PoolingSpec | None:
    fields = Fields(folder / "config.json", json.loads((folder / "config.json").read_text()))
    return read_pooling(folder, fields, find_task(folder, fields, choice, name), choice, SIZE, name)


def spec_of(folder: Path, choice: TaskChoice = NO_CHOICE, name: str = "") -> PoolingSpec:
    spec = read(folder, choice, name)
    assert spec is not None
    return spec


OLD_MEAN = {
    "word_embedding_dimension": SIZE,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_cls_token": False,
}


class TestTask:
    def test_a_plain_decoder_generates(self, write: WriteFolder) -> None:
        assert read(write(QWEN3)) is None
        assert read(write({"model_type": "qwen3"})) is None  # older files have no architectures

    @pytest.mark.parametrize(
        ("config", "task"),
        [
            (BERT, "embed"),
            (BERT | {"architectures": ["BertForMaskedLM"]}, "embed"),
            ({"model_type": "bert"}, "embed"),
            (QWEN3 | {"architectures": ["Qwen3Model"]}, "embed"),
            (BERT | {"architectures": ["BertForSequenceClassification"]}, "score"),
            (QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]}, "score"),
            (QWEN3 | {"model_type": "internlm2", "architectures": ["InternLM2ForRewardModel"]}, "score"),
        ],
    )
    def test_the_architecture_says_it(self, write: WriteFolder, config: dict[str, Any], task: str) -> None:
        assert spec_of(write(config)).task == task

    def test_modules_say_it(self, write: WriteFolder) -> None:
        assert spec_of(write(QWEN3, {"Pooling": {"pooling_mode": "lasttoken"}})).task == "embed"

    def test_a_decoder_with_modules_may_generate(self, write: WriteFolder) -> None:
        assert read(write(QWEN3, {"Pooling": OLD_MEAN}), TaskChoice("generate")) is None

    @pytest.mark.parametrize(
        ("config", "task", "message"),
        [
            (BERT, "generate", r"architectures is \['BertModel'\], but the task is generate: .*--task auto"),
            (BERT, "score", "no classifier .*--task embed"),
            (QWEN3, "score", "no classifier .*not named a reranker; use a reranker"),
            (QWEN3 | {"architectures": ["Qwen3ForRewardModel"]}, "auto", "only reward model .* InternLM2's"),
            (
                BERT | {"architectures": ["BertForSequenceClassification"]},
                "embed",
                "is a classifier; use --task score",
            ),
            (
                BERT | {"architectures": "BertModel"},
                "auto",
                "architectures is 'BertModel', expected a list of names",
            ),
        ],
    )
    def test_what_a_model_cannot_do_is_refused(
        self, write: WriteFolder, config: dict[str, Any], task: Any, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            read(write(config), TaskChoice(task))

    @pytest.mark.parametrize("task", ["auto", "generate"])
    def test_pooling_needs_the_task_embed(self, write: WriteFolder, task: Any) -> None:
        with pytest.raises(ConfigError, match="pooling is mean, but the task is generate"):
            read(write(QWEN3), TaskChoice(task, "mean"))


class TestEmbedder:
    def test_a_generator_embeds_with_its_last_token(
        self, write: WriteFolder, caplog: pytest.LogCaptureFixture
    ) -> None:
        spec = spec_of(write(QWEN3), TaskChoice("embed"))

        assert (spec.pooling, spec.size, spec.normalize) == ("last", SIZE, True)
        assert "there is no modules.json" in caplog.text
        assert spec_of(write(QWEN3), TaskChoice("embed", "mean")).pooling == "mean"

    def test_an_encoder_alone_has_the_mean(self, write: WriteFolder) -> None:
        spec = spec_of(write(BERT))

        assert (spec.pooling, spec.normalize) == ("mean", False)
        assert "mean pooling: without modules.json it is the default" in spec.reason

    @pytest.mark.parametrize(
        ("settings", "pooling"),
        [
            (OLD_MEAN, "mean"),
            ({"word_embedding_dimension": SIZE}, "mean"),
            ({"word_embedding_dimension": SIZE, "pooling_mode_cls_token": True}, "cls"),
            ({"word_embedding_dimension": SIZE, "pooling_mode_lasttoken": True}, "last"),
            ({"embedding_dimension": SIZE, "pooling_mode": "cls"}, "cls"),
            ({"embedding_dimension": SIZE, "pooling_mode": ["lasttoken"]}, "last"),
            # the newer field has precedence
            ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "cls"),
        ],
    )
    def test_poolings(self, write: WriteFolder, settings: dict[str, Any], pooling: str) -> None:
        assert spec_of(write(BERT, {"Pooling": settings})).pooling == pooling

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"pooling_mode": "max"}, "pooling_mode is 'max', only cls, mean, lasttoken are supported"),
            ({"pooling_mode": "weightedmean"}, "pooling_mode is 'weightedmean', only"),
            ({"pooling_mode": ["cls", "mean"]}, "the vectors of several modes in a row are not supported"),
            ({"pooling_mode": 7}, "pooling_mode is 7, expected a name"),
            ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is True, only"),
            ({"pooling_mode_mean_sqrt_len_tokens": True}, "pooling_mode_mean_sqrt_len_tokens is True, only"),
            ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "several modes in a row"),
            ({"pooling_mode_cls_token": "yes"}, "expected true or false"),
            ({"embedding_dimension": 64}, "embedding_dimension is 64, but the model's hidden size is 32"),
        ],
    )
    def test_a_pooling_that_is_not_computed_is_refused(
        self, write: WriteFolder, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"1_Pooling/config.json: .*{message}"):
            read(write(BERT, {"Pooling": settings}))

    def test_the_user_s_pooling_has_precedence(self, write: WriteFolder) -> None:
        spec = spec_of(write(BERT, {"Pooling": OLD_MEAN}), TaskChoice(pooling="cls"))

        assert spec.pooling == "cls"
        assert "--pooling, but its files say mean" in spec.reason

    def test_layers_after_pooling(self, write: WriteFolder) -> None:
        dense = {
            "in_features": SIZE,
            "out_features": 8,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        spec = spec_of(write(BERT, {"Pooling": OLD_MEAN, "Dense": dense, "Normalize": {}}))

        assert (spec.size, spec.normalize) == (8, True)
        assert spec.dense == (
            DenseSpec(folder="2_Dense", weight="linear.weight", in_features=SIZE, out_features=8),
        )

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"in_features": 16}, "in_features is 16, but the layer before it gives 32"),
            (
                {"activation_function": "torch.nn.modules.activation.Softplus"},
                "only Identity, Tanh, GELU, ReLU of",
            ),
            ({"activation_function": "mine.Tanh"}, "activation_function is 'mine.Tanh', only"),
            ({"use_residual": True}, "use_residual is True"),
            ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings', only"),
            ({"module_output_name": "scores"}, "module_output_name is 'scores', only"),
        ],
    )
    def test_a_layer_that_is_not_computed_is_refused(
        self, write: WriteFolder, settings: dict[str, Any], message: str
    ) -> None:
        dense = {"in_features": SIZE, "out_features": 8, **settings}

        with pytest.raises(ConfigError, match=f"2_Dense/config.json: .*{message}"):
            read(write(BERT, {"Pooling": OLD_MEAN, "Dense": dense}))

    @pytest.mark.parametrize(
        "kinds", [["Normalize"], ["Pooling", "Normalize", "Dense"], ["Dense", "Pooling"]]
    )
    def test_another_order_is_refused(self, write: WriteFolder, kinds: list[str]) -> None:
        dense = {"in_features": SIZE, "out_features": SIZE}

        with pytest.raises(ConfigError, match=f"the modules are Transformer, {', '.join(kinds)}; expected"):
            read(write(BERT, {kind: dense if kind == "Dense" else {} for kind in kinds}))

    def test_prompts(self, write: WriteFolder) -> None:
        settings = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
        spec = spec_of(write(BERT, {"Pooling": OLD_MEAN}, config_sentence_transformers=settings))

        assert (spec.prompts, spec.default_prompt) == (settings["prompts"], "query")

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"prompts": {"query": 7}}, "prompts is {'query': 7}, expected an object of texts"),
            ({"default_prompt_name": "query"}, "default_prompt_name is 'query', but the prompts are none"),
            ({"truncate_dim": 64}, "truncate_dim is 64, expected a whole number from 1 to 32"),
        ],
    )
    def test_settings_that_contradict_are_refused(
        self, write: WriteFolder, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"config_sentence_transformers.json: {message}"):
            read(write(BERT, {"Pooling": OLD_MEAN}, config_sentence_transformers=settings))

    @pytest.mark.parametrize("normalize", [True, False])
    def test_vectors_have_length_1_only_if_the_last_module_says_so(
        self, write: WriteFolder, normalize: bool
    ) -> None:
        last: dict[str, dict[str, Any]] = {"Normalize": {}} if normalize else {}
        assert spec_of(write(BERT, {"Pooling": OLD_MEAN} | last)).normalize is normalize

    def test_a_pooling_without_the_prompt_is_refused(self, write: WriteFolder) -> None:
        pooling = {**OLD_MEAN, "include_prompt": False}
        assert spec_of(write(BERT, {"Pooling": pooling})).pooling == "mean"  # there is no prompt

        settings = {"prompts": {"query": "find: "}}
        with pytest.raises(ConfigError, match="include_prompt is False"):
            read(write(BERT, {"Pooling": pooling}, config_sentence_transformers=settings))

    def test_shorter_vectors(self, write: WriteFolder) -> None:
        def lengths(choice: TaskChoice = NO_CHOICE, **fields: object) -> tuple[tuple[int, ...], bool]:
            spec = spec_of(write(BERT | fields, {"Pooling": OLD_MEAN}), choice)
            return spec.dimensions, spec.any_dimensions

        assert lengths() == ((), False)
        assert lengths(matryoshka_dimensions=[32, 16, 8]) == ((8, 16), False)
        assert lengths(is_matryoshka=True) == ((), True)
        assert lengths(is_matryoshka=True, matryoshka_dimensions=[16]) == ((16,), False)
        assert lengths(TaskChoice(any_dimensions=True)) == ((), True)
        with pytest.raises(ConfigError, match="matryoshka_dimensions is .*64 is more than a vector has, 32"):
            lengths(matryoshka_dimensions=[64])

    def test_a_default_length(self, write: WriteFolder) -> None:
        spec = spec_of(write(BERT, {"Pooling": OLD_MEAN}, config_sentence_transformers={"truncate_dim": 16}))

        assert (spec.default_dimensions, spec.dimensions) == (16, (16,))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"query_length": 32}, "a vector for each token"),
            ({"modality_config": {"image": {}}}, "only text is supported"),
            ({"processing_kwargs": {"text": {"padding": "max_length"}}}, "only the tokenizer's own settings"),
        ],
    )
    def test_another_form_of_texts_is_refused(
        self, write: WriteFolder, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"sentence_bert_config.json: .*{message}"):
            read(write(BERT, {"Pooling": OLD_MEAN}, sentence_bert_config=settings))


class TestScorer:
    @pytest.mark.parametrize(
        ("config", "pooling", "layers"),
        [
            (
                BERT | {"architectures": ["BertForSequenceClassification"]},
                "cls",
                [("bert.pooler.dense", "tanh", True, ""), ("classifier", "identity", True, "")],
            ),
            (
                {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]},
                "cls",
                [("classifier.dense", "tanh", True, ""), ("classifier.out_proj", "identity", True, "")],
            ),
            (
                {"model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"]},
                "cls",
                [("pre_classifier", "relu", True, ""), ("classifier", "identity", True, "")],
            ),
            (
                {
                    "model_type": "modernbert",
                    "architectures": ["ModernBertForSequenceClassification"],
                    "classifier_pooling": "mean",
                },
                "mean",
                [("head.dense", "gelu", False, "head.norm.weight"), ("classifier", "identity", True, "")],
            ),
            (
                QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]},
                "last",
                [("score", "identity", False, "")],
            ),
        ],
    )
    def test_heads(
        self,
        write: WriteFolder,
        config: dict[str, Any],
        pooling: str,
        layers: list[tuple[str, str, bool, str]],
    ) -> None:
        spec = spec_of(write(config | {"num_labels": 1}))

        assert (spec.task, spec.pooling, spec.size, spec.activation) == ("score", pooling, 1, "sigmoid")
        assert [
            (d.weight.removesuffix(".weight"), d.activation, bool(d.bias), d.norm) for d in spec.dense
        ] == layers
        assert (spec.dense[-1].in_features, spec.dense[-1].out_features) == (SIZE, 1)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"classifier_pooling": "max"}, "classifier_pooling is 'max', only cls and mean"),
            ({"classifier_activation": "relu"}, "classifier_activation is 'relu'"),
            ({"norm_bias": True}, "norm_bias is True"),
            ({"norm_eps": 1e-6}, "norm_eps is 1e-06, only 1e-05"),
        ],
    )
    def test_a_head_that_is_not_computed_is_refused(
        self, write: WriteFolder, fields: dict[str, Any], message: str
    ) -> None:
        config = {
            "model_type": "modernbert",
            "architectures": ["ModernBertForSequenceClassification"],
            **fields,
        }

        with pytest.raises(ConfigError, match=message):
            read(write(config))

    @pytest.mark.parametrize(
        ("fields", "activation"),
        [
            ({}, "identity"),  # two labels: the default of transformers
            ({"num_labels": 1}, "sigmoid"),
            (
                {
                    "num_labels": 1,
                    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
                },
                "identity",
            ),
            (
                {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
                "identity",
            ),
            (
                {
                    "num_labels": 3,
                    "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax"},
                },
                "softmax",
            ),
        ],
    )
    def test_activations(self, write: WriteFolder, fields: dict[str, Any], activation: str) -> None:
        config = BERT | {"architectures": ["BertForSequenceClassification"]} | fields

        assert spec_of(write(config)).activation == activation

    def test_the_activation_of_a_cross_encoder_of_version_6(self, write: WriteFolder) -> None:
        settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
        config = BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 1}

        assert spec_of(write(config, {}, config_sentence_transformers=settings)).activation == "identity"

    def test_a_prompt_before_pairs_is_refused(self, write: WriteFolder) -> None:
        settings = {"model_type": "CrossEncoder", "prompts": {"find": "find: ", "none": ""}}
        config = BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
        spec_of(
            write(config, {}, config_sentence_transformers=settings)
        )  # no pair has it unless it is asked for
        spec_of(write(config, {}, config_sentence_transformers=settings | {"default_prompt_name": "none"}))

        with pytest.raises(ConfigError, match="default_prompt_name is 'find', pairs with a prompt are not"):
            spec_of(
                write(config, {}, config_sentence_transformers=settings | {"default_prompt_name": "find"})
            )

    def test_labels(self, write: WriteFolder) -> None:
        config = BERT | {
            "architectures": ["BertForSequenceClassification"],
            "id2label": {"1": "no", "0": "yes"},
        }

        spec = spec_of(write(config))

        assert (spec.size, spec.labels) == (2, ("yes", "no"))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"id2label": {"0": "a", "2": "b"}}, "id2label is .*expected an object of names"),
            ({"id2label": ["a"]}, "expected an object of names"),
            ({"id2label": {"0": "a"}, "num_labels": 2}, "num_labels is 2, but id2label has 1"),
            ({"num_labels": 0}, "num_labels is 0, expected"),
            (
                {"sbert_ce_default_activation_function": "torch.nn.GLU"},
                "sbert_ce_default_activation_function is 'torch.nn.GLU', only Identity, Sigmoid, Softmax",
            ),
        ],
    )
    def test_labels_and_activations_that_are_wrong_are_refused(
        self, write: WriteFolder, fields: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            read(write(BERT | {"architectures": ["BertForSequenceClassification"]} | fields))

    def test_a_classifier_on_a_plain_encoder(self, write: WriteFolder) -> None:
        dense = {
            "in_features": SIZE,
            "out_features": 1,
            "activation_function": "torch.nn.modules.linear.Identity",
            "module_output_name": "scores",
        }
        settings = {"model_type": "CrossEncoder"}
        folder = write(BERT, {"Pooling": OLD_MEAN, "Dense": dense}, config_sentence_transformers=settings)

        spec = spec_of(folder)

        assert (spec.task, spec.pooling, spec.size, spec.activation) == ("score", "mean", 1, "sigmoid")
        assert spec.dense[0].folder == "2_Dense"

    def test_other_modules_of_a_cross_encoder_are_refused(self, write: WriteFolder) -> None:
        folder = write(
            BERT, {"Pooling": OLD_MEAN}, config_sentence_transformers={"model_type": "CrossEncoder"}
        )

        with pytest.raises(ConfigError, match="modules of a CrossEncoder are Transformer, Pooling; expected"):
            read(folder)

    @pytest.mark.parametrize("where", ["name", "config"])
    def test_a_reranker_that_generates(self, write: WriteFolder, where: str) -> None:
        config = QWEN3 | ({"_name_or_path": "Qwen/Qwen3-Reranker-0.6B"} if where == "config" else {})
        name = "Qwen/Qwen3-Reranker-4B" if where == "name" else "local"

        spec = spec_of(write(config), TaskChoice("score"), name)

        assert (spec.pooling, spec.size, spec.label_tokens) == ("last", 1, ("yes", "no"))
        text = spec.template.format(instruction=spec.instruction, query="What is it?", document="A {brace}.")
        assert text.endswith(
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            "<Query>: What is it?\n<Document>: A {brace}.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )

    def test_the_prompt_of_another_reranker_is_not_known(self, write: WriteFolder) -> None:
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}

        with pytest.raises(
            ConfigError, match="model_type is 'qwen2', the prompt of this reranker is not known"
        ):
            read(write(config), TaskChoice("score"), "mxbai-rerank-base-v2")

    def test_a_classifier_made_of_the_reranker_has_its_prompt(self, write: WriteFolder) -> None:
        config = QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}

        assert spec_of(write(config), name="someone/Qwen3-Reranker-0.6B-seq-cls").template
        assert not spec_of(write(config), name="someone/classifier").template


class TestTokenLimit:
    @pytest.mark.parametrize(
        ("transformer", "tokenizer", "limit"),
        [
            (None, None, None),
            ({"max_seq_length": 256}, {"model_max_length": 512}, 256),
            ({"max_seq_length": None}, {"model_max_length": 512}, 512),
            ({}, {"model_max_length": 10**30}, None),
            ({}, {"model_max_length": 1.0e30}, None),
        ],
    )
    def test_the_newest_place_has_precedence(
        self, write: WriteFolder, transformer: Any, tokenizer: Any, limit: int | None
    ) -> None:
        files = {"sentence_bert_config": transformer, "tokenizer_config": tokenizer}
        folder = write(BERT, **{name: value for name, value in files.items() if value is not None})

        assert token_limit(folder) == limit

    def test_a_limit_that_is_no_number_is_refused(self, write: WriteFolder) -> None:
        with pytest.raises(ConfigError, match="max_seq_length is 'long', expected a whole number"):
            token_limit(write(BERT, sentence_bert_config={"max_seq_length": "long"}))
