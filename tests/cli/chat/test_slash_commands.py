"""The chat's commands, by what they change and what they say."""

from __future__ import annotations

import json

import pytest

from engine.cli.chat.slash_commands import (
    COMMANDS,
    LeaveChat,
    find_command,
    is_command,
    message_of,
    run_command,
)
from engine.runtime.errors import RequestError


@pytest.fixture
def chat(make_chat):
    chat = make_chat()
    chat.session.add("one?", "1")
    chat.session.add("two?", "2")
    return chat


@pytest.fixture
def run(chat):
    def run_line(line):
        run_command(chat.conversation, line)
        return chat.written()

    return run_line


def test_a_slash_makes_a_command_and_two_make_a_slash():
    assert is_command("/help")
    assert not is_command("//help me")
    assert message_of("//help me") == "/help me"
    assert message_of("a / b") == "a / b"


@pytest.mark.parametrize(
    ("typed", "found"), [("help", "help"), ("h", "help"), ("reg", "regen"), ("q", "exit"), ("?", "help")]
)
def test_names_may_be_shortened(typed, found):
    assert find_command(typed).name == found


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("s", "/s could be /set, /show, /system, /save, /stats"),
        ("hlep", "there is no command /hlep; did you mean /help?"),
        ("xyzzy", "there is no command /xyzzy; /help lists them"),
        ("", "there is no command /; /help lists them"),
    ],
)
def test_a_wrong_name_is_helped_on(run, typed, message):
    with pytest.raises(RequestError) as raised:
        find_command(typed)
    assert message in str(raised.value)
    assert message in run(f"/{typed}")


def test_help_lists_every_command_in_80_columns(run):
    text = run("/help")
    assert all(f"/{name}" in text for name in COMMANDS)
    assert max(map(len, text.splitlines())) <= 80
    assert run("/help regen") == "/regen: answer the last question again\n"


def test_set_shows_changes_and_resets(run, chat):
    assert run("/set temperature 0.9") == "temperature = 0.9\n"
    assert run("/set max-tokens=7") == "max_tokens = 7\n"
    assert run("/set temperature") == "temperature = 0.9\n"
    assert (chat.session.settings.temperature, chat.session.settings.max_tokens) == (0.9, 7)
    assert run("/set max_tokens none") == "max_tokens = default\n"
    assert "top_p is 3.0" in run("/set top_p 3")
    assert "temperature is 9.0, but it must lie in [0, 2]" in run("/set temperature 9")
    assert "stop has 65 strings" in run(f"/set stop {json.dumps([str(n) for n in range(65)])}")
    assert "temperature         0.9  (set)" in run("/show")
    assert run("/set") == run("/show")


def test_system_sets_shows_and_removes(run, chat):
    assert "no system prompt" in run("/system")
    run("/system Be  brief.")
    assert chat.session.system == "Be  brief."
    assert run("/system") == "Be  brief.\n"
    run("/system none")
    assert chat.session.system is None


def test_clear_keeps_system_and_settings(run, chat):
    run("/system S")
    run("/set seed 5")
    run("/clear")
    assert [m["role"] for m in chat.session.messages()] == ["system"]
    assert chat.session.settings.seed == 5


def test_regen_asks_the_last_question_again(run, chat):
    assert run("/regen").startswith("Hello there\n")
    assert [m["content"] for m in chat.session.messages()] == ["one?", "1", "two?", "Hello there"]


def test_undo_edit_and_drop(run, chat):
    assert run("/undo") == "Forgot: two?\n"
    run("/edit")
    assert chat.conversation.pending == "one?"
    assert run("/undo") == "there is no question yet\n"
    assert run("/regen") == "there is no question yet\n"
    chat.session.add("a", "b")
    chat.session.add("c", "d")
    assert run("/drop") == "Forgot the 1 oldest of 2 exchanges.\n"
    assert run("/drop x") == "'x' is no count; give a number from 1\n"
    assert [m["content"] for m in chat.session.messages()] == ["c", "d"]


