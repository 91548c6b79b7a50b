"""Decisions: typed questions about an input, and their answers from the probabilities of labels as the next token.

Each question becomes the end of a prompt that begins with the input. Its options have labels of one token: Yes and No,
letters, or digits. One forward pass gives the log-probabilities of all labels; no text is generated. The kinds of
questions are those of OpenAI's Decisions and of System One (predicate or noul, choice, score).
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Sequence
from itertools import islice, product
from string import ascii_uppercase
from typing import Final, NamedTuple

from ...models.tokenizer.tokenizer import Tokenizer
from ...runtime.errors import RequestError
from ...runtime.pooling import PoolingKind, PoolingParams
from .scoring import softmax

PLAIN_END: Final = "\n\nAnswer:"
"""The end of a prompt without a chat template."""


class QuestionKind(enum.StrEnum):
    """Kind of a question. PREDICATE: is a statement true? CHOICE: one of some options. SCORE: a level of a scale."""

    PREDICATE = "predicate"
    CHOICE = "choice"
    SCORE = "score"


class Option(NamedTuple):
    """A choice or a level as the model sees it; `description` may be ""."""

    text: str
    description: str = ""


class Question(NamedTuple):
    """A question.

    Attributes:
        kind: see `QuestionKind`.
        instructions: what is asked.
        options: of a choice or a scale, in the client's order; of a predicate what yes and no mean, in this order.
    """

    kind: QuestionKind
    instructions: str
    options: tuple[Option, ...] = (Option("Yes"), Option("No"))


class Decided(NamedTuple):
    """The answer to a question.

    Attributes:
        probabilities: of each option, among the options; their sum is 1.
        label_mass: the probability that the model's next token is a label at all.
    """

    probabilities: list[float]
    label_mass: float

    @property
    def best(self) -> int:
        """The most likely option; the first of equals."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """System One's: 1 if one option has all the probability, 0 if all are equally likely."""
        flat = 1 / len(self.probabilities)
        return max(0.0, (max(self.probabilities) - flat) / (1 - flat))

    @property
    def expected(self) -> float:
        """The mean of the options' indices: the score of a scale whose lowest level is 0."""
        return math.fsum(index * each for index, each in enumerate(self.probabilities))


def question_text(question: Question, labels: Sequence[str], rotation: int = 0) -> str:
    """The text that asks a question.

    Args:
        labels: of the options in the order in which the model sees them.
        rotation: index of the option that comes first.
    """
    lines = [question.instructions.strip()]
    if question.kind is QuestionKind.PREDICATE:
        lines += [
            f"{label}: {option.description}"
            for label, option in zip(labels, question.options, strict=True)
            if option.description
        ]
        return "\n".join([*lines, "", f"Is it true? Answer with {labels[0]} or {labels[1]} only."])
    lines.append("")
    for label, option in zip(labels, rotated(question.options, rotation), strict=True):
        lines.append(f"{label}. {option.text}" + (f": {option.description}" if option.description else ""))
    what = "letter of the best option" if question.kind is QuestionKind.CHOICE else "number of the best level"
    return "\n".join([*lines, "", f"Answer with the {what} only."])


def rotated(options: tuple[Option, ...], rotation: int) -> tuple[Option, ...]:
    """The options, beginning with that of index `rotation`."""
    return options[rotation:] + options[:rotation]


class LabelTokens:
    """The tokens of labels after one end of a prompt.

    A label is every token that equals its text up to case and a space in front, so that a model that prefers " yes" or
    "YES" is heard; their probabilities are added.
    """

    def __init__(self, tokenizer: Tokenizer, ending: str) -> None:
        """Prepare for prompts that end with `ending`."""
        self._tokenizer = tokenizer
        self._ending = ending
        self._base = tokenizer.encode(ending, add_special_tokens=False)
        self._groups: dict[str, tuple[int, ...]] = {}

    def labels(self, question: Question, at: str) -> list[str]:
        """The labels of a question's options.

        Raises:
            RequestError: there are fewer labels of one token than options; names the field `at`.
        """
        count = len(question.options)
        if question.kind is QuestionKind.PREDICATE:
            wanted: Sequence[str] = ("Yes", "No") if self.group("Yes") and self.group("No") else ("Y", "N")
        elif question.kind is QuestionKind.SCORE:
            wanted = [str(level) for level in range(count)]
        elif count <= len(ascii_uppercase):
            wanted = ascii_uppercase[:count]
        else:
            wanted = [*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2))]
        labels = list(islice((label for label in wanted if self.group(label)), count))
        if len(labels) < count:
            raise RequestError(
                f"{at} has {count} options, but this model has {len(labels)} labels of one token each for them; send "
                "fewer, or use another model",
                param=at,
                code="invalid_value",
            )
        return labels

    def group(self, label: str) -> tuple[int, ...]:
        """The tokens of a label; empty if none of its forms is one token."""
        if (found := self._groups.get(label)) is None:
            forms = dict.fromkeys((label, label.lower(), label.upper()))
            ids = [self._next_token(space + form) for form in forms for space in ("", " ")]
            found = tuple(dict.fromkeys(each for each in ids if each is not None))
            self._groups[label] = found
        return found

    def params(self, labels: Sequence[str]) -> PoolingParams:
        """The pooling of a prompt with these labels."""
        return PoolingParams(
            PoolingKind.LABELS, label_ids=tuple(each for label in labels for each in self.group(label))
        )

    def decided(self, labels: Sequence[str], vector: bytes, rotation: int, temperature: float) -> Decided:
        """The answer of one prompt.

        Args:
            labels: of its options, in the order of the prompt.
            vector: float32 log-probabilities of `params(labels)`.
            rotation: as in `question_text`.
            temperature: divides the log-probabilities of the labels before they are compared; above 0.
        """
        logprobs = iter(array("f", vector))
        masses = [math.fsum(math.exp(next(logprobs)) for _ in self.group(label)) for label in labels]
        logits = [math.log(mass) / temperature if mass else -math.inf for mass in masses]
        if max(logits) == -math.inf:  # no label has any probability: they are equally unlikely
            logits = [0.0] * len(logits)
        shares = softmax(logits)
        turned = len(shares) - rotation
        return Decided(shares[turned:] + shares[:turned], min(1.0, math.fsum(masses)))

    def _next_token(self, text: str) -> int | None:
        """The token of a text after the prompt's end; None if it is not exactly one further token."""
        ids = self._tokenizer.encode(self._ending + text, add_special_tokens=False)
        return ids[-1] if ids[:-1] == self._base else None


def mean_of(answers: Sequence[Decided]) -> Decided:
    """The mean of the answers to one question in several orders of its options."""
    count = len(answers)
    columns = zip(*(each.probabilities for each in answers), strict=True)
    return Decided(
        [math.fsum(column) / count for column in columns],
        math.fsum(each.label_mass for each in answers) / count,
    )
