"""Questions as text, the tokens of labels, and answers from log-probabilities."""

from __future__ import annotations

import math
from array import array

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer

from engine.models.tokenizer.tokenizer import Tokenizer
from engine.runtime.errors import RequestError
from engine.tokenizer_manager.pooling.decisions import (
    Decided,
    LabelTokens,
    Option,
    Question,
    QuestionKind,
    mean_of,
    question_text,
)

WORDS = ("ĠYes", "ĠNo", "Yes", "yes", "No", "NO", "AA", "AB", "Ġa")
ENDING = "<|end|>\n"


def make_tokenizer(words: tuple[str, ...] = WORDS) -> Tokenizer:
    """One token per byte, and one for each of `words`."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in words:
        for size in range(2, len(word) + 1):
            if word[:size] not in vocab:
                vocab[word[:size]] = len(vocab)
                merges.append((word[: size - 1], word[size - 1]))
    core = CoreTokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(core, special_tokens={}, eos_token_ids=(), chat_templates={})


TOKENIZER = make_tokenizer()
PREDICATE = Question(QuestionKind.PREDICATE, "It is late.")
CHOICE = Question(QuestionKind.CHOICE, "Which?", (Option("red"), Option("green", "as grass"), Option("blue")))
SCORE = Question(QuestionKind.SCORE, "How much?", tuple(map(Option, ("none", "some", "all"))))


@pytest.fixture
def tokens() -> LabelTokens:
    return LabelTokens(TOKENIZER, ENDING)


def logprobs(*shares: float) -> bytes:
    return array("f", [math.log(share) if share else -math.inf for share in shares]).tobytes()


def test_a_label_is_every_token_of_its_text_up_to_case_and_a_space_in_front(tokens: LabelTokens):
    names = [TOKENIZER.token_bytes(each).decode() for each in tokens.group("Yes")]

    assert sorted(names) == [" Yes", "Yes", "yes"]
    assert sorted(TOKENIZER.token_bytes(each).decode() for each in tokens.group("No")) == [" No", "NO", "No"]
    assert tokens.group("the") == ()  # three tokens


def test_labels_of_each_kind(tokens: LabelTokens):
    assert tokens.labels(PREDICATE, "q") == ["Yes", "No"]
    assert tokens.labels(CHOICE, "q") == ["A", "B", "C"]
    assert tokens.labels(SCORE, "q") == ["0", "1", "2"]


def test_more_options_than_letters_have_codes_of_two_letters_that_are_one_token(tokens: LabelTokens):
    def of(count: int) -> Question:
        return Question(QuestionKind.CHOICE, "Which?", tuple(Option(str(i)) for i in range(count)))

    codes = tokens.labels(of(28), "q")[26:]
    assert codes == ["AA", "AB"] and all(tokens.group(code) for code in codes)
    with pytest.raises(
        RequestError, match=r"q has 255 options, but this model has \d\d labels of one token"
    ) as refused:
        tokens.labels(of(255), "q")
    assert refused.value.param == "q"


def test_a_tokenizer_of_bytes_answers_with_one_letter():
    labels = LabelTokens(make_tokenizer(words=()), ENDING).labels(PREDICATE, "q")

    assert labels == ["Y", "N"]
    assert question_text(PREDICATE, labels).endswith("Answer with Y or N only.")


def test_a_label_that_merges_with_the_prompts_end_is_none():
    assert LabelTokens(TOKENIZER, "Y").group("es") == ()  # "Yes" is one token, which replaces the end's


def test_texts_of_questions():
    assert question_text(PREDICATE, ["Yes", "No"]) == "It is late.\n\nIs it true? Answer with Yes or No only."
    assert question_text(CHOICE, ["A", "B", "C"], rotation=1) == (
        "Which?\n\nA. green: as grass\nB. blue\nC. red\n\nAnswer with the letter of the best option only."
    )
    assert question_text(SCORE, ["0", "1", "2"]) == (
        "How much?\n\n0. none\n1. some\n2. all\n\nAnswer with the number of the best level only."
    )
    meant = PREDICATE._replace(options=(Option("Yes", "after ten"), Option("No")))
    assert question_text(meant, ["Yes", "No"]) == (
        "It is late.\nYes: after ten\n\nIs it true? Answer with Yes or No only."
    )


def test_the_tokens_of_a_label_are_added(tokens: LabelTokens):
    labels = ["Yes", "No"]
    sizes = [len(tokens.group(label)) for label in labels]
    assert sizes == [3, 3]

    decided = tokens.decided(labels, logprobs(0.1, 0.2, 0.0, 0.05, 0.05, 0.0), 0, 1.0)

    assert decided.probabilities == pytest.approx([0.75, 0.25])
    assert decided.label_mass == pytest.approx(0.4)
    assert tokens.params(labels).label_ids == tokens.group("Yes") + tokens.group("No")


def test_a_rotation_is_undone(tokens: LabelTokens):
    labels = ["0", "1", "2"]
    assert [len(tokens.group(label)) for label in labels] == [1, 1, 1]

    decided = tokens.decided(labels, logprobs(0.5, 0.2, 0.1), 1, 1.0)  # of options 1, 2, 0

    assert decided.probabilities == pytest.approx([0.125, 0.625, 0.25])
    assert decided.best == 1


def test_a_temperature_flattens(tokens: LabelTokens):
    vector = logprobs(0.8, 0.1, 0.1)
    sharp, flat = (tokens.decided(["0", "1", "2"], vector, 0, each) for each in (1.0, 4.0))

    weights = [share ** (1 / 4) for share in (0.8, 0.1, 0.1)]
    assert flat.probabilities == pytest.approx([weight / sum(weights) for weight in weights])
    assert flat.confidence < sharp.confidence and flat.label_mass == sharp.label_mass


def test_labels_without_any_probability_are_equally_likely(tokens: LabelTokens):
    decided = tokens.decided(["0", "1"], logprobs(0.0, 0.0), 0, 1.0)

    assert decided == Decided([0.5, 0.5], 0.0)
    assert decided.confidence == 0.0


def test_confidence_and_expected_level():
    assert Decided([1.0, 0.0, 0.0], 1.0).confidence == 1.0
    assert Decided([0.5, 0.25, 0.25], 1.0).confidence == pytest.approx(0.25)
    assert Decided([0.2, 0.3, 0.5], 1.0).expected == pytest.approx(1.3)


def test_the_mean_of_several_orders():
    both = mean_of([Decided([0.8, 0.2], 0.9), Decided([0.4, 0.6], 0.5)])

    assert both.probabilities == pytest.approx([0.6, 0.4]) and both.label_mass == pytest.approx(0.7)
