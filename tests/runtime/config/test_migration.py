"""Flags of other engines: the commonest ones are settings, aliases, or errors that say what to use."""

from __future__ import annotations

import re

import pytest

from docs.reference.common_flags import COMMON
from engine.cli import main as cli
from engine.cli.bench.serve_run import ServerSettings  # noqa: F401  (its options are among the answers)
from engine.runtime.config.config_fields import find_setting, flag_of, setting_names
from engine.runtime.config.config_sources import from_arguments, from_yaml_file, merge
from engine.runtime.config.migration import (
    ANSWERS,
    CHAT_ANSWERS,
    CHAT_SHORT,
    COMMANDS,
    SHORT,
    answer_for,
)
from engine.runtime.errors import ConfigError

FLAGS = [(engine, name) for engine, names in COMMON.items() for name in names]


def test_each_engine_has_thirty_and_no_answer_hides_a_setting():
    assert all(len(set(names)) == len(names) >= 30 for names in COMMON.values())
    assert ANSWERS.keys() & setting_names().keys() == set()
    assert all(name in ANSWERS or name in setting_names() for name in SHORT.values())


@pytest.mark.fast_cases(17)
@pytest.mark.parametrize(("engine", "name"), FLAGS)
def test_each_common_flag_works_or_is_answered_everywhere(capsys, tmp_path, engine, name):
    if name in setting_names():
        assert find_setting(name.replace("_", "-")) is setting_names()[name]
        return
    answer = ANSWERS[name]
    path = tmp_path / "engine.yaml"
    path.write_text(f"{name.replace('_', '-')}: 1\n")
    for ask in (lambda: from_arguments({name: 1}), lambda: from_yaml_file(path)):
        with pytest.raises(ConfigError) as refused:
            ask()
        assert str(refused.value).endswith(f": {answer}")
    for arguments in ((flag_of(name), "1"), (f"{flag_of(name)}=1",)):
        assert cli.run(["serve", *arguments]) == 2
        assert capsys.readouterr().err == f"engine: there is no option {flag_of(name)}: {answer}\n"


@pytest.mark.parametrize("short", SHORT)
def test_a_short_flag_is_the_long_one_or_has_its_answer(capsys, short):
    name = SHORT[short]
    if name in setting_names():
        setting = setting_names()[name]
        assert cli.run(["serve", short, "no number", "--port", "none"]) == 2
        refused = flag_of(name) if setting.field.kind is not str else "--port"
        assert capsys.readouterr().err.startswith(f"engine: {refused} is ")
        return
    answer = ANSWERS.get(name, f"use {flag_of(name)}")
    assert answer_for(short) == answer
    assert cli.run(["serve", short, "1"]) == 2
    assert capsys.readouterr().err == f"engine: there is no option {short}: {answer}\n"


@pytest.mark.parametrize("answer", sorted(set(ANSWERS.values())))
def test_an_answer_names_flags_that_exist(answer):
    settings = setting_names().values()
    flags = {each.flag for each in settings}
    flags |= {each.flag.replace("--", "--no-") for each in settings if each.field.kind is bool}
    assert set(re.findall(r"--[\w-]+", answer)) <= flags


def test_the_negation_of_a_switch_has_the_answer_too(capsys):
    assert cli.run(["serve", "--no-mmap"]) == 2
    assert capsys.readouterr().err.startswith(
        "engine: there is no option --no-mmap: leave it out: weight files"
    )


