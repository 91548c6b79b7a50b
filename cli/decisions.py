"""`engine decisions fit`: finds the temperatures of a model's decisions from labeled questions; asks a running server.

One temperature for each type of question and number of options minimizes the log loss of the right answers (temperature
scaling: Guo et al. 2017, arXiv:1706.04599). It changes how sure the model is, never which option it prefers.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import httpx
import msgspec
import typer

from ..runtime.decision_calibration import temperature_of
from ..runtime.errors import ConfigError, RequestError, ServerError
from ..runtime.text import counted, variable
from .console import framed_table, output_console
from .options import CONTEXT_SETTINGS, GroupedCommand
from .server_client import ServerConnection, error_of, server_url

LEAST_EXAMPLES: Final = 10
"""A type with a number of options has a temperature of its own from so many examples on."""
NUM_BINS: Final = 15
"""Bins of equal width of the expected calibration error, as in the paper."""
_LOWEST, _HIGHEST = 0.05, 20.0
_SMALLEST: Final = 1e-12
"""Stands for a probability of 0, whose log loss has no end."""
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
_NUM_HALVINGS: Final = 60
_START_ONE: Final = "start one with `engine serve MODEL`"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Labeled(NamedTuple):
    """An answered question.

    Attributes:
        kind: predicate, choice or score.
        shares: the probability of each option at temperature 1.
        right: index of the right option.
    """

    kind: str
    shares: Sequence[float]
    right: int

    @property
    def key(self) -> str:
        """The type with the number of options."""
        return f"{self.kind}.{len(self.shares)}"


# ---------------------------------------------------------------- arithmetic


def tempered(shares: Sequence[float], temperature: float) -> list[float]:
    """Probabilities at another temperature: softmax(log p / T)."""
    logs = [math.log(max(share, _SMALLEST)) / temperature for share in shares]
    top = max(logs)
    weights = [math.exp(each - top) for each in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def log_loss(examples: Sequence[Labeled], temperature: float) -> float:
    """The mean of -log of the right option's probability, in nats."""
    losses = (-math.log(max(tempered(each.shares, temperature)[each.right], _SMALLEST)) for each in examples)
    return math.fsum(losses) / len(examples)


def calibration_error(examples: Sequence[Labeled], temperature: float) -> float:
    """Expected calibration error: how far confidence is from accuracy, over `NUM_BINS` bins of confidence."""
    gaps = [0.0] * NUM_BINS
    for each in examples:
        shares = tempered(each.shares, temperature)
        top = max(shares)
        gaps[min(int(top * NUM_BINS), NUM_BINS - 1)] += top - (shares.index(top) == each.right)
    return math.fsum(map(abs, gaps)) / len(examples)


