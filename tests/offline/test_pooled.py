"""`LLM.embed`, `rerank`, `score` and `label_probabilities`: results beside those of libraries, and bad calls."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine import LLM, EngineDeadError, RequestError
from engine.launch.resolve.prepare import Prepared
from engine.offline.engine import RowQueue
from engine.offline.pooled import PooledCalls
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import Finish, FinishKind, GenerateRequest, TextOutput, Usage
from engine.tokenizer_manager.scheduling_options import Scheduling
from tests.embedders import MAX_LEN, SIZE, make_decoder_embedder, make_embedder, make_reranker
from tests.model_runner.structures.own_code import write_as_published

TEXTS = ["the quick brown fox", "a cat and a kitten", "stock market", "one " * 40]
TOO_LONG = "one " * MAX_LEN
PROMPTS = {"query": "one cat: ", "document": ""}


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), dtype="float32", num_threads=1, show_progress=False, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("models") / "tiny-bert", prompts=PROMPTS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_reranker(tmp_path_factory.mktemp("models") / "tiny-reranker")
    with open_llm(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def generator(tiny_model: Path) -> Iterator[LLM]:
    with open_llm(tiny_model) as llm:
        yield llm


# ---------------------------------------------------------------- vectors


def test_vectors_are_those_of_sentence_transformers(llm, folder):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)

    vectors = llm.embed(TEXTS)

    assert vectors.shape == (len(TEXTS), SIZE) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert vectors.flags.writeable


def test_a_decoder_gives_those_of_sentence_transformers_too(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = make_decoder_embedder(tmp_path / "tiny-qwen3")
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with open_llm(folder, page_size=4) as llm:
        np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=1e-5)
        np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=1e-5)  # with what is cached


def test_one_input_has_one_vector(llm):
    one = llm.embed(TEXTS[0])
    assert one.shape == (SIZE,)
    np.testing.assert_allclose(one, llm.embed([TEXTS[0]])[0], atol=1e-6)
    assert llm.embed([]).shape == (0, SIZE)


def test_token_ids_are_an_input_too_and_get_no_special_tokens(llm):
    ids = llm.tokenizer.encode(TEXTS[0])
    np.testing.assert_allclose(llm.embed(ids), llm.embed(TEXTS[0]), atol=1e-6)
    mixed = llm.embed([TEXTS[1], ids])
    np.testing.assert_allclose(mixed[1], llm.embed(TEXTS[0]), atol=1e-6)
    array = llm.embed(np.array([ids, ids]))
    assert array.shape == (2, SIZE)
    assert not np.allclose(llm.embed(ids[1:-1]), llm.embed(ids), atol=1e-3)


def test_vectors_are_normalized_as_the_files_say_unless_it_is_asked_for(llm):
    unit, raw = llm.embed(TEXTS), llm.embed(TEXTS, normalize=False)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0, atol=1e-6)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1.0).max() > 0.1
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-6)


def test_prompts_by_name_and_by_type_of_the_input(llm):
    expected = llm.embed([PROMPTS["query"] + text for text in TEXTS[:2]])
    np.testing.assert_array_equal(llm.embed(TEXTS[:2], prompt_name="query"), expected)
    np.testing.assert_array_equal(llm.embed(TEXTS[:2], input_type="search_query"), expected)
    np.testing.assert_array_equal(llm.embed(TEXTS[:2], input_type="document"), llm.embed(TEXTS[:2]))


def test_dimensions_are_leading_numbers_of_length_1(folder):
    with open_llm(folder, matryoshka=True) as llm:
        whole, cut = llm.embed(TEXTS), llm.embed(TEXTS, dimensions=8)
        assert cut.shape == (len(TEXTS), 8)
        expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(cut, expected, atol=1e-6)
        np.testing.assert_array_equal(llm.embed(TEXTS, dimensions=SIZE), whole)


def test_long_inputs_are_cut_when_it_is_asked_for(llm):
    ids = llm.tokenizer.encode(TOO_LONG)
    expected = llm.embed(ids[: MAX_LEN - 1] + ids[-1:])
    np.testing.assert_allclose(llm.embed(TOO_LONG, truncate=True), expected, atol=1e-6)
    np.testing.assert_array_equal(llm.embed(TEXTS[0], truncate=True), llm.embed(TEXTS[0]))


def test_token_ids_without_special_tokens_are_cut_at_their_end(llm):
    ids = [*llm.tokenizer.encode(TOO_LONG, add_special_tokens=False), *llm.tokenizer.encode("cat")[1:2]]
    assert len(ids) > MAX_LEN
    np.testing.assert_allclose(llm.embed(ids, truncate=True), llm.embed(ids[:MAX_LEN]), atol=1e-6)


def test_many_inputs_keep_their_order_and_equal_single_ones(llm):
    texts = [f"{n} cat {'two ' * (n % 23)}" for n in range(300)]
    vectors = llm.embed(texts, progress_bar=True)
    for n in (0, 1, 150, 299):
        np.testing.assert_allclose(vectors[n], llm.embed(texts[n]), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": ""}, "input is empty"),
        ({"inputs": ["a", ""]}, r"input\[1\] is empty"),
        ({"inputs": [[]]}, "no tokens|empty"),
        ({"inputs": 5}, "inputs is 5, but it must be a text or"),
        ({"inputs": None}, "inputs is None"),
        ({"inputs": [{"text": "a"}]}, "input is {.*, but it must be a text or a list of token ids"),
        ({"inputs": [[1, 10**6]]}, "1000000"),
        ({"inputs": [[1, -1]]}, "-1"),
        ({"inputs": ["a", TOO_LONG]}, rf"input\[1\] has \d+ tokens and the model takes {MAX_LEN}"),
        ({"inputs": TOO_LONG}, f"the input has .* the model takes {MAX_LEN}"),
        ({"inputs": "a", "dimensions": 8}, "trained for vectors of 48 numbers only"),
        ({"inputs": "a", "dimensions": 0}, "dimensions is 0"),
        ({"inputs": "a", "dimensions": 49}, "have 48 numbers"),
        ({"inputs": "a", "dimensions": "8"}, "dimensions"),
        ({"inputs": "a", "normalize": "yes"}, "normalize"),
        ({"inputs": "a", "truncate": 1}, "truncate"),
        ({"inputs": "a", "prompt_name": "passage"}, "the model's prompts are: document, query"),
        ({"inputs": "a", "prompt_name": 5}, "prompt_name"),
        ({"inputs": [5, 6], "prompt_name": "query"}, "inputs are token ids"),
        ({"inputs": "a", "input_type": "title"}, "input_type is"),
        ({"inputs": "a", "input_type": ["query"]}, "input_type"),
        ({"inputs": "a", "timeout": -1}, "timeout"),
        ({"inputs": "a", "progress_bar": 1}, "progress_bar"),
        ({"inputs": "half of a pair: \ud83d"}, "lone surrogate|Unicode"),
    ],
)
def test_a_wrong_argument_of_embed_is_named(llm, arguments, message):
    with pytest.raises(RequestError, match=message):
        llm.embed(**arguments)
    assert llm.embed("a").shape == (SIZE,)


def test_a_model_without_vectors_is_refused(generator, reranker):
    with pytest.raises(RequestError, match="generates text and makes no vectors; .* task"):
        generator.embed("a")
    with pytest.raises(RequestError, match="scores texts and makes no vectors"):
        reranker.embed("a")


def test_what_generates_is_refused_by_a_model_of_vectors(llm):
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.sample("a", 2),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.label_probabilities("a", ["one"]),
    ):
        with pytest.raises(RequestError, match="makes vectors of texts"):
            call()


# ---------------------------------------------------------------- scores


def test_a_reranker_scores_as_sentence_transformers_does(reranker):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = sentence_transformers.CrossEncoder(str(reranker.config.model.model), device="cpu")
    expected = encoder.predict([("cat", text) for text in TEXTS])

    ranked = reranker.rerank("cat", TEXTS)

    order = sorted(range(len(TEXTS)), key=lambda n: -expected[n])
    assert [document.index for document in ranked] == order
    assert [document.text for document in ranked] == [TEXTS[n] for n in order]
    np.testing.assert_allclose([document.score for document in ranked], expected[order], atol=1e-5)
    np.testing.assert_allclose(reranker.score("cat", TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(reranker.score(["cat"] * 4, TEXTS), expected, atol=1e-5)
    assert [document.index for document in reranker.rerank("cat", TEXTS, top_n=2)] == order[:2]
    assert reranker.rerank("cat", TEXTS, top_n=0) == []
    assert len(reranker.rerank("cat", TEXTS, top_n=99)) == len(TEXTS)


def test_an_unknown_argument_is_one_of_python(llm):
    for call in (llm.embed, lambda _, **options: llm.rerank("a", ["b"], **options)):
        with pytest.raises(TypeError, match="temperature"):
            call("a", temperature=1.0)


def test_an_embedder_ranks_by_the_angle_between_vectors_with_their_prompts(llm):
    cosines = llm.embed(TEXTS, input_type="document") @ llm.embed("cat", input_type="query")
    np.testing.assert_allclose(llm.score("cat", TEXTS), cosines, atol=1e-5)
    ranked = llm.rerank("cat", TEXTS)
    assert [document.index for document in ranked] == list(np.argsort(-cosines))


def test_errors_of_an_embedder_name_the_document(llm):
    with pytest.raises(RequestError, match=r"^pair\[2\] has"):
        llm.rerank("cat", ["a", "a", TOO_LONG])  # equal documents are computed once
    with pytest.raises(RequestError, match="^the query has"):
        llm.rerank(TOO_LONG, ["a", "b", "b"])


def test_equal_scores_keep_the_order_of_the_documents(llm):
    ranked = llm.rerank("cat", ["one", "two", "one", "one"])
    assert [document.index for document in ranked if document.text == "one"] == [0, 2, 3]


def test_a_classifier_has_a_number_per_label_and_ranks_nothing(tmp_path):
    with open_llm(make_reranker(tmp_path / "three", num_labels=3)) as llm:
        scores = llm.score("cat", TEXTS[:2])
        assert np.shape(scores) == (2, 3)
        with pytest.raises(RequestError, match=r"3 scores for a pair.*use score\(\)"):
            llm.rerank("cat", TEXTS)


@pytest.mark.slow
def test_inputs_are_cut_to_the_memory_that_there_is(tmp_path):
    folder = make_reranker(tmp_path / "reranker")
    with open_llm(folder) as whole, open_llm(folder, max_total_tokens=32, max_model_len=MAX_LEN) as small:
        assert small.score("cat", TOO_LONG, truncate=True) == whole.score("cat", "one " * 28, truncate=True)


def test_pairs_that_are_too_long_are_cut_when_it_is_asked_for(reranker):
    with pytest.raises(RequestError, match=rf"pair\[1\] has \d+ tokens and the model takes {MAX_LEN}"):
        reranker.rerank("cat", ["a", TOO_LONG])
    assert len(reranker.rerank("cat", ["a", TOO_LONG], truncate=True)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cat", []), "documents is empty"),
        (("cat", [5]), "documents"),
        (("cat", ["a", "\ud83d"]), r"documents\[1\] is"),
        (("cat", None), "documents"),
        ((["cat", "dog"], ["a"]), "query"),
        ((5, ["a"]), "query"),
    ],
)
def test_a_wrong_argument_of_rerank_is_named(reranker, arguments, message):
    with pytest.raises(RequestError, match=message):
        reranker.rerank(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_n": -1}, "top_n is -1"),
        ({"top_n": "2"}, "top_n"),
        ({"top_n": 1.5}, "top_n"),
        ({"instruction": 5}, "instruction"),
        ({"truncate": "yes"}, "truncate"),
        ({"instruction": "find"}, "instruction is not supported"),
        ({"progress_bar": "no"}, "progress_bar"),
    ],
)
def test_a_wrong_option_of_rerank_is_named(reranker, options, message):
    with pytest.raises(RequestError, match=message):
        reranker.rerank("cat", ["a"], **options)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (["a", "b"], ["c"], "first has 2 texts and second has 1"),
        ([], ["c"], "first is empty"),
        ("a", [], "second is empty"),
        ("a", {"text": "b"}, "second"),
        (None, "b", "first"),
    ],
)
def test_a_wrong_argument_of_score_is_named(reranker, first, second, message):
    with pytest.raises(RequestError, match=message):
        reranker.score(first, second)


# ---------------------------------------------------------------- labels


def test_labels_are_probabilities_of_the_next_token(generator):
    ids = [generator.tokenizer.encode(label)[-1] for label in ("a", "b")]
    among, whole = (generator.label_probabilities("the", ids, among_labels=among) for among in (True, False))
    assert among[0][0] + among[0][1] == pytest.approx(1.0)
    assert sum(whole[0]) < 1.0
    assert whole[0][0] / sum(whole[0]) == pytest.approx(among[0][0], rel=1e-5)
    both = generator.label_probabilities(["the", [5, 6]], ids)
    assert both[0] == pytest.approx(among[0], rel=1e-4) and len(both) == 2


@pytest.mark.parametrize(
    ("prompts", "labels", "message"),
    [
        ("the", [], "labels is empty"),
        ("the", ["the quick brown fox"], "labels"),
        ("the", [10**6], "labels"),
        ("the", [-1], "labels"),
        ("the", [True], "labels"),
        ("the", [1.5], "labels"),
        ("the", 5, "labels"),
        ("", [5], "prompt is empty"),
        ([], [5], ""),
    ],
)
def test_a_wrong_argument_of_label_probabilities_is_named(generator, prompts, labels, message):
    if prompts == []:
        assert generator.label_probabilities(prompts, labels) == []
        return
    with pytest.raises(RequestError, match=message):
        generator.label_probabilities(prompts, labels)


# ---------------------------------------------------------------- the engine below


def test_a_model_can_be_refused_before_its_weights_are_read(folder):
    def refuse(prepared: Prepared) -> None:
        assert prepared.spec.pooling is not None
        raise RequestError("not this one")

    steps: list[str] = []
    with pytest.raises(RequestError, match="not this one"):
        LLM.from_config(merge(from_arguments({"model": folder})), on_step=steps.append, check=refuse)
    assert steps == ["model files"]


def test_a_call_fails_when_the_engine_ends(folder):
    llm = open_llm(folder)
    ended = threading.Thread(target=llm.close)
    ended.start()
    ended.join()
    with pytest.raises(EngineDeadError):
        llm.embed("a")
    with pytest.raises(EngineDeadError):
        llm.rerank("a", ["b"])


def test_a_failed_call_leaves_nothing_running(llm):
    with pytest.raises(RequestError):
        llm.embed(["a"] * 50 + [TOO_LONG])
    assert math.isclose(float(np.linalg.norm(llm.embed("a"))), 1.0, abs_tol=1e-5)
    report = llm.flush_cache()
    assert report.kept_tokens == 0


class FailingEngine:
    """Answers the second request of a call with an error, and no other."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.requests: list[GenerateRequest] = []
        self.rids: list[str] = []
        self.aborted: list[str] = []

    def check_usable(self) -> None:
        pass

    def submit_all(self, requests: list[GenerateRequest], rows: RowQueue) -> None:
        self.requests = requests
        self.rids = [request.rid for request in requests]
        finish = Finish(FinishKind.ERROR, message="not finite", status=500)
        rows.put(TextOutput(self.rids[1], "", b"", Usage(1, 0), finish))

    def abort(self, rid: str, reason: str) -> None:
        self.aborted.append(rid)