def test_aliases_are_hidden_in_help_and_other_commands_keep_their_own_words(capsys):
    assert cli.run(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--model-path", "--alias", "--threads", "--random-seed", "--crash-dump-folder"):
        assert word not in text
    assert cli.run(["top", "--metrics"]) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize("name", CHAT_ANSWERS)
def test_a_flag_of_llama_cli_is_answered_with_an_option_of_chat(capsys, name):
    for arguments in ((flag_of(name), "1"), (f"{flag_of(name)}=1",)):
        assert cli.run(["chat", *arguments]) == 2
        expected = f"engine: there is no option {flag_of(name)}: {CHAT_ANSWERS[name]}\n"
        assert capsys.readouterr().err == expected
    assert cli.run(["chat", "--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(flag in help_text for flag in re.findall(r"--[\w-]+", CHAT_ANSWERS[name]))


LLAMA = "-m /nope.gguf -c 4096 -t 2 --temp 0.5 -n 8 -sys Brief -r END"


def test_a_line_of_llama_server_is_pasted(capsys, monkeypatch, tmp_path):
    words = (
        f"serve -m {tmp_path} -c 4096 -t 2 -np 4 --host 127.0.0.1 --port 0 --load-format dummy --print-config"
    )
    (tmp_path / "config.json").write_text("{}")
    seen = []

    def prepare(merged, **_options):
        seen.append(merged)
        raise ConfigError("it is prepared")

    monkeypatch.setattr("engine.launch.resolve.prepare.prepare", prepare)
    assert cli.run(words.split()) == 2
    (merged,) = seen
    model, scheduler = merged.config.model, merged.config.scheduler
    assert (model.model, model.max_model_len, model.num_threads) == (str(tmp_path), 4096, 2)
    assert scheduler.max_running_requests == 4
    assert merged.origins["max_model_len"] == "--ctx-size"


def test_a_line_of_llama_cli_is_pasted(capsys, monkeypatch):
    seen = []

    def start(merged, *_args):
        seen.append(merged.config.model)
        raise ConfigError("it starts")

    monkeypatch.setattr("engine.cli.chat.command._start", start)
    monkeypatch.setattr("engine.cli.chat.command.ChatSession", lambda *given: seen.append(given))
    assert cli.run(["chat", "hi", "--temp=9", *LLAMA.split()[2:]]) == 2, "the last one wins, as in llama.cpp"
    assert capsys.readouterr().err.endswith("engine: it starts\n")
    (system, settings), model = seen
    assert (system, settings.temperature, settings.max_tokens, settings.stop) == ("Brief", 0.5, 8, ("END",))
    assert (model.max_model_len, model.num_threads) == (4096, 2)
    assert cli.run(["chat", "hi", "-np", "2"]) == 2
    assert capsys.readouterr().err.endswith("-np: leave it out: a chat is one conversation\n")


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["serve", ""], "argument 2"),
        (["serve", "--model", ""], "argument 3 (--model)"),
        (["serve", "--model=", "--port", "1"], "argument 2 (--model)"),
        (["serve", "--host", ""], "argument 3 (--host)"),
        (["chat", "--url", "", "hi"], "argument 3 (--url)"),
        (["chat", ""], "argument 2"),
        (["doctor", ""], "argument 2"),
        (["pull", ""], "argument 2"),
        (["embed", ""], "argument 2"),
        (["replay", ""], "argument 2"),
        (["bench", "compare", "", ""], "argument 3"),
    ],
)
def test_an_empty_value_is_named(capsys, arguments, place):
    assert cli.run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"engine: {place} is empty; is a variable not set?") and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--api-key=c2VjcmV0Cg==", "--system=x="])
def test_a_value_may_end_with_an_equals_sign(option):
    """As a key in base64 does."""
    assert cli.check_arguments(["chat", option]) == ["chat", option]


def test_an_empty_model_is_refused_in_python_and_files_too(tmp_path):
    (tmp_path / "engine.yaml").write_text('model: ""')
    for layer in (from_arguments({"model": ""}), from_yaml_file(tmp_path / "engine.yaml")):
        with pytest.raises(ConfigError, match="model is empty; give a model"):
            merge(layer)


@pytest.mark.parametrize("short", CHAT_SHORT)
def test_a_short_flag_of_llama_cli_has_the_answer_of_the_long_one(capsys, short):
    assert cli.run(["chat", short, "1"]) == 2
    answer = CHAT_ANSWERS[CHAT_SHORT[short]]
    assert capsys.readouterr().err == f"engine: there is no option {short}: {answer}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_another_tool_is_answered(capsys, name):
    assert name not in cli.COMMANDS
    assert cli.run([name, "smollm2"]) == 2
    assert capsys.readouterr().err == f"engine: there is no command '{name}': {COMMANDS[name]}\n"
    named = re.findall(r"\bengine ([a-z]\w*)", COMMANDS[name])
    assert set(named) <= set(cli.COMMANDS)