def test_save_and_load(run, chat, tmp_path):
    path = tmp_path / "a chat.json"
    assert run(f"/save {path}") == f"Saved 2 exchanges to {path}.\n"
    run("/clear")
    assert run(f"/load {path}") == f"Loaded 2 exchanges from {path}.\n"
    assert chat.session.num_exchanges == 2
    assert "cannot be read" in run("/load /no/such/file")
    assert run("/save") == "which file? /save FILE\n"


def test_stats_tokens_and_model(run, chat):
    assert run("/tokens") == "The conversation has 4 of 100 tokens (4%).\n"
    assert run("/model") == "scripted in a script, context of 100 tokens\n"
    assert run("/stats") == "  this chat    0 answers, 0 tokens\n"
    run("/stats off")
    assert run("/regen") == "Hello there\n"
    text = run("/stats")
    assert "last answer  TTFT 500 ms" in text
    assert "1 answer, 2 tokens" in text
    assert run("/stats maybe") == "/stats takes on or off, not 'maybe'\n"
    chat.backend.counts = False
    assert "cannot count tokens" in run("/tokens")


def test_save_and_export_replace_only_files_of_this_chat(run, chat, tmp_path):
    theirs, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    theirs.write_text("kept")
    for command in ("save", "export"):
        assert f"{theirs} exists already; `/{command} -f {theirs}` replaces it" in run(f"/{command} {theirs}")
    assert theirs.read_text() == "kept"
    assert run(f"/save {ours}") == run(f"/save {ours}") == f"Saved 2 exchanges to {ours}.\n"
    run(f"/load {ours}")
    markdown = tmp_path / "ours.md"
    assert "Wrote 2 exchanges" in run(f"/export {markdown}")
    assert "exists already; `/export -f" in run(f"/export {markdown}")
    assert "Wrote 2 exchanges" in run(f"/export -f {theirs}")
    assert theirs.read_text() == (
        "# Chat with scripted\n\n## You\n\none?\n\n## scripted\n\n1\n\n## You\n\ntwo?\n\n## scripted\n\n2\n"
    )


def test_a_file_goes_with_a_question(run, chat, tmp_path):
    path = tmp_path / "my notes.txt"
    path.write_text("a fact\n")
    assert run(f"/file '{path}'") == "my notes.txt, 7 characters, goes with the next question.\n"
    assert chat.backend.seen == []
    chat.conversation.ask("why?")
    assert chat.backend.seen[-1][-1]["content"] == "why?\n\nmy notes.txt:\n```\na fact\n```"
    chat.conversation.ask("and?")
    assert chat.backend.seen[-1][-1]["content"] == "and?"
    run(f"/file '{path}' how?")
    assert chat.backend.seen[-1][-1]["content"].startswith("how?\n\nmy notes.txt")


def test_files_that_cannot_go_are_refused(run, tmp_path):
    (tmp_path / "binary").write_bytes(b"caf\xe9")
    (tmp_path / "large").write_bytes(b"x" * 1_000_001)
    assert "is not UTF-8 text: unexpected end of data at byte 3" in run(f"/file {tmp_path}/binary x")
    assert "has 1,000,001 bytes; /file takes 1,000,000 at most" in run(f"/file {tmp_path}/large x")
    assert "No such file" in run(f"/file {tmp_path}/missing x")
    assert "which file? /file FILE [QUESTION]" in run("/file")


@pytest.mark.parametrize(
    ("typed", "stop"),
    [
        ("END", ("END",)),
        ('"\\n"', ("\n",)),
        ("'\\n'", ("\n",)),
        ("\\n", ("\n",)),
        ('["a b", "\\t"]', ("a b", "\t")),
        ('"', ('"',)),
        ("'say \"x\"'", ('say "x"',)),
    ],
)
def test_stop_strings_may_stand_in_quotes(run, chat, typed, stop):
    run(f"/set stop {typed}")
    assert chat.session.settings.stop == stop


@pytest.mark.parametrize("typed", ['"\\x"', "[1]", '["a]'])
def test_wrong_quotes_are_refused(run, chat, typed):
    assert f"stop is {typed}" in run(f"/set stop {typed}")
    assert chat.session.settings.stop == ()


def test_exit_leaves(run):
    for line in ("/exit", "/quit", "/bye", "/ex"):
        with pytest.raises(LeaveChat):
            run(line)
