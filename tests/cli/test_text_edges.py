"""Text that is not Unicode at every edge of the command line: one line with the byte and its position.

The tables are made from the commands: a new command, option or file is in them without a change here.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from engine.cli import main as cli
from engine.cli.main import show_what_cannot_be_encoded

LATIN_1 = "caf\udce9"
"""`caf\\xe9` as Python passes it on."""
PROBLEM = "is not UTF-8 text: byte 0xe9 at position 3"


def leaf_commands():
    """(words of the command, its click command) for each command and subcommand."""
    for name in cli.COMMANDS:
        command = cli.load_command(name)
        inner = getattr(command, "commands", None)
        if inner:
            yield from (((name, child), inner[child]) for child in inner)
        else:
            yield (name,), command


COMMANDS = dict(leaf_commands())
OPTIONS = [
    (words, option)
    for words, command in COMMANDS.items()
    for parameter in command.params
    if parameter.param_type_name == "option" and not parameter.is_flag
    for option in parameter.opts
]


def the_error(capsys, *arguments):
    """The one line that a command with a mistake of the user prints."""
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    line.encode()  # it can be shown
    return line


@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_an_argument_that_is_not_utf8_is_named_by_its_place(capsys, words):
    assert the_error(capsys, *words, LATIN_1) == f"engine: argument {len(words) + 1} {PROBLEM}"


@pytest.mark.fast_cases(60)
@pytest.mark.parametrize(
    ("words", "option"), OPTIONS, ids=lambda part: part if isinstance(part, str) else " ".join(part)
)
def test_an_option_that_is_not_utf8_is_named_without_its_value(capsys, words, option):
    for arguments, number, position in (
        ((*words, option, LATIN_1), len(words) + 2, 3),
        ((*words, f"{option}={LATIN_1}"), len(words) + 1, 4 + len(option)),
    ):
        if not option.startswith("--") and len(arguments) == len(words) + 1:
            continue
        expected = f"engine: argument {number} ({option}) is not UTF-8 text: byte 0xe9 at position {position}"
        assert the_error(capsys, *arguments) == expected


FILES = {
    "serve --config": "is not UTF-8 text: byte 0xe9 at position 3",
    "chat x --load": "is not UTF-8 text: byte 0xe9 at position 3",
    "chat x --schema": "is not UTF-8 text: byte 0xe9 at position 3",
    "chat x --tools": "is not UTF-8 text: byte 0xe9 at position 3",
    "chat x --config": "is not UTF-8 text: byte 0xe9 at position 3",
    "doctor --config": "is not UTF-8 text: byte 0xe9 at position 3",
    "simulate --config": "is not UTF-8 text: byte 0xe9 at position 3",
    "bench offline --config": "is not UTF-8 text: byte 0xe9 at position 3",
    "bench serve --structured": "is not UTF-8 text: byte 0xe9 at position 3",
    "bench serve --dataset-name custom --dataset-path": "is not UTF-8 text: byte 0xe9 at position 3",
    "bench serve --dataset-name sharegpt --dataset-path": "is no workload",
    "bench serve --dataset-name trace --dataset-path": "is no workload",
    "bench compare X": "is not a result file",
    "replay": "is not a decision log",
    "trace": "is not a decision log",
    "why x --log": "is not a decision log",
    "simulate --workload": "is no workload",
    "simulate --fit": "is not a decision log",
}


@pytest.mark.parametrize("command", FILES)
def test_a_file_that_is_not_utf8_is_named_with_the_position(capsys, tmp_path, monkeypatch, command):
    path = tmp_path / "latin-1"
    path.write_bytes(b"caf\xe9")
    arguments = [str(path) if word == "X" else word for word in command.split()]
    if command.startswith("bench serve"):
        monkeypatch.setattr("engine.cli.bench.serve_run.WorkloadTokenizer.load", lambda model: object())
    line = the_error(capsys, *arguments, str(path))
    assert str(path) in line
    assert FILES[command] in line


@pytest.mark.parametrize("option", ["--schema", "--tools", "--load"])
def test_half_of_a_surrogate_pair_in_a_file_is_refused(capsys, tmp_path, option):
    path = tmp_path / "half.json"
    path.write_text('{"title": "\\ud83d"}')
    assert "has a text with half of a surrogate pair" in the_error(capsys, "chat", "x", option, str(path))
    path.write_text('{"title": "\\ud83d\\ude00"}')
    if option == "--schema":
        from engine.cli.chat.settings import read_form

        assert read_form(path, None)["response_format"]["json_schema"]["schema"] == {"title": "😀"}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("serve", "ENGINE_API_KEY"),
        ("serve", "ENGINE_ADMIN_API_KEY"),
        ("chat x --url http://127.0.0.1:9", "ENGINE_API_KEY"),
        ("why x", "ENGINE_API_KEY"),
        ("top --once", "ENGINE_API_KEY"),
        ("top --once", "ENGINE_ADMIN_API_KEY"),
        ("bench serve", "ENGINE_API_KEY"),
    ],
)
def test_a_variable_that_is_not_utf8_is_named(capsys, monkeypatch, command, name):
    monkeypatch.setenv(name, LATIN_1)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert the_error(capsys, *command.split()) == f"engine: ${name} {PROBLEM}"


@pytest.mark.parametrize("text", ['"\\ud83d"', '"a\\0b"'])
def test_a_text_that_no_path_can_have_is_refused_in_a_configuration_file(capsys, tmp_path, text):
    path = tmp_path / "engine.yaml"
    path.write_text(f"chat_template: {text}\n")
    line = the_error(capsys, "serve", "--config", str(path))
    assert line.startswith(f"engine: {path}:1: chat_template is ")


def test_output_in_an_encoding_without_the_character_is_a_replacement():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    show_what_cannot_be_encoded((stream, None, io.StringIO()))
    stream.write("café 😀")
    stream.flush()
    assert raw.getvalue() == b"caf? ?"


LOCALES = {
    "C": {"LC_ALL": "C"},
    "POSIX": {"LC_ALL": "POSIX"},
    "C.UTF-8": {"LC_ALL": "C.UTF-8"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


def run_in(locale, *arguments, stdin=b""):
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONUTF8", "ENGINE_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        input=stdin,
        capture_output=True,
        check=False,
        timeout=60,
        env=inherited | LOCALES[locale],
    )


@pytest.mark.fast_cases(1)
@pytest.mark.real_process
@pytest.mark.parametrize("locale", LOCALES)
def test_in_every_locale_the_position_of_the_byte_is_told(locale):
    chat = ("chat", "--url", "http://127.0.0.1:9")
    cases = [
        (run_in(locale, *chat, "Repeat", stdin=b"caf\xe9"), f"standard input {PROBLEM}"),
        (run_in(locale, *chat, b"caf\xe9"), f"argument 4 {PROBLEM}"),
        (run_in(locale, "top", "--once", "--api-key", b"caf\xe9"), f"argument 4 (--api-key) {PROBLEM}"),
    ]
    for done, problem in cases:
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.decode() == f"engine: {problem}\n"


@pytest.mark.real_process
def test_what_is_utf8_but_not_of_the_locale_is_told_with_the_way_out():
    done = run_in("ASCII", "simulate", "café".encode())
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "engine: argument 2 is not in the encoding of this locale (ascii): byte 0xc3 at position 3; set PYTHONUTF8=1\n"
    )
    assert b"there is no model 'caf\xc3\xa9'" in run_in("C", "simulate", "café".encode()).stderr