def best_temperature(examples: Sequence[Labeled]) -> float:
    """The temperature with the smallest log loss, which has one minimum, in [0.05, 20]."""
    low, high = math.log(_LOWEST), math.log(_HIGHEST)
    for _ in range(_NUM_HALVINGS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if log_loss(examples, math.exp(left)) < log_loss(examples, math.exp(right)):
            high = right
        else:
            low = left
    return round(math.exp((low + high) / 2), 4)


def fit_temperatures(examples: Sequence[Labeled]) -> dict[str, float]:
    """A temperature for each type and number of options with enough examples, and for each type with enough."""
    groups: dict[str, list[Labeled]] = {}
    for each in examples:
        groups.setdefault(each.kind, []).append(each)
        if each.kind != "predicate":  # always has two options
            groups.setdefault(each.key, []).append(each)
    enough = {key: group for key, group in groups.items() if len(group) >= LEAST_EXAMPLES}
    return {key: best_temperature(enough[key]) for key in sorted(enough)}


# ---------------------------------------------------------------- command


@app.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    """Fit the temperatures of a model's decisions to labeled questions."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def fit(
    labeled: Annotated[
        Path,
        typer.Argument(
            metavar="LABELED",
            help="Lines with the input and questions of /v1/decisions; each has its answer.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Write the temperatures to this file.")
    ] = Path("decision-calibration.json"),
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Server to ask  [default: your newest on this machine]"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="TEXT", help="API key of that server (or set ENGINE_API_KEY)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="TEXT", help="Which of its models  [default: its first]")
    ] = None,
) -> None:
    """Find the temperatures of a model's decisions, and write the file of --decision-calibration.

    A line of LABELED is {"input": ..., "questions": [...]} as for /v1/decisions, where each question has "answer": true
    or false, the value of a choice, or the index of a level. Log loss and expected calibration error (ECE) before and
    after are printed, of these same examples.

    Example: engine decisions fit labeled.jsonl -o calibration.json
    """
    bodies = list(_read(labeled))
    server = ServerConnection(
        server_url(url),
        api_key=api_key or variable("ENGINE_API_KEY"),
        model=model,
        how_to_start=_START_ONE,
    )
    with contextlib.closing(server.client):
        examples = [each for where, body in bodies for each in _asked(server, where, body)]
    temperatures = fit_temperatures(examples)
    if not temperatures:
        raise RequestError(
            f"{labeled} has {counted(len(examples), 'labeled question')}, but a type needs {LEAST_EXAMPLES}; add more"
        )
    _print(examples, temperatures)  # before a file that cannot be written
    try:
        output.write_text(json.dumps(temperatures, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be written: {error.strerror}; name another file"
        ) from None
    typer.echo(f"{output}: use it with engine serve --decision-calibration {output}")


def _print(examples: Sequence[Labeled], temperatures: dict[str, float]) -> None:
    groups: dict[str, list[Labeled]] = {}
    for each in examples:
        groups.setdefault(each.key, []).append(each)
    console = output_console()
    table = framed_table(console)
    for column in ("questions", "examples", "temperature", "log loss", "after", "calibration error", "after"):
        table.add_column(column, justify="left" if column == "questions" else "right")
    for key in sorted(groups):
        group = groups[key]
        temperature = temperature_of(temperatures, group[0].kind, len(group[0].shares))
        numbers = [
            measure(group, each) for measure in (log_loss, calibration_error) for each in (1, temperature)
        ]
        table.add_row(key, str(len(group)), f"{temperature:g}", *(f"{number:.4f}" for number in numbers))
    console.print(table)


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The bodies of a file, and the place of each."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # texts have other separators of lines
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{path} cannot be read: {problem}; name a file with a JSON object in each line"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            body = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{where} is no JSON: {error}") from None
        questions = body.get("questions") if isinstance(body, dict) else None
        if not (
            isinstance(questions, list) and questions and all(isinstance(each, dict) for each in questions)
        ):
            raise RequestError(f"{where} has no list of questions; it must be as a body of /v1/decisions")
        yield where, body


def _asked(server: ServerConnection, where: str, body: dict[str, Any]) -> Iterable[Labeled]:
    """The server's answers to the questions of a line."""
    rights = [_right(question, f"{where}: questions[{i}]") for i, question in enumerate(body["questions"])]
    questions = [
        {name: value for name, value in question.items() if name != "answer"}
        for question in body["questions"]
    ]
    # A temperature of its own, so that a calibration that the server has already is not used; and no refusals.
    asked = {**body, "questions": questions, "temperature": 1, "min_label_mass": 0, "model": server.model}
    try:
        response = server.client.post(f"{server.base}/v1/decisions", json=asked)
    except httpx.HTTPError as error:
        raise server.failure(error) from None
    if response.status_code != httpx.codes.OK:
        refusal = error_of(response)
        raise type(refusal)(f"{where}: {refusal}")
    try:
        answers = response.json()["answers"]
        return [
            Labeled(question["type"], _shares(answer), right)
            for question, answer, right in zip(questions, answers, rights, strict=True)
        ]
    except (KeyError, TypeError, ValueError):
        raise ServerError(f"{server.base}/v1/decisions does not answer as this engine; check --url") from None


def _shares(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"], 1 - answer["probability"]]
    return [float(each["probability"]) for each in answer["probabilities"]]


def _right(question: dict[str, Any], at: str) -> int:
    """The index of the right option."""
    answer = question.get("answer")
    options: list[Any]
    match question.get("type"):
        case "predicate":
            options = [True, False]
        case "choice":
            options = [each.get("value") for each in _list(question, "choices", at) if isinstance(each, dict)]
        case "score":
            options = list(range(len(_list(question, "levels", at))))
        case kind:
            raise RequestError(f"{at}.type is {kind!r}, but it must be predicate, choice or score")
    for index, option in enumerate(options):
        if type(option) is type(answer) and option == answer:  # true is not 1
            return index
    shown = ", ".join(json.dumps(option) for option in options[:8])
    raise RequestError(f"{at}.answer is {json.dumps(answer)}, but it must be one of {shown}")


def _list(question: dict[str, Any], name: str, at: str) -> list[Any]:
    found = question.get(name)
    if not isinstance(found, list):
        raise RequestError(f"{at}.{name} is {json.dumps(found)}, but it must be a list as in /v1/decisions")
    return found