def test_an_input_that_fails_is_named_and_the_others_are_aborted(llm):
    spec = llm._spec
    engine = FailingEngine(Capacity(64, 16, 16, 8, spec.vocab_size))
    calls = PooledCalls(cast("Any", engine), llm.tokenizer, spec)

    with pytest.raises(RequestError, match=r"^input\[1\]: not finite") as caught:
        calls.embed(
            ["a", "cat", "one"],
            Scheduling(priority=3, extra_key="salt", tenant="me", timeout_s=7.5, queue_timeout_s=2.5),
            dimensions=None,
            normalize=None,
            prompt_name=None,
            input_type=None,
            truncate=False,
            progress_bar=False,
        )

    assert (caught.value.param, caught.value.status) == ("input[1]", 500)
    assert engine.aborted == [engine.rids[0], engine.rids[2]]
    for request in engine.requests:
        assert (request.priority, request.extra_key, request.tenant) == (3, "salt", "me")
        assert (request.timeout_s, request.queue_timeout_s) == (7.5, 2.5)


def test_values_of_other_libraries_are_taken(llm):
    ids = torch.tensor(llm.tokenizer.encode("cat"))
    np.testing.assert_allclose(llm.embed(ids), llm.embed("cat"), atol=1e-6)
    np.testing.assert_array_equal(llm.embed("cat", dimensions=np.int64(SIZE)), llm.embed("cat"))


def test_a_reward_model_scores_answers_as_its_code_does(tiny_model, tmp_path):
    """InternLM2-Reward: its head takes the last state of the chat, at a token of its own."""
    import transformers
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "reward"
    shutil.copytree(tiny_model, folder)
    write_as_published(folder, "internlm2")
    path = folder / "config.json"
    other = {"model_type": "internlm2", "architectures": ["InternLM2ForRewardModel"], "bias": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("output.weight", None)
    body = transformers.AutoModel.from_pretrained(tiny_model, dtype=torch.float32)
    head = torch.randn(1, body.config.hidden_size, generator=torch.Generator().manual_seed(0))
    save_file({**tensors, "v_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    chats = [
        f"<s><|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n<|reward|>"
        for text in TEXTS
    ]
    with open_llm(folder) as llm, torch.no_grad():
        ids = [llm.tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
        states = [body(torch.tensor([one])).last_hidden_state[0, -1] for one in ids]
        expected = [float(head[0] @ state) for state in states]
        np.testing.assert_allclose(llm.score("how?", TEXTS), expected, atol=1e-4)
        with pytest.raises(RequestError, match="instruction is not supported"):
            llm.rerank("how?", TEXTS, instruction="be strict")
