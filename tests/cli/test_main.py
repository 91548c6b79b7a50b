"""The entry point: what it loads, what its errors look like, and its exit codes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from engine import __version__
from engine.cli import main as cli
from engine.runtime.errors import ConfigError, EngineDeadError, RequestError


def failing(error):
    def command(*_args, **_kwargs):
        raise error

    return command


def test_alone_it_explains_itself_with_examples(capsys):
    assert cli.run([]) == 0
    out = capsys.readouterr().out
    assert "engine serve ./my-model --port 80" in out
    for name, (_module, line) in cli.COMMANDS.items():
        assert name in out
        assert line in out
    assert max(map(len, out.splitlines())) <= 80


def test_help_has_the_core_commands_first_and_the_others_by_subject(capsys):
    cli.run(["--help"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        *("Options", "Core commands", "Models on this machine", "Servers"),
        *("Texts, vectors and scores of files", "Decisions of the scheduler", "Examples"),
    ]
    shown = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in cli.COMMANDS]
    assert shown == [
        *("serve", "chat", "bench", "doctor"),
        *(
            "pull",
            "list",
            "rm",
            "ps",
            "launch",
            "top",
            "fleet",
            "state",
            "batch",
            "embed",
            "rerank",
            "decisions",
        ),
        *("why", "replay", "trace", "simulate"),
    ]


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"engine {__version__}\n"


def test_as_a_module_it_is_the_same_command():
    ended = subprocess.run(
        [sys.executable, "-m", "engine", "--version"], check=True, capture_output=True, text=True
    )
    assert ended.stdout == f"engine {__version__}\n"


def test_help_loads_no_command_and_nothing_heavy():
    code = (
        "import sys; from engine.cli.main import run; run(['--help']); "
        "print(*sorted(set(m.split('.')[0] for m in sys.modules)), file=sys.stderr); "
        "print(*[m for m in sys.modules if m.startswith('engine.cli')], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    top, ours = done.stderr.strip().splitlines()
    assert not {"torch", "numpy", "litestar", "tokenizers", "rich", "prompt_toolkit"} & set(top.split())
    assert set(ours.split()) == {
        "engine.cli",
        "engine.cli.main",
        "engine.cli.exit_codes",
        "engine.cli.options",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], "engine: there is no command 'serv'; did you mean 'serve'?"),
        (["route"], "engine: there is no command 'route': start a router by its own command, as smg launch"),
        (["frob"], f"engine: there is no command 'frob'; the commands are {', '.join(cli.COMMANDS)}"),
        (["serve", "--prot", "1"], "engine: No such option: --prot"),
        (["serve", "--port"], "engine: Option '--port' requires an argument (see engine serve --help)"),
        (
            ["serve", "--device", "gpu"],
            "engine: --device is 'gpu', but it must be one of auto, cpu, cuda; did you mean 'cuda'?",
        ),
        (
            ["serve", "--dtype", "fp16"],
            "engine: --dtype is 'fp16', but it must be one of auto, bfloat16, float32; did you mean 'bfloat16'?",
        ),
        (["serve", "--port", "x"], "engine: --port is 'x', but it must be a whole number"),
        (
            ["serve", "--port", "70000"],
            "engine: port is 70000, but it must lie in [0, 65535] (set by --port)",
        ),
        (
            ["serve", "--dtype", "float3"],
            "engine: --dtype is 'float3', but it must be one of auto, bfloat16, float32",
        ),
        (["serve", "--model", "a", "b"], "engine: the model is given twice: 'b' and --model 'a'; drop one"),
        (
            ["trace", "x", "--format", "pdf"],
            "engine: Invalid value for '--format': 'pdf' is not one of 'html'",
        ),
        (["list", "x", "y"], "engine: there is no use for the argument x y (see engine list --help)"),
        (["top", "--interval", "slow"], "engine: --interval is 'slow', but it must be a number"),
        (["rerank", "q", "-n", "2.5"], "engine: -n is '2.5', but it must be a whole number"),
        (["bench", "serve", "--num-prompts=a"], "engine: --num-prompts is 'a', but it must be a whole"),
        (["bench", "serve", "--seed", "-1"], "engine: --seed is -1, but it must be 0 or more"),
        (["bench", "serve", "--port", "-1"], "engine: --port is -1, but it must lie in [1, 65535]"),
        (["bench", "serve", "--timeout", "0"], "engine: --timeout is 0.0, but it must be above 0"),
        (
            ["bench", "serve", "--ready-check-timeout-sec", "-1"],
            "engine: --ready-check-timeout-sec is -1.0, but it must be 0 or more",
        ),
        (
            ["serve", "--config", "/nowhere.yaml"],
            "engine: cannot read the configuration file /nowhere.yaml: No such",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("the reason"), 2),
        (RequestError("the reason"), 2),
        (EngineDeadError("the reason"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(capsys, monkeypatch, error, code):
    monkeypatch.setattr(cli, "app", failing(error))
    assert cli.run([]) == code
    assert capsys.readouterr().err == ("" if code == 130 else "engine: the reason\n")


def test_a_file_of_another_user_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(cli, "app", failing(PermissionError(13, "Permission denied", "/hers")))
    assert cli.run([]) == 2
    assert capsys.readouterr().err.startswith("engine: /hers: Permission denied; ")


def test_a_bug_is_a_traceback(monkeypatch):
    monkeypatch.setattr(cli, "app", failing(ZeroDivisionError("x")))
    with pytest.raises(ZeroDivisionError):
        cli.run([])


def test_a_reader_that_has_enough_is_no_error():
    code = "from engine.cli.main import main; main(['--help'])"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"{sys.executable}" -c "{code}" | true'],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    "command",
    [name for name in cli.COMMANDS if name != "bench"]
    + [f"bench {name}" for name in ("offline", "serve", "compare")],
)
def test_the_help_of_each_command_is_in_its_words_and_not_in_pythons(capsys, command):
    assert cli.run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    usage = text.splitlines()[0]
    assert usage.startswith(f"Usage: engine {command} [OPTIONS]")
    arguments = usage.removeprefix(f"Usage: engine {command} [OPTIONS]")
    assert re.fullmatch(r"( \[?[A-Z]+\]?(\.\.\.)?)*", arguments), arguments
    assert not re.search(r"<(str|int|float|path|list)\b", text)


def test_help_leaves_half_of_a_narrow_terminal_to_the_descriptions(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "42")
    assert cli.run(["serve", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (model,) = (line for line in lines if line.startswith("  --model TEXT"))
    assert len(model.removeprefix("  --model TEXT").lstrip()) > 8
    indents = {len(line) - len(line.lstrip()) for line in lines}
    assert max(indents) <= 30
